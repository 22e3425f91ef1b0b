"""The plain format with values of 16 bits: entries as they stand in memory, but for the lower half of each value.

    indices, int32 or int64 | the upper 16 bits of values, which are float32

6 bytes per entry for gradients of fewer than 2^31 elements. Values have been quantized to bfloat16 before, so nothing
is lost here.
"""

from __future__ import annotations

import numpy as np

from sparsecomm.tensors.arrays import Array, Bytes
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.transport.memory import MessageMemory
from sparsecomm.wire.base import Packer, VectorType, Wire

__all__ = ["PlainBfloat16"]

_VALUE_BYTES = 2


class PlainBfloat16(Wire):
    """The plain format for quantized values, by shifts of whole arrays."""

    packed = True  # the shifts are work

    def parts(self, entries: SparseVector, packer: Packer) -> list[Array]:
        return [entries.indices, (entries.values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)]

    def max_bytes(self, count: int, vector: VectorType) -> int:
        return count * (vector.indices.itemsize + _VALUE_BYTES)

    def bytes_per_entry(self, k: int, vector: VectorType) -> float:
        return float(vector.indices.itemsize + _VALUE_BYTES)

    def decode(
        self, data: Bytes, count: int, vector: VectorType, packer: Packer, memory: MessageMemory
    ) -> tuple[Array, Array]:
        if len(data) != self.max_bytes(count, vector):
            raise ValueError(f"{count} entries in {len(data)} bytes; expected {self.max_bytes(count, vector)}")
        middle = count * vector.indices.itemsize
        upper = memory.get(data[middle:], np.uint16).astype(np.uint32)
        return memory.get(data[:middle], vector.indices), (upper << np.uint32(16)).view(np.float32)
