"""The dense sum of all gradients, which is faster than sparse algorithms at high density.

Source: a reduce-scatter and an all-gather (Rabenseifner, ICCS 2004, Section 3). In each of them, a rank sends to all
other ranks at once. If several ranks share the link of their node, the library uses a ring instead (Patarasuk and Yuan,
"Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009).

    The gradient is split into P segments; rank r owns segment r. Every rank sends each segment to its owner. The owner
    adds up the copies of its segment, and sends the sum to all ranks.

    rank          0         1         2         3         4         5         6
    sends      s1 ... s6  s2 ... s0  s3 ... s1   ...                              one to each
    adds up      s0        s1        s2        s3        s4        s5        s6

    On the ring, segment s travels in P - 1 steps from rank s + 1 to rank s, and every rank on the way adds its copy of
    the segment. The sums take P - 1 more steps to reach all ranks. Each byte leaves a node once.

    rank       0      1      2      3      4      5      6         (segment sent in step 0)
    sends     s6     s0     s1     s2     s3     s4     s5   -> to rank + 1

    If every rank has its own node, and the gradients are so short that their bytes take less time than the latency,
    every rank sends its whole gradient to all others, and adds up all segments itself. This takes one trip:
    alpha + (P - 2) gap + (P - 1) e n beta, with e bytes per element.

k is ignored. All three variants add up a segment in the order of the ring, so their results are equal. Nothing is
dropped; the residual becomes zero.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from sparsecomm.algorithms.base import Algorithm
from sparsecomm.contribution import Contribution
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.primitives.costs import Costs, Problem
from sparsecomm.tensors.sparse import Array, SparseVector

_MAX_SENT = 1 << 16  # limits the elements that a rank sends in one trip, even if the cost of bytes is unknown


def dense(comm: Communicator, gradient: Contribution, k: int) -> SparseVector:
    """Return the dense sum of all ranks' gradients."""
    size = comm.size
    total = gradient.whole()
    boundaries = [len(total) * i // size for i in range(size + 1)]
    segments = [total[begin:end] for begin, end in pairwise(boundaries)]
    sent = (size - 1) * len(total)
    if 1 < size == len(set(comm.node_of_rank)) and sent <= _MAX_SENT and comm.is_latency_bound(sent):
        _sum_everywhere(comm, total, segments)
    else:
        reduce_scatter(comm, segments)
        gathered = all_gather(comm, segments[comm.rank], [*map(len, segments)])
        for segment, received in zip(segments, gathered, strict=True):
            if received is not segment:
                segment[:] = received
    return comm.backend.nonzeros(total, gradient.shape)


def reduce_scatter(comm: Communicator, segments: list[Array]) -> None:
    """Add up all ranks' copies of this rank's segment, in place. Afterwards, the other segments are undefined."""
    rank, size, own = comm.rank, comm.size, segments[comm.rank]
    if size == 1:
        return
    if uses_ring(comm):
        dst, src = (rank + 1) % size, (rank - 1) % size
        for step in range(size - 1):
            sent, summed = segments[(rank - 1 - step) % size], segments[(rank - 2 - step) % size]
            comm.backend.add(summed, comm.exchange_segments({dst: sent}, {src: len(summed)}, step)[src])
        return
    received = comm.exchange_segments(dict(enumerate(segments)), dict.fromkeys(range(size), len(own)), 0)
    around = [received[(rank + distance) % size] for distance in range(1, size)] + [own]
    for before, segment in pairwise(around):
        comm.backend.add(segment, before)


def all_gather(comm: Communicator, own: Array, lengths: list[int]) -> list[Array]:
    """Return the segments of all ranks. ``own`` is this rank's, and ``lengths`` are the lengths of all."""
    rank, size = comm.rank, comm.size
    segments = {rank: own}
    if size > 1 and uses_ring(comm):
        for step in range(size - 1):
            source = (rank - 1 - step) % size
            sent, expected = {(rank + 1) % size: segments[(rank - step) % size]}, {(rank - 1) % size: lengths[source]}
            segments[source] = comm.exchange_segments(sent, expected, size - 1 + step)[(rank - 1) % size]
    elif size > 1:
        segments |= comm.exchange_segments(dict.fromkeys(range(size), own), dict(enumerate(lengths)), size - 1)
    return [segments[owner] for owner in range(size)]


def uses_ring(comm: Communicator) -> bool:
    """Return whether ranks share links, which messages to all ranks would cross several times."""
    return 1 < len(set(comm.node_of_rank)) < comm.size


def _sum_everywhere(comm: Communicator, total: Array, segments: list[Array]) -> None:
    """Add up all ranks' segments in place, in one trip: every rank receives all gradients and computes all sums."""
    size, begin = comm.size, 0
    totals = comm.exchange_segments(dict.fromkeys(range(size), total), dict.fromkeys(range(size), len(total)), 0)
    totals[comm.rank] = total.copy()
    for owner, segment in enumerate(segments):
        end = begin + len(segment)
        around = [totals[(owner + distance) % size][begin:end] for distance in range(1, size + 1)]
        for before, after in pairwise(around):
            comm.backend.add(after, before)
        segment[:], begin = around[-1], end


def predicted_time(problem: Problem, costs: Costs) -> float:
    """Return the predicted seconds of a call."""
    P, plain, nbytes = problem.P, replace(problem, needs_codec=False), problem.n / problem.P * problem.element_bytes
    num_nodes, sent = problem.num_nodes or P, (P - 1) * problem.n
    if 1 < num_nodes < P:
        moved = 2 * (P - 1) * plain.link(costs, sharing=1).trip(1, nbytes)  # each byte leaves a node once
    elif 1 < P == num_nodes and sent <= _MAX_SENT and sent < costs.latency_entries:
        return P * costs.add * problem.n + plain.link(costs).trip(P - 1, sent * problem.element_bytes)
    else:
        moved = 2 * plain.link(costs).trip(P - 1, (P - 1) * nbytes)
    return 2 * costs.add * problem.n + moved


ALGORITHM = Algorithm(
    name="dense",
    summary="the dense sum: each rank adds up a segment of the gradient",
    cost="2 alpha + 2 (P - 2) gap + 2 (P - 1)/P e n beta",
    result="the exact dense sum: every nonzero entry; k is ignored",
    source="Rabenseifner, ICCS 2004; Patarasuk and Yuan, JPDC 2009",
    run=dense,
    predicted_time=predicted_time,
    rejects=False,
    automatic=True,
    runs_between_nodes=False,
    cannot_count_contributors="sums whole gradients, so every rank contributes to every element: use op='mean'",
)
