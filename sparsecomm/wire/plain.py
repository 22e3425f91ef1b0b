"""The plain format: entries as they stand in memory, the array of larger elements first.

    values, float32 or float64 | indices, int32 or int64        (indices first where they are int64 beside float32)

8 bytes per entry for float32 gradients of fewer than 2^31 elements.
"""

from __future__ import annotations

from sparsecomm.tensors.arrays import Array, Bytes
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.transport.memory import MessageMemory
from sparsecomm.wire.base import Packer, VectorType, Wire

__all__ = ["Plain"]


class Plain(Wire):
    """The plain format, which loses nothing and computes nothing."""

    packed = False

    def parts(self, entries: SparseVector, packer: Packer) -> list[Array]:
        indices, values = entries.indices, entries.values
        return [indices, values] if indices.itemsize > values.itemsize else [values, indices]

    def max_bytes(self, count: int, vector: VectorType) -> int:
        return count * (vector.indices.itemsize + vector.values.itemsize)

    def bytes_per_entry(self, k: int, vector: VectorType) -> float:
        return float(vector.indices.itemsize + vector.values.itemsize)

    def decode(
        self, data: Bytes, count: int, vector: VectorType, packer: Packer, memory: MessageMemory
    ) -> tuple[Array, Array]:
        index, value = vector.indices, vector.values
        expected = count * (index.itemsize + value.itemsize)
        if len(data) != expected:
            raise ValueError(f"{count} entries in {len(data)} bytes; expected {expected}")
        if index.itemsize > value.itemsize:
            middle = count * index.itemsize
            return memory.get(data[:middle], index), memory.get(data[middle:], value)
        middle = count * value.itemsize
        return memory.get(data[middle:], index), memory.get(data[:middle], value)
