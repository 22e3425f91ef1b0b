"""gTopKAllReduce along a tree.

Source: Shi et al., "A distributed synchronous SGD algorithm with global Top-k sparsification for low bandwidth
networks", ICDCS 2019 (arXiv 1901.04359), Algorithm 3. Theirs is for P = 2^j and loses entries; this one takes any P.

Cost: 2 ceil(log2 P) (alpha + k b beta) per rank.

    rank       0     1     2     3     4     5     6
    round 0   0+1 <- 1    2+3 <- 3    4+5 <- 5     6
    round 1  0..3 <------ 2+3        4..6 <------- 6
    round 2  0..6 <------------------ 4+5+6
    then the same edges backwards carry the result to everyone.

Result: k entries, approximate: what was rejected below is not seen above. The same on all ranks: one rank computes it.
Put-back: the rank that merges keeps what the merge rejects.
"""

from __future__ import annotations

from sparsecomm.algorithms.base import Algorithm, Link, Problem, log2_ceil
from sparsecomm.algorithms.group import Group
from sparsecomm.feedback import Gradient
from sparsecomm.sparse import SparseVector

__all__ = ["TREE"]


def tree(group: Group, gradient: Gradient, k: int) -> SparseVector:
    rank, size = group.rank, group.size
    rounds = log2_ceil(size)
    kept = gradient.topk(k)
    depth = 0  # rounds in which this rank merges: those below its lowest set bit
    while depth < rounds and not rank >> depth & 1:
        child = rank + (1 << depth)
        if child < size:
            kept, rejected = group.ops.merge_topk(kept, group.receive(child, depth), k)
            gradient.put_back(rejected)
        depth += 1

    if rank > 0:
        parent = rank - (1 << depth)
        group.send(kept, parent, depth)
        kept = group.receive(parent, rounds + depth)
    for round in reversed(range(depth)):
        child = rank + (1 << round)
        if child < size:
            group.send(kept, child, rounds + round)
    return kept


def seconds(problem: Problem, link: Link) -> float:
    return 2 * log2_ceil(problem.P) * (link.alpha + problem.k * problem.entry_bytes * link.beta)


TREE = Algorithm(
    name="tree",
    summary="global top-k by merging along a binomial tree, then a broadcast (gTop-k as in the paper)",
    cost="2 log2(P) alpha + 2 k b log2(P) beta",
    result="at most k entries, the same on all ranks; approximate",
    source="Shi et al., ICDCS 2019, Algorithm 3",
    run=tree,
    seconds=seconds,
)
