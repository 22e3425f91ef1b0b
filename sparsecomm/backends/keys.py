"""Keys: magnitudes as integers, in the order of selection. Keys, counts and positions are on the host.

The key of a value is its bits without the sign. All NaN have the same key, that of infinity plus 1.
"""

from __future__ import annotations

import numpy as np

from sparsecomm.tensors.arrays import Array
from sparsecomm.tensors.interop import library_of
from sparsecomm.tensors.sparse import SparseVector

_MAX_PARTITIONS = 8  # maximum number of keys to find for which partitioning is faster than sorting


def max_key(entries: SparseVector) -> int:
    """Return the largest possible key of a value of this dtype: the key of NaN."""
    return _key_of_nan(entries.values.itemsize)


def keys_of(values: Array) -> list[int]:
    """Return the keys of float32 or float64 values."""
    keys: list[int] = _keys(values).tolist()
    return keys


def nth_keys(entries: SparseVector, numbers: list[int]) -> list[int]:
    """Return the keys of the n-th largest entries, for each n in ``numbers``, from 1 to nnz."""
    xp = library_of(entries.values)
    keys, positions = _keys(entries.values), entries.nnz - np.array(numbers, np.int64)
    few = xp is np and len(numbers) <= _MAX_PARTITIONS
    keys = np.partition(keys, positions) if few else xp.sort(keys)
    nth: list[int] = keys[xp.asarray(positions)].tolist()
    return nth


def scaled_key(entries: SparseVector, key: int, before: list[int], now: list[int]) -> int:
    """Return the key of the magnitude of ``key``, scaled by sum(magnitudes now) / sum(magnitudes before).

    ``before`` and ``now`` are keys of these magnitudes, which have the dtype of ``entries``. The key is returned
    unchanged if it is at least `max_key`, or if a sum is zero or not finite.
    """
    values = np.dtype(f"f{entries.values.itemsize}")
    if key >= max_key(entries):
        return key
    magnitude, old, new = (
        sum(np.array(keys, f"u{values.itemsize}").view(values).tolist()) for keys in ([key], before, now)
    )
    if not (0 < old < np.inf and 0 < new < np.inf and magnitude < np.inf):
        return key
    scaled = np.array([min(magnitude * (new / old), float(np.finfo(values.name).max))], np.float64).astype(values)
    return int(scaled.view(f"u{values.itemsize}")[0])


def largest_keys(keys: list[int], count: int, numbers: list[int]) -> tuple[Array, list[int]]:
    """Return the ascending positions of the ``count`` largest keys, and the n-th largest keys for n in ``numbers``.

    Among equal keys, earlier ones count as larger.
    """
    inverted = ~np.array(keys, np.uint64)
    ordered = np.partition(inverted, [number - 1 for number in (count, *numbers)])
    last = ordered[count - 1]
    larger, equal = np.flatnonzero(inverted < last), np.flatnonzero(inverted == last)
    positions = np.sort(np.concatenate([larger, equal[: count - len(larger)]]))
    return positions, [int(~ordered[number - 1]) for number in numbers]


def split_by_key(entries: SparseVector, low: int, high: int | None) -> tuple[SparseVector, SparseVector]:
    """Return the entries with keys of at least ``high`` (``None``: no entries), and those from ``low`` to below it."""
    keys = _keys(entries.values)
    largest = int(np.iinfo(keys.dtype).max)
    reach = keys >= keys.dtype.type(min(low, largest))
    if high is None:
        return entries.part(0, 0), entries.at(reach)
    sure = keys >= keys.dtype.type(min(high, largest))
    return entries.at(sure), entries.at(reach & ~sure)


def _keys(values: Array) -> Array:
    unsigned = np.uint64 if values.itemsize == 8 else np.uint32
    magnitude = values.view(unsigned) & unsigned(np.iinfo(unsigned).max >> 1)
    keys: Array = library_of(values).minimum(magnitude, unsigned(_key_of_nan(values.itemsize)))
    return keys


def _key_of_nan(itemsize: int) -> int:
    return (0x7FF << 52 if itemsize == 8 else 0xFF << 23) + 1
