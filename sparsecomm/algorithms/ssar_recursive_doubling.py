"""The exact sum of all ranks' top-k by recursive doubling. No entry is rejected.

Source: Renggli et al., "SparCML: High-performance sparse communication for machine learning", SC 2019, Section 5
(SSAR_Recursive_double). `sparsecomm.algorithms.butterfly` uses the same pattern and has a drawing of it.

Fewer bytes are sent if ranks select the same indices. Each merge adds the entries of the lower ranks first, so the
result is the same on all ranks. After each step, all ranks of a group have the same entries. They round the
entries before the next step, and each rank of the group records an equal shard of the rounding errors as dropped.
"""

from __future__ import annotations

from sparsecomm.algorithms.base import Algorithm
from sparsecomm.algorithms.butterfly import recursive_doubling
from sparsecomm.contribution import Contribution
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.primitives.costs import Costs, Problem
from sparsecomm.tensors.sparse import SparseVector


def ssar_recursive_doubling(comm: Communicator, gradient: Contribution, k: int) -> SparseVector:
    """Return the sum of all ranks' top-k."""

    def add(lower: SparseVector, upper: SparseVector, shard: int, num_shards: int) -> SparseVector:
        return comm.backend.merge(lower, upper)

    return recursive_doubling(comm, gradient, gradient.topk(k), add)


def predicted_time(problem: Problem, costs: Costs) -> float:
    """Return the predicted seconds of a call if all ranks select different indices: an upper bound."""
    P, k = problem.P, problem.k
    folds = 1 if P & (P - 1) else 0
    links = [(problem.link(costs, 1 << j + folds), min(1 << j + folds, P)) for j in range(P.bit_length() - 1)]
    links += [(problem.link(costs, 1), summed) for summed in (1, P)[: 2 * folds]]
    work = 2 * costs.merge + problem.codec(costs)
    moved = sum(x.alpha + summed * k * (problem.entry_bytes * x.beta + work) for x, summed in links)
    return costs.select * problem.n + moved


ALGORITHM = Algorithm(
    name="ssar_recursive_doubling",
    summary="the sum of all ranks' top-k by recursive doubling (SparCML)",
    cost="log2(P) alpha + log2(P) to (P - 1) times k b beta",
    result="up to k P entries, the exact sum of the local top-k",
    source="Renggli et al., SC 2019",
    run=ssar_recursive_doubling,
    predicted_time=predicted_time,
    rejects=False,
    cannot_count_contributors="merges partial sums without counting their contributors",
)
