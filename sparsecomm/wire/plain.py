"""The plain format: all indices, then all values, as they stand in memory.

    indices, int32 or int64 | up to 4 bytes of padding | values, float32 or float64

8 bytes per entry for float32 gradients of fewer than 2^31 elements. Values start at a multiple of their size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Plain"]

_Array = NDArray[Any]
_Bytes = NDArray[np.uint8]


class Plain:
    """Encodes and decodes without loss."""

    code = 0

    def length(self, indices: _Array, values: _Array) -> int:
        """Bytes that `encode` writes."""
        return self._values_at(indices.nbytes, values.itemsize) + values.nbytes

    def encode(self, indices: _Array, values: _Array, to: _Bytes) -> None:
        """Write entries to ``to``, of `length` bytes."""
        middle = len(to) - values.nbytes
        to[: indices.nbytes] = indices.view(np.uint8)
        to[indices.nbytes : middle] = 0
        to[middle:] = values.view(np.uint8)

    def decode(self, data: _Bytes, count: int, index: np.dtype[Any], value: np.dtype[Any]) -> tuple[_Array, _Array]:
        """The indices and values of ``count`` entries, as views.

        Raises:
            ValueError: ``data`` has another length.
        """
        end = count * index.itemsize
        middle = self._values_at(end, value.itemsize)
        if len(data) != middle + count * value.itemsize:
            raise ValueError(f"{count} entries in {len(data)} bytes; expected {middle + count * value.itemsize}")
        return data[:end].view(index), data[middle:].view(value)

    @staticmethod
    def _values_at(end: int, itemsize: int) -> int:
        return -(-end // itemsize) * itemsize
