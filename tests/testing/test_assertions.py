"""Assertions about the values of all ranks: the faults that they detect, and their messages."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm import testing
from sparsecomm.transport import simulated

LAYERS: list[Any] = [{"weight": np.arange(6, dtype=np.float32)}, np.ones(3, ml_dtypes.bfloat16)]
VALUES: dict[str, Any] = {"layers": LAYERS, "lr": 0.1}


def changed(**changes: Any) -> dict[str, Any]:
    return VALUES | changes


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (changed(lr=0.2), "'lr': 1 of 1 elements differ; the first, element 0, is 0.1 on rank 0 and 0.2 on rank 2"),
        (changed(new=1), "'new' is on rank 2 only"),
        ({"lr": 0.1}, "'layers.0.weight' is on rank 0 only"),
        (
            changed(layers=[{"weight": np.float32([0, 1, -2, 3, 4, 6])}, LAYERS[1]]),
            "'layers.0.weight': 2 of 6 elements differ; the first, element 2, is 2.0 on rank 0 and -2.0 on rank 2",
        ),
        (
            changed(layers=[{"weight": np.arange(6.0)}, LAYERS[1]]),
            "'layers.0.weight': rank 0 has float32 (6,), and rank 2 has float64 (6,)",
        ),
    ],
)
def test_the_first_difference_is_named(other: Any, text: str) -> None:
    testing.assert_same_on_all_ranks([VALUES, changed()])
    with pytest.raises(AssertionError, match=f"^{re.escape(text)}$"):
        testing.assert_same_on_all_ranks([VALUES, VALUES, other])


def test_bits_count() -> None:
    testing.assert_same_on_all_ranks([np.float32([np.nan])] * 2)
    with pytest.raises(AssertionError, match=r"the value: 1 of 2 elements differ; the first, element 1, is 0.0 on"):
        testing.assert_same_on_all_ranks([np.float32([1, 0.0]), np.float32([1, -0.0])])
    with pytest.raises(AssertionError, match="no values"):
        testing.assert_same_on_all_ranks([])


def test_sparse_sums_and_tensors() -> None:
    torch = pytest.importorskip("torch")
    vector = sc.SparseVector([1, 3], np.float32([1, 2]), 9)
    testing.assert_same_on_all_ranks([vector, sc.SparseVector([1, 3], np.float32([1, 2]), 9)])
    with pytest.raises(AssertionError, match="'indices': 1 of 2"):
        testing.assert_same_on_all_ranks([vector, sc.SparseVector([1, 4], np.float32([1, 2]), 9)])
    model = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    other = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    other.load_state_dict(model.state_dict())
    testing.assert_same_on_all_ranks([model.state_dict(), other.state_dict()])
    with torch.no_grad():
        other.bias[1] += 1
    with pytest.raises(AssertionError, match="'bias': 1 of 2 elements"):
        testing.assert_same_on_all_ranks([model.state_dict(), other.state_dict()])


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("wire", ["plain", "packed_int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_nothing_is_lost_in_steps(op: Any, wire: Any, dtype: str) -> None:
    if dtype == "float64" and wire != "plain":
        pytest.skip("rounds values of float32")
    P = 3

    def program(comm: simulated.SimulatedTransport) -> Any:
        rng = np.random.default_rng(comm.rank)
        gradients = [
            {"x": rng.standard_normal(500).astype(dtype), "y": rng.standard_normal((4, 9), np.float32)}
            for _ in range(5)
        ]
        reducer, sums = sc.Reducer(gradients[0], 0.1, comm=comm, dense_below=50, op=op, wire=wire), []
        for step in gradients:
            outs = {"x": np.zeros(500, np.float32 if dtype == "bfloat16" else dtype), "y": np.zeros((4, 9), np.float32)}
            for name, gradient in step.items():
                reducer.push(name, gradient, outs[name])
            reducer.wait()
            sums.append(outs)
        return gradients, sums, {name: reducer.residual(name).copy() for name in ("x", "y")}

    by_rank = [result.value for result in testing.run(P, program)]
    contributed = [step for gradients, _, _ in by_rank for step in gradients]
    applied, residuals = by_rank[0][1], [residual for _, _, residual in by_rank]
    divisor = P if op == "mean" else 1
    testing.assert_nothing_lost(contributed, applied, residuals, divisor=divisor)
    residuals[1]["x"][7] += 0.5
    with pytest.raises(AssertionError, match=r"'x': 1 of 500 elements .* element 7, lacks -0.5"):
        testing.assert_nothing_lost(contributed, applied, residuals, divisor=divisor)


def test_lost_values_are_found() -> None:
    ones = np.ones(5, np.float32)
    testing.assert_nothing_lost([ones, ones], [ones], [ones * 0.5, ones * 0.5])
    with pytest.raises(AssertionError, match=r"5 of 5 elements .* element 0, lacks 1$"):
        testing.assert_nothing_lost([ones, ones], [ones], [])
    with pytest.raises(AssertionError, match="nothing was contributed"):
        testing.assert_nothing_lost([], [ones], [])
    with pytest.raises(AssertionError, match=r"1 of 5 elements .* element 3, lacks nan"):
        testing.assert_nothing_lost([ones], [np.float32([1, 1, 1, np.nan, 1])], [])
    with pytest.raises(AssertionError, match="'b'"):
        testing.assert_nothing_lost([{"a": ones}], [{"a": ones, "b": ones}], [])


@pytest.mark.parametrize("algorithm", ["dense", "allgather", "butterfly", "split:2", "double", "hierarchical:tree"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_expected_sum_is_the_librarys(algorithm: Any, dtype: str) -> None:
    gradients = [np.random.default_rng(rank).standard_normal(300).astype(dtype) for rank in range(4)]

    def program(comm: simulated.SimulatedTransport) -> np.ndarray:
        return sc.sparse_allreduce(gradients[comm.rank], 20, comm=comm, algorithm=algorithm, wire="plain").to_dense()

    results = [result.value for result in testing.run(4, program, ranks_per_node=2)]
    testing.assert_same_on_all_ranks([*results, testing.expected_sum(algorithm, gradients, 20, [0, 0, 1, 1])])  # type: ignore[list-item]
