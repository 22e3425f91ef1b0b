"""What "auto" stands for: every algorithm with every exact format, by what it would cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from sparsecomm.algorithms import Algorithm, Costs, Link, Problem, automatic, find
from sparsecomm.primitives.completion import seconds as completing
from sparsecomm.tensors.sparse import index_dtype
from sparsecomm.wire import EXACT, WIRES, VectorType, Wire

__all__ = ["Candidate", "CostQuery", "Explanation", "bucket_bytes", "candidates", "decide"]


@dataclass(frozen=True)
class CostQuery:
    """A call, as far as its cost depends on it.

    Attributes:
        P, num_nodes: ranks, and machines that they are on.
        n, k: elements, entries per rank.
        carrier: bytes of a value in which sums are carried.
        algorithm, wire: as the caller gave them, "auto" or a name.
        complete: whether the result is to be completed.
    """

    P: int
    num_nodes: int
    n: int
    k: int
    accumulator: int
    algorithm: str = "auto"
    wire: str = "auto"
    complete: bool = False

    def problem(self, wire: Wire) -> Problem:
        vector = VectorType(self.n, index_dtype(self.n), np.dtype(f"f{self.accumulator}"))
        entry_bytes = wire.bytes_per_entry(self.k, vector)
        return Problem(self.P, self.n, self.k, entry_bytes, self.accumulator, self.num_nodes, packed=wire.packed)


@dataclass(frozen=True)
class Candidate:
    """One way to do it, and the seconds that it would take."""

    algorithm: Algorithm
    wire: Wire
    seconds: float


@dataclass(frozen=True)
class Explanation:
    """Why "auto" took what it took. Printing it shows the candidates, the fastest first.

    Attributes:
        question: the call.
        costs: what it was evaluated with; ``source`` says where they are from.
        candidates: the fastest first: that is the one taken.
    """

    query: CostQuery
    costs: Costs
    source: str
    candidates: Sequence[Candidate]

    def __str__(self) -> str:
        q, link, node = self.query, self.costs.link, self.costs.node or self.costs.link
        work = (
            f"per entry: merge {_ns(self.costs.merge)}, pack and unpack {_ns(self.costs.codec)}; "
            f"per element: select {_ns(self.costs.select)}, add {_ns(self.costs.add)}"
        )
        lines = [
            f"n={q.n}, k={q.k} on {q.P} ranks of {q.num_nodes} machine(s); costs: {self.source}",
            f"between machines {_link(link)}, inside {_link(node)}",
            work,
            f"{'algorithm':<24} {'wire':<16} {'predicted':>12}",
        ]
        lines += [f"{c.algorithm.name:<24} {c.wire.name:<16} {c.seconds * 1e3:>9.3f} ms" for c in self.candidates]
        best, *others = self.candidates
        why = f"{best.algorithm.name} with {best.wire.name} takes least"
        if others:
            longer = others[0].seconds / best.seconds if best.seconds else 1
            why += f"; {others[0].algorithm.name} with {others[0].wire.name} would take {longer:.2f} times as long"
        return "\n".join([*lines, why])


def _link(link: Link) -> str:
    return f"{link.alpha * 1e6:.3g} us + {_ns(link.beta)} per byte"


def _ns(seconds: float) -> str:
    return f"{seconds * 1e9:.3g} ns"


@lru_cache(maxsize=1024)
def candidates(query: CostQuery, costs: Costs) -> tuple[Candidate, ...]:
    """The fastest first; of equals the first of `automatic` with the plainest format."""
    named = find(query.algorithm)
    algorithms = automatic(query.num_nodes, query.P) if named is None else [named]
    if query.complete:
        algorithms = [a for a in algorithms if a.reselects]
    exact = [wire for wire in WIRES.values() if wire.kind is EXACT]
    wires = exact if query.wire == "auto" else [WIRES[query.wire]]
    found = []
    for algorithm in algorithms:
        for wire in wires:
            problem = query.problem(wire)
            seconds = algorithm.seconds(problem, costs)
            if query.complete:
                seconds += completing(problem, costs)
            found.append(Candidate(algorithm, wire, seconds))
    return tuple(sorted(found, key=lambda c: c.seconds))


def decide(query: CostQuery, costs: Costs) -> Candidate:
    """The same on all ranks: it depends on nothing else."""
    return candidates(query, costs)[0]


_MORE = 0.25  # what an element may cost more in a small bucket than in the largest
_BUCKETS = [1 << j for j in range(18, 25)]  # elements: 1 to 64 MiB of float32


def bucket_bytes(P: int, num_nodes: int, density: float, costs: Costs) -> int:
    """The smallest bucket of float32 gradients in which an element costs at most a quarter more than in the largest.

    Small buckets begin early, so that more of them is hidden behind the backward pass; each pays latency.
    """

    def per_element(n: int) -> float:
        return decide(CostQuery(P, num_nodes, n, max(1, round(density * n)), 4), costs).seconds / n

    most = (1 + _MORE) * per_element(_BUCKETS[-1])
    return 4 * next(n for n in _BUCKETS if per_element(n) <= most)
