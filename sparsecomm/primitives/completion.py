"""After a global top-k: all that any rank holds where the winners are.

A global top-k algorithm finds k indices, and adds up what ranks had selected there. What a rank held there below its
own top-k, or lost in a merge, would wait in residuals. Here the first exchange only votes: a second one adds up,
densely, what all ranks hold at the winning indices, and the residuals become zero there.

Source: the dense sum is recursive halving and doubling (Thakur, Rabenseifner and Gropp, IJHPCA 2005, Section 4.4), with
the ranks beyond a power of two folded into their neighbours, as in `sparsecomm.algorithms.butterfly`.

Cost, beside that of the vote: 2 log2 P alpha + 2 (P - 1)/P k e beta per rank, e bytes per value; where P is no power of
two, 2 (alpha + k e beta) more.

    rank          0        1        2        3
    round 0      01 <---> 23                          of four parts each rank keeps two, summed
                                   01 <---> 23
    round 1       0 <-------------> 1                 then one
                           2 <-------------> 3
    and backwards the sums come together.

Result: the indices of the vote, with the exact sum of all ranks' residual + x there, without zeros. The same on all
ranks: one rank, or one pair, adds up each part. Put-back: residual + x, with zeros where the indices are.
"""

from __future__ import annotations

from dataclasses import replace

from sparsecomm.algorithms.dense import segments_of
from sparsecomm.feedback import Gradient
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.primitives.costs import Costs, Problem, log2_ceil
from sparsecomm.tensors.sparse import Array, SparseVector

__all__ = ["complete", "seconds"]


def complete(comm: Communicator, gradient: Gradient, winners: SparseVector) -> SparseVector:
    held = gradient.held(winners)
    sum_dense(comm, held)
    gradient.applied(winners)
    return comm.backend.with_values(winners, held)


def sum_dense(comm: Communicator, held: Array) -> None:
    """Add up everyone's array, in place."""
    rank, size, add = comm.rank, comm.size, comm.backend.add
    rounds = size.bit_length() - 1
    folded = size - (1 << rounds)
    if rank < 2 * folded and rank % 2 == 0:
        comm.send_dense(held, rank + 1, 0)
        held[:] = comm.receive_dense(rank + 1, len(held), held.itemsize, 2 * rounds + 1)
        return
    if rank < 2 * folded:
        add(held, comm.receive_dense(rank - 1, len(held), held.itemsize, 0))

    place = rank // 2 if rank < 2 * folded else rank - folded
    steps: list[tuple[int, Array, Array]] = []  # peer, the half that is this rank's, the half that is the peer's
    for round_no in range(rounds):
        other = place ^ (1 << round_no)
        peer = 2 * other + 1 if other < folded else other + folded
        lower, upper = segments_of(steps[-1][1] if steps else held, 2)
        mine, theirs = (lower, upper) if place < other else (upper, lower)
        steps.append((peer, mine, theirs))
        add(mine, comm.exchange_dense(theirs, peer, peer, len(mine), 1 + round_no))
    for round_no, (peer, mine, theirs) in enumerate(reversed(steps)):
        theirs[:] = comm.exchange_dense(mine, peer, peer, len(theirs), 1 + rounds + round_no)
    if rank < 2 * folded:
        comm.send_dense(held, rank - 1, 2 * rounds + 1)


def seconds(problem: Problem, costs: Costs) -> float:
    problem = replace(problem, packed=False)
    P, k = problem.P, problem.k
    rounds = P.bit_length() - 1
    links = [problem.link(costs, 1 << j) for j in range(rounds)]
    halves = [k / (2 << j) for j in range(rounds)]
    moved = sum(2 * (x.alpha + half * problem.element_bytes * x.beta) for x, half in zip(links, halves, strict=True))
    if P & (P - 1):
        fold = problem.link(costs, 1)
        moved += 2 * (fold.alpha + k * problem.element_bytes * fold.beta)
    return moved + log2_ceil(P) * costs.add * k
