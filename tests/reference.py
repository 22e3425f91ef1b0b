"""The oracle: what every kernel and algorithm must give, in plain NumPy, written to be read and not to be fast."""

from __future__ import annotations

import numpy as np

ACCUMULATOR = {"float16": np.float32, "bfloat16": np.float32, "float32": np.float32, "float64": np.float64}


def widened(x):
    """A flat array in the type in which its sums are carried."""
    x = np.asarray(x).reshape(-1)
    return x.astype(ACCUMULATOR[x.dtype.name])


def order(v):
    """Indices by (|v| descending, index ascending), NaN above infinity, without those of zeros."""
    magnitude = np.abs(v)
    magnitude = np.where(np.isnan(v), np.inf, magnitude)
    found = np.lexsort((np.arange(len(v)), -magnitude, ~np.isnan(v)))
    return found[v[found] != 0]


def select(v, indices):
    indices = np.sort(indices)
    return indices, canonical(v[indices])


def canonical(v):
    return np.where(np.isnan(v), np.array(np.nan, v.dtype), v)


def topk(v, k):
    """(indices, values) of the top-k of a flat float32 or float64 array."""
    return select(v, order(v)[:k])


def threshold(v, tau):
    with np.errstate(invalid="ignore"):
        hit = ((np.abs(v.astype(np.float64)) >= tau) | np.isnan(v)) & (v != 0)
    return select(v, np.flatnonzero(hit))


def merge(a, b):
    """The sum of two (indices, values), without zeros."""
    indices = np.union1d(a[0], b[0])
    total = np.zeros(len(indices), a[1].dtype)
    total[np.searchsorted(indices, a[0])] = a[1]
    with np.errstate(all="ignore"):
        total[np.searchsorted(indices, b[0])] += b[1]
    total = canonical(total)
    return indices[total != 0], total[total != 0]


def merge_topk(a, b, k):
    """(kept, rejected) of the sum of two (indices, values)."""
    indices, values = merge(a, b)
    best = np.sort(order(values)[:k])
    others = np.setdiff1d(np.arange(len(values)), best)
    return (indices[best], values[best]), (indices[others], values[others])


def dense(entries, size):
    out = np.zeros(size, entries[1].dtype)
    out[entries[0]] = entries[1]
    return out


def allgather(selected):
    """The sum of all ranks' entries, added in pairs of neighbours."""
    level = list(selected)
    while len(level) > 1:
        level = [merge(*level[i : i + 2]) if i + 1 < len(level) else level[i] for i in range(0, len(level), 2)]
    return level[0]


def tree(selected, k):
    """The paper's tree on any number of ranks."""
    held, step = list(selected), 1
    while step < len(held):
        for rank in range(0, len(held) - step, 2 * step):
            held[rank] = merge_topk(held[rank], held[rank + step], k)[0]
        step *= 2
    return held[0]


def butterfly(selected, k):
    """Neighbours are folded until a power of two is left; then it is the tree."""
    power = 1 << (len(selected).bit_length() - 1)
    folded = len(selected) - power
    held = [merge_topk(selected[2 * i], selected[2 * i + 1], k)[0] for i in range(folded)]
    return tree(held + list(selected[2 * folded :]), k)


SUMS = ("allgather", "ssar_recursive_doubling", "ssar_split_allgather", "dsar_split_allgather")


def allreduce(algorithm, xs, k, nodes):
    """(indices, values) of `sparse_allreduce` of whole numbers, whose sums do not depend on the order.

    ``nodes``: the machine of every rank.
    """
    int64_indices = [widened(x) for x in xs]
    if algorithm == "dense":
        total = sum(int64_indices[1:], int64_indices[0])
        return select(total, np.flatnonzero(total))
    selected = [topk(x, k) for x in int64_indices]
    if algorithm in SUMS:
        return allgather(selected)
    if algorithm == "split":
        return topk(dense(allgather(selected), len(int64_indices[0])), k)
    num_nodes = [[rank for rank, node in enumerate(nodes) if node == machine] for machine in dict.fromkeys(nodes)]
    if algorithm == "hierarchical":
        return butterfly([tree([selected[rank] for rank in ranks], k) for ranks in num_nodes], k)
    if algorithm == "hierarchical_dense":
        return butterfly([topk(sum(int64_indices[rank] for rank in ranks), k) for ranks in num_nodes], k)
    return {"tree": tree, "butterfly": butterfly}[algorithm](selected, k)
