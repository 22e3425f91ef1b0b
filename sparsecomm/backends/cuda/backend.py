"""The arithmetic of a CUDA device: sequences of the kernels in ``kernels/cuda``.

Nothing here waits for the device, but `CountedVector` when its number of entries is asked for, and `threshold`,
`well_formed` and packing, whose answers the host needs. Grids come from bounds that the host knows; numbers of entries
stay in device memory. After a first call of the same sizes, which compiles and allocates, a sequence can be captured
into a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

from numpy.typing import DTypeLike

from sparsecomm.backends.base import Done
from sparsecomm.backends.cuda import chunks, dense, merging, packing, selection
from sparsecomm.backends.cuda.context import ExecutionContext
from sparsecomm.backends.cuda.memory import DeviceMemory, StagedMemory
from sparsecomm.backends.cuda.runtime import Runtime
from sparsecomm.backends.cuda.timeline import CudaTimeline
from sparsecomm.backends.cuda.tuning import TUNING
from sparsecomm.backends.entries import EntryOperations
from sparsecomm.errors import InvalidInputError
from sparsecomm.tensors.interop import Tensor
from sparsecomm.tensors.kinds import ValueKind
from sparsecomm.tensors.sparse import Array, SparseVector
from sparsecomm.transport.memory import MessageMemory

__all__ = ["CudaBackend"]


class _Context:
    """A context that may be entered again: a call that a signal has interrupted goes on where it was."""

    def __init__(self, make: Callable[[], AbstractContextManager[object]]) -> None:
        self._make = make

    def __enter__(self) -> None:
        self._entered = self._make()
        self._entered.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.__exit__(*error)


class CudaBackend(EntryOperations):
    """`sparsecomm.backends.base.Backend` on one device and its current stream, in an execution context of its own."""

    def __init__(self, runtime: Runtime, **sizes: int) -> None:
        """``sizes``: those of `Tuning` that are to be others than the default."""
        self.runtime, self.context = runtime, ExecutionContext(runtime, replace(TUNING, **sizes))

    def on_stream(self, x: Tensor | None) -> AbstractContextManager[object]:
        return _Context(partial(self.runtime.on_stream, x.stream if x else None))

    def side_stream(self) -> AbstractContextManager[object]:
        return _Context(partial(self.context.side_stream, self.runtime.record()))

    def timeline(self) -> CudaTimeline:
        return CudaTimeline(self.runtime)

    def memory(self, direct: bool) -> MessageMemory:
        if self.runtime.capturing():
            raise InvalidInputError(
                "x is on a stream that is being captured into a CUDA graph; expected one on which work runs: a call "
                "that talks to other ranks cannot be replayed; call it before or after the graph"
            )
        return (DeviceMemory if direct else StagedMemory)(self.runtime, self.context.in_use)

    def as_tensor(self, array: Array, shape: tuple[int, ...]) -> Tensor:
        return self.context.tensor(array, shape)

    def memory_of(self, tensor: Tensor) -> Array:
        return self.runtime.view(tensor.pointer, tensor.size, tensor.dtype.view, tensor.owner)

    def zeros(self, count: int, dtype: DTypeLike) -> Array:
        return self.context.zeros(count, dtype)

    # -- kernels ------------------------------------------------------------------------------------------------------

    def topk(self, x: Tensor, k: int, residual: Tensor | None, done: Done = None) -> SparseVector:
        return selection.topk(self.context, x, k, residual, done)

    def topk_by_chunk(
        self, x: Tensor, k: int, chunk: int, residual: Tensor | None, decay: float = 1.0, done: Done = None
    ) -> SparseVector:
        return chunks.topk_by_chunk(self.context, x, k, chunk, residual, decay, done)

    def add_into(self, x: Tensor, residual: Tensor, done: Done = None) -> None:
        selection.add_into(self.context, x, residual, done)

    def threshold(self, x: Tensor, tau: float, residual: Tensor | None, done: Done = None) -> SparseVector:
        return selection.threshold(self.context, x, tau, residual, done)

    def nonzeros(self, dense: Array, shape: tuple[int, ...]) -> SparseVector:
        return selection.nonzeros(self.context, dense, shape)

    def merge(self, a: SparseVector, b: SparseVector) -> SparseVector:
        return merging.merge(self.context, a, b)

    def merge_topk(self, a: SparseVector, b: SparseVector, k: int) -> tuple[SparseVector, SparseVector]:
        return merging.merge_topk(self.context, a, b, k)

    def scatter_add(self, dense_tensor: Tensor, entries: SparseVector, done: Done = None) -> None:
        dense.scatter_add(self.context, dense_tensor, entries, done)

    def scatter_add_where(
        self, dense_tensor: Tensor, entries: SparseVector, others: SparseVector, present: bool, done: Done = None
    ) -> None:
        dense.scatter_add_where(self.context, dense_tensor, entries, others, present, done)

    def densify(self, out: Tensor, entries: SparseVector) -> None:
        dense.densify(self.context, out, entries)

    def divide(self, entries: SparseVector, divisor: int) -> SparseVector:
        return dense.divide(self.context, entries, divisor)

    def well_formed(self, entries: SparseVector) -> bool:
        return dense.well_formed(self.context, entries)

    def accumulate(self, x: Tensor, residual: Tensor | None) -> Array:
        return dense.accumulate(self.context, x, residual)

    def add(self, total: Array, addend: Array) -> None:
        dense.add(self.context, total, addend)

    def cast_into(self, values: Array | None, out: Tensor, done: Done = None) -> None:
        dense.cast_into(self.context, values, out, done)

    def pack(self, entries: SparseVector, kind: ValueKind) -> Array:
        return packing.pack(self.context, entries, kind)

    def unpack(
        self, data: Array, head: bytes, count: int, n: int, kind: ValueKind, float64_values: bool
    ) -> tuple[Array, Array]:
        return packing.unpack(self.context, data, head, count, n, kind, float64_values)

    def quantize_values(self, values: Array, kind: ValueKind) -> tuple[Array, Array, int]:
        return packing.quantize_values(self.context, values, kind)
