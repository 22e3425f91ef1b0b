"""Arithmetic on entries that is the same text for NumPy's arrays and CuPy's. Its work is by k entries, not n elements.

Keys are magnitudes as integers that order as selection does: the bits of a value without the sign, of a NaN those of
infinity and one more.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any

import numpy as np

from sparsecomm.backends.base import Backend
from sparsecomm.tensors.dtypes import BFLOAT16, DType
from sparsecomm.tensors.interop import Tensor
from sparsecomm.tensors.kinds import ValueKind
from sparsecomm.tensors.sparse import DenseSum, SparseVector, index_dtype

__all__ = ["EntryOperations"]

Array = Any  # NumPy's, or CuPy's


class EntryOperations(Backend):
    """The methods of `sparsecomm.backends.base.Backend` that every backend has from here."""

    def memory_of(self, tensor: Tensor) -> Array:
        """Return the elements of a tensor of this device as a flat array, bfloat16 as uint16. It shares memory."""
        raise NotImplementedError

    def quantize_values(self, values: Array, kind: ValueKind) -> tuple[Array, Array, int]:
        """Return rounded values, values - rounded (0 beside what is not finite), and how many of rounded are zero."""
        raise NotImplementedError

    def finite(self, x: Tensor) -> bool:
        return self.threshold(x, np.inf, None).nnz == 0

    def scale(self, dense: Tensor, factor: float) -> None:
        """A backend has this in `sparsecomm.backends.default_float_mode`."""
        if dense.dtype.itemsize > 2:
            memory = self.memory_of(dense)
            memory *= factor
            return
        values = self.accumulate(dense, None)
        values *= factor
        self.cast_into(values, dense)

    # -- by index -----------------------------------------------------------------------------------------------------

    def searchsorted(self, entries: SparseVector, boundaries: list[int]) -> list[int]:
        xp, indices = _library(entries.indices), entries.indices
        found: list[int] = _host(xp.searchsorted(indices, xp.asarray(np.array(boundaries, indices.dtype)))).tolist()
        return found

    def split_at_indices(self, entries: SparseVector, boundaries: list[int]) -> list[SparseVector]:
        ranges = list(pairwise(boundaries))
        if isinstance(entries, DenseSum):
            return [self.nonzeros(entries.dense[begin:end], (end - begin,)) for begin, end in ranges]
        positions = pairwise(self.searchsorted(entries, boundaries))
        found = []
        for (begin, end), (first, last) in zip(ranges, positions, strict=True):
            indices = (entries.indices[first:last] - begin).astype(index_dtype(end - begin), copy=False)
            found.append(SparseVector.trusted(indices, entries.values[first:last], end - begin, (end - begin,)))
        return found

    def indices_at(self, entries: SparseVector, positions: list[int]) -> list[int]:
        xp, indices = _library(entries.indices), entries.indices
        found: list[int] = _host(indices[xp.asarray(np.array(positions, np.int64))]).tolist()
        return found

    def concatenate_entries(self, vectors: list[SparseVector]) -> SparseVector:
        xp, first = _library(vectors[0].values), vectors[0]
        if len(vectors) == 1:
            return first
        indices = xp.concatenate([v.indices for v in vectors])
        return SparseVector.trusted(indices, xp.concatenate([v.values for v in vectors]), first.size, first.shape)

    def empty_like(self, entries: SparseVector) -> SparseVector:
        return entries.part(0, 0)

    # -- by magnitude -------------------------------------------------------------------------------------------------

    def nth_key(self, entries: SparseVector, n: int) -> int:
        if not 0 < n <= entries.nnz:
            return 0
        xp, keys = _library(entries.values), _keys(entries.values)
        return int(xp.partition(keys, len(keys) - n)[len(keys) - n])

    def count_keys(self, entries: SparseVector, low: int, shift: int, bins: int) -> list[int]:
        keys = _keys(entries.values)
        keys = keys[keys >= keys.dtype.type(low)] - keys.dtype.type(low)
        numbers = _library(keys).minimum(keys >> keys.dtype.type(shift), keys.dtype.type(bins - 1))
        found: list[int] = _host(_library(keys).bincount(numbers.astype(np.int64), minlength=bins)).tolist()
        return found

    def reaching_key(self, entries: SparseVector, low: int) -> SparseVector:
        keys = _keys(entries.values)
        return _where(entries, keys >= keys.dtype.type(low))

    # -- narrow values ------------------------------------------------------------------------------------------------

    def quantize(self, entries: SparseVector, kind: ValueKind) -> tuple[SparseVector, SparseVector]:
        rounded, errors, zeros = self.quantize_values(entries.values, kind)
        narrow = SparseVector.trusted(entries.indices, rounded, entries.size, entries.shape)
        lost = SparseVector.trusted(entries.indices, errors, entries.size, entries.shape)
        positions = None  # of the entries that remain
        while zeros:  # they are dropped, and of int8 the others then share their exponents with others
            kept = _library(rounded).flatnonzero(narrow.values)
            positions = kept if positions is None else positions[kept]
            narrow = SparseVector.trusted(narrow.indices[kept], narrow.values[kept], narrow.size, narrow.shape)
            rounded, more, zeros = self.quantize_values(narrow.values, kind)
            narrow.values = rounded
            errors[positions] += more
        return narrow, _where(lost, errors != 0)

    # -- dense memory, where entries are ------------------------------------------------------------------------------

    def gather(self, dense: Tensor, entries: SparseVector) -> Array:
        return _widen(self.memory_of(dense)[entries.indices], dense.dtype)

    def clear(self, dense: Tensor, entries: SparseVector) -> None:
        self.memory_of(dense)[entries.dense != 0 if isinstance(entries, DenseSum) else entries.indices] = 0

    def overlay(self, values: Array, entries: SparseVector, over: SparseVector) -> None:
        xp = _library(values)
        if not entries.nnz or not over.nnz:
            return
        positions = xp.minimum(xp.searchsorted(entries.indices, over.indices), entries.nnz - 1)
        found = entries.indices[positions] == over.indices
        values[positions[found]] = over.values[found]

    def ones_like(self, entries: SparseVector) -> SparseVector:
        values = entries.values
        ones = _library(values).zeros(entries.nnz, values.dtype) + values.dtype.type(1)
        return SparseVector.trusted(entries.indices, ones, entries.size, entries.shape)

    def values_at(self, entries: SparseVector, others: SparseVector) -> Array:
        if entries.nnz == others.nnz:  # then the indices are the same
            return entries.values
        return entries.values[_library(entries.values).searchsorted(entries.indices, others.indices)]

    def remainder(self, entries: SparseVector, counts: Array, quotients: SparseVector) -> SparseVector:
        xp = _library(entries.values)
        aligned = xp.zeros(entries.nnz, entries.values.dtype)
        self.overlay(aligned, entries, quotients)
        values = entries.values - counts * aligned
        return self.with_values(entries, xp.where(xp.isfinite(values), values, values.dtype.type(0)))

    def with_values(self, entries: SparseVector, values: Array) -> SparseVector:
        xp = _library(values)
        found = xp.where(xp.isnan(values), values.dtype.type(np.nan), values)
        return _where(SparseVector.trusted(entries.indices, found, entries.size, entries.shape), found != 0)

    def densify_range(self, entries: SparseVector, begin: int, end: int) -> Array:
        xp = _library(entries.values)
        dense = xp.zeros(end - begin, entries.values.dtype)
        dense[entries.indices.astype(np.int64) - begin] = entries.values
        return dense

    def concatenate(self, arrays: list[Array]) -> Array:
        return _library(arrays[0]).concatenate(arrays)


def _library(array: Array) -> Any:
    """Return the library of an array: NumPy or CuPy."""
    return sys.modules[type(array).__module__.partition(".")[0]]


def _host(array: Array) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = array if isinstance(array, np.ndarray) else array.get()
    return found


def _keys(values: Array) -> Array:
    float64 = values.itemsize == 8
    sign, infinity = (2**63, 0x7FF << 52) if float64 else (2**31, 0xFF << 23)
    unsigned = np.uint64 if float64 else np.uint32
    return _library(values).minimum(values.view(unsigned) & unsigned(sign - 1), unsigned(infinity + 1))


def _where(entries: SparseVector, mask: Array) -> SparseVector:
    return SparseVector.trusted(entries.indices[mask], entries.values[mask], entries.size, entries.shape)


def _widen(elements: Array, dtype: DType) -> Array:
    if dtype is BFLOAT16:
        return (elements.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return elements.astype(dtype.accumulator)
