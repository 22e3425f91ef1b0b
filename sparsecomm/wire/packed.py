"""The packed format: indices in about 2 + log2(n/k) bits, values in 32, 16 or 8.

Source: Elias, "Efficient storage and retrieval by content and address of static files", J. ACM 1974; Fano, "On the
number of bits required to implement an associative memory", MIT 1971. At density 0.001 an index takes 11.96 bits; its
entropy is 11.41. Unlike bit-packed differences, or Golomb codes, which are no shorter, the length follows from the
number of entries and the two outermost indices alone, and the position of every entry from its number: any thread can
write any word, and a decoder knows beforehand what it must find.

For m entries, all words of 64 bits, little-endian:

    first, span    the first index, and the last one less the first
    low            m times the l low bits of (index - first), where l = log2((span + 1) / m), rounded down; whole words
    high           one bit for every entry i, at position ((index - first) >> l) + i; whole words
    values         m values: float32 or float64 as they are, bfloat16, float16, or int8
    exponents      beside int8, one byte for 64 values: values are q 2^(exponent - 126), q from -126 to 126;
                   q = 127 and -127 stand for the infinities, q = -128 for NaN
    zero bytes     to a multiple of 8

No bytes at all for no entries. Values that are to travel narrow have been quantized before (`Backend.quantize`), so
that what rounding took away is known and kept: packing loses nothing.
"""

from __future__ import annotations

import math

import numpy as np

from sparsecomm.tensors.arrays import Array, Bytes
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.transport.memory import MessageMemory
from sparsecomm.wire.base import Packer, VectorType, Wire

__all__ = ["Packed"]

_HEAD = 16  # bytes: first and span


class Packed(Wire):
    """A packed format: Elias-Fano indices, and values of one kind."""

    def parts(self, entries: SparseVector, packer: Packer) -> list[Array]:
        return [packer.pack(entries, self.kind)]

    def max_bytes(self, count: int, vector: VectorType) -> int:
        if not count:
            return 0
        low = max(vector.n // count, 1).bit_length() - 1  # indices that spread over all of n take most
        words = -(-count * low // 64) + -(-(count + (vector.n >> low) + 1) // 64) + 2
        return _HEAD + 8 * words + math.ceil(count * self.kind.bytes_per_value(vector.values.itemsize)) + 16

    def bytes_per_entry(self, k: int, vector: VectorType) -> float:
        k = max(k, 1)
        low = max(vector.n // k, 1).bit_length() - 1
        return (low + 1 + (vector.n >> low) / k) / 8 + self.kind.bytes_per_value(vector.values.itemsize)

    def decode(
        self, data: Bytes, count: int, vector: VectorType, packer: Packer, memory: MessageMemory
    ) -> tuple[Array, Array]:
        head, packed = memory.header(data, _HEAD), memory.get(data, np.uint8)
        return packer.unpack(packed, head, count, vector.n, self.kind, vector.values.itemsize == 8)
