"""Merging and reselecting: kernels/cuda/merge.cu."""

from __future__ import annotations

import numpy as np

from sparsecomm.backends.cuda.launches import INT64_SIZE, Launch, Launcher, emit_tiles, over, u64
from sparsecomm.backends.cuda.modules import merge_definitions
from sparsecomm.backends.cuda.runtime import Kernel
from sparsecomm.backends.cuda.tuning import sizes
from sparsecomm.backends.cuda.vector import CountedVector, count_of
from sparsecomm.tensors.sparse import SparseVector, index_dtype

__all__ = ["Merging"]


class Merging(Launcher):
    """Sums of sparse vectors."""

    def merge(self, a: SparseVector, b: SparseVector) -> SparseVector:
        most = count_of(self.runtime, a)[2] + count_of(self.runtime, b)[2]
        return self._merged(a, b, most)[0]

    def merge_topk(self, a: SparseVector, b: SparseVector, k: int) -> tuple[SparseVector, SparseVector]:
        return self._merged(a, b, k)

    def _merged(self, a: SparseVector, b: SparseVector, k: int) -> tuple[SparseVector, SparseVector]:
        """See kernels/cuda/merge.cu."""
        runtime, work, at = self.runtime, self._workspace(), self.runtime.address
        int64_indices, accumulator, index = a.size >= INT64_SIZE, a._accumulator, index_dtype(a.size)
        a_indices, a_values, a_most, a_count, a_counter = count_of(runtime, a)
        b_indices, b_values, b_most, b_count, b_counter = count_of(runtime, b)
        most = a_most + b_most
        kept = runtime.empty(min(k, most), index), runtime.empty(min(k, most), accumulator)
        lost = runtime.empty(most, index), runtime.empty(most, accumulator)
        counters = runtime.empty(2, np.uint64)
        results = (
            CountedVector(runtime, kept, counters[:1], a.size, a.shape),
            CountedVector(runtime, lost, counters[1:], a.size, a.shape),
        )
        definitions = merge_definitions(accumulator.itemsize == 8, int64_indices)

        def kernel(name: str) -> Kernel:
            return runtime.kernel("merge.cu", name, definitions)

        size, found = sizes(), self._candidates(work, most, index, accumulator)
        tiles = max(1, over(most, size["MERGE_THREADS"] * size["MERGE_ITEMS"]))
        look_back = work.tiles(max(tiles, emit_tiles(most)))
        merge = Launch(
            kernel("merge"),
            tiles,
            size["MERGE_THREADS"],
            (
                u64(at(a_indices)),
                u64(at(a_values)),
                u64(a_count),
                u64(a_counter),
                u64(at(b_indices)),
                u64(at(b_values)),
                u64(b_count),
                u64(b_counter),
                u64(k),
                u64(found.indices),
                u64(found.bits),
                u64(look_back),
                u64(work.selection),
            ),
        )
        self._start([merge, *self._kth_and_emit(kernel, work, found, kept, lost, 0, counters)])
        return results
