"""The packed format: kernels/cuda/packed.cu.

The host waits for what it must know: the outermost indices, and what was found.

Values of few bits travel exact if one of them is not finite. That is looked for in a launch of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sparsecomm.backends.cuda.context import Argument, ExecutionContext, Launch, ceil_div
from sparsecomm.backends.cuda.modules import packed_definitions
from sparsecomm.backends.cuda.runtime import Kernel, fetch, read_word
from sparsecomm.tensors.kinds import EXACT, ValueKind
from sparsecomm.tensors.sparse import INT64_SIZE, Array, SparseVector

__all__ = ["pack", "quantize_values", "unpack"]

_HEAD = 16  # bytes: first and span
_EXACT_FLAG = 1 << 63  # in the word of span: values of planes are exact


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
    indices, values = entries.indices, entries.values
    float64_values, int64_indices = values.dtype.itemsize == 8, entries.size >= INT64_SIZE
    not_finite = _not_finite(context, values, kind)
    context.start(*not_finite.launches)
    first, last, exact = _outermost(context, indices, not_finite.found)
    sent = EXACT if exact else kind
    kernel = _kernel(context, "pack", sent, float64_values, int64_indices)
    layout = _Layout.of(count, last - first, sent, float64_values)
    message = runtime.empty(layout.nbytes, np.uint8)
    launch = _per_entry(
        context,
        kernel,
        count,
        indices=indices,
        values=values,
        count=count,
        first=first,
        span=last - first,
        l=np.uint32(layout.low_bits),
        flags=_EXACT_FLAG if exact else 0,
        message=message,
    )
    context.start(launch)
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
    if kind.planes and span & _EXACT_FLAG:
        kind, span = EXACT, span ^ _EXACT_FLAG
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
        raise ValueError(f"not {count} indices, values that cannot be, or bits that are not zero behind the end")
    return indices, values


def quantize_values(context: ExecutionContext, values: Array, kind: ValueKind) -> tuple[Array, Array, int]:
    runtime, count = context.runtime, len(values)
    rounded, errors = runtime.empty(count, values.dtype), runtime.empty(count, values.dtype)
    if not count:
        return rounded, errors, 0
    kernel = _kernel(context, "quantize_values", kind, values.dtype.itemsize == 8, int64_indices=False)
    not_finite, zeros = _not_finite(context, values, kind), context.zeros(1, np.uint64)
    quantize = _per_entry(
        context,
        kernel,
        count,
        values=values,
        count=count,
        rounded=rounded,
        errors=errors,
        not_finite=not_finite.found,
        zeros=zeros,
    )
    context.start(*not_finite.launches, quantize)
    return rounded, errors, read_word(runtime, zeros)


class _NotFinite(NamedTuple):
    """What looks for values that are not finite, and where it says so. Nothing for kinds that have room for them."""

    launches: tuple[Launch, ...] = ()
    found: Array | None = None


def _not_finite(context: ExecutionContext, values: Array, kind: ValueKind) -> _NotFinite:
    if not kind.planes:
        return _NotFinite()
    kernel, found = _kernel(context, "find_not_finite", kind, False, False), context.zeros(1, np.uint32)
    launch = _per_entry(context, kernel, len(values), values=values, count=len(values), found=found)
    return _NotFinite((launch,), found)


def _kernel(context: ExecutionContext, name: str, kind: ValueKind, float64_values: bool, int64_indices: bool) -> Kernel:
    return context.kernel("packed.cu", name, packed_definitions(kind, float64_values, int64_indices))


def _per_entry(context: ExecutionContext, kernel: Kernel, entries: int, **arguments: Argument) -> Launch:
    """Return the launch of a kernel with a thread per entry, or some entries per thread."""
    threads = context.tuning.packed_threads
    blocks = min(ceil_div(entries, threads), 16 * context.runtime.multiprocessors)
    return context.prepare(kernel, blocks, threads, **arguments)


def _outermost(context: ExecutionContext, indices: Array, found: Array | None) -> tuple[int, int, bool]:
    """Wait for the current stream, and return the first and the last index, and whether a value is not finite."""
    runtime, width = context.runtime, indices.dtype.itemsize
    address = runtime.address(indices)
    sources = [(address, width), (address + (len(indices) - 1) * width, width)]
    if found is not None:
        sources.append((runtime.address(found), found.nbytes))
    fetched = fetch(runtime, *sources)
    first, last = fetched[: 2 * width].view(indices.dtype)
    return int(first), int(last), bool(fetched[2 * width :].any())
