"""Ranks compare the shape of x, and whether there are a residual and an out, before anything is applied."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests.ranks import errors

SHAPES = [((100, 10), (10, 100)), ((1000,), (10, 100)), ((1000,), (1, 1000)), ((10, 10, 10), (10, 100))]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(("mine", "theirs"), SHAPES)
@pytest.mark.parametrize("algorithm", ["auto", "dense"])
def test_another_shape(mine: Any, theirs: Any, algorithm: Any, background: bool) -> None:
    residuals = [np.ones(theirs if rank == 2 else mine, np.float32) for rank in range(3)]
    outs = [np.full(residual.shape, 7, np.float32) for residual in residuals]

    def program(transport: simulated.SimulatedTransport) -> None:
        residual, out = residuals[transport.rank], outs[transport.rank]
        x, options = (
            np.ones_like(residual),
            {"comm": transport, "residual": residual, "out": out, "algorithm": algorithm},
        )
        if background:
            sc.isparse_allreduce(x, 10, **options).wait()
        else:
            sc.sparse_allreduce(x, 10, **options)

    for error in errors(3, program):  # of the rank that noticed, which told the others
        text = str(error)
        assert isinstance(error, sc.CollectiveMismatchError)
        assert "calls differ in shape: rank " in text
        assert f" of shape {mine}, k=10" in text or f" of shape {theirs}, k=10" in text
        assert " of another shape, k=10" in text or " of shape (1000,), k=10" in text
    for residual, out in zip(residuals, outs, strict=True):
        assert (residual == 2).all(), "the gradient is kept"
        assert (out == 7).all(), "nothing was applied"


@pytest.mark.parametrize("argument", ["residual", "out"])
@pytest.mark.parametrize("algorithm", ["auto", "dense"])
def test_an_argument_on_one_rank_only(argument: str, algorithm: Any) -> None:
    given = np.zeros(1000, np.float32)

    def program(transport: simulated.SimulatedTransport) -> None:
        options = {argument: given} if transport.rank == 1 else {}
        sc.sparse_allreduce(np.ones(1000, np.float32), 10, comm=transport, algorithm=algorithm, **options)

    for error in errors(3, program):
        text = str(error)
        assert isinstance(error, sc.CollectiveMismatchError)
        assert f"calls differ in {argument}: rank " in text
        assert text.count(f", with {argument}") == 1, "of one side"
        assert f"pass {argument}= on all ranks, or on none" in text
    assert (given == (argument == "residual")).all()
