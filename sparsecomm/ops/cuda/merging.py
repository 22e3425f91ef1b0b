"""Merging and reselecting: kernels/cuda/merge.cu."""

from __future__ import annotations

import numpy as np

from sparsecomm.ops.cuda.launches import (
    WIDE,
    Launch,
    Launcher,
    emit_tiles,
    over,
    u64,
)
from sparsecomm.ops.cuda.modules import merge_definitions
from sparsecomm.ops.cuda.runtime import Kernel
from sparsecomm.ops.cuda.tuning import sizes
from sparsecomm.ops.cuda.vector import CountedVector, count_of
from sparsecomm.sparse import SparseVector, index_dtype

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
        wide, carrier, index = a.size >= WIDE, a._carrier, index_dtype(a.size)
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
        tiles = max(1, over(most, size["MERGE_THREADS"] * size["MERGE_ITEMS"]))
        look_back = work.tiles(max(tiles, emit_tiles(most)))
        merge = Launch(
            kernel("merge"), tiles, size["MERGE_THREADS"],
            (u64(at(a_indices)), u64(at(a_values)), u64(a_count), u64(a_counter), u64(at(b_indices)),
             u64(at(b_values)), u64(b_count), u64(b_counter), u64(k), u64(found.indices), u64(found.bits),
             u64(look_back), u64(work.selection)),
        )  # fmt: skip
        self._start([merge, *self._kth_and_emit(kernel, work, found, kept, lost, 0, counters)])
        return results
