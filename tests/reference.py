"""The oracle of every kernel, in plain and slow NumPy.

The oracles of algorithms are in `sparsecomm.testing.oracles`.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from sparsecomm.testing import expected_sum

ACCUMULATOR = {"float16": np.float32, "bfloat16": np.float32, "float32": np.float32, "float64": np.float64}


def widened(x):
    """Return a flat array in the type of its sums."""
    x = np.asarray(x).reshape(-1)
    return x.astype(ACCUMULATOR[x.dtype.name])


def order(v):
    """Return the indices of nonzeros by (|v| descending, index ascending), NaN first."""
    nan = np.isnan(v)
    numbers = np.flatnonzero(~nan & (v != 0))
    return np.concatenate([np.flatnonzero(nan), numbers[np.argsort(-np.abs(v[numbers]), kind="stable")]])


def select(v, indices):
    indices = np.sort(indices)
    return indices, canonical(v[indices])


def canonical(v):
    return np.where(np.isnan(v), np.array(np.nan, v.dtype), v)


def topk(v, k):
    """Return (indices, values) of the top-k of a flat float32 or float64 array."""
    return select(v, order(v)[:k])


def topk_by_chunk(v, k, chunk):
    """Return (indices, values) of the top-k of every chunk of a flat float32 or float64 array."""
    indices = order(v)
    indices = indices[np.argsort(indices // chunk, kind="stable")]  # by chunk, keeping the order within a chunk
    begin = np.searchsorted(indices // chunk, indices // chunk)
    return select(v, indices[np.arange(len(indices)) - begin < k])


def accumulated(x, residual, decay=1.0):
    """Return decay * residual + x as stored in the residual: product, sum and result are each rounded."""
    with np.errstate(all="ignore"):
        scaled = widened(residual) * widened(x).dtype.type(decay)
        return (scaled + widened(x)).astype(np.asarray(residual).dtype)


def threshold(v, tau):
    with np.errstate(invalid="ignore"):
        hit = ((np.abs(v.astype(np.float64)) >= tau) | np.isnan(v)) & (v != 0)
    return select(v, np.flatnonzero(hit))


def merge(a, b):
    """Return the sum of two (indices, values), without zeros."""
    indices = np.union1d(a[0], b[0])
    total = np.zeros(len(indices), a[1].dtype)
    total[np.searchsorted(indices, a[0])] = a[1]
    with np.errstate(all="ignore"):
        total[np.searchsorted(indices, b[0])] += b[1]
    total = canonical(total)
    return indices[total != 0], total[total != 0]


def merge_topk(a, b, k):
    """Return the top-k of the sum of two (indices, values), and the rejected entries."""
    indices, values = merge(a, b)
    best = np.sort(order(values)[:k])
    others = np.setdiff1d(np.arange(len(values)), best)
    return (indices[best], values[best]), (indices[others], values[others])


def dense(entries, size):
    out = np.zeros(size, entries[1].dtype)
    out[entries[0]] = entries[1]
    return out


def allreduce(algorithm, xs, k, nodes):
    """Return (indices, values) of `sparse_allreduce`; ``nodes``: the node of every rank."""
    total = expected_sum(algorithm, [widened(x) for x in xs], k, nodes)
    return select(total, np.flatnonzero(total))


# -- values of few bits: kernels/few_bits.hpp -------------------------------------------------------------------------

BLOCK = 64  # values that share a block's levels
UNITS = {0: 0, 1: 16, 3: 2}  # by bits per level: the unit of steps, in units in the last place of the lowest level


def few_bits(values, bits):
    """Quantize nonzero float32 values to a sign and one of 2^bits magnitudes, in blocks of 64.

    Returns the rounded values; for each block, the bfloat16 bits of its lowest magnitude and its step; and for each
    value, the number of its magnitude. If a value is not finite, returns the values unchanged and three times None.
    """
    values = np.asarray(values, np.float32)
    if not np.isfinite(values).all():
        return canonical(values), None, None, None
    count, blocks = len(values), -(-len(values) // BLOCK)
    magnitudes = np.zeros((blocks, BLOCK), np.float32)
    magnitudes.reshape(-1)[:count] = np.abs(values)
    present = np.arange(blocks * BLOCK).reshape(blocks, BLOCK) < count
    lowest, step, unit = block_levels(magnitudes, present, bits)
    spacing = step * np.float32(UNITS[bits]) * unit
    base = np.where(step > 0, lowest, np.float32(np.inf))[:, None]
    levels = sum((magnitudes >= base + np.float32(j - 0.5) * spacing[:, None]).astype(int) for j in range(1, 2**bits))
    levels = levels + np.zeros((blocks, BLOCK), int)
    rounded = lowest[:, None] + levels.astype(np.float32) * spacing[:, None]
    rounded = np.copysign(rounded.reshape(-1)[:count], values)
    return rounded, lowest.view(np.uint32) >> 16, step.astype(int), levels.reshape(-1)[:count]


def block_levels(magnitudes, present, bits):
    """Return each block's lowest magnitude, its step, and the unit in the last place of the lowest magnitude.

    Everything is float32 and rounded after every operation. Sums are trees: `tree_sum`.
    """
    f32, top = np.float32, magnitudes.max(axis=1, initial=0)
    exponent = np.clip((top.view(np.uint32) >> 23).astype(int) - 127, -126, 126)
    scale, back = np.ldexp(f32(1), -exponent), np.ldexp(f32(1), exponent)
    u = np.minimum(magnitudes * scale[:, None], f32(2))  # the largest is from 1 to 2, unless it is denormal
    low = np.where(present, u, f32(2)).min(axis=1, initial=2).astype(f32)
    high = u.max(axis=1, initial=0)
    above = np.where(present, u - low[:, None], f32(0))
    lower, upper = np.full_like(low, np.inf), np.full_like(low, np.inf)
    if bits == 1:  # 3/4 of (the sum of squares / the sum) separates the two levels
        total, squares = tree_sum(above), tree_sum(above * above)
        lower = upper = f32(0.75) * (squares / np.where(total > 0, total, f32(1)))
    elif bits:  # magnitudes near both ends
        lower, upper = f32(3 / 32) * (high - low), f32(29 / 32) * (high - low)
    is_lower, is_upper = (above <= lower[:, None]) & present, above > upper[:, None]
    n_lower, n_upper = (mask.sum(axis=1).astype(f32) for mask in (is_lower, is_upper))
    a = low + tree_sum(np.where(is_lower, above, f32(0))) / n_lower
    b = low + tree_sum(np.where(is_upper, above, f32(0))) / np.maximum(n_upper, f32(1))
    b = np.where(n_upper > 0, np.minimum(b, high), a)
    lowest, unit, wanted = fitted(a, b, back, bits)
    if bits == 0:
        return lowest, wanted, unit
    # The ends are too far apart for the step: choose a and ratio * a with the least squared error.
    ratio = f32(1 + UNITS[bits] * (2**bits - 1))
    nearer = (n_lower * a + ratio * n_upper * b) / (n_lower + ratio * ratio * n_upper)
    far = wanted >= 256
    a, b = np.where(far, nearer, a), np.where(far, np.minimum(ratio * nearer, b), b)
    lowest, unit, wanted = fitted(a, b, back, bits)
    return lowest, np.clip(np.trunc(wanted), 0, 255).astype(f32), unit


def fitted(a, b, back, bits):
    """Return the lowest magnitude as a bfloat16, its unit, and the step to b before rounding to an integer."""
    f32 = np.float32
    lowest = (np.maximum(a, f32(2**-14)) * back).astype(ml_dtypes.bfloat16).astype(f32)
    lowest = np.maximum(lowest, f32(2.0**-133))
    biased = (lowest.view(np.uint32) >> 23).astype(int)
    unit = np.ldexp(f32(1), np.maximum(biased, 1) - 134)
    if bits == 0:
        return lowest, unit, np.zeros_like(lowest)
    steps = (b - lowest / back) / (f32(UNITS[bits] * (2**bits - 1)) * (unit / back))
    return lowest, unit, steps + f32(0.5 if bits == 1 else 0)  # one bit: round to nearest; more: round down


def tree_sum(terms):
    while terms.shape[1] > 1:
        half = terms.shape[1] // 2
        terms = terms[:, :half] + terms[:, half:]
    return terms[:, 0]


def few_bits_bytes(values, bits):
    """Return the bytes of a message for values that `few_bits` has rounded.

    The second result says whether the values are sent as float32, because one is not finite.
    """
    _, lowest, steps, levels = few_bits(values, bits)
    if lowest is None:
        return np.asarray(values, np.float32).tobytes(), True
    out, count = [], len(values)
    for begin in range(0, count, BLOCK):
        block = slice(begin, min(begin + BLOCK, count))
        planes = [np.signbit(values[block]), *(levels[block] >> j & 1 for j in range(bits))]
        out += [sum(int(bit) << i for i, bit in enumerate(plane)).to_bytes(8, "little") for plane in planes]
    heads = lowest.astype("<u2").tobytes() + (steps.astype(np.uint8).tobytes() if bits else b"")
    return b"".join(out) + heads, False
