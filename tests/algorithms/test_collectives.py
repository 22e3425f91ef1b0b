"""Every algorithm on simulated ranks, at many world sizes: its results and the promises of docs/concepts/guarantees.md.

``test_promise_N...`` tests promise N.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsecomm as sc
from sparsecomm.algorithms import inner_algorithms
from sparsecomm.calls.label import Label
from sparsecomm.primitives.costs import Costs, Link, Problem
from sparsecomm.testing import expected_sum, num_contributors
from sparsecomm.transport import simulated
from sparsecomm.wire import EXACT, WIRES
from tests import data, reference
from tests.algorithms.comparison import WordsComparison
from tests.ranks import allreduce, errors, nodes_of, run
from tests.thinning import exhaustive

RANKS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17]
ALGORITHMS = list(sc.algorithms())
NARROW = [name for name, wire in WIRES.items() if wire.kind is not EXACT]
FEW_BITS = [name for name, wire in WIRES.items() if wire.kind.planes]  # these round integers

every_algorithm = pytest.mark.parametrize("algorithm", [*ALGORITHMS, "split:3"])
every_variant = pytest.mark.parametrize(
    "algorithm", [*ALGORITHMS, "split:3", *(f"hierarchical:{inner}" for inner in inner_algorithms())]
)
every_size = pytest.mark.parametrize("P", RANKS)
more_sizes = pytest.mark.parametrize("P", [*RANKS, exhaustive(31), exhaustive(32), exhaustive(33)])


def expected_result(
    algorithm: str, accumulated: list[np.ndarray], k: int, chunk: int | None, nodes: list[int]
) -> np.ndarray:
    """Return the sum that an algorithm computes; ``accumulated``: residual + x of every rank."""
    n, accumulated = accumulated[0].size, [reference.widened(v) for v in accumulated]
    if chunk is not None and algorithm != "dense":
        accumulated = [reference.dense(reference.topk_by_chunk(v, k, chunk), n) for v in accumulated]
        k = sum(min(k, chunk, n - begin) for begin in range(0, n, chunk))
    return expected_sum(algorithm, accumulated, k, nodes)


@pytest.mark.covering(2)
@every_variant
@more_sizes
@pytest.mark.parametrize("dtype", data.DTYPES)
def test_promise_5_no_gradient_mass_is_lost(algorithm: str, P: int, dtype: str) -> None:
    """The result equals the oracle's, with the same bits on all ranks, and residuals hold the rest of the gradients.

    If the algorithm selects from sums, a rank gets back everything that it had at indices outside the result.
    """
    rule = sc.algorithms()[algorithm] if algorithm != "split:3" else sc.algorithms()["split"]
    wires = [wire for wire in WIRES if dtype != "float64" or wire not in NARROW]
    ops = ["sum", "mean"] + ["mean_of_contributors"] * (dtype == "float32" and not rule.cannot_count_contributors)
    sizes = st.one_of(st.integers(1, 300), st.sampled_from([1, 97, 3000]))

    @settings(max_examples=6)
    @given(st.data(), sizes, data.seeds, st.sampled_from(ops), st.booleans(), st.sampled_from(wires))
    def check(draw: st.DataObject, n: int, seed: int, op: str, wider: bool, wire: str) -> None:
        chunk, nodes, few_bits = None, nodes_of(P), wire in FEW_BITS
        if rule.by_chunk and op != "mean_of_contributors" and draw.draw(st.booleans()):
            chunk = draw.draw(st.one_of(st.integers(1, 40), st.sampled_from([64, n, n + 1, 4096])))
        if algorithm.startswith("hierarchical"):
            drawn = draw.draw(st.lists(st.integers(0, 3), min_size=P, max_size=P))
            nodes = [list(dict.fromkeys(drawn)).index(node) for node in drawn]
        k = draw.draw(data.counts(min(n, chunk or n)))
        xs = [data.integers(n, dtype, seed + rank, 3) for rank in range(P)]
        residual_dtype = "float32" if (wider or few_bits) and dtype in ("float16", "bfloat16") else dtype
        residuals = [2 * data.integers(n, residual_dtype, seed + P + rank, 1) for rank in range(P)]
        options: dict[str, Any] = {"algorithm": algorithm, "op": op, "wire": wire, "chunk": chunk}
        # The second step starts with the residuals of the first. Multiplying integers by 0.5 is exact.
        for decay in (0.5 if rule.name != "dense" else 1.0, 1.0):
            before = [reference.accumulated(x, r, decay) for x, r in zip(xs, residuals, strict=True)]
            divisor = {"sum": lambda: 1, "mean": lambda: P}.get(op, lambda: num_contributors(before, k))()  # noqa: B023
            results = [r.to_dense() for r in allreduce(xs, k, residuals, nodes, decay=decay, **options)]
            assert all(data.same_bits(result, results[0]) for result in results)
            if wire not in NARROW:
                wanted = expected_result(algorithm, before, k, chunk, nodes)
                np.testing.assert_array_equal(results[0], (wanted / divisor).astype(wanted.dtype))
            if rule.bounded_result and rule.rejects:
                outside = results[0] == 0
                assert all(data.same_bits(r[outside], v[outside]) for r, v in zip(residuals, before, strict=True))
            applied = results[0].astype(np.float64) * divisor
            if not few_bits:  # means of three are rounded; the residual has the rounding errors
                applied = np.where(np.abs(applied - np.rint(applied)) < 1e-5, np.rint(applied), applied)
            left = np.sum([r.astype(np.float64) for r in residuals], axis=0)
            total = np.sum([v.astype(np.float64) for v in before], axis=0)
            np.testing.assert_allclose(left + applied, total, rtol=0, atol=max(1e-4, 1e-6 * P * P) * few_bits)
            if op == "mean_of_contributors" and wire in NARROW:
                break  # the residuals are not integers
            xs = [np.zeros_like(x) for x in xs]

    check()


@pytest.mark.covering(2)
@every_algorithm
@pytest.mark.parametrize("P", [2, 3, 4, 7, 9])
@pytest.mark.parametrize("wire", ["plain", *NARROW])
def test_promise_1_nan_and_infinities_reach_all_ranks(algorithm: str, P: int, wire: str) -> None:
    """In every wire format. An infinity that meets a NaN or the opposite infinity becomes NaN."""

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
            expected, total = (
                reference.dense(entries, n) for entries in ((indices, values), (result.indices, result.values))
            )
            np.testing.assert_array_equal(*(np.where(np.isfinite(v), 0, v) for v in (total, expected)))
            return
        np.testing.assert_array_equal(result.indices, indices)
        assert data.same_bits(result.values, values)
        for residual in residuals:  # integers are not rounded
            finite = residual[np.isfinite(residual)]
            np.testing.assert_array_equal(finite, np.rint(finite))

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


DIFFERENCES: dict[str, dict[str, Any]] = {
    "n": {"x": np.ones(101, np.float32)},
    "dtype": {"x": np.ones(100, np.float64)},
    "shape": {"x": np.ones((10, 10), np.float32)},
    "k": {"k": 6},
    "op": {"op": "mean"},
    "wire": {"wire": "packed_int8"},
    "label": {"label": "another layer"},
    "chunk": {"chunk": 20, "k": 1},
    "residual": {"residual": None},
    "out": {"out": None},
    "algorithm": {},
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("field", DIFFERENCES)
@pytest.mark.parametrize("P", [2, 3, 8, 13])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("background", [False, True])
@every_algorithm
def test_promise_7_ranks_that_disagree_all_raise_and_keep_their_gradient(
    field: str, P: int, half: bool, background: bool, algorithm: str
) -> None:
    """One rank differs, or half of them. Nothing is written to ``out``, and the next call succeeds."""
    changes = DIFFERENCES[field]
    if field == "algorithm":
        changes = {"algorithm": ALGORITHMS[ALGORITHMS.index(algorithm.partition(":")[0]) - 1 - P % 4]}
    if field == "chunk" and algorithm == "double":
        pytest.skip("double does not select by chunk")

    def make(call: dict[str, Any]) -> sc.SparseVector:
        return sc.isparse_allreduce(**call).wait() if background else sc.sparse_allreduce(**call)

    base: dict[str, Any] = {"x": np.arange(100, dtype=np.float32), "k": 5, "algorithm": algorithm, "wire": "plain"}

    def program(transport: simulated.SimulatedTransport) -> str:
        odd = transport.rank >= P // 2 if half else transport.rank == 1
        x = (changes if odd else {}).get("x", base["x"])
        residual, out = np.ones_like(x), np.full_like(x, 7)
        call = base | {"residual": residual, "out": out} | (changes if odd else {})
        with pytest.raises(sc.CollectiveMismatchError) as caught:
            make(call | {"comm": transport})
        assert (out == 7).all()
        if call["residual"] is not None:
            np.testing.assert_array_equal(residual, x + 1)
        assert sc.sparse_allreduce(np.ones(10, np.float32), 2, comm=transport, wire="plain").values.tolist() == [P, P]
        return str(caught.value)

    named = {"n": "shape is"}.get(field, f"{field} is")
    assert any(named in said for said in run(P, program, [0] * P))


@every_algorithm
@pytest.mark.parametrize("P", [2, 3, 8])
def test_promise_7_a_rank_that_never_calls_is_named(algorithm: str, P: int) -> None:
    """The calls queued behind the first one also fail and keep their gradients."""

    def program(transport: simulated.SimulatedTransport) -> list[str]:
        if transport.rank == 1:
            return []
        calls, said = [], []
        for i in range(3):
            x, residual = (data.integers(40, "float32", seed) for seed in (10 * i + transport.rank, 100 + i))
            call = sc.isparse_allreduce(x, 4, comm=transport, residual=residual, algorithm=algorithm, wire="plain")
            calls.append((call, residual, residual + x))
        for call, residual, total in calls:
            with pytest.raises(sc.TransportError) as caught:
                call.wait()
            said.append(str(caught.value))
            np.testing.assert_array_equal(residual, total)
        return said

    messages = [said for said in run(P, program) if said]
    assert len(messages) == P - 1
    assert any("rank 1" in said[0] for said in messages)
    assert all("did not make this call, since an earlier one failed" in said[-1] for said in messages)


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


# Algorithms with P^2 messages would take minutes to simulate on more ranks.
MANY = {"tree": [256, 1024], "butterfly": [256, 1024]}
FLAT = [a for a in ALGORITHMS if not a.startswith("hierarchical")]


@pytest.mark.parametrize(
    ("algorithm", "P"),
    [
        pytest.param(a, P, marks=pytest.mark.exhaustive if P > 33 and P != 64 else ())
        for a in FLAT
        for P in [*RANKS, 31, 32, 33, 40, 47, 63, 64, *MANY.get(a, [])]
    ],
)
def test_cost_in_the_header_is_the_cost(algorithm: str, P: int) -> None:
    """Compare trips and bytes with the formula. Ranks select different indices, so sums have P * k entries.

    Split is measured in its second call, which uses the ranges of the first.
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
    rounds, moved = (max(amounts) for amounts in zip(*results, strict=True))
    trips = seconds(problem, Costs(Link(1.0, 0.0)))
    assert rounds <= trips
    long = 2.0**30  # the formula may trade bytes for trips
    bytes_ = seconds(problem, Costs(Link(long, 1.0))) - seconds(problem, Costs(Link(long, 0.0)))
    assert moved <= 1.1 * bytes_
    if P > 1:
        assert rounds >= 0.5 * trips  # a rank without a partner waits less
        assert moved >= 0.3 * bytes_  # the tree's formula adds both directions


@pytest.mark.parametrize("P", [2, 4, 8, 16])
def test_butterfly_is_the_tree_where_there_is_a_power_of_two(P: int) -> None:
    xs = [data.gradient("normal", 2000, "float32", seed) for seed in range(P)]
    tree, butterfly = (allreduce(xs, 50, algorithm=a)[0] for a in ("tree", "butterfly"))
    assert data.same_bits(tree.indices, butterfly.indices)
    assert data.same_bits(tree.values, butterfly.values)


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_entries_of_a_dense_sum_are_computed_on_access(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    xs = [data.integers(300, "float16", seed) for seed in range(4)]
    total = sum(x.astype(np.float32) for x in xs) / (4 if op == "mean" else 1)

    def program(transport: simulated.SimulatedTransport) -> sc.SparseVector:
        out = np.empty(300, np.float32)
        result = sc.sparse_allreduce(xs[transport.rank], 3, comm=transport, algorithm="dense", op=op, out=out)
        np.testing.assert_array_equal(out, total)
        np.testing.assert_array_equal(result.to_dense(), total)
        return result

    with monkeypatch.context() as patch:
        patch.setattr("sparsecomm.backends.CpuBackend.threshold", lambda *_: pytest.fail("looked for entries"))
        results = run(4, program)
    np.testing.assert_array_equal(results[0].indices, np.flatnonzero(total))
    np.testing.assert_array_equal(results[0].values, total[total != 0])


@every_algorithm
@pytest.mark.parametrize("P", [1, 2, 5])
def test_a_gradient_without_elements(algorithm: str, P: int) -> None:
    xs = [np.zeros((0, 3), np.float32) for _ in range(P)]
    for result in allreduce(xs, 4, [x.copy() for x in xs], algorithm=algorithm):
        assert (result.size, result.nnz, result.shape) == (0, 0, (0, 3))


@every_size
@pytest.mark.parametrize("count", [0, 20])
@pytest.mark.parametrize("direct", [True, False], ids=["to all at once", "along a tree"])
def test_ranks_compare_their_words_with_rank_0(
    P: int, count: int, direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank returns before all have begun, so all learn of a rank that makes another call."""
    monkeypatch.setattr(Costs, "direct_is_faster", lambda *_: direct)

    def program(transport: simulated.SimulatedTransport, odd: int | None) -> list[int]:
        words = [2**64 - 1 - 3 * i for i in range(count)]
        words[transport.rank :] = [0] * len(words[transport.rank :]) if transport.rank else words
        call = WordsComparison(transport, words, Label.of(("odd", transport.rank == odd)))
        call.run()
        return call.words

    assert run(P, lambda transport: program(transport, None)) == [[count, *(min(r, count) for r in range(1, P))]] * P
    for odd in range(P) if P > 1 else ():
        raised = errors(P, lambda transport, odd=odd: program(transport, odd))
        assert {type(error) for error in raised} == {sc.CollectiveMismatchError}
