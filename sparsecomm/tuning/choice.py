"""The choice that "auto" makes among all algorithms and exact wire formats, by predicted time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from sparsecomm.algorithms import ALGORITHMS, Algorithm, Comparison, alternatives
from sparsecomm.errors import InvalidInputError
from sparsecomm.primitives.costs import Costs, Link, Problem
from sparsecomm.quantities import number_text, time_text
from sparsecomm.tensors.sparse import index_dtype
from sparsecomm.wire import EXACT, WIRES, VectorType, Wire


@dataclass(frozen=True)
class CostQuery:
    """The sizes and options of a call that its predicted time depends on."""

    P: int  # ranks
    num_nodes: int
    n: int  # elements
    k: int  # entries per rank
    value_bytes: int  # of a value in the accumulator dtype
    algorithm: str | Comparison = "auto"
    wire: str = "auto"
    contributors: bool = False  # whether the algorithm must know how many ranks contribute to each entry

    def problem(self, wire: Wire) -> Problem:
        """Return the parameters for predicting the time of this call with a wire format."""
        vector = VectorType(self.n, index_dtype(self.n), np.dtype(f"f{self.value_bytes}"))
        entry_bytes = wire.bytes_per_entry(self.k, vector)
        exact_sums = wire.kind is EXACT and not self.contributors
        return Problem(
            self.P, self.n, self.k, entry_bytes, self.value_bytes, self.num_nodes, wire.needs_codec, exact_sums
        )


@dataclass(frozen=True)
class Candidate:
    """One way to make a call."""

    algorithm: Algorithm
    wire: Wire
    seconds: float  # predicted
    weight: float = 1.0  # factor on `seconds` when candidates are compared

    @property
    def cost(self) -> float:
        """The weighted time by which candidates are compared."""
        return self.weight * self.seconds


@dataclass(frozen=True)
class Explanation:
    """The reasons for a choice. Printing it lists the candidates, the cheapest first."""

    query: CostQuery  # the call
    costs: Costs
    source: str  # of the costs
    candidates: Sequence[Candidate]  # the cheapest first; the first one is chosen
    per_node: int = 1  # ranks per node; if above 1, each makes this call for its own slice, all at once

    def __str__(self) -> str:
        q, link, node = self.query, self.costs.link, self.costs.node or self.costs.link
        per_element = f"per element: select {_ns(self.costs.select)}, add {_ns(self.costs.add)}"
        where = f"{q.P} ranks of {q.num_nodes} node(s)"
        if self.per_node > 1:
            where = f"{q.P} nodes, for each of {self.per_node} slices, whose calls share the link"
        lines = [
            f"n={q.n}, k={q.k} on {where}; costs: {self.source}",
            f"between nodes {_link(link)}, inside {_link(node)}",
            f"per entry: merge {_ns(self.costs.merge)}, pack and unpack {_ns(self.costs.codec)}; " + per_element,
            f"{'algorithm':<24} {'wire':<16} {'predicted':>12}",
        ]
        for c in self.candidates:
            weight = f"   times a weight of {number_text(c.weight)}" if c.weight != 1 else ""
            lines.append(f"{c.algorithm.name:<24} {c.wire.name:<16} {c.seconds * 1e3:>9.3f} ms{weight}")
        best, *others = self.candidates
        reason = f"{best.algorithm.name} with {best.wire.name} takes least"
        if others:
            longer = others[0].cost / best.cost if best.cost else 1
            weighted = "" if best.weight == others[0].weight == 1 else ", with the weight"
            reason += f"; {others[0].algorithm.name} with {others[0].wire.name} would take {longer:.2f} times as long"
            reason += weighted
        return "\n".join([*lines, reason])


def _link(link: Link) -> str:
    return f"{time_text(link.alpha)} + {_ns(link.beta)} per byte"


def _ns(seconds: float) -> str:
    return f"{number_text(seconds * 1e9)} ns"


def candidates(query: CostQuery, costs: Costs) -> tuple[Candidate, ...]:
    """Return the candidates, the cheapest first.

    Candidates of equal cost keep the order of `alternatives` and, for one algorithm, the order of `WIRES`. Raise
    `InvalidInputError` if no algorithm in ``query`` supports such a call.
    """
    return _candidates(query, costs, len(ALGORITHMS))


@lru_cache(maxsize=1024)  # `num_registered` invalidates the cache when the user registers an algorithm
def _candidates(query: CostQuery, costs: Costs, num_registered: int) -> tuple[Candidate, ...]:
    algorithms = alternatives(query.algorithm, query.num_nodes, query.P)
    if query.contributors:
        algorithms = [(a, weight) for a, weight in algorithms if not a.cannot_count_contributors]
    exact = [wire for wire in WIRES.values() if wire.kind is EXACT]
    wires = exact if query.wire == "auto" else [WIRES[query.wire]]
    supported, reasons = [], []
    for algorithm, weight in algorithms:
        for wire in wires:
            problem = query.problem(wire)
            if algorithm.unsupported is not None and (reason := algorithm.unsupported(problem)):
                reasons.append(f"algorithm={algorithm.name!r} {reason}")
                continue
            supported.append(Candidate(algorithm, wire, algorithm.predicted_time(problem, costs), weight))
    if not supported:
        raise InvalidInputError("; ".join(dict.fromkeys(reasons)) + "; choose another algorithm, or auto")
    return tuple(sorted(supported, key=lambda c: c.cost))


def decide(query: CostQuery, costs: Costs) -> Candidate:
    """Return the cheapest candidate. It depends only on the arguments, so it is the same on all ranks."""
    return candidates(query, costs)[0]


_EXTRA = 0.25  # extra cost of an element in a small bucket, relative to the largest bucket
_BUCKETS = [1 << j for j in range(18, 29)]  # elements: 1 MiB to 1 GiB of float32
_STEP_ON_GPU = 2.5e-4  # seconds of the host for a bucket's work outside of its call, an estimate


def bucket_bytes(
    P: int,
    num_nodes: int,
    density: float,
    costs: Costs,
    algorithm: str | Comparison = "auto",
    wire: str = "auto",
    *,
    on_gpu: bool = False,
) -> int:
    """Return the best bucket size in bytes of float32.

    Small buckets overlap more with the backward pass, but each one pays the latency. The result is the smallest size
    whose cost per element is at most 25 % above the cost in the largest bucket. ``costs`` were measured on a CPU.
    """
    fixed = 0.0
    if on_gpu:  # work on elements and entries takes hardly any time, but each operation takes some of the host's
        fixed, costs = _STEP_ON_GPU, replace(costs, select=1e-11, merge=1e-9, codec=1e-9, add=1e-11, call=5e-5)

    def per_element(n: int) -> float:
        k = max(1, round(density * n))
        return (decide(CostQuery(P, num_nodes, n, k, 4, algorithm, wire), costs).seconds + fixed) / n

    max_cost = (1 + _EXTRA) * per_element(_BUCKETS[-1])
    return 4 * next(n for n in _BUCKETS if per_element(n) <= max_cost)
