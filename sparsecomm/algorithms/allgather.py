"""Top-k S-SGD: everyone gathers everyone's top-k and adds them up.

Source: Lin et al., "Deep Gradient Compression", ICLR 2018; gathered as by Bruck et al., IEEE TPDS 1997, Section 3.

Cost: ceil(log2 P) alpha + (P - 1) k b beta per rank.

    rank       0      1      2      3      4      5      6
    at first   0      1      2      3      4      5      6
    round 0    01     12     23     34     45     56     60      from rank + 1
    round 1    0123   1234   2345   3456   4560   5601   6012    from rank + 2
    round 2    all: the three vectors missing, from rank + 4

Result: up to k P entries, the exact sum of what the ranks selected. The same on all ranks: all add in order of rank.
Put-back: nothing is rejected.
"""

from __future__ import annotations

from sparsecomm.algorithms.base import Algorithm, Link, Problem, log2_ceil
from sparsecomm.algorithms.group import Group
from sparsecomm.feedback import Gradient
from sparsecomm.sparse import SparseVector

__all__ = ["ALLGATHER"]


def allgather(group: Group, gradient: Gradient, k: int) -> SparseVector:
    rank, size = group.rank, group.size
    held = [gradient.topk(k)]  # of ranks rank, rank + 1, ...
    for round in range(log2_ceil(size)):
        step = 1 << round
        new = min(step, size - step)
        theirs = range(rank + step, rank + step + new)
        held += group.exchange_lists(held[:new], (rank - step) % size, theirs, (rank + step) % size, round)

    level = held[size - rank :] + held[: size - rank]  # in order of rank
    while len(level) > 1:
        pairs = [group.ops.merge(a, b) for a, b in zip(level[::2], level[1::2], strict=False)]
        level = pairs + level[len(level) // 2 * 2 :]
    return level[0]


def seconds(problem: Problem, link: Link) -> float:
    P = problem.P
    return log2_ceil(P) * link.alpha + (P - 1) * problem.k * problem.entry_bytes * link.beta


ALLGATHER = Algorithm(
    name="allgather",
    summary="the sum of all ranks' top-k, gathered and added by everyone (Top-k S-SGD)",
    cost="log2(P) alpha + (P - 1) k b beta",
    result="up to k P entries, the exact sum of the local top-k, the same on all ranks",
    source="Lin et al., ICLR 2018; Bruck et al., IEEE TPDS 1997",
    run=allgather,
    seconds=seconds,
)
