"""The packed format: kernels/cuda/packed.cu.

The host waits for what it must know: the outermost indices, and what was found.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sparsecomm.backends.cuda.context import Argument, ExecutionContext, ceil_div
from sparsecomm.backends.cuda.modules import packed_definitions
from sparsecomm.backends.cuda.runtime import Kernel, fetch, read_word
from sparsecomm.tensors.kinds import ValueKind
from sparsecomm.tensors.sparse import INT64_SIZE, Array, SparseVector

__all__ = ["pack", "quantize_values", "unpack"]

_HEAD = 16  # bytes: first and span


class _Layout(NamedTuple):
    """The layout of a message of at least one entry; as Areas of kernels/cuda/packed.cu."""

    low_bits: int  # of each index
    high_words: int
    nbytes: int

    @classmethod
    def of(cls, count: int, span: int, kind: ValueKind, float64_values: bool) -> _Layout:
        low_bits = max(1, (span + 1) // count).bit_length() - 1
        low_words, high_words = ceil_div(count * low_bits, 64), ceil_div((span >> low_bits) + count, 64)
        value_words = ceil_div(kind.nbytes(count, 8 if float64_values else 4), 8)
        return cls(low_bits, high_words, _HEAD + 8 * (low_words + high_words + value_words))


def pack(context: ExecutionContext, entries: SparseVector, kind: ValueKind) -> Array:
    count, runtime = entries.nnz, context.runtime
    if not count:
        return runtime.empty(0, np.uint8)
    float64_values = entries.values.dtype.itemsize == 8
    kernel = _kernel(context, "pack", kind, float64_values, entries.size >= INT64_SIZE)
    first, last = _outermost(context, entries.indices)
    layout = _Layout.of(count, last - first, kind, float64_values)
    message = runtime.empty(layout.nbytes, np.uint8)
    _per_entry(
        context,
        kernel,
        count,
        indices=entries.indices,
        values=entries.values,
        count=count,
        first=first,
        span=last - first,
        l=np.uint32(layout.low_bits),
        message=message,
    )
    return message


def unpack(
    context: ExecutionContext, data: Array, head: bytes, count: int, n: int, kind: ValueKind, float64_values: bool
) -> tuple[Array, Array]:
    """See `sparsecomm.backends.base.Backend`. ``data`` is at a multiple of 8 bytes."""
    runtime, value = context.runtime, np.dtype(np.float64 if float64_values else np.float32)
    if count > n:
        raise ValueError(f"{count} entries of {n} elements")
    if not count and len(data):
        raise ValueError(f"no entries, and {len(data)} bytes")
    if not count:
        return context.entries(0, n, value)
    if len(data) < _HEAD or len(head) < _HEAD:
        raise ValueError(f"{len(data)} bytes; expected at least {_HEAD}")
    first, span = (int(word) for word in np.frombuffer(head, "<u8", 2))
    if first + span >= n:
        raise ValueError(f"indices from {first} to {first + span}; expected less than {n}")
    layout = _Layout.of(count, span, kind, float64_values)
    if len(data) != layout.nbytes:
        raise ValueError(f"{len(data)} bytes; expected {layout.nbytes}")
    kernel = _kernel(context, "unpack", kind, float64_values, n >= INT64_SIZE)
    (indices, values), threads = context.entries(count, n, value), context.tuning.packed_threads
    tiles, faults = ceil_div(layout.high_words, threads), context.zeros(1, np.uint32)
    context.start(
        context.prepare(
            kernel,
            tiles,
            threads,
            message=data,
            count=count,
            first=first,
            span=span,
            l=np.uint32(layout.low_bits),
            indices=indices,
            values=values,
            look_back=context.workspace().look_back(tiles),
            faults=faults,
        )
    )
    if read_word(runtime, faults):
        raise ValueError(f"not {count} indices, an exponent too large, or bits that are not zero behind the end")
    return indices, values


def quantize_values(context: ExecutionContext, values: Array, kind: ValueKind) -> tuple[Array, Array, int]:
    runtime, count = context.runtime, len(values)
    rounded, errors = runtime.empty(count, values.dtype), runtime.empty(count, values.dtype)
    if not count:
        return rounded, errors, 0
    kernel = _kernel(context, "quantize_values", kind, values.dtype.itemsize == 8, int64_indices=False)
    zeros = context.zeros(1, np.uint64)
    _per_entry(context, kernel, count, values=values, count=count, rounded=rounded, errors=errors, zeros=zeros)
    return rounded, errors, read_word(runtime, zeros)


def _kernel(context: ExecutionContext, name: str, kind: ValueKind, float64_values: bool, int64_indices: bool) -> Kernel:
    return context.kernel("packed.cu", name, packed_definitions(kind, float64_values, int64_indices))


def _per_entry(context: ExecutionContext, kernel: Kernel, entries: int, **arguments: Argument) -> None:
    """Start a kernel with a thread per entry, or some entries per thread."""
    threads = context.tuning.packed_threads
    blocks = min(ceil_div(entries, threads), 16 * context.runtime.multiprocessors)
    context.start(context.prepare(kernel, blocks, threads, **arguments))


def _outermost(context: ExecutionContext, indices: Array) -> tuple[int, int]:
    """Wait for the current stream, and return the first and the last index."""
    address, width = context.runtime.address(indices), indices.dtype.itemsize
    both = fetch(context.runtime, (address, width), (address + (len(indices) - 1) * width, width))
    first, last = both.view(indices.dtype)
    return int(first), int(last)
