"""What every algorithm must return: plain NumPy on dense vectors, which shares no code with the library.

A sparse vector is a dense one with zeros, so merging is adding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsecomm.algorithms import ALGORITHMS

__all__ = ["Nodes", "Oracle", "Vector", "oracle"]

Vector = NDArray[Any]
Nodes = Sequence[int]
Oracle = Callable[[Sequence[Vector], int, Nodes], Vector]


def oracle(name: str) -> Oracle:
    """What that algorithm returns, dense, of all ranks' gradients, with k and the machine of each rank."""
    outer, _, inner = name.partition(":")
    if not outer.startswith("hierarchical"):
        return _FLAT[name]
    inner = inner or "butterfly"

    def hierarchical(gradients: Sequence[Vector], k: int, nodes: Nodes) -> Vector:
        nodes_gradients = by_node(gradients, nodes)
        if outer == "hierarchical_dense":
            sums = [top(in_pairs(its, np.add), k) for its in nodes_gradients]
        elif ALGORITHMS[inner].reselects:
            sums = [tree(its, k, nodes) for its in nodes_gradients]
        else:
            sums = [allgather(its, k, nodes) for its in nodes_gradients]
            k = sums[0].size  # of these nothing is selected any more
        return _FLAT[inner](sums, k, range(len(sums)))

    return hierarchical


def top(v: Vector, k: int) -> Vector:
    """``v`` with zeros in place of all but the first k by (NaN, |v| descending, index ascending)."""
    first = np.lexsort((-np.abs(v), ~np.isnan(v)))[:k]  # a stable sort: of equals the lower index comes first
    kept = np.zeros_like(v)
    kept[first] = v[first]
    return kept


def in_pairs(vectors: Sequence[Vector], combine: Callable[[Vector, Vector], Vector]) -> Vector:
    """Combine neighbours until one is left. Rounding depends on the order, so the order is a part of the promise."""
    while len(vectors) > 1:
        paired = [combine(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=False)]
        vectors = [*paired, *vectors[2 * len(paired) :]]
    return vectors[0]


def dense(gradients: Sequence[Vector], k: int, nodes: Nodes) -> Vector:
    """One segment per rank; its sum begins at the next rank and goes around the ring."""
    P = len(gradients)
    edges = [gradients[0].size * i // P for i in range(P + 1)]
    around = [[gradients[(rank + 1 + i) % P][edges[rank] : edges[rank + 1]] for i in range(P)] for rank in range(P)]
    return np.concatenate([reduce(np.add, parts) for parts in around])


def allgather(gradients: Sequence[Vector], k: int, nodes: Nodes) -> Vector:
    return in_pairs([top(v, k) for v in gradients], np.add)


def split(gradients: Sequence[Vector], k: int, nodes: Nodes) -> Vector:
    return top(allgather(gradients, k, nodes), k)


def tree(gradients: Sequence[Vector], k: int, nodes: Nodes) -> Vector:
    return in_pairs([top(v, k) for v in gradients], lambda a, b: top(a + b, k))


def by_node(gradients: Sequence[Vector], nodes: Nodes) -> list[list[Vector]]:
    return [[v for v, its in zip(gradients, nodes, strict=True) if its == node] for node in dict.fromkeys(nodes)]


def butterfly(gradients: Sequence[Vector], k: int, nodes: Nodes) -> Vector:
    """The tree, after as many pairs of neighbours were folded as leave a power of two."""
    P = len(gradients)
    folded = P - (1 << P.bit_length() - 1)
    selected = [top(v, k) for v in gradients]
    pairs = [top(selected[2 * i] + selected[2 * i + 1], k) for i in range(folded)]
    return in_pairs([*pairs, *selected[2 * folded :]], lambda a, b: top(a + b, k))


def doubling(gradients: Sequence[Vector], k: int, nodes: Nodes) -> Vector:
    """As the butterfly, with nothing rejected."""
    return butterfly([top(v, k) for v in gradients], gradients[0].size, nodes)


_FLAT: dict[str, Oracle] = {
    "dense": dense,
    "allgather": allgather,
    "tree": tree,
    "butterfly": butterfly,
    "split": split,
    "ssar_recursive_doubling": doubling,
    "ssar_split_allgather": allgather,
    "dsar_split_allgather": allgather,
}
