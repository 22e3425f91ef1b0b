"""The packed format: kernels/cuda/packed.cu.

The host waits for the device, because the layout of a message depends on the first and last index, and on whether all
values are finite. If one is not, the kinds with bit planes (int4, int2 and sign) send all values exactly.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sparsecomm.backends.base import value_bytes
from sparsecomm.backends.cuda.context import Arguments, ExecutionContext, ceil_div
from sparsecomm.backends.cuda.modules import packed_definitions
from sparsecomm.backends.cuda.runtime import Launch, fetch, read_word
from sparsecomm.tensors.kinds import EXACT, ValueKind
from sparsecomm.tensors.sparse import INT64_SIZE, Array, SparseVector

_HEAD = 16  # bytes: first and span
_EXACT_FLAG = 1 << 63  # bit of span: the values are exact, although the kind has bit planes


class _Layout(NamedTuple):
    """The layout of a message of at least one entry, like ``Areas`` in kernels/cuda/packed.cu."""

    low_bits: int  # of each index
    high_words: int
    nbytes: int

    @classmethod
    def of(cls, count: int, span: int, kind: ValueKind, float64_values: bool) -> _Layout:
        low_bits = max(1, (span + 1) // count).bit_length() - 1
        low_words, high_words = ceil_div(count * low_bits, 64), ceil_div((span >> low_bits) + count, 64)
        value_words = ceil_div(value_bytes(kind, count, 8 if float64_values else 4), 8)
        return cls(low_bits, high_words, _HEAD + 8 * (low_words + high_words + value_words))


class Packing(ExecutionContext):
    """The methods of `sparsecomm.backends.base.Backend` on packed entries."""

    def pack(self, entries: SparseVector, kind: ValueKind) -> Array:
        count, runtime = entries.nnz, self.runtime
        if not count:
            return runtime.empty(0, np.uint8)
        indices, values = entries.indices, entries.values
        span = entries.span if isinstance(entries, _Rounded) else None
        if span is None or span.kind is not kind:
            counters = self.zeros(2, np.uint64)
            self.start(*self._find_not_finite(values, kind, counters))
            span = self._read(indices, kind, counters)[0]
        first, last, exact, _ = span
        sent = EXACT if exact else kind
        types = packed_definitions(sent, values.dtype.itemsize == 8, entries.size >= INT64_SIZE)
        layout = _Layout.of(count, last - first, sent, values.dtype.itemsize == 8)
        message = runtime.empty(layout.nbytes, np.uint8)
        arguments: Arguments = {"indices": indices, "values": values, "count": count, "first": first}
        arguments |= {"span": last - first, "l": np.uint32(layout.low_bits)}
        arguments |= {"flags": _EXACT_FLAG if exact else 0, "message": message}
        self.start(self._per_entry("pack", types, count, arguments))
        return message

    def unpack(
        self, data: Array, head: bytes, count: int, n: int, kind: ValueKind, float64_values: bool
    ) -> tuple[Array, Array]:
        value = np.dtype(np.float64 if float64_values else np.float32)
        if count > n:
            raise ValueError(f"{count} entries of {n} elements")
        if not count and len(data):
            raise ValueError(f"no entries, and {len(data)} bytes")
        if not count:
            return self.room(0, n, value)
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
        (indices, values), threads = self.room(count, n, value), self.tuning.packed_threads
        tiles, faults = ceil_div(layout.high_words, threads), self.zeros(1, np.uint32)
        arguments: Arguments = {"message": data, "count": count, "first": first, "span": span}
        arguments |= {"l": np.uint32(layout.low_bits), "indices": indices, "values": values}
        arguments |= {"look_back": self.workspace().look_back(tiles), "faults": faults}
        types = packed_definitions(kind, float64_values, n >= INT64_SIZE)
        self.start(self.prepare("packed.cu", "unpack", types, tiles, threads, arguments))
        if read_word(self.runtime, faults):
            raise ValueError(f"bytes that are not {count} indices and valid values, or unused bits that are not zero")
        return indices, values

    def quantize(self, entries: SparseVector, kind: ValueKind) -> tuple[SparseVector, SparseVector]:
        indices, values, positions, size, shape = entries.indices, entries.values, None, entries.size, entries.shape
        types = packed_definitions(kind, values.dtype.itemsize == 8, size >= INT64_SIZE)
        errors = self.runtime.empty(len(values), values.dtype)
        while True:  # repeat while rounding makes zeros: without them, blocks contain other values
            rounded, span, zeros = self._round(values, kind, types, positions, errors, indices)
            if not zeros:
                narrow = _Rounded.trusted(indices, rounded, size, shape)
                assert isinstance(narrow, _Rounded)
                narrow.span = span
                return narrow, SparseVector.trusted(entries.indices, errors, size, shape)
            values, indices, positions = self._drop_zeros(rounded, indices, positions, zeros, types)

    def quantize_values(self, values: Array, kind: ValueKind) -> tuple[Array, Array, int]:
        errors = self.runtime.empty(len(values), values.dtype)
        types = packed_definitions(kind, values.dtype.itemsize == 8, int64_indices=False)
        rounded, _, zeros = self._round(values, kind, types, None, errors, None)
        return rounded, errors, zeros

    def _round(
        self,
        values: Array,
        kind: ValueKind,
        types: tuple[str, ...],
        positions: Array | None,
        errors: Array,
        indices: Array | None,
    ) -> tuple[Array, _Span, int]:
        """Run quantize_values. Return the rounded values, what `pack` needs to know, and how many values are zero."""
        rounded, count = self.runtime.empty(len(values), values.dtype), len(values)
        if not count:
            return rounded, _Span(0, 0, False, kind), 0
        counters = self.zeros(2, np.uint64)  # of zeros, and of values that are not finite
        arguments: Arguments = {"values": values, "count": count, "positions": positions, "rounded": rounded}
        arguments |= {"errors": errors, "not_finite": counters[1:], "zeros": counters[:1]}
        launches = self._find_not_finite(values, kind, counters)
        self.start(*launches, self._per_entry("quantize_values", types, count, arguments))
        return rounded, *self._read(indices, kind, counters)

    def _drop_zeros(
        self, values: Array, indices: Array, positions: Array | None, zeros: int, types: tuple[str, ...]
    ) -> tuple[Array, Array, Array]:
        """Run drop_zeros. Return the values, indices and positions of the other entries."""
        count, threads = len(values), self.tuning.packed_threads
        nonzero = [self.runtime.empty(count - zeros, array.dtype) for array in (values, indices, indices)]
        new_values, new_indices, new_positions = nonzero
        arguments: Arguments = {"values": values, "indices": indices, "positions": positions, "count": count}
        arguments |= {"rest_values": new_values, "rest_indices": new_indices, "rest_positions": new_positions}
        arguments |= {"look_back": self.workspace().look_back(ceil_div(count, threads))}
        self.start(self.prepare("packed.cu", "drop_zeros", types, ceil_div(count, threads), threads, arguments))
        return new_values, new_indices, new_positions

    def _find_not_finite(self, values: Array, kind: ValueKind, counters: Array) -> list[Launch]:
        """Return the launch of find_not_finite, which counts into the second counter; none if all are allowed."""
        arguments: Arguments = {"values": values, "count": len(values), "found": counters[1:]}
        types = packed_definitions(kind, False, False)
        return [self._per_entry("find_not_finite", types, len(values), arguments)] if kind.planes else []

    def _per_entry(self, name: str, types: tuple[str, ...], entries: int, arguments: Arguments) -> Launch:
        threads = self.tuning.packed_threads
        return self.prepare("packed.cu", name, types, self.spread(entries, threads), threads, arguments)

    def _read(self, indices: Array | None, kind: ValueKind, counters: Array) -> tuple[_Span, int]:
        """Wait, once, for what `pack` needs to know about entries, and for the number of zeros."""
        ends = [] if indices is None else [indices[:1], indices[-1:]]
        fetched = fetch(self.runtime, *((self._address(array), array.nbytes) for array in (counters, *ends)))
        zeros, not_finite = fetched[: counters.nbytes].view(np.uint64).tolist()
        first, last = (0, 0) if indices is None else fetched[counters.nbytes :].view(indices.dtype).tolist()
        return _Span(first, last, not_finite > 0, kind), zeros


class _Span(NamedTuple):
    """The first and the last index of entries, and whether a value is not finite, so that all are sent exactly."""

    first: int
    last: int
    exact: bool
    kind: ValueKind


class _Rounded(SparseVector):
    """Entries whose values are rounded to a kind. `pack` need not wait for their span."""

    __slots__ = ("span",)
    span: _Span
