"""Top-k and threshold: kernels/cuda/topk.cu, radix.cu and threshold.cu."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from sparsecomm.backends.base import Done
from sparsecomm.backends.cuda.context import ExecutionContext, Launch, aligned, ceil_div
from sparsecomm.backends.cuda.keys import min_key
from sparsecomm.backends.cuda.modules import selection_definitions
from sparsecomm.backends.cuda.vector import CountedVector
from sparsecomm.tensors.interop import Tensor
from sparsecomm.tensors.sparse import INT64_SIZE, Array, DenseSum, SparseVector, index_dtype

__all__ = [
    "Candidates",
    "add_into",
    "definitions_of",
    "kth_and_emit",
    "look_back_tiles",
    "nonzeros",
    "room_for",
    "threshold",
    "topk",
]

_ABOVE_ALL = 2**64 - 1  # no key is so large
_MAX_CANDIDATES = 2**31 - 1  # `emit` counts in halves of one word


class Candidates(NamedTuple):
    """Room for entries that may be selected: their indices and bits, and scratch for bits, as addresses."""

    capacity: int
    indices: int
    bits: int
    survivors: int

    @classmethod
    def room(cls, context: ExecutionContext, capacity: int, size: int, value_bytes: int) -> Candidates:
        """Return room in the current stream's workspace, for entries of ``size`` elements."""
        work, bits = context.workspace(), f"u{value_bytes}"
        indices = work.room("indices", capacity, index_dtype(size))
        return cls(capacity, indices, work.room("bits", capacity, bits), work.room("survivors", capacity, bits))


_NO_CANDIDATES = Candidates(0, 0, 0, 0)


def topk(context: ExecutionContext, x: Tensor, k: int, residual: Tensor | None, done: Done = None) -> SparseVector:
    k, tuning = min(k, x.size), context.tuning
    entries = room_for(context, k, x)
    if k == 0:  # no elements
        context.runtime.clear(entries.counter)
        context.start(done=done, result=entries)
    elif x.size <= tuning.radix_max_size or 2 * k + tuning.spare_candidates > _MAX_CANDIDATES:
        context.start(_radix(context, x, residual, k, entries, _NO_CANDIDATES), done=done, result=entries)
    else:
        context.start(*_sampled(context, x, residual, k, entries), done=done, result=entries)
    return entries


def add_into(context: ExecutionContext, x: Tensor, residual: Tensor, done: Done = None) -> None:
    _above(context, x, x, residual, _ABOVE_ALL, 0, done)  # in place: it may be that memory has run out


def threshold(
    context: ExecutionContext, x: Tensor, tau: float, residual: Tensor | None, done: Done = None
) -> SparseVector:
    key = min_key(tau, (residual or x).dtype)
    capacity = max(1024, x.size // 64)
    parts: list[SparseVector] = []
    rest: Tensor | None = x
    while True:
        found = _above(context, rest, x, residual, key, min(capacity, max(x.size, 1)))
        count = found.nnz
        if residual is None and count > capacity:  # again, with room for all
            capacity = count
            continue
        here = min(count, capacity)
        parts.append(SparseVector.trusted(found.room[0][:here], found.room[1][:here], x.size, x.shape))
        if count == here:
            entries = parts[0] if len(parts) == 1 else _concatenate(context, parts)
            context.start(done=done, result=entries)
            return entries
        rest, capacity = None, count - here  # what did not fit is in the residual still, and comes after


def nonzeros(context: ExecutionContext, dense: Array, shape: tuple[int, ...]) -> SparseVector:
    runtime, tuning = context.runtime, context.tuning

    def find(dense: Array) -> tuple[Array, Array]:  # any thread may ask, at any time: so in a context of its own
        context = ExecutionContext(runtime, tuning)
        with runtime.on_stream(None):
            found = threshold(context, context.tensor(dense), 0.0, None)
            return found.indices, found.values

    return DenseSum(dense, shape, find)


def look_back_tiles(context: ExecutionContext, tiles: int, capacity: int) -> int:
    """Return the address of a look-back over ``tiles``, and after it over those of `kth_and_emit`."""
    return context.workspace().look_back(max(tiles, _emit_tiles(context, capacity)))


def kth_and_emit(
    context: ExecutionContext,
    file: str,
    definitions: tuple[str, ...],
    found: Candidates,
    kept: CountedVector,
    lost: CountedVector | None = None,
    residual: Tensor | None = None,
) -> list[Launch]:
    """Return the launches of emit.cuh, which ``file`` includes. Other entries go to ``lost`` or ``residual``."""
    size, work, tiles = context.tuning, context.workspace(), _emit_tiles(context, found.capacity)
    blocks = max(1, min(ceil_div(found.capacity, size.refine_threads), 8 * context.runtime.multiprocessors))
    return [
        context.prepare(
            context.kernel(file, "refine", definitions),
            blocks,
            size.refine_threads,
            bits=found.bits,
            survivors=found.survivors,
            selection=work.selection,
        ),
        context.prepare(
            context.kernel(file, "emit", definitions),
            tiles,
            size.emit_threads,
            indices=found.indices,
            bits=found.bits,
            kept_indices=kept.room[0],
            kept_values=kept.room[1],
            lost_indices=lost.room[0] if lost else None,
            lost_values=lost.room[1] if lost else None,
            residual=residual,
            kept_count=kept.counter,
            lost_count=lost.counter if lost else None,
            look_back=work.look_back(tiles),
            selection=work.selection,
        ),
    ]


def _emit_tiles(context: ExecutionContext, capacity: int) -> int:
    return max(1, ceil_div(capacity, context.tuning.emit_threads * context.tuning.emit_items))


def room_for(context: ExecutionContext, count: int, x: Tensor) -> CountedVector:
    """Return room for ``count`` entries of x, whose number is yet to be written."""
    room = context.entries(count, x.size, x.dtype.accumulator)
    return CountedVector(context.runtime, room, context.runtime.empty(1, np.uint64), x.size, x.shape)


def definitions_of(x: Tensor, residual: Tensor | None) -> tuple[str, ...]:
    """Return the types of kernels that select from these."""
    return selection_definitions(x.dtype, residual.dtype if residual else None, x.size >= INT64_SIZE)


def _sampled(
    context: ExecutionContext, x: Tensor, residual: Tensor | None, k: int, entries: CountedVector
) -> list[Launch]:
    """Return the launches of kernels/cuda/topk.cu."""
    size, work, definitions = context.tuning, context.workspace(), definitions_of(x, residual)
    value_bytes = (residual or x).dtype.itemsize
    found = Candidates.room(context, min(x.size, 2 * k + size.spare_candidates), x.size, value_bytes)
    sector = 32 // x.dtype.itemsize
    sectors = min(size.sample_sectors, x.size // sector)
    expected = sectors * sector * k / x.size
    sample = context.prepare(
        context.kernel("topk.cu", "sample", definitions),
        min(ceil_div(sectors, size.sample_threads), 4 * context.runtime.multiprocessors),
        size.sample_threads,
        x=x,
        residual=residual,
        n=x.size,
        aligned=aligned(x, residual),
        sectors=sectors,
        wanted=math.ceil(expected + 5 * math.sqrt(expected) + 5),  # too few candidates once in millions of calls
        state=work.sample,
        selection=work.selection,
    )
    tiles = _filter_tiles(context, x)
    filter_ = context.prepare(
        context.kernel("topk.cu", "filter", definitions),
        tiles,
        size.filter_threads,
        x=x,
        residual=residual,
        n=x.size,
        k=k,
        aligned=aligned(x, residual),
        capacity=found.capacity,
        indices=found.indices,
        bits=found.bits,
        look_back=look_back_tiles(context, tiles, found.capacity),
        selection=work.selection,
    )
    rest = kth_and_emit(context, "topk.cu", definitions, found, entries, residual=residual)
    return [sample, filter_, *rest, _radix(context, x, residual, k, entries, found)]


def _radix(
    context: ExecutionContext, x: Tensor, residual: Tensor | None, k: int, entries: CountedVector, found: Candidates
) -> Launch:
    """Return the launch of radix.cu: from x with `_NO_CANDIDATES`, else from what `filter` left, if it has to."""
    kernel, work = context.kernel("radix.cu", "radix", definitions_of(x, residual)), context.workspace()
    threads = context.tuning.radix_threads
    rows = ceil_div(x.size, threads * (16 // x.dtype.itemsize))
    blocks = min(rows, 2 * context.runtime.multiprocessors)  # most calls need them only to look at one flag
    return context.prepare(
        kernel,
        blocks,
        threads,
        x=x,
        residual=residual,
        n=x.size,
        k=k,
        aligned=aligned(x, residual),
        from_start=found is _NO_CANDIDATES,
        capacity=found.capacity,
        indices=found.indices,
        bits=found.bits,
        kept_indices=entries.room[0],
        kept_values=entries.room[1],
        kept_count=entries.counter,
        state=work.radix(blocks),
        selection=work.selection,
    )


def _above(
    context: ExecutionContext,
    rest: Tensor | None,
    x: Tensor,
    residual: Tensor | None,
    key: int,
    capacity: int,
    done: Done = None,
) -> CountedVector:
    """Run kernels/cuda/threshold.cu. ``rest``: x, or None to look at the residual alone."""
    found, tiles = room_for(context, capacity, x), _filter_tiles(context, x)
    context.runtime.clear(found.counter)
    launches = []
    if tiles:
        launches.append(
            context.prepare(
                context.kernel("threshold.cu", "threshold", definitions_of(x, residual)),
                tiles,
                context.tuning.filter_threads,
                x=rest,
                residual=residual,
                n=x.size,
                aligned=aligned(x, residual),
                threshold=key,
                capacity=capacity,
                indices=found.room[0],
                values=found.room[1],
                count=found.counter,
                look_back=context.workspace().look_back(tiles),
            )
        )
    context.start(*launches, done=done, result=found)
    return found


def _filter_tiles(context: ExecutionContext, x: Tensor) -> int:
    elements = context.tuning.filter_threads * context.tuning.filter_vectors * (16 // x.dtype.itemsize)
    return ceil_div(x.size, elements)


def _concatenate(context: ExecutionContext, parts: list[SparseVector]) -> SparseVector:
    """Return one vector of all parts, in memory of the context's device."""
    indices, values = context.entries(sum(part.nnz for part in parts), parts[0].size, parts[0].values.dtype)
    begin = 0
    for part in parts:
        indices[begin : begin + part.nnz] = part.indices
        values[begin : begin + part.nnz] = part.values
        begin += part.nnz
    return SparseVector.trusted(indices, values, parts[0].size, parts[0].shape)
