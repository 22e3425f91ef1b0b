"""The choice of "auto", and the output of `explain`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sparsecomm as sc
from sparsecomm.algorithms import Comparison
from sparsecomm.primitives.costs import Costs, Link
from sparsecomm.tuning import choice, profile
from sparsecomm.wire import EXACT, WIRES
from tests.ranks import run

FLAT = {"dense", "tree", "butterfly", "split"}
HIERARCHICAL = {"hierarchical:tree", "hierarchical:butterfly", "hierarchical:split"}
# A measured network of 1 Gb/s.
NETWORK = {"alpha": 100e-6, "beta": 8e-9, "node_alpha": 4e-6, "node_beta": 0.25e-9}
ONE_EACH, ONE_NODE, TWO_OF_TWO, UNEVEN = [0, 1, 2, 3], [0] * 4, [0, 0, 1, 1], [0, 0, 0, 1]


def explained(n: Any, k: Any, *, nodes: Sequence[int] = ONE_EACH, **options: Any) -> choice.Explanation:
    """Return the explanation, the same on all ranks."""
    explanations = run(len(nodes), lambda transport: sc.explain(n, k, comm=transport, **options), nodes, **NETWORK)
    assert all(str(other) == str(explanations[0]) for other in explanations)
    return explanations[0]


def names(explanation: choice.Explanation) -> set[tuple[str, str]]:
    return {(c.algorithm.name, c.wire.name) for c in explanation.candidates}


# -- candidates -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [[0], [0, 1], ONE_EACH, ONE_NODE, TWO_OF_TWO, UNEVEN], ids=str)
def test_candidates(nodes: list[int]) -> None:
    explanation = explained(1_000_000, 0.001, nodes=nodes)
    algorithms = FLAT | (HIERARCHICAL if nodes in (TWO_OF_TWO, UNEVEN) else set())
    assert names(explanation) == {(a, w.name) for a in algorithms for w in WIRES.values() if w.kind == EXACT}
    assert len(explanation.candidates) == len(names(explanation))
    times = [c.seconds for c in explanation.candidates]
    assert times == sorted(times)
    assert times[0] > 0
    q = explanation.query
    assert (q.P, q.num_nodes, q.n, q.k) == (len(nodes), len(set(nodes)), 1_000_000, 1000)


def test_of_named_ones() -> None:
    assert names(explained(10_000, 10, algorithm="allgather")) == {("allgather", "plain"), ("allgather", "packed")}
    assert names(explained(10_000, 10, wire="packed_int8")) == {(a, "packed_int8") for a in FLAT}
    explanation = explained(10_000, 10, algorithm="hierarchical:allgather", wire="plain", nodes=TWO_OF_TWO)
    assert names(explanation) == {("hierarchical:allgather", "plain")}


@pytest.mark.parametrize(
    ("n", "density", "nodes", "best"),
    [
        (1_000_000, 1.0, [0, 1], {"dense"}),
        (25_000_000, 0.001, [0, 1], {"butterfly"}),
        (25_000_000, 0.01, [0] * 4 + [1] * 4, HIERARCHICAL),
    ],
)
def test_what_is_best_between_two_machines(n: int, density: float, nodes: list[int], best: set[str]) -> None:
    first = explained(n, density, nodes=nodes).candidates[0]
    assert first.algorithm.name in best
    assert first.wire.name == ("plain" if best == {"dense"} else "packed")


def test_of_equals_the_plainest_wins() -> None:
    explanation = explained(10_000, 10, algorithm="dense")  # dense messages are not packed
    assert explanation.candidates[0].seconds == explanation.candidates[1].seconds
    assert explanation.candidates[0].wire.name == "plain"


@pytest.mark.parametrize("weight", [1, 1.05, 40])
def test_a_weight_multiplies_the_cost_of_one(weight: float) -> None:
    """The predicted and printed seconds do not include the weight."""
    n, k = 1_000_000, 10_000
    plain, weighted = (
        explained(n, k, nodes=[0, 1, 2, 3], algorithm=Comparison((("split", factor), ("tree", 1.0))))
        for factor in (1.0, weight)
    )
    assert {c.algorithm.name: c.seconds for c in plain.candidates} == {
        c.algorithm.name: c.seconds for c in weighted.candidates
    }
    expected = min(plain.candidates, key=lambda c: c.seconds * (weight if c.algorithm.name == "split" else 1))
    best, second = weighted.candidates[:2]
    assert (best.algorithm, best.wire) == (expected.algorithm, expected.wire)
    assert (f"times a weight of {weight:g}" in str(weighted)) == (weight != 1)
    if {best.weight, second.weight} != {1}:
        assert f"would take {second.cost / best.cost:.2f} times as long, with the weight" in str(weighted)


costs = st.floats(0, 1e-3)
links = st.builds(Link, costs, costs)


@given(
    st.builds(Costs, links, st.none() | links, costs, costs, costs, costs),
    st.integers(1, 64).flatmap(lambda P: st.tuples(st.just(P), st.integers(1, P))),
    st.integers(1, 2**40).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))),
    st.sampled_from([4, 8]),
    st.booleans(),
)
def test_some_way_is_always_found(
    costs: Costs, ranks: tuple[int, int], sizes: tuple[int, int], accumulator: int, contributors: bool
) -> None:
    query = choice.CostQuery(*ranks, *sizes, accumulator, contributors=contributors)
    candidates = choice.candidates(query, costs)
    assert choice.decide(query, costs) == candidates[0]
    assert all(0 <= candidates[0].seconds <= c.seconds < float("inf") for c in candidates)
    assert [c.seconds for c in candidates] == sorted(c.seconds for c in candidates)


def test_split_also_sends_keys_of_means_and_of_rounded_sums() -> None:
    def seconds(wire: str, contributors: bool) -> float:
        query = choice.CostQuery(8, 8, 10**6, 1000, 4, "split", wire, contributors)
        return choice.decide(query, replace(profile.DEFAULT, link=Link(0.0, 1e-8))).seconds

    assert seconds("plain", contributors=True) > seconds("plain", contributors=False)
    assert seconds("packed_int2", contributors=True) == seconds("packed_int2", contributors=False)


# -- output -----------------------------------------------------------------------------------------------------------


def test_printing_names_the_winner_and_the_runner_up() -> None:
    explanation = explained(1_000_000, 0.01, nodes=TWO_OF_TWO)
    best, second = explanation.candidates[:2]
    *lines, why = str(explanation).splitlines()
    assert why.startswith(f"{best.algorithm.name} with {best.wire.name} takes least; {second.algorithm.name} with ")
    assert f"{second.wire.name} would take {second.seconds / best.seconds:.2f} times as long" in why
    assert lines[0].startswith("n=1000000, k=10000 on 4 ranks of 2 node(s); costs: measured at set-up: ")
    assert "100 us, 1 Gb/s between nodes; 4 us, 31.5 Gb/s inside" in lines[0]
    table = [line.split()[:2] for line in lines[-len(explanation.candidates) :]]
    assert table == [[c.algorithm.name, c.wire.name] for c in explanation.candidates]


def test_printing_of_one_candidate_and_where_nothing_costs_anything() -> None:
    assert str(explained(1000, 1, algorithm="tree", wire="plain")).endswith("\ntree with plain takes least")
    free = replace(explained(1000, 1), costs=Costs(Link(0.0, 0.0)))
    explanation = replace(free, candidates=choice.candidates(free.query, free.costs))
    assert "would take 1.00 times as long" in str(explanation)


# -- calls ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [{"n": 0}, {"n": 10.5}, {"n": "many"}, {"k": 1001}, {"dtype": "int32"}], ids=str)
def test_refused(change: dict[str, Any]) -> None:
    (name, value), *_ = change.items()
    with pytest.raises(sc.InvalidInputError, match=f"{name}={value!r}"):
        explained(**{"n": 1000, "k": 10, **change})


@pytest.mark.parametrize("nodes", [[0, 1], TWO_OF_TWO], ids=str)
@pytest.mark.parametrize("density", [0.001, 1.0])
def test_auto_takes_the_first(nodes: list[int], density: float) -> None:
    best = explained(20_000, density, nodes=nodes).candidates[0]

    def traffic(**options: Any) -> list[tuple[int, int]]:
        def program(transport: Any) -> tuple[int, int]:
            x, totals = np.random.default_rng(transport.rank).standard_normal(20_000), [(0, 0)]
            for _ in range(2):  # the first call measures links
                sc.sparse_allreduce(x, density, comm=transport, **options)
                totals.append((transport.counters.messages_sent, transport.counters.bytes_sent))
            return totals[2][0] - totals[1][0], totals[2][1] - totals[1][1]

        return run(len(nodes), program, nodes, **NETWORK)

    assert traffic() == traffic(algorithm=best.algorithm.name, wire=best.wire.name)


@pytest.mark.parametrize("P", [1, 2, 4, 8, 64])
def test_a_bucket_grows_with_latency_and_shrinks_with_work(P: int) -> None:
    def bucket(alpha: float, select: float = 0.3e-9, density: float = 0.001, on_gpu: bool = False) -> int:
        costs = replace(profile.DEFAULT, link=Link(alpha, 8e-9), select=select)
        return choice.bucket_bytes(P, P, density, costs, on_gpu=on_gpu)

    sizes = [bucket(alpha) for alpha in (0.0, 1e-5, 1e-4, 1e-3, 1e-1)]
    assert sizes == sorted(sizes)
    assert 1 << 24 <= bucket(1e-5, on_gpu=True) > sizes[1]  # each call costs host time
    assert all(size in [1 << j for j in range(20, 31)] for size in sizes)
    if P > 1:
        assert sizes[0] < sizes[-1] == 1 << 30
        assert bucket(1e-3, select=3e-8) < bucket(1e-3)
        assert bucket(1e-3, density=0.1) < bucket(1e-3)  # more entries: the latency is a smaller part
