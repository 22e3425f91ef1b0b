"""Top-k S-SGD along a ring: each rank hands on what it received in the step before.

Source: the ring of Patarasuk and Yuan, JPDC 2009, with the entries of Lin et al., "Deep Gradient Compression", ICLR
2018.

Cost: (P - 1) (alpha + k b beta) per rank: more messages than `allgather`, all of them to a neighbour.

    rank       0      1      2      3      4      5      6
    step 0    s6     s0     s1     s2     s3     s4     s5    received from rank - 1
    step 1    s5     s6     s0     s1     s2     s3     s4

Result: up to k P entries, the exact sum of what the ranks selected. The same on all ranks: all add in order of rank.
Put-back: nothing is rejected; a rank keeps what quantizing to a narrow format takes from its entries.
"""

from __future__ import annotations

from sparsecomm.algorithms.base import Algorithm
from sparsecomm.feedback import Contribution
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.primitives.costs import Costs, Problem, log2_ceil
from sparsecomm.primitives.gather import sum_in_pairs
from sparsecomm.tensors.sparse import SparseVector

__all__ = ["ALGORITHM"]


def ring_allgather(comm: Communicator, gradient: Contribution, k: int) -> SparseVector:
    """Return the sum of all ranks' top-k."""
    rank, size = comm.rank, comm.size
    held = {rank: comm.quantized(gradient.topk(k), gradient)}
    for step in range(size - 1):
        sent, received = (rank - step) % size, (rank - step - 1) % size
        held[received] = comm.exchange(held[sent], (rank + 1) % size, (rank - 1) % size, step)
    return sum_in_pairs(comm, [held[maker] for maker in range(size)])


def predicted_time(problem: Problem, costs: Costs) -> float:
    """Return the seconds of a call, as predicted."""
    P, k, link = problem.P, problem.k, problem.link(costs, sharing=1)
    work = P * k * (log2_ceil(P) * costs.merge + problem.codec(costs))
    return costs.select * problem.n + (P - 1) * (link.alpha + k * problem.entry_bytes * link.beta) + work


ALGORITHM = Algorithm(
    name="ring_allgather",
    summary="the sum of all ranks' top-k, handed on around a ring and added by everyone",
    cost="(P - 1) (alpha + k b beta)",
    result="up to k P entries, the exact sum of the local top-k",
    put_back="none are rejected",
    source="Patarasuk and Yuan, JPDC 2009; Lin et al., ICLR 2018",
    run=ring_allgather,
    predicted_time=predicted_time,
)
