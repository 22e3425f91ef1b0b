"""Every algorithm at every number of ranks, on simulated ranks: what it returns, and what the library promises.

The test of each promise is named after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsecomm as sc
from sparsecomm.algorithms import ETHERNET, Link, Problem, choose
from sparsecomm.transport import simulated
from tests import data, reference

RANKS = [*range(1, 18)]
ALGORITHMS = ["dense", "allgather", "tree", "butterfly"]
GLOBAL_TOPK = ["tree", "butterfly"]

every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)
every_size = pytest.mark.parametrize("P", RANKS)


def test_the_table_is_complete() -> None:
    assert sorted(sc.algorithms()) == sorted(ALGORITHMS)


def run(P: int, program: Callable[[simulated.SimulatedTransport], Any], **options: Any) -> list[Any]:
    return [result.value for result in simulated.run(P, program, **options)]


def allreduce(xs: list[np.ndarray], k: float, residuals: list[np.ndarray] | None = None, **options: Any) -> list[Any]:
    def program(ranks: simulated.SimulatedTransport) -> sc.SparseVector:
        residual = None if residuals is None else residuals[ranks.rank]
        return sc.sparse_allreduce(xs[ranks.rank], k, comm=ranks, residual=residual, **options)

    return run(len(xs), program)


def expected(algorithm: str, xs: list[np.ndarray], k: int) -> tuple[np.ndarray, np.ndarray]:
    """The oracle's result."""
    wide = [reference.widened(x) for x in xs]
    if algorithm == "dense":
        total = sum(wide[1:], wide[0])
        return reference.select(total, np.flatnonzero(total))
    selected = [reference.topk(x, k) for x in wide]
    if algorithm == "allgather":
        return reference.allgather(selected)
    return getattr(reference, algorithm)(selected, k)


@every_algorithm
@every_size
@pytest.mark.parametrize("dtype", data.DTYPES)
def test_the_result_is_the_oracles(algorithm: str, P: int, dtype: str) -> None:
    for n, k in ((1, 1), (97, 5), (500, 500), (3000, 30)):
        xs = [data.integers(n, dtype, seed) for seed in range(P)]
        result = allreduce(xs, k, algorithm=algorithm)[0]
        indices, values = expected(algorithm, xs, k)
        np.testing.assert_array_equal(result.indices, indices)
        assert data.same_bits(result.values, values)


@every_algorithm
@every_size
@pytest.mark.parametrize("dtype", data.DTYPES)
def test_promise_5_no_gradient_mass_is_lost(algorithm: str, P: int, dtype: str) -> None:
    @settings(max_examples=6, deadline=None, derandomize=True)
    @given(st.data(), st.integers(1, 300), data.seeds, st.sampled_from(["sum", "mean"]), st.booleans())
    def check(draw: st.DataObject, n: int, seed: int, op: str, wide: bool) -> None:
        k = draw.draw(data.counts(n))
        xs = [data.integers(n, dtype, seed + rank, 3) for rank in range(P)]
        residual_dtype = "float32" if wide and dtype in ("float16", "bfloat16") else dtype
        residuals = [data.integers(n, residual_dtype, seed + P + rank, 2) for rank in range(P)]
        before = sum(r.astype(np.float64) + x.astype(np.float64) for r, x in zip(residuals, xs, strict=True))
        for _ in range(2):  # the second step finds what the first put back
            result = allreduce(xs, k, residuals, algorithm=algorithm, op=op)[0].to_dense().astype(np.float64)
            applied = result if op == "sum" else np.rint(result * P)
            before = before - applied
            np.testing.assert_array_equal(sum(r.astype(np.float64) for r in residuals), before)
            xs = [np.zeros_like(x) for x in xs]

    check()


@every_algorithm
@every_size
def test_promise_4_bit_identical_on_all_ranks_and_from_run_to_run(algorithm: str, P: int) -> None:
    for kind in ("normal", "few values", "NaN and infinities", "mostly zero", "huge range"):
        xs = [data.gradient(kind, 700, "float32", seed) for seed in range(P)]
        results = allreduce(xs, 0.05, algorithm=algorithm) + allreduce(xs, 0.05, algorithm=algorithm)
        assert len({(r.indices.tobytes(), r.values.tobytes()) for r in results}) == 1


@every_algorithm
@every_size
def test_promise_1_nan_reaches_every_rank_and_zeros_are_never_selected(algorithm: str, P: int) -> None:
    xs = [np.zeros(50, np.float32) for _ in range(P)]
    xs[P // 2][17] = np.nan
    for result in allreduce(xs, 10, algorithm=algorithm):
        assert result.indices.tolist() == [17]
        assert np.isnan(result.values[0])


@every_algorithm
@every_size
def test_promise_3_index_sorted_and_unique(algorithm: str, P: int) -> None:
    xs = [data.gradient("few values", 400, "float64", seed) for seed in range(P)]
    result = allreduce(xs, 40, algorithm=algorithm)[0]
    assert np.all(np.diff(result.indices) > 0)
    assert result.nnz <= 40 or algorithm not in GLOBAL_TOPK


@every_algorithm
@pytest.mark.parametrize("P", [1, 2, 5, 8])
def test_promise_6_inputs_are_not_touched_and_out_may_be_x(algorithm: str, P: int) -> None:
    xs = [data.gradient("normal", 333, "float32", seed) for seed in range(P)]
    copies = [x.copy() for x in xs]
    results = allreduce(xs, 11, algorithm=algorithm)
    assert all(data.same_bits(x, c) for x, c in zip(xs, copies, strict=True))

    def into_x(ranks: simulated.SimulatedTransport) -> None:
        x = xs[ranks.rank]
        sc.sparse_allreduce(x, 11, comm=ranks, algorithm=algorithm, out=x)

    run(P, into_x)
    assert all(data.same_bits(x, results[0].to_dense()) for x in xs)


DIFFERENCES = {
    "n": lambda rank: {"x": np.ones(100 + (rank == 1), np.float32)},
    "k": lambda rank: {"k": 5 + (rank == 1)},
    "dtype": lambda rank: {"x": np.ones(100, np.float64 if rank == 1 else np.float32)},
    "algorithm": lambda rank: {"algorithm": "tree" if rank == 1 else "butterfly"},
    "op": lambda rank: {"op": "mean" if rank == 1 else "sum"},
}


@pytest.mark.parametrize("field", DIFFERENCES)
@pytest.mark.parametrize("P", [2, 3, 5, 8, 13])
@every_algorithm
def test_promise_7_ranks_that_disagree_all_raise_and_keep_their_gradient(field: str, P: int, algorithm: str) -> None:
    residuals = {}

    def program(ranks: simulated.SimulatedTransport) -> None:
        arguments: dict[str, Any] = {"x": np.arange(100, dtype=np.float32), "k": 5, "algorithm": algorithm}
        arguments |= DIFFERENCES[field](ranks.rank)
        residual = np.ones_like(arguments["x"])
        residuals[ranks.rank] = residual, residual + arguments["x"]
        sc.sparse_allreduce(**arguments, comm=ranks, residual=residual)

    results = simulated.run(P, program, catch=True)
    for result in results:
        assert isinstance(result.error, sc.CollectiveMismatchError), result.error
    assert any(f"calls differ in {field}" in str(result.error) for result in results)
    for residual, total in residuals.values():
        np.testing.assert_array_equal(residual, total)


@pytest.mark.parametrize("pair", [(a, b) for a in ALGORITHMS for b in ALGORITHMS if a < b])
@pytest.mark.parametrize("P", [2, 3, 4, 7, 8])
def test_promise_7_different_algorithms_on_half_of_the_ranks(pair: tuple[str, str], P: int) -> None:
    for split in range(1, P):
        results = simulated.run(
            P,
            lambda ranks, split=split: sc.sparse_allreduce(
                np.ones(64, np.float32), 3, comm=ranks, algorithm=pair[ranks.rank < split]
            ),
            catch=True,
        )
        assert all(isinstance(r.error, sc.CollectiveMismatchError) for r in results), [r.error for r in results]


@pytest.mark.parametrize("P", [2, 3, 8])
def test_promise_7_another_order_of_calls(P: int) -> None:
    def program(ranks: simulated.SimulatedTransport) -> None:
        sizes = (10, 20) if ranks.rank else (20, 10)
        for n in sizes:
            sc.sparse_allreduce(np.ones(n, np.float32), 3, comm=ranks)

    for result in simulated.run(P, program, catch=True):
        assert isinstance(result.error, sc.CollectiveMismatchError)


@every_algorithm
@pytest.mark.parametrize("P", [2, 3, 8])
def test_promise_7_a_rank_that_never_calls_is_named(algorithm: str, P: int) -> None:
    def program(ranks: simulated.SimulatedTransport) -> None:
        if ranks.rank != 1:
            sc.sparse_allreduce(np.ones(50, np.float32), 3, comm=ranks, algorithm=algorithm)

    results = simulated.run(P, program, catch=True)
    errors = [r.error for r in results if r.error is not None]
    assert len(errors) == P - 1
    assert any(isinstance(e, sc.TimeoutError) and "rank 1" in str(e) for e in errors), errors


@pytest.mark.parametrize("stage", ["of", "begin"])
def test_promise_5_a_call_that_fails_before_it_begins_loses_nothing(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program(ranks: simulated.SimulatedTransport) -> None:
        def fails(*_: Any) -> Any:
            raise sc.TransportError("another rank has left already")

        if stage == "begin":
            monkeypatch.setattr(ranks, "begin", fails)
        else:
            monkeypatch.setattr("sparsecomm.transport.of", fails)
        x, residual = np.arange(9, dtype=np.float16), np.ones(9, np.float32)
        with pytest.raises(sc.TransportError, match="left already"):
            sc.sparse_allreduce(x, 2, comm=ranks, residual=residual)
        np.testing.assert_array_equal(residual, x.astype(np.float32) + 1)

    run(1, program)


def test_promise_7_calls_go_on_after_one_that_failed() -> None:
    def program(ranks: simulated.SimulatedTransport) -> np.ndarray:
        with pytest.raises(sc.CollectiveMismatchError):
            sc.sparse_allreduce(np.ones(10, np.float32), 2 + (ranks.rank == 2), comm=ranks)
        return sc.sparse_allreduce(np.ones(10, np.float32), 2, comm=ranks).to_dense()

    for dense in run(6, program):
        np.testing.assert_array_equal(dense, [6, 6, 0, 0, 0, 0, 0, 0, 0, 0])


@every_algorithm
@every_size
def test_cost_in_the_header_is_the_cost(algorithm: str, P: int) -> None:
    """Virtual time against the formula, and messages with it; entries everywhere apart, so that k entries stay k."""
    k, n, alpha, beta = 64, 64 * P * 3, 1e-3, 1e-6
    xs = [np.where(np.arange(n) % P == rank, rank + 1.0, 0).astype(np.float32) for rank in range(P)]
    program = lambda ranks: sc.sparse_allreduce(xs[ranks.rank], k, comm=ranks, algorithm=algorithm)  # noqa: E731
    results = simulated.run(P, program, alpha=alpha, beta=beta)
    predicted = sc.algorithms()[algorithm].seconds(Problem(P, n, k), Link(alpha, beta))
    measured = max(result.seconds for result in results)
    headers = 80 * beta * max(max(r.counters.messages_sent, r.counters.messages_received) for r in results) * 2 * P
    assert measured <= predicted + headers + 1e-12
    if P > 1 and not (algorithm == "butterfly" and P & (P - 1)):
        assert measured >= 0.5 * predicted


@pytest.mark.parametrize("P", [2, 4, 8, 16])
def test_butterfly_is_the_tree_where_there_is_a_power_of_two(P: int) -> None:
    xs = [data.gradient("normal", 2000, "float32", seed) for seed in range(P)]
    tree, butterfly = (allreduce(xs, 50, algorithm=a)[0] for a in GLOBAL_TOPK)
    assert data.same_bits(tree.indices, butterfly.indices)
    assert data.same_bits(tree.values, butterfly.values)


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_entries_of_a_dense_sum_are_found_only_when_asked_for(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    xs = [data.integers(300, "float16", seed) for seed in range(4)]
    whole = sum(x.astype(np.float32) for x in xs) / (4 if op == "mean" else 1)

    def program(ranks: simulated.SimulatedTransport) -> sc.SparseVector:
        out = np.empty(300, np.float32)
        result = sc.sparse_allreduce(xs[ranks.rank], 3, comm=ranks, algorithm="dense", op=op, out=out)
        np.testing.assert_array_equal(out, whole)
        np.testing.assert_array_equal(result.to_dense(), whole)
        return result

    with monkeypatch.context() as patch:
        patch.setattr("sparsecomm.ops._cpu.threshold", lambda *_: pytest.fail("looked for entries"))
        results = run(4, program)
    np.testing.assert_array_equal(results[0].indices, np.flatnonzero(whole))
    np.testing.assert_array_equal(results[0].values, whole[whole != 0])


@every_algorithm
@pytest.mark.parametrize("P", [1, 2, 5])
def test_a_gradient_without_elements(algorithm: str, P: int) -> None:
    xs = [np.zeros((0, 3), np.float32) for _ in range(P)]
    for result in allreduce(xs, 4, [x.copy() for x in xs], algorithm=algorithm):
        assert (result.size, result.nnz, result.shape) == (0, 0, (0, 3))


@pytest.mark.parametrize("P", [1, 2, 3, 8, 32])
@pytest.mark.parametrize("density", [1e-4, 1e-3, 0.01, 0.1, 0.5, 1.0])
def test_auto_takes_the_cheapest_that_returns_k_entries_or_everything(P: int, density: float) -> None:
    n = 1_000_000
    problem = Problem(P, n, int(density * n))
    chosen = choose(problem)
    assert chosen.name != "allgather"
    for name in ("butterfly", "tree", "dense"):
        assert chosen.seconds(problem, ETHERNET) <= sc.algorithms()[name].seconds(problem, ETHERNET)
    if P == 8:
        assert (chosen.name == "dense") == (density >= 0.5)
