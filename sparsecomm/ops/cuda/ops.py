"""The arithmetic of a CUDA device: sequences of the kernels in ``kernels/cuda``.

Nothing here waits for the device, but `CountedVector` when its number of entries is asked for, `threshold` and
`well_formed`, whose answers the host needs. Grids come from bounds that the host knows; numbers of entries stay in
device memory. After a first call of the same sizes, which compiles and allocates, a sequence can be captured into a
CUDA graph.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from sparsecomm.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, DType
from sparsecomm.interop import Device, Tensor
from sparsecomm.memory import Memory
from sparsecomm.ops.cuda.memory import DeviceMemory, StagedMemory
from sparsecomm.ops.cuda.modules import dense_definitions, merge_definitions, selection_definitions
from sparsecomm.ops.cuda.runtime import Argument, Runtime
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
        room = self._entries(k, x)
        counter = self.runtime.empty(1, np.uint64)
        entries = CountedVector(self.runtime, room, counter, x.size, x.shape)
        if k == 0:
            self._above(x, x, residual, _ABOVE_ALL, 0)
            self.runtime.clear(counter)
        elif x.size <= self._short or 2 * k + self._spare > _MOST_CANDIDATES:
            self._radix(x, residual, k, room, counter, 0, 0, 0)
        else:
            self._sampled(x, residual, k, room, counter)
        return entries

    def _sampled(self, x: Tensor, residual: Tensor | None, k: int, room: tuple[Array, Array], counter: Array) -> None:
        """See kernels/cuda/topk.cu."""
        run, size, work = self._launcher("topk.cu", x, residual), sizes(), self._workspace()
        acc = residual or x
        capacity = min(x.size, 2 * k + self._spare)
        indices = work.room("indices", capacity, index_dtype(x.size))
        bits = work.room("bits", capacity, f"u{acc.dtype.itemsize}")
        survivors = work.room("survivors", capacity, f"u{acc.dtype.itemsize}")
        aligned = _aligned(x, residual)
        x_at, r_at, n = _u64(x.pointer), _u64(residual.pointer if residual else 0), _u64(x.size)

        sector = 32 // x.dtype.itemsize
        sectors = min(size["SAMPLE_SECTORS"], x.size // sector)
        expected = sectors * sector * k / x.size
        wanted = math.ceil(expected + 5 * math.sqrt(expected) + 5)  # too few candidates once in millions of calls
        blocks = min(_over(sectors, size["SAMPLE_THREADS"]), 4 * self.runtime.multiprocessors)
        run("sample", blocks, size["SAMPLE_THREADS"],
            x_at, r_at, n, aligned, _u64(sectors), _u64(wanted), _u64(work.sample), _u64(work.selection))  # fmt: skip

        chunks = size["FILTER_THREADS"] * size["FILTER_CHUNKS"]
        tiles = _over(x.size, chunks * (16 // x.dtype.itemsize))
        run("filter", tiles, size["FILTER_THREADS"],
            x_at, r_at, n, _u64(k), aligned, _u64(capacity), _u64(indices), _u64(bits), _u64(work.tiles(tiles)),
            _u64(work.selection))  # fmt: skip
        self._kth_and_emit(run, work, capacity, indices, bits, survivors, room, None,
                           residual.pointer if residual else 0, counter)  # fmt: skip
        self._radix(x, residual, k, room, counter, capacity, indices, bits)

    def _kth_and_emit(
        self,
        run: Any,
        work: Workspace,
        capacity: int,
        indices: int,
        bits: int,
        survivors: int,
        kept: tuple[Array, Array],
        lost: tuple[Array, Array] | None,
        residual: int,
        counters: Array,
    ) -> None:
        """See kernels/cuda/emit.cuh. ``counters``: of the kept entries, and of the lost ones if they are wanted."""
        size, at = sizes(), self.runtime.address
        threads = size["REFINE_THREADS"]
        blocks = max(1, min(_over(capacity, threads), 8 * self.runtime.multiprocessors))
        run("refine", blocks, threads, _u64(bits), _u64(survivors), _u64(work.selection))
        tiles = max(1, _over(capacity, size["EMIT_THREADS"] * size["EMIT_ITEMS"]))
        lost_at = (at(lost[0]), at(lost[1])) if lost else (0, 0)
        counter = at(counters)
        run("emit", tiles, size["EMIT_THREADS"],
            _u64(indices), _u64(bits), _u64(at(kept[0])), _u64(at(kept[1])), _u64(lost_at[0]), _u64(lost_at[1]),
            _u64(residual), _u64(counter), _u64(counter + 8 if lost else 0), _u64(work.tiles(tiles)),
            _u64(work.selection))  # fmt: skip

    def _radix(
        self,
        x: Tensor,
        residual: Tensor | None,
        k: int,
        room: tuple[Array, Array],
        counter: Array,
        capacity: int,
        indices: int,
        bits: int,
    ) -> None:
        """See kernels/cuda/radix.cu. ``capacity`` 0: afresh, not after `filter`."""
        definitions = selection_definitions(x.dtype, residual.dtype if residual else None, x.size >= _INT32_SIZES)
        kernel = self.runtime.kernel("radix.cu", "radix", definitions)
        threads, work, at = sizes()["RADIX_THREADS"], self._workspace(), self.runtime.address
        rows = _over(x.size, threads * (16 // x.dtype.itemsize))
        blocks = min(rows, self.runtime.resident(kernel, threads))
        arguments = (
            _u64(x.pointer), _u64(residual.pointer if residual else 0), _u64(x.size), _u64(k), _aligned(x, residual),
            np.bool_(capacity == 0), _u64(capacity), _u64(indices), _u64(bits), _u64(at(room[0])), _u64(at(room[1])),
            _u64(at(counter)), _u64(work.radix(blocks)), _u64(work.selection),
        )  # fmt: skip
        self.runtime.launch(kernel, blocks, threads, arguments, cooperative=True)

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
        tiles = _over(x.size, size["FILTER_THREADS"] * size["FILTER_CHUNKS"] * (16 // x.dtype.itemsize))
        if tiles:
            self._launcher("threshold.cu", x, residual)(
                "threshold", tiles, size["FILTER_THREADS"],
                _u64(left.pointer if left else 0), _u64(residual.pointer if residual else 0), _u64(x.size),
                _aligned(x, residual), _u64(edge), _u64(capacity), _u64(self.runtime.address(room[0])),
                _u64(self.runtime.address(room[1])), _u64(self.runtime.address(counter)), _u64(work.tiles(tiles)),
            )  # fmt: skip
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

        def run(name: str, blocks: int, threads: int, *arguments: Argument) -> None:
            runtime.launch(runtime.kernel("merge.cu", name, definitions), blocks, threads, arguments)

        size = sizes()
        indices, bits = work.room("union indices", most, index), work.room("union", most, f"u{carrier.itemsize}")
        survivors = work.room("union survivors", most, f"u{carrier.itemsize}")
        tiles = max(1, _over(most, size["MERGE_THREADS"] * size["MERGE_ITEMS"]))
        run("merge", tiles, size["MERGE_THREADS"],
            _u64(at(a_indices)), _u64(at(a_values)), _u64(a_count), _u64(a_counter),
            _u64(at(b_indices)), _u64(at(b_values)), _u64(b_count), _u64(b_counter),
            _u64(k), _u64(indices), _u64(bits), _u64(work.tiles(tiles)), _u64(work.selection))  # fmt: skip
        self._kth_and_emit(run, work, most, indices, bits, survivors, kept, lost, 0, counters)
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
        self.runtime.launch(kernel, tiles, sizes()["DENSE_THREADS"], arguments)

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
            _u64(x.pointer), _u64(residual.pointer if residual else 0), _u64(x.size),
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

    def _launcher(self, file: str, x: Tensor, residual: Tensor | None) -> Any:
        definitions = selection_definitions(x.dtype, residual.dtype if residual else None, x.size >= _INT32_SIZES)

        def run(name: str, blocks: int, threads: int, *arguments: Argument) -> None:
            self.runtime.launch(self.runtime.kernel(file, name, definitions), blocks, threads, arguments)

        return run

    def _elementwise(self, name: str, most: int, definitions: tuple[str, ...], *arguments: Argument) -> None:
        if most == 0:
            return
        threads = sizes()["DENSE_THREADS"]
        blocks = min(_over(most, threads), 16 * self.runtime.multiprocessors)
        self.runtime.launch(self.runtime.kernel("dense.cu", name, definitions), blocks, threads, arguments)


def _over(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def _aligned(x: Tensor, residual: Tensor | None) -> Argument:
    return np.bool_((x.pointer | (residual.pointer if residual else 0)) % 16 == 0)


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
