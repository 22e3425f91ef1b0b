"""The plain format: entries as they stand in memory, the array of larger elements first.

    values, float32 or float64 | indices, int32 or int64        (indices first where they are int64 beside float32)

8 bytes per entry for float32 gradients of fewer than 2^31 elements.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsecomm.tensors.kinds import EXACT
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.transport.memory import HOST, Array, Bytes, Memory
from sparsecomm.wire.base import Packer

__all__ = ["Plain"]


class Plain:
    """Encodes and decodes without loss and without work."""

    name, code, kind = "plain", 0, EXACT

    def parts(self, entries: SparseVector, packer: Packer | None = None) -> list[Array]:
        indices, values = entries.indices, entries.values
        return [indices, values] if indices.itemsize > values.itemsize else [values, indices]

    def max_bytes(self, count: int, n: int, index: np.dtype[Any], value: np.dtype[Any]) -> int:
        return count * (index.itemsize + value.itemsize)

    def bytes_per_entry(self, k: int, n: int, index: np.dtype[Any], value: np.dtype[Any]) -> float:
        return float(index.itemsize + value.itemsize)

    def decode(
        self,
        data: Bytes,
        count: int,
        n: int,
        index: np.dtype[Any],
        value: np.dtype[Any],
        packer: Packer | None = None,
        memory: Memory = HOST,
    ) -> tuple[Array, Array]:
        if len(data) != self.max_bytes(count, n, index, value):
            raise ValueError(f"{count} entries in {len(data)} bytes; expected {self.max_bytes(count, n, index, value)}")
        if index.itemsize > value.itemsize:
            middle = count * index.itemsize
            return memory.get(data[:middle], index), memory.get(data[middle:], value)
        middle = count * value.itemsize
        return memory.get(data[middle:], index), memory.get(data[:middle], value)
