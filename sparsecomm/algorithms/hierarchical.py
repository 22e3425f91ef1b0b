"""A sum inside each node, then another algorithm between one leader per node, then a broadcast inside each node.

Source: Karonis et al., IPDPS 2000, for collectives; Shi et al., "Towards scalable distributed training of deep learning
on public cloud clusters", MLSys 2021, for Top-k. Any other algorithm can run between nodes.

    node            A: 0 1 2          B: 3 4          C: 5 6
    inside       0 <- 1, 0 <- 2      3 <- 4          5 <- 6         along a tree
    leaders      0 <-----------------> 3 <-----------> 5             the inner algorithm
    inside       0 -> 2, 0 -> 1      3 -> 4          5 -> 6

Messages inside a node have the plain format. Leaders forward the result unchanged. Ranks record dropped entries as in
the inner algorithm. If the inner algorithm reselects after each merge, merges inside a node do the same, and the
merging rank records the rejected entries as dropped.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from sparsecomm.algorithms.base import Algorithm
from sparsecomm.algorithms.tree import broadcast, reduce, reselecting
from sparsecomm.contribution import Contribution
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.primitives.costs import Costs, Problem, log2_ceil
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.wire import PLAIN


@cache
def hierarchical(inner: Algorithm, name: str) -> Algorithm:
    """Return the algorithm that runs ``inner`` between nodes, after a sum inside them."""

    def run(comm: Communicator, gradient: Contribution, k: int) -> SparseVector:
        same_node = [rank for rank in range(comm.size) if comm.node_of_rank[rank] == comm.node_of_rank[comm.rank]]
        first_rank = {node: rank for rank, node in reversed(list(enumerate(comm.node_of_rank)))}
        leaders = sorted(first_rank.values())
        node = comm.subgroup(same_node, 1, wire=PLAIN)
        combine = reselecting(node, gradient, k) if inner.bounded_result else node.backend.merge
        entries = reduce(node, gradient, gradient.topk(k), combine)
        if node.rank == 0:
            entries = inner.run(comm.subgroup(leaders, 2), gradient.with_selection(entries), k)
        return broadcast(comm.subgroup(same_node, 3, wire=PLAIN), entries, k if inner.bounded_result else None)

    def predicted_time(problem: Problem, costs: Costs) -> float:
        k, steps, node = problem.k, log2_ceil(problem.per_node), costs.node or costs.link
        message = node.alpha + k * (4 + problem.element_bytes) * node.beta
        between = replace(problem, P=problem.num_nodes or problem.P, num_nodes=None)
        return steps * (2 * message + 2 * k * costs.merge) + inner.predicted_time(between, costs)

    return Algorithm(
        name=name,
        summary=f"{inner.name} between nodes, after adding up entries inside each node",
        cost=f"2 log2(m) messages inside a node of m ranks, plus {inner.name} between nodes",
        result=f"the result of {inner.name} on the sums of the nodes",
        source=f"Shi et al., MLSys 2021; {inner.source}",
        run=run,
        predicted_time=predicted_time,
        bounded_result=inner.bounded_result,
        rejects=inner.rejects,
        runs_between_nodes=False,
        unsupported=inner.unsupported,
        cannot_count_contributors="sends the sums of nodes without counting their contributors",
    )
