"""The whole gradient, summed along a ring: what sparse exchange competes with, and what wins at high density.

Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009.

Cost: 2 (P - 1) alpha + 2 (P - 1)/P e n beta per rank, e bytes per element.

    The gradient is cut into P segments. In P - 1 rounds segment s travels once around the ring, from rank s + 1 on to
    rank s, and every rank adds its own; in P - 1 more rounds the sums travel on.

    rank       0      1      2      3      4      5      6         (segment sent in round 0)
    sends     s6     s0     s1     s2     s3     s4     s5   -> to rank + 1

Result: the exact dense sum, as all its entries that are not zero; k is not used. The same on all ranks: one rank
computes each segment. Put-back: nothing is left; the residual becomes zero.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from sparsecomm.algorithms.base import Algorithm
from sparsecomm.feedback import Contribution
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.primitives.costs import Costs, Problem
from sparsecomm.tensors.sparse import Array, SparseVector

__all__ = ["DENSE"]


def dense(comm: Communicator, gradient: Contribution, k: int) -> SparseVector:
    rank, size = comm.rank, comm.size
    total = gradient.whole()
    segments = segments_of(total, size)
    to, source = (rank + 1) % size, (rank - 1) % size

    for round_no in range(size - 1):
        out, into = segments[(rank - 1 - round_no) % size], segments[(rank - 2 - round_no) % size]
        comm.backend.add(into, comm.exchange_dense(out, to, source, len(into), round_no))
    for round_no in range(size - 1):
        out, into = segments[(rank - round_no) % size], segments[(rank - 1 - round_no) % size]
        into[:] = comm.exchange_dense(out, to, source, len(into), size - 1 + round_no)
    return comm.backend.nonzeros(total, gradient.shape)


def gather_segments(comm: Communicator, mine: Array, boundaries: list[int], round_no: int) -> list[Array]:
    """Everyone's segment, from ``boundaries[rank]`` to ``boundaries[rank + 1]`` of a vector, around the ring."""
    rank, size = comm.rank, comm.size
    to, source = (rank + 1) % size, (rank - 1) % size
    segments = {rank: mine}
    for j in range(size - 1):
        maker = (source - j) % size
        expected = boundaries[maker + 1] - boundaries[maker]
        segments[maker] = comm.exchange_dense(segments[(rank - j) % size], to, source, expected, round_no + j)
    return [segments[maker] for maker in range(size)]


def segments_of(array: Array, size: int) -> list[Array]:
    """As many views of a flat array, of equal lengths but for one element."""
    boundaries = [len(array) * i // size for i in range(size + 1)]
    return [array[begin:end] for begin, end in pairwise(boundaries)]


def seconds(problem: Problem, costs: Costs) -> float:
    P, link = problem.P, replace(problem, packed=False).link(costs, sharing=1)  # the ring leaves each machine once
    moved = 2 * (P - 1) * (link.alpha + problem.n / P * problem.element_bytes * link.beta)
    return 2 * costs.add * problem.n + moved


DENSE = Algorithm(
    name="dense",
    summary="the whole gradient, summed along a ring",
    cost="2 (P - 1) alpha + 2 (P - 1)/P e n beta (e: bytes of an element)",
    result="the exact dense sum: every entry that is not zero, whatever k is",
    source="Patarasuk and Yuan, JPDC 2009",
    reselects=False,
    run=dense,
    seconds=seconds,
)
