"""Completion of a global top-k: all that any rank holds where the winners are.

A global top-k algorithm finds k indices, and adds up what ranks had selected there. What a rank held there below its
own top-k, or lost in a merge, would wait in residuals. Here the first exchange only votes: a second one adds up,
densely, what all ranks hold at the winning indices, and the residuals become zero there.

Source: the dense sum is recursive halving and doubling (Thakur, Rabenseifner and Gropp, IJHPCA 2005, Section 4.4),
after the fold (`sparsecomm.primitives.fold`) where P is no power of two.

Cost, beside that of the vote: 2 log2 P alpha + 2 (P - 1)/P k e beta per rank, e bytes per value; where P is no power of
two, 2 (alpha + k e beta) more.

    rank          0        1        2        3
    step 0       01 <---> 23                          of four parts each rank keeps two, summed
                                   01 <---> 23
    step 1        0 <-------------> 1                 then one
                           2 <-------------> 3
    and backwards the sums come together.

Result: the indices of the vote, with the exact sum of all ranks' residual + x there, without zeros. The same on all
ranks: one rank, or one pair, adds up each part. Residuals: residual + x, with zeros where the indices are.
"""

from __future__ import annotations

from dataclasses import replace

from sparsecomm.feedback import Gradient
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.primitives.costs import Costs, Problem, log2_ceil
from sparsecomm.primitives.fold import Fold
from sparsecomm.primitives.ring import segments_of
from sparsecomm.tensors.sparse import Array, SparseVector

__all__ = ["complete", "completion_time"]


def complete(comm: Communicator, gradient: Gradient, winners: SparseVector) -> SparseVector:
    """Return the sum of all that the ranks hold where ``winners`` are. Their residuals become zero there."""
    held = gradient.held(winners)
    sum_dense(comm, held)
    gradient.applied(winners)
    return comm.backend.with_values(winners, held)


def sum_dense(comm: Communicator, held: Array) -> None:
    """Add up all ranks' arrays, of equal lengths, in place."""
    fold, add, length = Fold.of(comm.rank, comm.size), comm.backend.add, len(held)
    unfold = 2 * fold.steps + 1
    if fold.hands_over:
        comm.send_dense(held, fold.partner, 0)
        held[:] = comm.receive_dense(fold.partner, length, held.itemsize, unfold)
        return
    if fold.partner >= 0:
        add(held, comm.receive_dense(fold.partner, length, held.itemsize, 0))

    halves: list[tuple[int, Array, Array]] = []  # peer, the half that is this rank's, the half that is the peer's
    for step in range(fold.steps):
        newdst = fold.newrank ^ (1 << step)
        peer = fold.rank_of(newdst)
        lower, upper = segments_of(halves[-1][1] if halves else held, 2)
        mine, theirs = (lower, upper) if fold.newrank < newdst else (upper, lower)
        halves.append((peer, mine, theirs))
        add(mine, comm.exchange_dense(theirs, peer, peer, len(mine), 1 + step))
    for step, (peer, mine, theirs) in enumerate(reversed(halves)):
        theirs[:] = comm.exchange_dense(mine, peer, peer, len(theirs), 1 + fold.steps + step)
    if fold.partner >= 0:
        comm.send_dense(held, fold.partner, unfold)


def completion_time(problem: Problem, costs: Costs) -> float:
    """Return the predicted seconds of `complete`, beside those of the vote."""
    problem = replace(problem, packed=False)
    P, k = problem.P, problem.k
    links = [problem.link(costs, 1 << step) for step in range(P.bit_length() - 1)]
    moved = sum(2 * (x.alpha + k / (2 << step) * problem.element_bytes * x.beta) for step, x in enumerate(links))
    if P & (P - 1):
        fold = problem.link(costs, 1)
        moved += 2 * (fold.alpha + k * problem.element_bytes * fold.beta)
    return moved + log2_ceil(P) * costs.add * k
