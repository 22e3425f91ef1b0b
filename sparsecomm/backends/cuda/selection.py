"""Top-k and threshold: kernels/cuda/topk.cu, radix.cu and threshold.cu."""

from __future__ import annotations

import math

import numpy as np

from sparsecomm.backends.cuda.keys import min_key
from sparsecomm.backends.cuda.launches import (
    NO_CANDIDATES,
    Candidates,
    Launch,
    Launcher,
    aligned,
    emit_tiles,
    over,
    pointer,
    tile,
    u64,
)
from sparsecomm.backends.cuda.runtime import Runtime
from sparsecomm.backends.cuda.tuning import sizes
from sparsecomm.backends.cuda.vector import CountedVector
from sparsecomm.tensors.interop import Tensor
from sparsecomm.tensors.sparse import Array, DenseSum, SparseVector, index_dtype

__all__ = ["Selecting"]

_SHORT = 1 << 16  # elements up to which one launch of `radix` does it all
_SPARE = 1 << 20  # room for candidates beyond 2 k: what an unlucky sample lets through
_ABOVE_ALL = 2**64 - 1  # no key is so large
_MAX_CANDIDATES = 2**31 - 1  # `emit` counts in halves of one word


class Selecting(Launcher):
    """Selection."""

    def __init__(self, runtime: Runtime, *, short: int = _SHORT, spare: int = _SPARE) -> None:
        """``short``, ``spare``: see `_SHORT` and `_SPARE`; tests make them small."""
        super().__init__(runtime)
        self._short, self._spare = short, spare

    def topk(self, x: Tensor, k: int, residual: Tensor | None) -> SparseVector:
        k = min(k, x.size)
        room, counter = self._entries(k, x), self.runtime.empty(1, np.uint64)
        entries = CountedVector(self.runtime, room, counter, x.size, x.shape)
        if k == 0:  # no elements
            self.runtime.clear(counter)
        elif x.size <= self._short or 2 * k + self._spare > _MAX_CANDIDATES:
            self._start([self._radix(x, residual, k, room, counter, NO_CANDIDATES)])
        else:
            self._start(self._sampled(x, residual, k, room, counter))
        return entries

    def _sampled(
        self, x: Tensor, residual: Tensor | None, k: int, room: tuple[Array, Array], counter: Array
    ) -> list[Launch]:
        """See kernels/cuda/topk.cu."""
        kernel, size, work = self._kernels("topk.cu", x, residual), sizes(), self._workspace()
        found = self._candidates(work, min(x.size, 2 * k + self._spare), index_dtype(x.size), residual or x)
        x_at, r_at, n, whole = u64(x.pointer), u64(pointer(residual)), u64(x.size), aligned(x, residual)

        sector = 32 // x.dtype.itemsize
        sectors = min(size["SAMPLE_SECTORS"], x.size // sector)
        expected = sectors * sector * k / x.size
        wanted = math.ceil(expected + 5 * math.sqrt(expected) + 5)  # too few candidates once in millions of calls
        blocks = min(over(sectors, size["SAMPLE_THREADS"]), 4 * self.runtime.multiprocessors)
        sample = Launch(
            kernel("sample"),
            blocks,
            size["SAMPLE_THREADS"],
            (x_at, r_at, n, whole, u64(sectors), u64(wanted), u64(work.sample), u64(work.selection)),
        )
        tiles = over(x.size, tile(x))
        look_back = work.tiles(max(tiles, emit_tiles(found.capacity)))
        filter_ = Launch(
            kernel("filter"),
            tiles,
            size["FILTER_THREADS"],
            (
                x_at,
                r_at,
                n,
                u64(k),
                whole,
                u64(found.capacity),
                u64(found.indices),
                u64(found.bits),
                u64(look_back),
                u64(work.selection),
            ),
        )
        rest = self._kth_and_emit(kernel, work, found, room, None, pointer(residual), counter)
        return [sample, filter_, *rest, self._radix(x, residual, k, room, counter, found)]

    def _radix(
        self, x: Tensor, residual: Tensor | None, k: int, room: tuple[Array, Array], counter: Array, found: Candidates
    ) -> Launch:
        """See kernels/cuda/radix.cu. With `NO_CANDIDATES` it starts afresh, else where `filter` left off."""
        kernel = self._kernels("radix.cu", x, residual)("radix")
        threads, work, at = sizes()["RADIX_THREADS"], self._workspace(), self.runtime.address
        rows = over(x.size, threads * (16 // x.dtype.itemsize))
        blocks = min(rows, self.runtime.resident(kernel, threads))
        arguments = (
            u64(x.pointer),
            u64(pointer(residual)),
            u64(x.size),
            u64(k),
            aligned(x, residual),
            np.bool_(found is NO_CANDIDATES),
            u64(found.capacity),
            u64(found.indices),
            u64(found.bits),
            u64(at(room[0])),
            u64(at(room[1])),
            u64(at(counter)),
            u64(work.radix(blocks)),
            u64(work.selection),
        )
        return Launch(kernel, blocks, threads, arguments, cooperative=True)

    def add_into(self, x: Tensor, residual: Tensor) -> None:
        self._above(x, x, residual, _ABOVE_ALL, 0)  # in place: it may be that memory has run out

    def threshold(self, x: Tensor, tau: float, residual: Tensor | None) -> SparseVector:
        edge = min_key(tau, (residual or x).dtype)
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

    def nonzeros(self, dense: Array, shape: tuple[int, ...]) -> SparseVector:
        def find(dense: Array) -> tuple[Array, Array]:
            found = self.threshold(self._tensor(dense), 0.0, None)
            return found.indices, found.values

        return DenseSum(dense, shape, find)

    def _above(
        self, left: Tensor | None, x: Tensor, residual: Tensor | None, edge: int, capacity: int
    ) -> tuple[tuple[Array, Array], CountedVector]:
        """See kernels/cuda/threshold.cu. ``left``: x, or None to look at the residual alone."""
        size, work = sizes(), self._workspace()
        room, counter = self._entries(capacity, x), self.runtime.empty(1, np.uint64)
        found = CountedVector(self.runtime, room, counter, x.size, x.shape)
        self.runtime.clear(counter)
        if tiles := over(x.size, tile(x)):
            arguments = (
                u64(pointer(left)),
                u64(pointer(residual)),
                u64(x.size),
                aligned(x, residual),
                u64(edge),
                u64(capacity),
                u64(self.runtime.address(room[0])),
                u64(self.runtime.address(room[1])),
                u64(self.runtime.address(counter)),
                u64(work.tiles(tiles)),
            )
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
