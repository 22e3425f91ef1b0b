"""`expected_sum`: the result of every algorithm, in plain NumPy on dense vectors, without the library's arithmetic.

A sparse vector is a dense one with zeros, so merging is adding. To add an algorithm, add a function and a line to
`ORACLES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsecomm.algorithms import ALGORITHMS

Vector = NDArray[Any]
Nodes = Sequence[int]
Oracle = Callable[[Sequence[Vector], int, Nodes], Vector]


def expected_sum(algorithm: str, gradients: Sequence[Vector], k: int, node_of_rank: Nodes | None = None) -> Vector:
    """Return the dense result that `sparsecomm.sparse_allreduce` must have with an exact wire format, bit for bit.

        expected = testing.expected_sum("butterfly", [x + residual for x, residual in inputs], k)

    Args:
        algorithm: a name from `sparsecomm.algorithms`, such as "hierarchical:tree" or "split:2".
        gradients: of all ranks, flat; with residuals, the sums of both. 16-bit types are summed in float32.
        k: number of entries that every rank selects.
        node_of_rank: node number of each rank; ``None``: each rank has its own node.
    """
    vectors = [v.astype(np.float32) if v.dtype.itemsize < 4 else v for v in gradients]
    outer, _, inner = algorithm.partition(":")
    if outer == "split" and inner:
        oracle: Oracle = partial(split, ratio=int(inner))
    else:
        oracle = partial(_hierarchical, inner or "butterfly") if outer == "hierarchical" else ORACLES[algorithm]
    return oracle(vectors, k, range(len(vectors)) if node_of_rank is None else node_of_rank)


def top(v: Vector, k: int) -> Vector:
    """Return ``v`` with all but the first k elements set to zero, by (NaN, |v| descending, index ascending)."""
    entries = np.flatnonzero(v)
    values = v[entries]
    first = entries[np.lexsort((-np.abs(values), ~np.isnan(values)))[:k]]  # stable: ties go to the lower index
    selected = np.zeros_like(v)
    selected[first] = v[first]
    return selected


def in_pairs(vectors: Sequence[Vector], combine: Callable[[Vector, Vector], Vector]) -> Vector:
    """Combine neighbours until one vector is left. Rounding depends on this order, so the library guarantees it."""
    while len(vectors) > 1:
        paired = [combine(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=False)]
        vectors = [*paired, *vectors[2 * len(paired) :]]
    return vectors[0]


def dense(gradients: Sequence[Vector], k: int, node_of_rank: Nodes) -> Vector:
    """Return the sum. The sum of each rank's segment starts at the next rank and goes around the ring."""
    P = len(gradients)
    bounds = [gradients[0].size * i // P for i in range(P + 1)]
    around = [[gradients[(rank + 1 + i) % P][bounds[rank] : bounds[rank + 1]] for i in range(P)] for rank in range(P)]
    return np.concatenate([reduce(np.add, parts) for parts in around])


def allgather(gradients: Sequence[Vector], k: int, node_of_rank: Nodes) -> Vector:
    """Return the sum of all ranks' selections, added in pairs of neighbours."""
    return in_pairs([top(v, k) for v in gradients], np.add)


def split(gradients: Sequence[Vector], k: int, node_of_rank: Nodes, ratio: int = 1) -> Vector:
    """Return the top-(ratio * k) of the sum of all ranks' selections."""
    return top(allgather(gradients, k, node_of_rank), ratio * k)


def double(gradients: Sequence[Vector], k: int, node_of_rank: Nodes) -> Vector:
    """Add the other ranks' selections to each owner's gradient within its range; return the largest sums of each."""
    P, n = len(gradients), gradients[0].size
    owners = min(P, max(1, k // 16))
    results = []
    for owner in range(owners):
        own = slice(n * owner // owners, n * (owner + 1) // owners)
        count = k * (owner + 1) // owners - k * owner // owners
        others = [top(v[own], count) for rank, v in enumerate(gradients) if rank != owner]
        results.append(
            top(gradients[owner][own] + in_pairs(others, np.add) if others else gradients[owner][own], count)
        )
    return np.concatenate(results)


def tree(gradients: Sequence[Vector], k: int, node_of_rank: Nodes) -> Vector:
    """Return the result of the paper's tree, in which every pair reselects k, on any number of ranks."""
    return in_pairs([top(v, k) for v in gradients], lambda a, b: top(a + b, k))


def butterfly(gradients: Sequence[Vector], k: int, node_of_rank: Nodes) -> Vector:
    """Return the result of the tree, after folding pairs of neighbours down to a power of two."""
    P = len(gradients)
    rem = P - (1 << P.bit_length() - 1)
    selected = [top(v, k) for v in gradients]
    pairs = [top(selected[2 * i] + selected[2 * i + 1], k) for i in range(rem)]
    return in_pairs([*pairs, *selected[2 * rem :]], lambda a, b: top(a + b, k))


def doubling(gradients: Sequence[Vector], k: int, node_of_rank: Nodes) -> Vector:
    """Return the result of a butterfly whose merges keep all entries."""
    return butterfly([top(v, k) for v in gradients], gradients[0].size, node_of_rank)


def num_contributors(gradients: Sequence[Vector], k: int) -> Vector:
    """Return the number of ranks that select each element, at least 1: the divisor of ``op="mean_of_contributors"``."""
    counts: Vector = np.sum([top(v, k) != 0 for v in gradients], axis=0)
    return np.maximum(counts, 1)


ORACLES: dict[str, Oracle] = {
    "dense": dense,
    "allgather": allgather,
    "tree": tree,
    "butterfly": butterfly,
    "split": split,
    "double": double,
    "ssar_recursive_doubling": doubling,
    "ssar_split_allgather": allgather,
}


def _hierarchical(inner: str, gradients: Sequence[Vector], k: int, node_of_rank: Nodes) -> Vector:
    """Return the result of the inner algorithm on the sums of all nodes."""
    every_node = [
        [gradient for gradient, number in zip(gradients, node_of_rank, strict=True) if number == node]
        for node in dict.fromkeys(node_of_rank)
    ]
    if ALGORITHMS[inner].bounded_result:
        sums = [tree(members, k, node_of_rank) for members in every_node]
    else:
        sums = [allgather(members, k, node_of_rank) for members in every_node]
        k = sums[0].size  # the inner algorithm selects nothing
    return ORACLES[inner](sums, k, range(len(sums)))
