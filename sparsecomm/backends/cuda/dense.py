"""Between sparse and dense, and dense sums: kernels/cuda/dense.cu."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import DTypeLike

from sparsecomm.backends.cuda.launches import INT64_SIZE, Launch, dtype_of, over, pointer, u64
from sparsecomm.backends.cuda.modules import dense_definitions
from sparsecomm.backends.cuda.selection import Selecting
from sparsecomm.backends.cuda.tuning import sizes
from sparsecomm.backends.cuda.vector import CountedVector, count_of
from sparsecomm.backends.entries import EntryOperations
from sparsecomm.tensors.interop import Tensor
from sparsecomm.tensors.sparse import Array, DenseSum, SparseVector

__all__ = ["DenseOperations"]


class DenseOperations(Selecting, EntryOperations):
    """Dense memory."""

    def scatter_add(self, dense: Tensor, entries: SparseVector) -> None:
        indices, values, most, count, counter = count_of(self.runtime, entries)
        self._elementwise(
            "scatter_add",
            most,
            dense_definitions(dense.dtype, int64_indices=entries.size >= INT64_SIZE),
            u64(dense.pointer),
            u64(self.runtime.address(indices)),
            u64(self.runtime.address(values)),
            u64(count),
            u64(counter),
        )

    def densify(self, out: Tensor, entries: SparseVector) -> None:
        if isinstance(entries, DenseSum):
            return self.cast_into(entries.dense, out)
        if not out.size:
            return None
        indices, values, _, count, counter = count_of(self.runtime, entries)
        definitions = dense_definitions(out.dtype, int64_indices=entries.size >= INT64_SIZE)
        kernel = self.runtime.kernel("dense.cu", "densify", definitions)
        arguments = (
            u64(out.pointer),
            u64(out.size),
            np.bool_(out.pointer % 16 == 0),
            u64(self.runtime.address(indices)),
            u64(self.runtime.address(values)),
            u64(count),
            u64(counter),
        )
        tiles = over(out.size, sizes()["DENSIFY_TILE"])
        self._start([Launch(kernel, tiles, sizes()["DENSE_THREADS"], arguments)])

    def divide(self, entries: SparseVector, divisor: int) -> SparseVector:
        if isinstance(entries, DenseSum):
            quotients = self._divided(entries.dense, len(entries.dense), len(entries.dense), 0, divisor)
            return self.nonzeros(quotients, entries.shape)
        indices, values, most, count, counter = count_of(self.runtime, entries)
        quotients = self._divided(values, most, count, counter, divisor)
        if isinstance(entries, CountedVector):
            return entries.with_values(quotients)
        return SparseVector.trusted(indices, quotients, entries.size, entries.shape)

    def _divided(self, values: Array, most: int, count: int, counter: int, divisor: int) -> Array:
        quotients = self.runtime.empty(most, values.dtype)
        self._elementwise(
            "divide",
            most,
            dense_definitions(dtype_of(values)),
            u64(self.runtime.address(values)),
            u64(count),
            u64(counter),
            values.dtype.type(divisor),
            u64(self.runtime.address(quotients)),
        )
        return quotients

    def well_formed(self, entries: SparseVector) -> bool:
        faults = self.runtime.empty(1, np.uint32)
        self.runtime.clear(faults)
        indices, values = entries.indices, entries.values
        self._elementwise(
            "well_formed",
            entries.nnz,
            dense_definitions(dtype_of(values), int64_indices=entries.size >= INT64_SIZE),
            u64(self.runtime.address(indices)),
            u64(self.runtime.address(values)),
            u64(entries.nnz),
            u64(entries.size),
            u64(self.runtime.address(faults)),
        )
        word = self.runtime.pinned(4)
        self.runtime.copy(word.ctypes.data, self.runtime.address(faults), 4)
        self.runtime.record().wait()
        return not word.view(np.uint32)[0]

    def accumulate(self, x: Tensor, residual: Tensor | None) -> Array:
        total = self.runtime.empty(x.size, x.dtype.accumulator)
        self._elementwise(
            "widen",
            x.size,
            dense_definitions(x.dtype, residual.dtype if residual else x.dtype),
            u64(x.pointer),
            u64(pointer(residual)),
            u64(x.size),
            u64(self.runtime.address(total)),
        )
        return total

    def zeros(self, count: int, dtype: DTypeLike) -> Array:
        made = self.runtime.empty(count, dtype)
        self.runtime.clear(made)
        return made

    def add(self, total: Array, addend: Array) -> None:
        self._elementwise(
            "add",
            len(total),
            dense_definitions(dtype_of(total)),
            u64(self.runtime.address(total)),
            u64(self.runtime.address(addend)),
            u64(len(total)),
        )

    def memory_of(self, tensor: Tensor) -> Array:
        return self.runtime.view(tensor.pointer, tensor.size, tensor.dtype.view, tensor.owner)

    def flat(self, array: Array, shape: tuple[int, ...]) -> Tensor:
        return dataclasses.replace(self._tensor(array), shape=shape)

    def cast_into(self, values: Array | None, out: Tensor) -> None:
        self._elementwise(
            "narrow",
            out.size,
            dense_definitions(out.dtype),
            u64(0 if values is None else self.runtime.address(values)),
            u64(out.size),
            u64(out.pointer),
        )
