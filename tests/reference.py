"""The oracle: what every kernel must give, in plain NumPy, written to be read and not to be fast.

What an algorithm must give is in `sparsecomm.cli.oracles`; `allreduce` asks there.
"""

from __future__ import annotations

import numpy as np

from sparsecomm.cli.oracles import oracle

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


def topk_by_chunk(v, k, chunk):
    """(indices, values) of the top-k of every chunk of a flat float32 or float64 array."""
    chunks = [begin + order(v[begin : begin + chunk])[:k] for begin in range(0, len(v), chunk)]
    return select(v, np.concatenate([np.zeros(0, np.int64), *chunks]))


def accumulated(x, residual, decay=1.0):
    """decay * residual + x, as it is stored in the residual: product, sum and result are rounded one after another."""
    with np.errstate(all="ignore"):
        scaled = widened(residual) * widened(x).dtype.type(decay)
        return (scaled + widened(x)).astype(np.asarray(residual).dtype)


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


def allreduce(algorithm, xs, k, nodes):
    """(indices, values) of `sparse_allreduce` of all ranks' gradients, with the node of every rank."""
    total = oracle(algorithm)([widened(x) for x in xs], k, nodes)
    return select(total, np.flatnonzero(total))
