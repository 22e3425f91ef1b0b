"""Selection by chunk: kernels/cuda/chunks.cu."""

from __future__ import annotations

from sparsecomm.backends.base import Done
from sparsecomm.backends.cuda.context import ExecutionContext, aligned, ceil_div
from sparsecomm.backends.cuda.selection import definitions_of, room_for
from sparsecomm.tensors.interop import Tensor
from sparsecomm.tensors.sparse import SparseVector

__all__ = ["topk_by_chunk"]


def topk_by_chunk(
    context: ExecutionContext,
    x: Tensor,
    k: int,
    chunk: int,
    residual: Tensor | None,
    decay: float = 1.0,
    done: Done = None,
) -> SparseVector:
    runtime, threads = context.runtime, context.tuning.by_chunk_threads
    tile = threads * context.tuning.by_chunk_items
    if k >= chunk:  # all that is not zero, whatever the chunks are
        k = chunk = tile
    chunk = min(chunk, max(x.size, 1))
    k = min(k, chunk)
    whole, rest = divmod(x.size, chunk)
    entries = room_for(context, whole * k + min(k, rest), x)
    if not x.size:
        runtime.clear(entries.counter)
        context.start(done=done, result=entries)
        return entries
    chunks_per_tile = max(1, tile // chunk)
    tiles = ceil_div(x.size, chunks_per_tile * chunk)
    select = context.prepare(
        context.kernel("chunks.cu", "chunks", definitions_of(x, residual)),
        tiles,
        threads,
        x=x,
        residual=residual,
        n=x.size,
        k=k,
        chunk=chunk,
        chunks_per_tile=chunks_per_tile,
        decay=x.dtype.accumulator.type(decay),
        aligned=aligned(x, residual),
        indices=entries.room[0],
        values=entries.room[1],
        count=entries.counter,
        look_back=context.workspace().look_back(tiles),
    )
    context.start(select, done=done, result=entries)
    return entries
