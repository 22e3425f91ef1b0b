"""Every algorithm at every number of ranks, on simulated ranks: what it returns, and what the library promises.

The test of each promise is named after it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsecomm as sc
from sparsecomm.algorithms import inner_algorithms
from sparsecomm.calls.collectives import WordsComparison
from sparsecomm.primitives.costs import Costs, Link, Problem
from sparsecomm.transport import simulated
from sparsecomm.wire import EXACT, WIRES
from tests import data, reference
from tests.ranks import allreduce, errors, nodes_of, run
from tests.thinning import exhaustive

RANKS = [*range(1, 18)]
ALGORITHMS = list(sc.algorithms())
NARROW = [name for name, wire in WIRES.items() if wire.kind is not EXACT]
FEW_BITS = [name for name, wire in WIRES.items() if wire.kind.planes]  # whole numbers become others

every_algorithm = pytest.mark.parametrize("algorithm", [*ALGORITHMS, "split:3"])
every_size = pytest.mark.parametrize("P", RANKS)
more_sizes = pytest.mark.parametrize("P", [*RANKS, exhaustive(31), exhaustive(32), exhaustive(33)])


@pytest.mark.covering(2)
@every_algorithm
@every_size
@pytest.mark.parametrize("dtype", data.DTYPES)
def test_the_result_is_the_oracles(algorithm: str, P: int, dtype: str) -> None:
    for n, k in ((1, 1), (97, 5), (500, 500), (3000, 30)):
        xs = [data.integers(n, dtype, seed) for seed in range(P)]
        result = allreduce(xs, k, algorithm=algorithm, wire="packed" if P % 2 else "plain")[0]
        indices, values = reference.allreduce(algorithm, xs, k, nodes_of(P))
        np.testing.assert_array_equal(result.indices, indices)
        assert data.same_bits(result.values, values)


@pytest.mark.covering(2)
@every_algorithm
@more_sizes
@pytest.mark.parametrize("dtype", data.DTYPES)
def test_promise_5_no_gradient_mass_is_lost(algorithm: str, P: int, dtype: str) -> None:
    wires = [wire for wire in WIRES if dtype != "float64" or wire not in NARROW]

    @settings(max_examples=6)
    @given(
        st.data(),
        st.integers(1, 300),
        data.seeds,
        st.sampled_from(["sum", "mean"]),
        st.booleans(),
        st.sampled_from(wires),
    )
    def check(draw: st.DataObject, n: int, seed: int, op: str, wider: bool, wire: str) -> None:
        k, options = draw.draw(data.counts(n)), {"algorithm": algorithm, "op": op, "wire": wire}
        xs = [data.integers(n, dtype, seed + rank, 3) for rank in range(P)]
        residual_dtype = "float32" if (wider or wire in FEW_BITS) and dtype in ("float16", "bfloat16") else dtype
        residuals = [data.integers(n, residual_dtype, seed + P + rank, 2) for rank in range(P)]
        before = sum(r.astype(np.float64) + x.astype(np.float64) for r, x in zip(residuals, xs, strict=True))
        for _ in range(2):  # the second step finds what the first left
            result = allreduce(xs, k, residuals, **options)[0].to_dense().astype(np.float64)
            applied = result * (P if op == "mean" else 1)
            before = before - (applied if wire in FEW_BITS else np.rint(applied))
            rounding = 1e-6 * P * P if wire in FEW_BITS else 0  # of sums of at most 5 P, of which none is more precise
            np.testing.assert_allclose(sum(r.astype(np.float64) for r in residuals), before, rtol=0, atol=rounding)
            xs = [np.zeros_like(x) for x in xs]

    check()


@pytest.mark.covering(2)
@every_algorithm
@pytest.mark.parametrize("P", [2, 3, 4, 7, 9])
@pytest.mark.parametrize("wire", ["plain", *NARROW])
def test_promise_1_what_is_not_finite_reaches_all_ranks_as_it_is(algorithm: str, P: int, wire: str) -> None:
    """In every format: a NaN that a rank selects, and an infinity that meets no NaN and none of the other sign."""

    @settings(max_examples=10)
    @given(st.data(), st.integers(1, 150), data.seeds, st.lists(st.sampled_from([np.nan, np.inf, -np.inf]), min_size=1))
    def check(draw: st.DataObject, n: int, seed: int, specials: list[float]) -> None:
        k, rng = draw.draw(data.counts(n)), np.random.default_rng(seed)
        xs = [data.integers(n, "float32", seed + rank, 3) for rank in range(P)]
        for special in specials:
            xs[rng.integers(P)][rng.integers(n)] = special
        residuals = [np.zeros(n, np.float32) for _ in range(P)]
        with np.errstate(invalid="ignore"):
            result = allreduce(xs, k, residuals, algorithm=algorithm, wire=wire)[0]
            indices, values = reference.allreduce(algorithm, xs, k, nodes_of(P))
        assert np.isnan(result.values).any() or not np.isnan(xs).any()
        if wire in FEW_BITS:
            expected, found = (
                reference.dense(entries, n) for entries in ((indices, values), (result.indices, result.values))
            )
            np.testing.assert_array_equal(*(np.where(np.isfinite(v), 0, v) for v in (found, expected)))
            return
        np.testing.assert_array_equal(result.indices, indices)
        assert data.same_bits(result.values, values)
        for residual in residuals:  # of whole numbers rounding takes nothing
            kept = residual[np.isfinite(residual)]
            np.testing.assert_array_equal(kept, np.rint(kept))

    check()


@every_algorithm
@every_size
def test_promise_4_bit_identical_on_all_ranks_and_from_run_to_run(algorithm: str, P: int) -> None:
    for kind, wire in (
        ("normal", "packed_int8"),
        ("few values", "plain"),
        ("NaN and infinities", "packed_float16"),
        ("mostly zero", "packed_bfloat16"),
        ("huge range", "packed_int8"),
        ("huge range", "packed"),
    ):
        xs = [data.gradient(kind, 700, "float32", seed) for seed in range(P)]
        options = {"algorithm": algorithm, "wire": wire}
        results = allreduce(xs, 0.05, **options) + allreduce(xs, 0.05, **options)
        assert len({(r.indices.tobytes(), r.values.tobytes()) for r in results}) == 1


@pytest.mark.parametrize("inner", inner_algorithms())
@pytest.mark.parametrize("nodes", [[0, 0, 1, 1, 2], [0, 1, 0, 1, 1, 1, 2], [0, 0, 0], [0, 1, 2, 3]])
@pytest.mark.parametrize("wire", ["plain", "packed_int8"])
def test_any_algorithm_between_machines_of_any_size(inner: str, nodes: list[int], wire: str) -> None:
    """Also ranks of one machine that are not neighbours."""
    P, n, k = len(nodes), 200, 20
    xs = [data.integers(n, "float32", seed) for seed in range(P)]
    residuals = [np.zeros(n, np.float32) for _ in range(P)]
    results = allreduce(xs, k, residuals, nodes, algorithm=f"hierarchical:{inner}", wire=wire)
    assert len({(r.indices.tobytes(), r.values.tobytes()) for r in results}) == 1
    np.testing.assert_array_equal(sum(residuals) + results[0].to_dense(), sum(xs))
    if wire == "plain":
        indices, values = reference.allreduce(f"hierarchical:{inner}", xs, k, nodes)
        np.testing.assert_array_equal(results[0].indices, indices)
        np.testing.assert_array_equal(results[0].values, values)


@pytest.mark.parametrize("P", [4, 7, 16, pytest.param(64, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("crowded", [False, True])
def test_split_shares_the_work_evenly_wherever_the_entries_are(P: int, crowded: bool) -> None:
    """Bytes sent and received by each rank, in k b: about 4 (P - 1)/P, and no rank far above the others.

    A first call, whose ranges are equally long, tells indices and keys besides.
    """
    n, k = 1_000_000, 25_600

    def program(transport: simulated.SimulatedTransport) -> list[int]:
        x, moved = np.random.default_rng(transport.rank).normal(size=n).astype(np.float32), [0]
        x[n // 10 if crowded else n :] *= 1e-6
        for _ in range(2):
            sc.sparse_allreduce(x, k, comm=transport, algorithm="split", wire="plain")
            moved.append(transport.counters.bytes_sent + transport.counters.bytes_received)
        return np.diff(moved).tolist()

    first, second = np.array([r.value for r in simulated.run(P, program)]).T / (8 * k)
    for moved, limit in ((first, 4.8), (second, 4.4)):
        assert moved.mean() < limit
        if moved is second or not crowded:
            assert moved.max() < 1.5 * moved.mean()


@every_algorithm
@pytest.mark.parametrize("wire", [*NARROW, "packed"])
def test_narrow_values_lose_nothing_over_time(algorithm: str, wire: str) -> None:
    """The sum of all results follows the sum of all gradients: what rounding takes comes with a later step."""
    P, n, steps = 5, 400, 30
    rng = np.random.default_rng(3)
    residuals, applied, given = [np.zeros(n, np.float32) for _ in range(P)], np.zeros(n), np.zeros(n)
    for _ in range(steps):
        xs = list(rng.normal(size=(P, n)).astype(np.float32))
        given += np.sum(xs, axis=0, dtype=np.float64)
        applied += allreduce(xs, 80, residuals, algorithm=algorithm, wire=wire)[0].to_dense()
    np.testing.assert_allclose(applied + np.sum(residuals, axis=0, dtype=np.float64), given, atol=2e-3)


DIFFERENCES = {
    "n": lambda rank: {"x": np.ones(100 + (rank == 1), np.float32)},
    "k": lambda rank: {"k": 5 + (rank == 1)},
    "dtype": lambda rank: {"x": np.ones(100, np.float64 if rank == 1 else np.float32)},
    "algorithm": lambda rank: {"algorithm": "tree" if rank == 1 else "butterfly"},
    "op": lambda rank: {"op": "mean" if rank == 1 else "sum"},
    "wire": lambda rank: {"wire": "packed_int8" if rank == 1 else "plain"},
}


@pytest.mark.parametrize("field", DIFFERENCES)
@pytest.mark.parametrize("P", [2, 3, 5, 8, 13])
@every_algorithm
def test_promise_7_ranks_that_disagree_all_raise_and_keep_their_gradient(field: str, P: int, algorithm: str) -> None:
    residuals = {}

    def program(transport: simulated.SimulatedTransport) -> None:
        arguments: dict[str, Any] = {"x": np.arange(100, dtype=np.float32), "k": 5, "algorithm": algorithm}
        arguments |= DIFFERENCES[field](transport.rank)
        residual = np.ones_like(arguments["x"])
        residuals[transport.rank] = residual, residual + arguments["x"]
        sc.sparse_allreduce(**arguments, comm=transport, residual=residual)

    raised = errors(P, program)
    assert {type(error) for error in raised} == {sc.CollectiveMismatchError}
    assert any(f"calls differ in {field}" in str(error) for error in raised)
    for residual, total in residuals.values():
        np.testing.assert_array_equal(residual, total)


@pytest.mark.parametrize("pair", [(a, b) for a in ALGORITHMS for b in ALGORITHMS if a < b])
@pytest.mark.parametrize("P", [2, 3, 4, 7, 8])
def test_promise_7_different_algorithms_on_half_of_the_ranks(pair: tuple[str, str], P: int) -> None:
    x = np.ones(64, np.float32)
    for split in range(1, P):
        raised = errors(P, lambda r, split=split: sc.sparse_allreduce(x, 3, comm=r, algorithm=pair[r.rank < split]))
        assert {type(error) for error in raised} == {sc.CollectiveMismatchError}


@every_algorithm
@pytest.mark.parametrize("P", [2, 3, 8])
def test_promise_7_a_rank_that_never_calls_is_named(algorithm: str, P: int) -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        if transport.rank != 1:
            sc.sparse_allreduce(np.ones(50, np.float32), 3, comm=transport, algorithm=algorithm)

    raised = [error for error in errors(P, program) if error is not None]
    assert len(raised) == P - 1
    assert any(isinstance(error, sc.TimeoutError) and "rank 1" in str(error) for error in raised), raised


@pytest.mark.parametrize("stage", ["transport_of", "begin"])
def test_promise_5_a_call_that_fails_before_it_begins_loses_nothing(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        def fails(*_: Any) -> Any:
            raise sc.TransportError("another rank has left already")

        if stage == "begin":
            monkeypatch.setattr(transport, "begin", fails)
        else:
            monkeypatch.setattr("sparsecomm.calls.collectives.transport_of", fails)
        x, residual = np.arange(9, dtype=np.float16), np.ones(9, np.float32)
        with pytest.raises(sc.TransportError, match="left already"):
            sc.sparse_allreduce(x, 2, comm=transport, residual=residual)
        np.testing.assert_array_equal(residual, x.astype(np.float32) + 1)

    run(1, program)


def test_promise_7_calls_go_on_after_one_that_failed() -> None:
    def program(transport: simulated.SimulatedTransport) -> np.ndarray:
        with pytest.raises(sc.CollectiveMismatchError):
            sc.sparse_allreduce(np.ones(10, np.float32), 2 + (transport.rank == 2), comm=transport)
        return sc.sparse_allreduce(np.ones(10, np.float32), 2, comm=transport).to_dense()

    for dense in run(6, program):
        np.testing.assert_array_equal(dense, [6, 6, 0, 0, 0, 0, 0, 0, 0, 0])


# Those of P^2 messages in all would take minutes to simulate on more ranks.
MANY = {"tree": [256, 1024], "butterfly": [256, 1024]}
FLAT = [a for a in ALGORITHMS if not a.startswith("hierarchical")]


@pytest.mark.parametrize(
    ("algorithm", "P"),
    [
        pytest.param(a, P, marks=pytest.mark.exhaustive if P > 33 and P != 64 else ())
        for a in FLAT
        for P in [*range(1, 34), 40, 47, 53, 63, 64, *MANY.get(a, [])]
    ],
)
def test_cost_in_the_header_is_the_cost(algorithm: str, P: int) -> None:
    """Trips and bytes against the formula; entries everywhere apart, so that k entries stay k.

    They are those of the second call where an algorithm keeps something from the first, which all ranks end at once.
    """
    k = 32
    n = k * P * (2 if algorithm != "dense" else 2 + (1 << 17) // (k * P * P))  # small dense sums take one trip

    def program(transport: simulated.SimulatedTransport) -> tuple[float, int]:
        x, mine = np.zeros(n, np.float32), np.arange(transport.rank, n, P)
        x[mine] = 1 + mine * 7919 % 65537
        calls = [(0.0, 0)]
        for _ in range(2 if "split" in algorithm else 1):
            sc.sparse_allreduce(x, k, comm=transport, algorithm=algorithm, wire="plain")
            calls.append((transport.seconds, max(transport.counters.bytes_sent, transport.counters.bytes_received)))
        return calls[-1][0] - calls[-2][0], calls[-1][1] - calls[-2][1]

    results = [result.value for result in simulated.run(P, program, alpha=1.0)]
    problem, seconds = Problem(P, n, k), sc.algorithms()[algorithm].predicted_time
    rounds, moved = (max(each) for each in zip(*results, strict=True))
    trips = seconds(problem, Costs(Link(1.0, 0.0)))
    assert rounds <= trips
    long = 2.0**30  # so that trips are worth bytes
    bytes_ = seconds(problem, Costs(Link(long, 1.0))) - seconds(problem, Costs(Link(long, 0.0)))
    assert moved <= 1.1 * bytes_
    if P > 1:
        assert rounds >= 0.5 * trips  # a rank that pairs with none waits less
        assert moved >= 0.3 * bytes_  # the tree counts what goes down after what has come up


@pytest.mark.parametrize("P", [2, 4, 8, 16])
def test_butterfly_is_the_tree_where_there_is_a_power_of_two(P: int) -> None:
    xs = [data.gradient("normal", 2000, "float32", seed) for seed in range(P)]
    tree, butterfly = (allreduce(xs, 50, algorithm=a)[0] for a in ("tree", "butterfly"))
    assert data.same_bits(tree.indices, butterfly.indices)
    assert data.same_bits(tree.values, butterfly.values)


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_entries_of_a_dense_sum_are_found_only_when_asked_for(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    xs = [data.integers(300, "float16", seed) for seed in range(4)]
    whole = sum(x.astype(np.float32) for x in xs) / (4 if op == "mean" else 1)

    def program(transport: simulated.SimulatedTransport) -> sc.SparseVector:
        out = np.empty(300, np.float32)
        result = sc.sparse_allreduce(xs[transport.rank], 3, comm=transport, algorithm="dense", op=op, out=out)
        np.testing.assert_array_equal(out, whole)
        np.testing.assert_array_equal(result.to_dense(), whole)
        return result

    with monkeypatch.context() as patch:
        patch.setattr("sparsecomm.backends.CpuBackend.threshold", lambda *_: pytest.fail("looked for entries"))
        results = run(4, program)
    np.testing.assert_array_equal(results[0].indices, np.flatnonzero(whole))
    np.testing.assert_array_equal(results[0].values, whole[whole != 0])


@every_algorithm
@pytest.mark.parametrize("P", [1, 2, 5])
def test_a_gradient_without_elements(algorithm: str, P: int) -> None:
    xs = [np.zeros((0, 3), np.float32) for _ in range(P)]
    for result in allreduce(xs, 4, [x.copy() for x in xs], algorithm=algorithm):
        assert (result.size, result.nnz, result.shape) == (0, 0, (0, 3))


@every_size
@pytest.mark.parametrize("count", [0, 1, 20])
def test_ranks_compare_their_words_with_those_of_the_first(P: int, count: int) -> None:
    """And none is done before all have begun, so that all learn of a rank that makes another call."""

    def program(transport: simulated.SimulatedTransport, odd: int | None) -> list[int]:
        words = [2**64 - 1 - 3 * i for i in range(count)]
        words[transport.rank :] = [0] * len(words[transport.rank :]) if transport.rank else words
        call = WordsComparison(transport, words, 9 if transport.rank == odd else 5)
        call.run()
        return call.words

    assert run(P, lambda transport: program(transport, None)) == [[count, *(min(r, count) for r in range(1, P))]] * P
    for odd in range(P) if P > 1 else ():
        raised = errors(P, lambda transport, odd=odd: program(transport, odd))
        assert {type(error) for error in raised} == {sc.CollectiveMismatchError}
