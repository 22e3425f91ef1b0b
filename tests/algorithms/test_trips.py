"""The one-way trips of calls, and the memory of split: wrong or missing memory costs trips and changes no result."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import sparsecomm as sc
from sparsecomm.algorithms.split import Bounds
from sparsecomm.calls.collectives import WordsGather
from sparsecomm.calls.label import UNLABELLED
from sparsecomm.calls.queue import queue_of
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.primitives.costs import Costs, Link, Problem
from sparsecomm.primitives.ranges import Ranges
from sparsecomm.testing import expected_sum, num_contributors
from sparsecomm.transport import simulated
from tests import data, reference
from tests.algorithms.comparison import WordsComparison
from tests.ranks import run

SplitVariant = dict[str, Any]
SPLITS: dict[str, SplitVariant] = {
    "split": {"algorithm": "split"},
    "packed": {"algorithm": "split", "wire": "packed"},
    "split:2": {"algorithm": "split:2"},
    "means": {"algorithm": "split:2", "op": "mean_of_contributors"},
    "chunk, 2 bits": {
        "algorithm": "split:2",
        "op": "mean_of_contributors",
        "wire": "packed_int2",
        "chunk": 512,
        "k": 4,
    },
    "ssar": {"algorithm": "ssar_split_allgather"},
}


def trips(P: int, calls: int, **options: Any) -> list[float]:
    """Return the trips of each call."""

    def program(transport: simulated.SimulatedTransport) -> list[float]:
        rng, ends = np.random.default_rng(transport.rank), [0.0]
        for _ in range(calls):
            x = rng.standard_normal(40_000).astype(np.float32)
            sc.sparse_allreduce(x, comm=transport, **({"k": 400} | options))
            ends.append(transport.seconds)
        return ends

    return np.diff(np.max([result.value for result in simulated.run(P, program, alpha=1.0)], axis=0)).tolist()


@pytest.mark.parametrize(
    ("variant", "P"),
    [(variant, P) for variant in SPLITS for P in [2, 3, 8, 16, 31] if P < 20 or variant in ("split", "means")],
)
def test_split_takes_four_trips_at_most_and_usually_two(variant: str, P: int) -> None:
    calls = 6 if P < 20 else 3
    counts = trips(P, calls, **SPLITS[variant])
    assert max(counts) <= 4
    assert counts.count(2.0) >= calls - 2  # the first call and at most one other may take more


@pytest.mark.parametrize("variant", ["split", "packed", "ssar"])
def test_no_owner_receives_most_of_many_entries(variant: str) -> None:
    """Also in the first call, when the entries of all ranks are in one eighth of the indices."""
    P, n, k = 8, 80_000, 5_000

    def program(transport: simulated.SimulatedTransport) -> list[int]:
        rng, totals = np.random.default_rng(transport.rank), [0]
        for _ in range(3):
            x = rng.standard_normal(n).astype(np.float32)
            x[: n // P] *= 100
            sc.sparse_allreduce(x, k, comm=transport, **SPLITS[variant])
            totals.append(transport.counters.bytes_received)
        return [after - before for before, after in pairwise(totals)]

    first, _, usual = (max(nbytes) for nbytes in zip(*run(P, program, [0] * P), strict=True))
    assert first < 1.2 * usual


@pytest.mark.parametrize("P", [2, 3, 8, 13])
def test_small_dense_sums_have_the_same_bits_in_one_trip(P: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def program(transport: simulated.SimulatedTransport) -> tuple[bytes, float]:
        x = np.random.default_rng(transport.rank).standard_normal(25).astype(np.float32)
        return sc.sparse_allreduce(x, 1, comm=transport, algorithm="dense").to_dense().tobytes(), transport.seconds

    small = [result.value for result in simulated.run(P, program, alpha=1.0)]
    monkeypatch.setattr(sys.modules["sparsecomm.algorithms.dense"], "_MAX_SENT", 0)
    large = [result.value for result in simulated.run(P, program, alpha=1.0)]
    assert {(result, 2 * end) for result, end in small} == {*large} == {(small[0][0], 2.0)}


@pytest.mark.parametrize("algorithm", ["allgather", "split", "double", "hierarchical:split"])
@pytest.mark.parametrize(("P", "per_node"), [(8, 1), (8, 4), (16, 4), (12, 2), (64, 4)])
def test_predicted_trips_are_those_of_calls(algorithm: str, P: int, per_node: int) -> None:
    """Only the latency between machines costs time here."""
    n, k = 40_000, 400

    def program(transport: simulated.SimulatedTransport) -> list[float]:
        rng, ends = np.random.default_rng(transport.rank), [0.0]
        for _ in range(4):
            x = rng.standard_normal(n).astype(np.float32)
            x[:: n // k * 2] *= 3  # all ranks select these
            sc.sparse_allreduce(x, k, comm=transport, algorithm=algorithm)
            ends.append(transport.seconds)
        return ends

    nodes = [rank // per_node for rank in range(P)]
    results = simulated.run(P, program, alpha=1.0, node_of_rank=nodes, node_alpha=0.0)
    ends = np.max([result.value for result in results], axis=0)
    costs, problem = Costs(Link(1.0, 0.0), Link(0.0, 0.0)), Problem(P, n, k, num_nodes=P // per_node)
    assert np.median(np.diff(ends)[1:]) == sc.algorithms()[algorithm].predicted_time(problem, costs)


@pytest.mark.parametrize("algorithm", sc.algorithms())
def test_no_cost_makes_a_predicted_time_shorter(algorithm: str) -> None:
    costs = Costs(Link(1e-4, 1e-9), Link(1e-6, 1e-10), select=1e-9, merge=1e-8, codec=1e-8, add=1e-9, call=1e-5)

    def seconds(**changed: float) -> float:
        problem = Problem(8, 10**6, 1000, num_nodes=4, needs_codec=True)
        return sc.algorithms()[algorithm].predicted_time(problem, replace(costs, **changed))

    for name in ("select", "merge", "codec", "add", "call"):
        assert seconds(**{name: 1e-3}) >= seconds() > 0, name


@pytest.mark.parametrize("P", [2, 5, 8, 33, 64])
@pytest.mark.parametrize(("kind", "expected"), [(WordsGather, 1), (WordsComparison, 2)])
def test_ranks_agree_in_few_trips(kind: type[WordsGather], expected: int, P: int) -> None:
    results = simulated.run(P, lambda transport: kind(transport, [3, 4], UNLABELLED).run(), alpha=1.0)
    assert max(result.seconds for result in results) <= expected


def expected_result(gradients: list[np.ndarray], k: int, options: SplitVariant) -> np.ndarray:
    """Return the dense result by plain NumPy."""
    widened = [reference.widened(x) for x in gradients]
    total = expected_sum(options["algorithm"], widened, k, range(len(widened)))
    if options.get("op") == "mean_of_contributors":
        total = total / num_contributors(widened, k).astype(total.dtype)
    return reference.canonical(total) + 0


KINDS = ["normal", "few values", "all equal", "mostly zero", "huge range", "denormals"]
steps = st.tuples(st.sampled_from(KINDS), st.sampled_from([1e-3, 0.5, 1.0, 1.02, 64.0]), st.booleans(), data.seeds)


def gradients_of(step: tuple[str, float, bool, int], n: int, P: int) -> list[np.ndarray]:
    """Return one gradient per rank; the largest entries of crowded ones are in a tenth of the indices."""
    kind, scale, crowded, seed = step
    gradients = [(data.gradient(kind, n, "float32", seed + rank) * np.float32(scale)) for rank in range(P)]
    for x in gradients if crowded else ():
        x[seed % 2 * (n // 2) + n // 10 :] *= np.float32(1e-3)
    return gradients


def memory_of(transport: simulated.SimulatedTransport) -> dict[type, object]:
    """Return the memory of the algorithm in the only plan of a transport."""
    (plan,) = queue_of(transport).plans._plans.values()
    return plan.comm.cache


@pytest.mark.parametrize("variant", ["split", "split:2", "means", "ssar"])
@pytest.mark.parametrize("P", [2, 3, 5, 8, 20])
def test_whatever_ranks_remember_the_result_is_the_oracles(variant: str, P: int) -> None:
    """Gradients change from call to call far more than in a training run.

    Before the last call, a rank may forget some of its memory, or get back its memory after the first call.
    """
    options = SPLITS[variant]
    sizes = st.one_of(st.integers(1, 400), st.just(3000))
    memories = st.tuples(
        st.integers(0, P - 1), st.sampled_from([Ranges, Bounds, None])
    )  # what to forget; None: go back to the first call

    @settings(max_examples=20 if P < 9 else 3)
    @given(sizes, st.data(), st.lists(steps, min_size=2, max_size=5), st.lists(memories, max_size=3))
    def calls(n: int, draw: st.DataObject, sequence: list[Any], losses: list[tuple[int, type | None]]) -> None:
        k = draw.draw(data.counts(n))
        gradients = [gradients_of(step, n, P) for step in sequence]
        if variant == "means":  # the oracle does not drop means that round to zero
            totals = [np.sum(xs, axis=0, dtype=np.float32) for xs in gradients]
            assume(all((total / np.float32(P) != 0).sum() == (total != 0).sum() for total in totals))

        def program(transport: simulated.SimulatedTransport) -> list[np.ndarray]:
            results, before = [], {}
            for call, xs in enumerate(gradients):
                if call == len(gradients) - 1:
                    memory = memory_of(transport)
                    for rank, kind in losses:
                        if rank == transport.rank:
                            memory.update(before if kind is None else {kind: None})
                results.append(sc.sparse_allreduce(xs[transport.rank], k, comm=transport, **options).to_dense() + 0)
                before = before or dict(memory_of(transport))
            return results

        with np.errstate(all="ignore"):
            wanted = [expected_result(xs, k, options) for xs in gradients]
            for results in run(P, program):
                for result, expected in zip(results, wanted, strict=True):
                    assert data.same_bits(result, expected)

    calls()


@pytest.mark.parametrize("variant", ["split", "means", "chunk, 2 bits"])
@pytest.mark.parametrize("P", [2, 3, 6])
def test_a_rank_that_leaves_anywhere_loses_nothing_and_the_next_call_succeeds(
    variant: str, P: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves after sending and receiving, so others may have ended the call and remember more than it does."""
    options, n = SPLITS[variant], 2048
    k = options.get("k", 64)
    exchange = Communicator.exchange_parcels

    @settings(max_examples=12)
    @given(st.integers(0, P - 1), st.integers(0, 2), st.integers(0, 4), data.seeds)
    def calls(leaver: int, left_call: int, trip: int, seed: int) -> None:
        gradients = [[data.integers(n, "float32", seed + 10 * call + rank) for rank in range(P)] for call in range(4)]
        passed = 0

        def leaves(self: Communicator, *args: Any, **kwargs: Any) -> Any:
            nonlocal passed
            received = exchange(self, *args, **kwargs)
            if self.rank == leaver and self.number == left_call + 1:
                passed += 1
                if passed == trip + 1:
                    raise sc.TransportError("it leaves")
            return received

        def program(transport: simulated.SimulatedTransport) -> tuple[np.ndarray, list[np.ndarray | None]]:
            residual, sums = np.zeros(n, np.float32), []
            for call, xs in enumerate(gradients):
                try:
                    arguments = options | {"k": k, "residual": residual, "comm": transport}
                    sums.append(sc.sparse_allreduce(xs[transport.rank], **arguments).to_dense())
                except sc.TransportError:  # noqa: PERF203
                    assert call == left_call
                    sums.append(None)
            return residual, sums

        with monkeypatch.context() as patch:
            patch.setattr(Communicator, "exchange_parcels", leaves)
            outcomes = run(P, program)
        applied = np.zeros(n)
        for results in zip(*(sums for _, sums in outcomes), strict=True):
            complete = [result for result in results if result is not None]
            assert all(data.same_bits(result, complete[0]) for result in complete)
            if 0 < len(complete) < P:
                return  # some ranks applied the result and others kept their gradients
            applied += complete[0] if complete else 0
        if variant == "split":
            left = np.sum([residual for residual, _ in outcomes], axis=0, dtype=np.float64)
            np.testing.assert_array_equal(applied + left, np.sum(gradients, axis=(0, 1), dtype=np.float64))

    calls()
