"""Ranks compare the shape of x, and whether there are a residual and an out, before anything is applied."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests.ranks import errors

SHAPES = [((100, 10), (10, 100)), ((1000,), (10, 100)), ((1000,), (1, 1000)), ((10, 10, 10), (10, 100))]
every_kind = pytest.mark.parametrize("algorithm", ["auto", "dense"])


@pytest.mark.parametrize(("mine", "theirs"), SHAPES)
@every_kind
def test_another_shape(mine: Any, theirs: Any, algorithm: Any) -> None:
    residuals = [np.ones(theirs if rank == 2 else mine, np.float32) for rank in range(3)]
    outs = [np.full(residual.shape, 7, np.float32) for residual in residuals]

    def program(comm: simulated.SimulatedTransport) -> None:
        residual, out = residuals[comm.rank], outs[comm.rank]
        sc.sparse_allreduce(np.ones_like(residual), 10, comm=comm, residual=residual, out=out, algorithm=algorithm)

    for error in errors(3, program):
        assert isinstance(error, sc.CollectiveMismatchError)
        assert "calls differ in shape: rank " in str(error)
        assert f" of shape {mine}, k=10" in str(error) or f" of shape {theirs}, k=10" in str(error)
    for residual, out in zip(residuals, outs, strict=True):
        assert (residual == 2).all(), "the gradient is kept"
        assert (out == 7).all(), "nothing was applied"


@pytest.mark.parametrize("argument", ["residual", "out"])
@every_kind
def test_an_argument_on_one_rank_only(argument: str, algorithm: Any) -> None:
    given = np.zeros(1000, np.float32)

    def program(comm: simulated.SimulatedTransport) -> None:
        options = {argument: given} if comm.rank == 1 else {}
        sc.sparse_allreduce(np.ones(1000, np.float32), 10, comm=comm, algorithm=algorithm, **options)

    for error in errors(3, program):
        assert isinstance(error, sc.CollectiveMismatchError)
        assert f"calls differ in {argument}: rank " in str(error)
        assert f"pass {argument}= on all ranks, or on none" in str(error)
    assert (given == (argument == "residual")).all()
