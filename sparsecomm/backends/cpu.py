"""The arithmetic of host memory: the C++ kernels of ``kernels/cpu``."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np
from numpy.typing import DTypeLike

from sparsecomm import config
from sparsecomm.backends import _cpu
from sparsecomm.backends.base import Done
from sparsecomm.backends.entries import EntryOperations
from sparsecomm.errors import InvalidInputError
from sparsecomm.tensors import interop
from sparsecomm.tensors.interop import Tensor
from sparsecomm.tensors.kinds import ValueKind
from sparsecomm.tensors.sparse import INT64_SIZE, Array, DenseSum, SparseVector
from sparsecomm.transport.memory import HOST, HostMemory

__all__ = ["CpuBackend"]

_ANYWHERE: AbstractContextManager[None] = nullcontext()
_NONE = np.empty(0)


class _AtOnce:
    """A `sparsecomm.backends.base.Timeline` of work that is done when a method returns."""

    def on_stream(self, x: Tensor | None) -> AbstractContextManager[None]:
        return _ANYWHERE

    def wait(self) -> None:
        pass


_AT_ONCE = _AtOnce()


class CpuBackend(EntryOperations):
    """`sparsecomm.backends.base.Backend` on the CPU, on ``threads`` threads."""

    def __init__(self, threads: int | None = None) -> None:
        self.threads = config.threads() if threads is None else threads
        if (asked := config.simd()) is not None and asked != _cpu.simd() and not _cpu.use_simd(asked):
            raise InvalidInputError(f"SPARSECOMM_SIMD={asked}: this processor lacks it; unset it, or set portable")

    def on_stream(self, x: Tensor | None) -> AbstractContextManager[None]:
        return _ANYWHERE

    def side_stream(self) -> AbstractContextManager[None]:
        return _ANYWHERE

    def timeline(self) -> _AtOnce:
        return _AT_ONCE

    def memory(self, direct: bool) -> HostMemory:
        return HOST

    def topk(self, x: Tensor, k: int, residual: Tensor | None, done: Done = None) -> SparseVector:
        pointer, code = _of(residual)
        int64_indices = x.size >= INT64_SIZE
        made = SparseVector.trusted(_NONE, _NONE, x.size, x.shape)
        _cpu.topk(x.pointer, x.dtype.code, x.size, pointer, code, k, int64_indices, self.threads, made, done)
        return made

    def topk_by_chunk(
        self, x: Tensor, k: int, chunk: int, residual: Tensor | None, decay: float = 1.0, done: Done = None
    ) -> SparseVector:
        pointer, code = _of(residual)
        made = SparseVector.trusted(_NONE, _NONE, x.size, x.shape)
        of_chunk = k, min(chunk, max(x.size, k)), decay
        many = x.size >= INT64_SIZE
        _cpu.topk_by_chunk(x.pointer, x.dtype.code, x.size, pointer, code, *of_chunk, many, self.threads, made, done)
        return made

    def add_into(self, x: Tensor, residual: Tensor, done: Done = None) -> None:
        if residual.dtype.itemsize == residual.dtype.accumulator.itemsize:
            _cpu.add_into(x.pointer, x.dtype.code, x.size, residual.pointer, residual.dtype.code, self.threads, done)
        else:
            self.cast_into(self.accumulate(x, residual), residual, done)

    def zeros(self, count: int, dtype: DTypeLike) -> Array:
        return np.zeros(count, dtype)

    def threshold(self, x: Tensor, tau: float, residual: Tensor | None, done: Done = None) -> SparseVector:
        pointer, code = _of(residual)
        int64_indices = x.size >= INT64_SIZE
        made = SparseVector.trusted(_NONE, _NONE, x.size, x.shape)
        _cpu.threshold(x.pointer, x.dtype.code, x.size, pointer, code, tau, int64_indices, self.threads, made, done)
        return made

    def merge(self, a: SparseVector, b: SparseVector) -> SparseVector:
        int64_indices, float64_values = a.size >= INT64_SIZE, a.values.itemsize == 8
        indices, values = _cpu.merge(a.indices, a.values, b.indices, b.values, int64_indices, float64_values)
        return SparseVector.trusted(indices, values, a.size, a.shape)

    def merge_topk(self, a: SparseVector, b: SparseVector, k: int) -> tuple[SparseVector, SparseVector]:
        int64_indices, float64_values = a.size >= INT64_SIZE, a.values.itemsize == 8
        indices, values, lost_indices, lost_values = _cpu.merge_topk(
            a.indices, a.values, b.indices, b.values, k, int64_indices, float64_values
        )
        return (
            SparseVector.trusted(indices, values, a.size, a.shape),
            SparseVector.trusted(lost_indices, lost_values, a.size, a.shape),
        )

    def scatter_add(self, dense: Tensor, entries: SparseVector, done: Done = None) -> None:
        code, int64_indices = dense.dtype.code, entries.size >= INT64_SIZE
        _cpu.scatter_add(dense.pointer, code, dense.size, entries.indices, entries.values, int64_indices, done)

    def scatter_add_where(
        self, dense: Tensor, entries: SparseVector, others: SparseVector, present: bool, done: Done = None
    ) -> None:
        _cpu.scatter_add_where(
            dense.pointer,
            dense.dtype.code,
            dense.size,
            entries.indices,
            entries.values,
            others.indices,
            entries.size >= INT64_SIZE,
            present,
            done,
        )

    def densify(self, out: Tensor, entries: SparseVector) -> None:
        if isinstance(entries, DenseSum):
            return self.cast_into(entries.dense, out)
        int64_indices = entries.size >= INT64_SIZE
        _cpu.densify(
            out.pointer, out.dtype.code, out.size, entries.indices, entries.values, int64_indices, self.threads
        )

    def divide(self, entries: SparseVector, divisor: int) -> SparseVector:
        if isinstance(entries, DenseSum):
            return self.nonzeros(entries.dense / divisor, entries.shape)
        return SparseVector.trusted(entries.indices, entries.values / divisor, entries.size, entries.shape)

    def well_formed(self, entries: SparseVector) -> bool:
        int64_indices, float64_values = entries.size >= INT64_SIZE, entries.values.itemsize == 8
        return _cpu.well_formed(entries.indices, entries.values, entries.size, int64_indices, float64_values)

    def accumulate(self, x: Tensor, residual: Tensor | None) -> Array:
        pointer, code = _of(residual)
        return _cpu.widen(x.pointer, x.dtype.code, x.size, pointer, code, self.threads)

    def add(self, total: Array, addend: Array) -> None:
        _cpu.add(total, addend, total.itemsize == 8, self.threads)

    def nonzeros(self, dense: Array, shape: tuple[int, ...]) -> SparseVector:
        def find(dense: Array) -> tuple[Array, Array]:
            tensor = interop.tensor(dense, "dense")
            int64_indices = tensor.size >= INT64_SIZE
            return _cpu.threshold(
                tensor.pointer, tensor.dtype.code, tensor.size, 0, 0, 0.0, int64_indices, self.threads
            )

        return DenseSum(dense, shape, find)

    def pack(self, entries: SparseVector, kind: ValueKind) -> Array:
        int64_indices, float64_values = entries.size >= INT64_SIZE, entries.values.itemsize == 8
        return _cpu.pack(entries.indices, entries.values, kind.code, int64_indices, float64_values)

    def unpack(
        self, data: Array, head: bytes, count: int, n: int, kind: ValueKind, float64_values: bool
    ) -> tuple[Array, Array]:
        return _cpu.unpack(data, count, n, kind.code, n >= INT64_SIZE, float64_values)

    def quantize_values(self, values: Array, kind: ValueKind) -> tuple[Array, Array, int]:
        return _cpu.quantize_values(values, kind.code)

    def memory_of(self, tensor: Tensor) -> Array:
        return interop.as_numpy(tensor)

    def as_tensor(self, array: Array, shape: tuple[int, ...]) -> Tensor:
        return interop.tensor(array.reshape(shape), "array", writable=True)

    def cast_into(self, values: Array | None, out: Tensor, done: Done = None) -> None:
        if values is None:
            interop.as_numpy(out).fill(0)
            if done is not None:
                done.append(None)  # a signal before it does no harm: zeros are written again
        else:
            _cpu.narrow(np.ascontiguousarray(values), out.pointer, out.dtype.code, out.size, self.threads, done)


def _of(residual: Tensor | None) -> tuple[int, int]:
    return (0, 0) if residual is None else (residual.pointer, residual.dtype.code)
