"""Calls in the background have the results, residuals and errors of blocking calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.calls.queue import Handle
from sparsecomm.transport import simulated
from tests import data
from tests.ranks import run

ALGORITHMS = list(sc.algorithms())


def bits(*arrays: np.ndarray) -> list[bytes]:
    return [array.tobytes() for array in arrays]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("P", [1, 2, 5])
@pytest.mark.parametrize(
    ("dtype", "wire", "op"),
    [
        ("float32", "plain", "sum"),
        ("float32", "packed_int8", "mean"),
        ("float16", "packed_float16", "sum"),
        ("bfloat16", "auto", "mean"),
        ("float64", "packed", "sum"),
    ],
)
def test_results_equal_those_of_sparse_allreduce(algorithm: str, P: int, dtype: str, wire: str, op: str) -> None:
    options = {"algorithm": algorithm, "wire": wire, "op": op, "label": "a layer"}

    def program(blocking: bool) -> Callable[[simulated.SimulatedTransport], list[bytes]]:
        def on_rank(transport: simulated.SimulatedTransport) -> list[bytes]:
            found, under_way = [], []
            for layer, n in enumerate((300, 77)):
                x = data.gradient("normal", n, dtype, 10 * layer + transport.rank)
                residual, out = data.gradient("normal", n, dtype, 99 + transport.rank), np.empty_like(x)
                found += [x, residual, out]
                arguments = {"comm": transport, "residual": residual, "out": out, **options}
                under_way.append((sc.sparse_allreduce if blocking else sc.isparse_allreduce)(x, 20, **arguments))
                assert isinstance(under_way[-1], sc.SparseVector if blocking else Handle)
            for one in reversed(under_way):
                result = one if blocking else one.wait()
                found += [result.indices, result.values]
            return bits(*found)

        return on_rank

    assert run(P, program(blocking=False)) == run(P, program(blocking=True))


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("P", [2, 3, 8])
def test_different_labels_do_not_match_and_lose_nothing(blocking: bool, P: int) -> None:
    def call(*arguments: Any, **options: Any) -> sc.SparseVector:
        if blocking:
            return sc.sparse_allreduce(*arguments, **options)
        return sc.isparse_allreduce(*arguments, **options).wait()

    def program(transport: simulated.SimulatedTransport) -> str:
        x, residual = np.arange(50, dtype=np.float32), np.ones(50, np.float32)
        for labels in (("conv1", "conv2"), ("", "conv1")):
            residual[:] = 1
            with pytest.raises(sc.CollectiveMismatchError) as caught:
                call(x, 5, comm=transport, residual=residual, label=labels[transport.rank == 1])
            np.testing.assert_array_equal(residual, x + 1)
        assert call(x, 5, comm=transport, label="conv1").nnz == 5
        return str(caught.value)

    assert any("calls differ in label" in text for text in run(P, program))


@pytest.mark.parametrize("P", [2, 3, 8])
@pytest.mark.parametrize("algorithm", ["dense", "butterfly", "split", "tree"])
def test_a_transport_error_rolls_back_queued_calls_on_all_ranks(
    P: int, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARSECOMM_PROFILE", "none")  # so that the first call measures nothing, and is queued

    def program(transport: simulated.SimulatedTransport) -> list[str]:
        if transport.rank == 1:  # never comes
            return []
        xs = [data.integers(40, "float32", 10 * i + transport.rank) for i in range(3)]
        residuals = [data.integers(40, "float32", 100 + i) for i in range(3)]
        expected = [x + r for x, r in zip(xs, residuals, strict=True)]
        under_way = [
            sc.isparse_allreduce(x, 4, comm=transport, residual=r, algorithm=algorithm, wire="plain")
            for x, r in zip(xs, residuals, strict=True)
        ]
        said = []
        for handle in under_way:
            with pytest.raises(sc.TransportError) as caught:
                handle.wait()
            said.append(str(caught.value))
        for residual, total in zip(residuals, expected, strict=True):
            np.testing.assert_array_equal(residual, total)
        return said

    for said in [result for result in run(P, program) if result]:
        assert all("rank 1" in text or "left" in text for text in said)
        assert "did not make this call, since an earlier one failed" in said[-1]
