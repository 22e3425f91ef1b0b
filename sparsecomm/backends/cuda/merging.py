"""Merging and reselecting: kernels/cuda/merge.cu."""

from __future__ import annotations

import numpy as np

from sparsecomm.backends.cuda.context import ExecutionContext, ceil_div
from sparsecomm.backends.cuda.modules import merge_definitions
from sparsecomm.backends.cuda.selection import Candidates, kth_and_emit, look_back_tiles
from sparsecomm.backends.cuda.vector import CountedVector, Operand
from sparsecomm.tensors.sparse import INT64_SIZE, SparseVector

__all__ = ["merge", "merge_topk"]


def merge(context: ExecutionContext, a: SparseVector, b: SparseVector) -> SparseVector:
    return merge_topk(context, a, b, Operand.of(a).max_count + Operand.of(b).max_count)[0]


def merge_topk(
    context: ExecutionContext, a: SparseVector, b: SparseVector, k: int
) -> tuple[SparseVector, SparseVector]:
    """See kernels/cuda/merge.cu."""
    runtime, size, accumulator = context.runtime, context.tuning, a._accumulator
    left, right = Operand.of(a), Operand.of(b)
    max_count = left.max_count + right.max_count
    counters = runtime.empty(2, np.uint64)
    kept, lost = (
        CountedVector(runtime, context.entries(count, a.size, accumulator), counters[i : i + 1], a.size, a.shape)
        for i, count in enumerate((min(k, max_count), max_count))
    )
    definitions = merge_definitions(accumulator.itemsize == 8, a.size >= INT64_SIZE)
    found = Candidates.room(context, max_count, a.size, accumulator.itemsize)
    tiles = max(1, ceil_div(max_count, size.merge_threads * size.merge_items))
    union = context.prepare(
        context.kernel("merge.cu", "merge", definitions),
        tiles,
        size.merge_threads,
        a_indices=left.indices,
        a_values=left.values,
        a_host_count=left.host_count,
        a_device_count=left.device_count,
        b_indices=right.indices,
        b_values=right.values,
        b_host_count=right.host_count,
        b_device_count=right.device_count,
        k=k,
        indices=found.indices,
        bits=found.bits,
        look_back=look_back_tiles(context, tiles, max_count),
        selection=context.workspace().selection,
    )
    context.start(union, *kth_and_emit(context, "merge.cu", definitions, found, kept, lost))
    return kept, lost
