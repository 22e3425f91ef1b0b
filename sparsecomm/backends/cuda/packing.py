"""The packed format: kernels/cuda/packed.cu."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sparsecomm.backends.cuda.launches import INT64_SIZE, Launch, Launcher, over, u64
from sparsecomm.backends.cuda.modules import packed_definitions
from sparsecomm.backends.cuda.runtime import Argument, Kernel
from sparsecomm.backends.cuda.tuning import sizes
from sparsecomm.tensors.kinds import ValueKind
from sparsecomm.tensors.sparse import Array, SparseVector, index_dtype

__all__ = ["Packing"]

_HEAD = 16  # bytes: first and span


class _Layout(NamedTuple):
    """Of a message of at least one entry; as Areas of kernels/cuda/packed.cu."""

    low_bits: int  # of each index
    high_words: int
    nbytes: int

    @classmethod
    def of(cls, count: int, span: int, kind: ValueKind, float64_values: bool) -> _Layout:
        each = max(1, (span + 1) // count).bit_length() - 1
        low, high = over(count * each, 64), over((span >> each) + count, 64)
        values = kind.nbytes(count, 8 if float64_values else 4)
        return cls(each, high, _HEAD + 8 * (low + high + over(values, 8)))


class Packing(Launcher):
    """Entries to bytes and back. The host waits for what it must know: the outermost indices, and what was found."""

    def pack(self, entries: SparseVector, kind: ValueKind) -> Array:
        """Entries, whose values are rounded to that kind, as flat bytes."""
        count, runtime = entries.nnz, self.runtime
        if not count:
            return runtime.empty(0, np.uint8)
        indices, values, float64_values = entries.indices, entries.values, entries.values.dtype.itemsize == 8
        kernel = self._kernel("pack", kind, float64_values, entries.size >= INT64_SIZE)
        first, last = self._outermost(indices)
        layout = _Layout.of(count, last - first, kind, float64_values)
        message = runtime.empty(layout.nbytes, np.uint8)
        self._spread(
            kernel,
            count,
            u64(runtime.address(indices)),
            u64(runtime.address(values)),
            u64(count),
            u64(first),
            u64(last - first),
            np.uint32(layout.low_bits),
            u64(runtime.address(message)),
        )
        return message

    def unpack(
        self, data: Array, head: bytes, count: int, n: int, kind: ValueKind, float64_values: bool
    ) -> tuple[Array, Array]:
        """The indices and values of ``count`` entries of a vector of ``n`` elements.

        ``data`` begins at a multiple of 8; ``head``: its first 16 bytes, on the host. Indices that are out of order or
        of no element, and values that are zero, are left to `well_formed`.

        Raises:
            ValueError: these are not the bytes of so many entries.
        """
        runtime = self.runtime
        if count > n:
            raise ValueError(f"{count} entries of {n} elements")
        if not count and len(data):
            raise ValueError(f"no entries, and {len(data)} bytes")
        if not count:
            return self._room(0, n, float64_values)
        if len(data) < _HEAD or len(head) < _HEAD:
            raise ValueError(f"{len(data)} bytes; expected at least {_HEAD}")
        first, span = (int(word) for word in np.frombuffer(head, "<u8", 2))
        if first + span >= n:
            raise ValueError(f"indices from {first} to {first + span}; expected less than {n}")
        layout = _Layout.of(count, span, kind, float64_values)
        if len(data) != layout.nbytes:
            raise ValueError(f"{len(data)} bytes; expected {layout.nbytes}")
        kernel = self._kernel("unpack", kind, float64_values, n >= INT64_SIZE)
        (indices, values), faults = self._room(count, n, float64_values), runtime.empty(1, np.uint32)
        tiles = over(layout.high_words, sizes()["PACKED_THREADS"])
        look_back = self._workspace().tiles(tiles)
        runtime.clear(faults)
        arguments = (
            u64(runtime.address(data)),
            u64(count),
            u64(first),
            u64(span),
            np.uint32(layout.low_bits),
            u64(runtime.address(indices)),
            u64(runtime.address(values)),
            u64(look_back),
            u64(runtime.address(faults)),
        )
        self._start([Launch(kernel, tiles, sizes()["PACKED_THREADS"], arguments)])
        if self._word(faults):
            raise ValueError(f"not {count} indices, an exponent too large, or bits that are not zero behind the end")
        return indices, values

    def quantize_values(self, values: Array, kind: ValueKind) -> tuple[Array, Array, int]:
        """Values as they will arrive, what that takes away from each, and how many become zero."""
        runtime, count = self.runtime, len(values)
        rounded, errors = runtime.empty(count, values.dtype), runtime.empty(count, values.dtype)
        if not count:
            return rounded, errors, 0
        kernel = self._kernel("quantize_values", kind, values.dtype.itemsize == 8, int64_indices=False)
        zeros = runtime.empty(1, np.uint64)
        runtime.clear(zeros)
        self._spread(
            kernel,
            count,
            u64(runtime.address(values)),
            u64(count),
            u64(runtime.address(rounded)),
            u64(runtime.address(errors)),
            u64(runtime.address(zeros)),
        )
        return rounded, errors, self._word(zeros)

    def _kernel(self, name: str, kind: ValueKind, float64_values: bool, int64_indices: bool) -> Kernel:
        return self.runtime.kernel("packed.cu", name, packed_definitions(kind, float64_values, int64_indices))

    def _spread(self, kernel: Kernel, count: int, *arguments: Argument) -> None:
        """A thread per entry, or some entries per thread."""
        threads = sizes()["PACKED_THREADS"]
        blocks = min(over(count, threads), 16 * self.runtime.multiprocessors)
        self._start([Launch(kernel, blocks, threads, arguments)])

    def _room(self, count: int, n: int, float64_values: bool) -> tuple[Array, Array]:
        value = np.float64 if float64_values else np.float32
        return self.runtime.empty(count, index_dtype(n)), self.runtime.empty(count, value)

    def _outermost(self, indices: Array) -> tuple[int, int]:
        """The first and the last one."""
        width, address = indices.dtype.itemsize, self.runtime.address(indices)
        both = self.runtime.pinned(2 * width)
        self.runtime.copy(both.ctypes.data, address, width)
        self.runtime.copy(both.ctypes.data + width, address + (len(indices) - 1) * width, width)
        self.runtime.record().wait()
        first, last = both.view(indices.dtype)
        return int(first), int(last)

    def _word(self, counter: Array) -> int:
        """What is counted there, when all before is done."""
        word = self.runtime.pinned(counter.nbytes)
        self.runtime.copy(word.ctypes.data, self.runtime.address(counter), counter.nbytes)
        self.runtime.record().wait()
        return int(word.view(counter.dtype)[0])
