"""The plain format: all indices, then all values, as they stand in memory.

    indices, int32 or int64 | up to 4 bytes of padding | values, float32 or float64

8 bytes per entry for float32 gradients of fewer than 2^31 elements. Values start at a multiple of their size.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsecomm.memory import HOST, Array, Bytes, Memory

__all__ = ["Plain"]


class Plain:
    """Encodes and decodes without loss."""

    code = 0

    def length(self, indices: Array, values: Array) -> int:
        """Bytes that `encode` writes."""
        return int(self._values_at(indices.nbytes, values.itemsize) + values.nbytes)

    def most(self, count: int, index: np.dtype[Any], value: np.dtype[Any]) -> int:
        """Bytes that so many entries take at most."""
        return self._values_at(count * index.itemsize, value.itemsize) + count * value.itemsize

    def encode(self, indices: Array, values: Array, to: Bytes, memory: Memory = HOST) -> None:
        """Write entries to ``to``, of `length` bytes in ``memory``."""
        middle = len(to) - values.nbytes
        memory.put(indices, to[: indices.nbytes])
        to[indices.nbytes : middle] = 0
        memory.put(values, to[middle:])

    def decode(
        self, data: Bytes, count: int, index: np.dtype[Any], value: np.dtype[Any], memory: Memory = HOST
    ) -> tuple[Array, Array]:
        """The indices and values of ``count`` entries, as ``memory`` gives them.

        Raises:
            ValueError: ``data`` has another length.
        """
        end = count * index.itemsize
        middle = self._values_at(end, value.itemsize)
        if len(data) != middle + count * value.itemsize:
            raise ValueError(f"{count} entries in {len(data)} bytes; expected {middle + count * value.itemsize}")
        return memory.get(data[:end], index), memory.get(data[middle:], value)

    @staticmethod
    def _values_at(end: int, itemsize: int) -> int:
        return -(-end // itemsize) * itemsize
