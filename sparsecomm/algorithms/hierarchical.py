"""First the ranks of a node, then one leader of every node, then the node again.

Source: the scheme is old (Karonis et al., IPDPS 2000, for collectives; Shi et al., "Towards scalable distributed
training of deep learning on public cloud clusters", MLSys 2021, for Top-k). Between nodes any other algorithm runs.

Cost, for m ranks on each of N nodes: 2 log2 m (alpha' + 8 k beta') inside, in shared memory, where entries travel as
they are, and what the inner algorithm costs for N ranks. With a dense sum inside: log2 m (alpha' + e n beta') instead
of the first half.

    node            A: 0 1 2          B: 3 4          C: 5 6
    inside       0 <- 1, 0 <- 2      3 <- 4          5 <- 6         along a tree
    leaders      0 <-----------------> 3 <-----------> 5             the inner algorithm
    inside       0 -> 2, 0 -> 1      3 -> 4          5 -> 6

Result: that of the inner algorithm, on what the nodes have. The same on all ranks: leaders hand it on as it is.
Dropped: as by the inner algorithm; if that reselects, also what merges inside a node reject, by the rank that merges.
With a dense sum inside, nothing is selected before it: the leader selects from the sum of its node, takes back what the
result does not hold of that, and keeps all that the sum holds beyond its top-k.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from sparsecomm.algorithms.base import Algorithm
from sparsecomm.algorithms.tree import broadcast, reduce, reselecting
from sparsecomm.feedback import Contribution
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.primitives.costs import Costs, Problem, log2_ceil
from sparsecomm.tensors.sparse import Array, SparseVector

__all__ = ["DENSE_INSIDE", "SPARSE_INSIDE", "hierarchical"]

SPARSE_INSIDE, DENSE_INSIDE = "hierarchical", "hierarchical_dense"
OWNERS = "the first rank of a node takes back what its node has selected"


@cache
def hierarchical(inner: Algorithm, *, dense: bool, name: str) -> Algorithm:
    """Return the algorithm that runs ``inner`` between nodes, after a sum inside them that is ``dense`` or sparse."""

    def run(comm: Communicator, gradient: Contribution, k: int) -> SparseVector:
        mine = [rank for rank in range(comm.size) if comm.node_of_rank[rank] == comm.node_of_rank[comm.rank]]
        first = {node: rank for rank, node in reversed(list(enumerate(comm.node_of_rank)))}
        leaders = sorted(first.values())
        node = comm.subgroup(mine, 1, plain=True)
        entries = sum_dense(node, gradient, k) if dense else sum_sparse(node, gradient, k, inner.reselects)
        if entries is not None and node.rank == 0:
            entries = inner.run(comm.subgroup(leaders, 2), _NodeSum(gradient, entries), k)
        return broadcast(comm.subgroup(mine, 3, plain=True), entries)

    def predicted_time(problem: Problem, costs: Costs) -> float:
        k, steps, node = problem.k, log2_ceil(problem.per_node), costs.node or costs.link
        once = node.alpha + k * (4 + problem.element_bytes) * node.beta
        if dense:
            first = node.alpha + problem.n * (problem.element_bytes * node.beta + costs.add)
        else:
            first = once + 2 * k * costs.merge
        between = replace(problem, P=problem.num_nodes or problem.P, num_nodes=None)
        whole = costs.add * problem.n if dense else 0.0  # a copy of the gradient, to add the others to
        return whole + steps * (first + once) + inner.predicted_time(between, costs)

    what = "its dense sum" if dense else "its own sum"
    return Algorithm(
        name=name,
        summary=f"{inner.name} between nodes, after every node has made {what}",
        cost=f"2 log2(m) messages inside a node of m ranks, and {inner.name} between nodes",
        result=f"that of {inner.name}, on the sums of the nodes" + (f"; {OWNERS}" if dense else ""),
        source=f"Shi et al., MLSys 2021; {inner.source}",
        run=run,
        predicted_time=predicted_time,
        reselects=inner.reselects and not dense,
        rejects=inner.rejects,
        between_nodes=False,
        unsupported=inner.unsupported,
        contributors_unknown="sends the sums of nodes, which do not say of how many ranks",
    )


def sum_sparse(node: Communicator, gradient: Contribution, k: int, reselects: bool) -> SparseVector:
    """Return the sum of the node's top-k, or its top-k, at its leader, and at the others what they sent."""
    combine = reselecting(node, gradient, k) if reselects else node.backend.merge
    return reduce(node, gradient, gradient.topk(k), combine)


def sum_dense(node: Communicator, gradient: Contribution, k: int) -> SparseVector | None:
    """Return the top-k of the sum of the node's gradients at its leader, which keeps the rest, and None elsewhere."""
    total = gradient.whole()
    distance, round_no = 1, 0
    while distance < node.size:
        if node.rank & distance:
            node.send_dense(total, node.rank - distance, round_no)
            return None
        if node.rank + distance < node.size:
            node.backend.add(total, node.receive_dense(node.rank + distance, len(total), total.itemsize, round_no))
        distance, round_no = 2 * distance, round_no + 1
    return gradient.rest(total, k)


class _NodeSum:
    """A leader's contribution to the inner algorithm: the sum of its node."""

    def __init__(self, gradient: Contribution, entries: SparseVector) -> None:
        self.shape, self.drop, self.rest = gradient.shape, gradient.drop, gradient.rest
        self._entries = entries

    def topk(self, k: int) -> SparseVector:
        return self._entries

    def whole(self) -> Array:
        raise NotImplementedError("the inner algorithm takes entries")
