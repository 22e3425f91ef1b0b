"""The arithmetic of a CUDA device: sequences of the kernels in ``kernels/cuda``.

Nothing here waits for the device, but `CountedVector` when its number of entries is asked for, `threshold` and
`well_formed`, whose answers the host needs. Grids come from bounds that the host knows; numbers of entries stay in
device memory. After a first call of the same sizes, which compiles and allocates, a sequence can be captured into a
CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from sparsecomm.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, DType
from sparsecomm.interop import Device, Tensor
from sparsecomm.memory import Memory
from sparsecomm.ops.cuda.memory import DeviceMemory, StagedMemory
from sparsecomm.ops.cuda.modules import dense_definitions, merge_definitions, selection_definitions
from sparsecomm.ops.cuda.runtime import Argument, Kernel, Runtime
from sparsecomm.ops.cuda.tuning import sizes
from sparsecomm.ops.cuda.vector import CountedVector, count_of
from sparsecomm.ops.cuda.workspace import Workspace
from sparsecomm.sparse import Array, DenseSum, SparseVector, index_dtype

__all__ = ["CudaOps"]

_INT32_SIZES = 2**31
_SHORT = 1 << 16  # elements up to which one launch of `radix` does it all
_SPARE = 1 << 20  # room for candidates beyond 2 k: what an unlucky sample lets through
_ABOVE_ALL = 2**64 - 1  # no key is so large
_MOST_CANDIDATES = 2**31 - 1  # `emit` counts in halves of one word


_u64 = np.uint64


class Launch(NamedTuple):
    """A kernel, ready to be started."""

    kernel: Kernel
    blocks: int
    threads: int
    arguments: tuple[Argument, ...]
    cooperative: bool = False


class Candidates(NamedTuple):
    """Room for so many: indices, bits, and the bits of those that are looked at again; as addresses."""

    capacity: int
    indices: int
    bits: int
    survivors: int


_NO_CANDIDATES = Candidates(0, 0, 0, 0)


class CudaOps:
    """`sparsecomm.ops.base.Ops` on one device and its current stream."""

    def __init__(self, runtime: Runtime, *, short: int = _SHORT, spare: int = _SPARE) -> None:
        """``short``, ``spare``: see `_SHORT` and `_SPARE`; tests make them small."""
        self.runtime = runtime
        self._short, self._spare = short, spare
        self._workspaces: dict[int, Workspace] = {}
        self._memories = StagedMemory(runtime), DeviceMemory(runtime)

    def using(self, x: Tensor | None) -> AbstractContextManager[Any]:
        return self.runtime.using(x.stream if x else None)

    def memory(self, direct: bool) -> Memory:
        return self._memories[direct]

    # -- selection --------------------------------------------------------------------------------------------------

    def topk(self, x: Tensor, k: int, residual: Tensor | None) -> SparseVector:
        k = min(k, x.size)
        room, counter = self._entries(k, x), self.runtime.empty(1, np.uint64)
        entries = CountedVector(self.runtime, room, counter, x.size, x.shape)
        if k == 0:  # no elements
            self.runtime.clear(counter)
        elif x.size <= self._short or 2 * k + self._spare > _MOST_CANDIDATES:
            self._start([self._radix(x, residual, k, room, counter, _NO_CANDIDATES)])
        else:
            self._start(self._sampled(x, residual, k, room, counter))
        return entries

    def _sampled(
        self, x: Tensor, residual: Tensor | None, k: int, room: tuple[Array, Array], counter: Array
    ) -> list[Launch]:
        """See kernels/cuda/topk.cu."""
        kernel, size, work = self._kernels("topk.cu", x, residual), sizes(), self._workspace()
        found = self._candidates(work, min(x.size, 2 * k + self._spare), index_dtype(x.size), residual or x)
        x_at, r_at, n, aligned = _u64(x.pointer), _u64(_pointer(residual)), _u64(x.size), _aligned(x, residual)

        sector = 32 // x.dtype.itemsize
        sectors = min(size["SAMPLE_SECTORS"], x.size // sector)
        expected = sectors * sector * k / x.size
        wanted = math.ceil(expected + 5 * math.sqrt(expected) + 5)  # too few candidates once in millions of calls
        blocks = min(_over(sectors, size["SAMPLE_THREADS"]), 4 * self.runtime.multiprocessors)
        sample = Launch(
            kernel("sample"), blocks, size["SAMPLE_THREADS"],
            (x_at, r_at, n, aligned, _u64(sectors), _u64(wanted), _u64(work.sample), _u64(work.selection)),
        )  # fmt: skip
        tiles = _over(x.size, _tile(x))
        look_back = work.tiles(max(tiles, _emit_tiles(found.capacity)))
        filter_ = Launch(
            kernel("filter"), tiles, size["FILTER_THREADS"],
            (x_at, r_at, n, _u64(k), aligned, _u64(found.capacity), _u64(found.indices), _u64(found.bits),
             _u64(look_back), _u64(work.selection)),
        )  # fmt: skip
        rest = self._kth_and_emit(kernel, work, found, room, None, _pointer(residual), counter)
        return [sample, filter_, *rest, self._radix(x, residual, k, room, counter, found)]

    def _candidates(
        self, work: Workspace, capacity: int, index: np.dtype[Any], bits: Tensor | np.dtype[Any]
    ) -> Candidates:
        width = bits.dtype.itemsize if isinstance(bits, Tensor) else bits.itemsize
        return Candidates(
            capacity,
            work.room("indices", capacity, index),
            work.room("bits", capacity, f"u{width}"),
            work.room("survivors", capacity, f"u{width}"),
        )

    def _kth_and_emit(
        self,
        kernel: Callable[[str], Kernel],
        work: Workspace,
        found: Candidates,
        kept: tuple[Array, Array],
        lost: tuple[Array, Array] | None,
        residual: int,
        counters: Array,
    ) -> list[Launch]:
        """See kernels/cuda/emit.cuh. ``counters``: of the kept entries, and of the lost ones if they are wanted."""
        size, at = sizes(), self.runtime.address
        threads, tiles = size["REFINE_THREADS"], _emit_tiles(found.capacity)
        blocks = max(1, min(_over(found.capacity, threads), 8 * self.runtime.multiprocessors))
        lost_at = (at(lost[0]), at(lost[1])) if lost else (0, 0)
        counter = at(counters)
        return [
            Launch(kernel("refine"), blocks, threads,
                   (_u64(found.bits), _u64(found.survivors), _u64(work.selection))),
            Launch(kernel("emit"), tiles, size["EMIT_THREADS"],
                   (_u64(found.indices), _u64(found.bits), _u64(at(kept[0])), _u64(at(kept[1])), _u64(lost_at[0]),
                    _u64(lost_at[1]), _u64(residual), _u64(counter), _u64(counter + 8 if lost else 0),
                    _u64(work.tiles(tiles)), _u64(work.selection))),
        ]  # fmt: skip

    def _radix(
        self,
        x: Tensor,
        residual: Tensor | None,
        k: int,
        room: tuple[Array, Array],
        counter: Array,
        found: Candidates,
    ) -> Launch:
        """See kernels/cuda/radix.cu. With `_NO_CANDIDATES` it starts afresh, else where `filter` left off."""
        kernel = self._kernels("radix.cu", x, residual)("radix")
        threads, work, at = sizes()["RADIX_THREADS"], self._workspace(), self.runtime.address
        rows = _over(x.size, threads * (16 // x.dtype.itemsize))
        blocks = min(rows, self.runtime.resident(kernel, threads))
        arguments = (
            _u64(x.pointer), _u64(_pointer(residual)), _u64(x.size), _u64(k), _aligned(x, residual),
            np.bool_(found is _NO_CANDIDATES), _u64(found.capacity), _u64(found.indices), _u64(found.bits),
            _u64(at(room[0])), _u64(at(room[1])), _u64(at(counter)), _u64(work.radix(blocks)), _u64(work.selection),
        )  # fmt: skip
        return Launch(kernel, blocks, threads, arguments, cooperative=True)

    def absorb(self, x: Tensor, residual: Tensor) -> None:
        self._above(x, x, residual, _ABOVE_ALL, 0)  # in place: it may be that memory has run out

    def threshold(self, x: Tensor, tau: float, residual: Tensor | None) -> SparseVector:
        edge = _least_key(tau, (residual or x).dtype)
        capacity = max(1024, x.size // 64)
        parts: list[SparseVector] = []
        left: Tensor | None = x
        while True:
            room, found = self._above(left, x, residual, edge, min(capacity, max(x.size, 1)))
            count = found.nnz
            if residual is None and count > capacity:  # again, with room for all
                capacity = count
                continue
            here = min(count, capacity)
            parts.append(SparseVector.trusted(room[0][:here], room[1][:here], x.size, x.shape))
            if count == here:
                return parts[0] if len(parts) == 1 else self._joined(parts)
            left, capacity = None, count - here  # what did not fit is in the residual still, and comes after

    def _above(
        self, left: Tensor | None, x: Tensor, residual: Tensor | None, edge: int, capacity: int
    ) -> tuple[tuple[Array, Array], CountedVector]:
        """See kernels/cuda/threshold.cu. ``left``: x, or None to look at the residual alone."""
        size, work = sizes(), self._workspace()
        room, counter = self._entries(capacity, x), self.runtime.empty(1, np.uint64)
        found = CountedVector(self.runtime, room, counter, x.size, x.shape)
        self.runtime.clear(counter)
        if tiles := _over(x.size, _tile(x)):
            arguments = (
                _u64(_pointer(left)), _u64(_pointer(residual)), _u64(x.size), _aligned(x, residual), _u64(edge),
                _u64(capacity), _u64(self.runtime.address(room[0])), _u64(self.runtime.address(room[1])),
                _u64(self.runtime.address(counter)), _u64(work.tiles(tiles)),
            )  # fmt: skip
            kernel = self._kernels("threshold.cu", x, residual)("threshold")
            self._start([Launch(kernel, tiles, size["FILTER_THREADS"], arguments)])
        return room, found

    def _joined(self, parts: list[SparseVector]) -> SparseVector:
        count = sum(part.nnz for part in parts)
        room = self.runtime.empty(count, parts[0].indices.dtype), self.runtime.empty(count, parts[0].values.dtype)
        begin = 0
        for part in parts:
            room[0][begin : begin + part.nnz] = part.indices
            room[1][begin : begin + part.nnz] = part.values
            begin += part.nnz
        return SparseVector.trusted(*room, parts[0].size, parts[0].shape)

    # -- merging ----------------------------------------------------------------------------------------------------

    def merge(self, a: SparseVector, b: SparseVector) -> SparseVector:
        most = count_of(self.runtime, a)[2] + count_of(self.runtime, b)[2]
        return self._merged(a, b, most)[0]

    def merge_topk(self, a: SparseVector, b: SparseVector, k: int) -> tuple[SparseVector, SparseVector]:
        return self._merged(a, b, k)

    def _merged(self, a: SparseVector, b: SparseVector, k: int) -> tuple[SparseVector, SparseVector]:
        """See kernels/cuda/merge.cu."""
        runtime, work, at = self.runtime, self._workspace(), self.runtime.address
        wide, carrier, index = a.size >= _INT32_SIZES, a._carrier, index_dtype(a.size)
        a_indices, a_values, a_most, a_count, a_counter = count_of(runtime, a)
        b_indices, b_values, b_most, b_count, b_counter = count_of(runtime, b)
        most = a_most + b_most
        kept = runtime.empty(min(k, most), index), runtime.empty(min(k, most), carrier)
        lost = runtime.empty(most, index), runtime.empty(most, carrier)
        counters = runtime.empty(2, np.uint64)
        results = (
            CountedVector(runtime, kept, counters[:1], a.size, a.shape),
            CountedVector(runtime, lost, counters[1:], a.size, a.shape),
        )
        definitions = merge_definitions(carrier.itemsize == 8, wide)

        def kernel(name: str) -> Kernel:
            return runtime.kernel("merge.cu", name, definitions)

        size, found = sizes(), self._candidates(work, most, index, carrier)
        tiles = max(1, _over(most, size["MERGE_THREADS"] * size["MERGE_ITEMS"]))
        look_back = work.tiles(max(tiles, _emit_tiles(most)))
        merge = Launch(
            kernel("merge"), tiles, size["MERGE_THREADS"],
            (_u64(at(a_indices)), _u64(at(a_values)), _u64(a_count), _u64(a_counter), _u64(at(b_indices)),
             _u64(at(b_values)), _u64(b_count), _u64(b_counter), _u64(k), _u64(found.indices), _u64(found.bits),
             _u64(look_back), _u64(work.selection)),
        )  # fmt: skip
        self._start([merge, *self._kth_and_emit(kernel, work, found, kept, lost, 0, counters)])
        return results

    # -- dense ------------------------------------------------------------------------------------------------------

    def scatter_add(self, dense: Tensor, entries: SparseVector) -> None:
        indices, values, most, count, counter = count_of(self.runtime, entries)
        self._elementwise(
            "scatter_add", most, dense_definitions(dense.dtype, wide=entries.size >= _INT32_SIZES),
            _u64(dense.pointer), _u64(self.runtime.address(indices)), _u64(self.runtime.address(values)), _u64(count),
            _u64(counter),
        )  # fmt: skip

    def densify(self, out: Tensor, entries: SparseVector) -> None:
        if isinstance(entries, DenseSum):
            return self.store(entries.dense, out)
        if not out.size:
            return None
        indices, values, _, count, counter = count_of(self.runtime, entries)
        definitions = dense_definitions(out.dtype, wide=entries.size >= _INT32_SIZES)
        kernel = self.runtime.kernel("dense.cu", "densify", definitions)
        arguments = (
            _u64(out.pointer), _u64(out.size), np.bool_(out.pointer % 16 == 0), _u64(self.runtime.address(indices)),
            _u64(self.runtime.address(values)), _u64(count), _u64(counter),
        )  # fmt: skip
        tiles = _over(out.size, sizes()["DENSIFY_TILE"])
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
            "divide", most, dense_definitions(_dtype(values)), _u64(self.runtime.address(values)), _u64(count),
            _u64(counter), values.dtype.type(divisor), _u64(self.runtime.address(quotients)),
        )  # fmt: skip
        return quotients

    def well_formed(self, entries: SparseVector) -> bool:
        faults = self.runtime.empty(1, np.uint32)
        self.runtime.clear(faults)
        indices, values = entries.indices, entries.values
        self._elementwise(
            "well_formed", entries.nnz, dense_definitions(_dtype(values), wide=entries.size >= _INT32_SIZES),
            _u64(self.runtime.address(indices)), _u64(self.runtime.address(values)), _u64(entries.nnz),
            _u64(entries.size), _u64(self.runtime.address(faults)),
        )  # fmt: skip
        word = self.runtime.pinned(4)
        self.runtime.copy(word.ctypes.data, self.runtime.address(faults), 4)
        self.runtime.record().wait()
        return not word.view(np.uint32)[0]

    def accumulate(self, x: Tensor, residual: Tensor | None) -> Array:
        total = self.runtime.empty(x.size, x.dtype.carrier)
        self._elementwise(
            "widen", x.size, dense_definitions(x.dtype, residual.dtype if residual else x.dtype),
            _u64(x.pointer), _u64(_pointer(residual)), _u64(x.size),
            _u64(self.runtime.address(total)),
        )  # fmt: skip
        return total

    def add(self, total: Array, addend: Array) -> None:
        self._elementwise(
            "add", len(total), dense_definitions(_dtype(total)), _u64(self.runtime.address(total)),
            _u64(self.runtime.address(addend)), _u64(len(total)),
        )  # fmt: skip

    def nonzeros(self, dense: Array, shape: tuple[int, ...]) -> SparseVector:
        def find(dense: Array) -> tuple[Array, Array]:
            found = self.threshold(self._tensor(dense), 0.0, None)
            return found.indices, found.values

        return DenseSum(dense, shape, find)

    def store(self, values: Array | None, out: Tensor) -> None:
        self._elementwise(
            "narrow", out.size, dense_definitions(out.dtype),
            _u64(0 if values is None else self.runtime.address(values)), _u64(out.size), _u64(out.pointer),
        )  # fmt: skip

    # -- launching --------------------------------------------------------------------------------------------------

    def _workspace(self) -> Workspace:
        stream = self.runtime.stream()
        if stream not in self._workspaces:
            self._workspaces[stream] = Workspace(self.runtime)
        return self._workspaces[stream]

    def _entries(self, count: int, x: Tensor) -> tuple[Array, Array]:
        return self.runtime.empty(count, index_dtype(x.size)), self.runtime.empty(count, x.dtype.carrier)

    def _tensor(self, array: Array) -> Tensor:
        dtype, pointer = _dtype(array), self.runtime.address(array)
        return Tensor(pointer, len(array), array.shape, dtype, Device("cuda", self.runtime.device), False, array)

    def _kernels(self, file: str, x: Tensor, residual: Tensor | None) -> Callable[[str], Kernel]:
        definitions = selection_definitions(x.dtype, residual.dtype if residual else None, x.size >= _INT32_SIZES)
        return lambda name: self.runtime.kernel(file, name, definitions)

    def _start(self, launches: list[Launch]) -> None:
        """All that can fail, compiling and allocating, was done to make the list: it runs whole or not at all."""
        for it in launches:
            self.runtime.launch(it.kernel, it.blocks, it.threads, it.arguments, cooperative=it.cooperative)

    def _elementwise(self, name: str, most: int, definitions: tuple[str, ...], *arguments: Argument) -> None:
        if most == 0:
            return
        threads = sizes()["DENSE_THREADS"]
        blocks = min(_over(most, threads), 16 * self.runtime.multiprocessors)
        self._start([Launch(self.runtime.kernel("dense.cu", name, definitions), blocks, threads, arguments)])


def _over(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def _tile(x: Tensor) -> int:
    """Elements of a tile of kernels/cuda/filter.cuh."""
    return sizes()["FILTER_THREADS"] * sizes()["FILTER_CHUNKS"] * (16 // x.dtype.itemsize)


def _emit_tiles(capacity: int) -> int:
    return max(1, _over(capacity, sizes()["EMIT_THREADS"] * sizes()["EMIT_ITEMS"]))


def _pointer(tensor: Tensor | None) -> int:
    return tensor.pointer if tensor else 0


def _aligned(x: Tensor, residual: Tensor | None) -> Argument:
    return np.bool_((x.pointer | _pointer(residual)) % 16 == 0)


def _dtype(array: Array) -> DType:
    return FLOAT64 if array.dtype.itemsize == 8 else FLOAT32


def _least_key(tau: float, dtype: DType) -> int:
    """The least key whose value is at least ``tau``; at least 1, as zeros are never selected."""
    if tau == math.inf:
        return _infinity(dtype)
    low, high = 1, _infinity(dtype)
    while low < high:  # values rise with their bits
        middle = (low + high) // 2
        if _value(middle, dtype) >= tau:
            high = middle
        else:
            low = middle + 1
    return low


def _value(bits: int, dtype: DType) -> float:
    if dtype is BFLOAT16:
        return float(np.array(bits << 16, np.uint32).view(np.float32))
    return float(np.array(bits, f"u{dtype.itemsize}").view(dtype.view))


def _infinity(dtype: DType) -> int:
    return {FLOAT16: 0x7C00, BFLOAT16: 0x7F80, FLOAT32: 0x7F800000, FLOAT64: 0x7FF0000000000000}[dtype]
