"""The wire formats: entries to bytes and back.

A format is one line in the table below, and its name in `WireName`: the name that callers give, its code in the header
of messages, the kind of its values, and the class that encodes it. The CLI's choices, the cost model, the tests'
parameters and the tables in the docs come from this table. The code of a format never changes: ranks of different
versions must not mistake it for another.

Plain: entries as they stand in memory, the array of larger elements first.

    values, float32 or float64 | indices, int32 or int64        (indices first where they are int64 beside float32)

8 bytes per entry for float32 gradients of fewer than 2^31 elements.

Packed: indices in about 2 + log2(n/k) bits, values in 64 to 1.

Source: Elias, "Efficient storage and retrieval by content and address of static files", J. ACM 1974; Fano, "On the
number of bits required to implement an associative memory", MIT 1971. At density 0.001 an index takes 11.96 bits; its
entropy is 11.41. Unlike bit-packed differences, or Golomb codes, which are no shorter, the length follows from the
number of entries and the two outermost indices alone, and the position of every entry from its number: any thread can
write any word, and a decoder knows beforehand what it must find.

For m entries, all words of 64 bits, little-endian:

    first, span    the first index, and the last one less the first
    low            m times the l low bits of (index - first), where l = log2((span + 1) / m), rounded down; whole words
    high           one bit for every entry i, at position ((index - first) >> l) + i; whole words
    values         m values, of one of these kinds
    zero bytes     to a multiple of 8

    float32, float64, bfloat16, float16    as they are
    int8              m bytes, and then for every 64 values one byte, their exponent: values are q 2^(exponent - 126),
                      q from -126 to 126; q = 127 and -127 stand for the infinities, q = -128 for NaN
    int4, int2, sign  for every 64 values 4, 2 or 1 words: the signs, and then the bits of the levels j, lowest first;
                      bits of no value are zero. Then for every 64 values `low`, 2 bytes, the bits of a bfloat16
                      p 2^q > 0 with p < 256 and q >= -133; then, but for sign, for every 64 values `step`, 1 byte.
                      Values are +- (p + j * step * UNIT) 2^q, j from 0 to 7, 1 or 0, UNIT = 2 for int4 and 16 for
                      int2. They are finite: where one of the m values is not, bit 63 of the word of span is set, and
                      all of them are float32

No bytes at all for no entries. Values that are to travel narrow have been quantized before (`Backend.quantize`), so
that what rounding took away is known and kept: packing loses nothing. Of int4, int2 and sign, the smallest magnitude of
64 then has level 0 and the largest the last level, so that low and step follow from these two.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np

from sparsecomm.backends.base import Backend
from sparsecomm.tensors.arrays import Array, Bytes
from sparsecomm.tensors.kinds import BFLOAT16, EXACT, FLOAT16, INT2, INT4, INT8, SIGN
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.transport.memory import MessageMemory
from sparsecomm.wire.base import VectorType, Wire

__all__ = ["PLAIN", "WIRES", "WIRE_OF_CODE", "Packed", "Plain", "WireName"]

WireName: TypeAlias = Literal[  # "auto" and those of the table
    "auto",
    "plain",
    "packed",
    "packed_bfloat16",
    "packed_float16",
    "packed_int8",
    "packed_int4",
    "packed_int2",
    "packed_sign",
]

_HEAD = 16  # bytes of the packed format: first and span


class Plain(Wire):
    """The plain format, which loses nothing and computes nothing."""

    packed = False

    def parts(self, entries: SparseVector, backend: Backend) -> list[Array]:
        indices, values = entries.indices, entries.values
        return [indices, values] if indices.itemsize > values.itemsize else [values, indices]

    def max_bytes(self, count: int, vector: VectorType) -> int:
        return count * (vector.indices.itemsize + vector.values.itemsize)

    def bytes_per_entry(self, k: int, vector: VectorType) -> float:
        return float(vector.indices.itemsize + vector.values.itemsize)

    def decode(
        self, data: Bytes, count: int, vector: VectorType, backend: Backend, memory: MessageMemory
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


class Packed(Wire):
    """A packed format: Elias-Fano indices, and values of one kind.

    `max_bytes` allows for float32 values, as which those of a few bits may travel; `bytes_per_entry` does not.
    """

    def parts(self, entries: SparseVector, backend: Backend) -> list[Array]:
        return [backend.pack(entries, self.kind)]

    def max_bytes(self, count: int, vector: VectorType) -> int:
        if not count:
            return 0
        low = max(vector.n // count, 1).bit_length() - 1  # indices that spread over all of n take most
        words = -(-count * low // 64) + -(-(count + (vector.n >> low) + 1) // 64) + 2
        kinds = (self.kind, EXACT) if self.kind.planes else (self.kind,)
        return _HEAD + 8 * words + max(kind.nbytes(count, vector.values.itemsize) for kind in kinds) + 16

    def bytes_per_entry(self, k: int, vector: VectorType) -> float:
        k = max(k, 1)
        low = max(vector.n // k, 1).bit_length() - 1
        return (low + 1 + (vector.n >> low) / k) / 8 + self.kind.nbytes(k, vector.values.itemsize) / k

    def decode(
        self, data: Bytes, count: int, vector: VectorType, backend: Backend, memory: MessageMemory
    ) -> tuple[Array, Array]:
        head, packed = memory.header(data, _HEAD), memory.get(data, np.uint8)
        return backend.unpack(packed, head, count, vector.n, self.kind, vector.values.itemsize == 8)


PLAIN = Plain("plain", 0, EXACT)
_FORMATS: tuple[Wire, ...] = (
    PLAIN,
    Packed("packed", 1, EXACT),
    Packed("packed_bfloat16", 2, BFLOAT16),
    Packed("packed_float16", 3, FLOAT16),
    Packed("packed_int8", 5, INT8),  # 4 was one without infinities
    Packed("packed_int4", 6, INT4),
    Packed("packed_int2", 7, INT2),
    Packed("packed_sign", 8, SIGN),
)
WIRES = {wire.name: wire for wire in _FORMATS}
WIRE_OF_CODE = {wire.code: wire for wire in _FORMATS}
