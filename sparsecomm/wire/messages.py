"""`Messages`, which builds, checks and reads messages; and `Wire`, the interface of wire formats, with
`Plain` and `Packed`."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from sparsecomm.backends.base import Backend, value_bytes
from sparsecomm.errors import CollectiveMismatchError
from sparsecomm.tensors.arrays import Array, ArrayDType, Bytes
from sparsecomm.tensors.kinds import EXACT, ValueKind
from sparsecomm.tensors.sparse import SparseVector, index_dtype
from sparsecomm.transport.base import HOST, MessageMemory
from sparsecomm.wire.header import CALL_BYTES, HEADER, HEADER_BYTES, INCOMPLETE, LABEL_AT, WIRE_NAMES, CallSignature

_HEAD = 16  # bytes of first and span in the packed format
_LONG = 1 << 20  # bytes from which NumPy's memory, in large pages, is faster to write than a bytearray
_WIDTHS = {1: 0, 2: 1, 4: 2, 8: 3}  # code by the bytes of an integer
_MANY = 1 << 10  # bytes of words from which compressing them is tried
_MAX_WORDS = 1 << 24  # compressed words of a message, beside one per element


class VectorType(NamedTuple):
    """The type of a call's sparse vectors: ``n`` elements, and the dtypes of indices and values."""

    n: int
    indices: ArrayDType
    values: ArrayDType


@dataclass(frozen=True)
class Wire(ABC):
    """A wire format, which encodes entries as bytes. `sparsecomm.wire.formats` lists all formats.

    Attributes:
        name: the value of ``wire=``.
        code: its number in message headers.
        kind: kind of its values. Unless it is `EXACT`, `Backend.quantize` rounds values before encoding.
        needs_codec: whether the cost model counts the time of encoding and decoding.
    """

    name: str
    code: int
    kind: ValueKind
    needs_codec: ClassVar[bool] = True

    def __post_init__(self) -> None:
        WIRE_NAMES[self.code] = self.name

    @abstractmethod
    def parts(self, entries: SparseVector, backend: Backend) -> list[Array]:
        """Encode entries; return arrays on the device, perhaps views, whose concatenated bytes are the encoding."""

    @abstractmethod
    def max_bytes(self, count: int, vector: VectorType) -> int:
        """Return an upper bound of the encoded size of ``count`` entries."""

    @abstractmethod
    def bytes_per_entry(self, k: int, vector: VectorType) -> float:
        """Return the encoded size per entry of k entries that are spread evenly over all elements."""

    @abstractmethod
    def decode(
        self, data: Bytes, count: int, vector: VectorType, backend: Backend, memory: MessageMemory
    ) -> tuple[Array, Array]:
        """Decode ``count`` entries; return indices and values as flat arrays on the device, views if possible.

        Does not check that indices increase and that values are not zero.

        Args:
            data: the part of a message, allocated by ``memory``, with the entries.

        Raises:
            ValueError: ``data`` does not encode ``count`` entries.
        """


class Plain(Wire):
    """The plain format: the values, then the indices; but int64 indices come before float32 values.

    An entry takes 8 bytes for float32 gradients of fewer than 2^31 elements.
    """

    needs_codec = False

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
            raise ValueError(f"{count} entries in {len(data)} bytes; expected {expected} bytes")
        if index.itemsize > value.itemsize:
            middle = count * index.itemsize
            return memory.get(data[:middle], index), memory.get(data[middle:], value)
        middle = count * value.itemsize
        if memory is HOST:  # takes half the time of two slices and two views
            return np.frombuffer(data, index, count, middle), np.frombuffer(data, value, count)
        return memory.get(data[middle:], index), memory.get(data[:middle], value)


class Packed(Wire):
    """A packed format, which `sparsecomm.wire.formats` describes: Elias-Fano coded indices, and values of one kind.

    `max_bytes` covers values of a few bits that are sent as float32; `bytes_per_entry` does not.
    """

    def parts(self, entries: SparseVector, backend: Backend) -> list[Array]:
        return [backend.pack(entries, self.kind)]

    def max_bytes(self, count: int, vector: VectorType) -> int:
        if not count:
            return 0
        low = max(vector.n // count, 1).bit_length() - 1  # indices spread over all of n take the most bits
        words = -(-count * low // 64) + -(-(count + (vector.n >> low) + 1) // 64) + 2
        kinds = (self.kind, EXACT) if self.kind.planes else (self.kind,)
        return _HEAD + 8 * words + max(value_bytes(kind, count, vector.values.itemsize) for kind in kinds) + 16

    def bytes_per_entry(self, k: int, vector: VectorType) -> float:
        k = max(k, 1)
        low = max(vector.n // k, 1).bit_length() - 1
        return (low + 1 + (vector.n >> low) / k) / 8 + value_bytes(self.kind, k, vector.values.itemsize) / k

    def decode(
        self, data: Bytes, count: int, vector: VectorType, backend: Backend, memory: MessageMemory
    ) -> tuple[Array, Array]:
        head, packed = memory.header(data, _HEAD), memory.get(data, np.uint8)
        return backend.unpack(packed, head, count, vector.n, self.kind, vector.values.itemsize == 8)


PLAIN = Plain("plain", 0, EXACT)


class Messages:
    """The messages of calls of one signature.

    `entries`, `parcel` and `dense` return a new message of this rank for communication round ``round_no``. The
    ``read_...`` methods return the contents of a message from rank ``source``, as views if possible. They raise
    `CollectiveMismatchError` if the message is invalid or belongs to another call or round. Rank numbers are the
    transport's.

    Attributes:
        call, shape: the call signature, and the shape of the gradient.
        signature: the call signature as bytes, with the current call's label; the beginning of every header.
        memory: allocates the messages of this call.
        incomplete: whether this rank's contribution to this call is incomplete, or a message that was read says that
            another rank's is. All later messages repeat it, so all ranks agree at the end of the call.
    """

    def __init__(
        self, call: CallSignature, rank: int, accumulator: ArrayDType, shape: tuple[int, ...], backend: Backend
    ) -> None:
        """Prepare the messages of calls. ``backend``: of the gradient's device.

        ``accumulator`` is the dtype of all values before and after encoding, float32 or float64. ``shape`` is the shape
        of the gradient, and of the vectors that the ``read_...`` methods return.
        """
        self.call, self.signature = call, call.pack()
        self.memory: MessageMemory = HOST
        self.incomplete = False
        self._number, self._label = 0, call.label
        self._backend, self._rank, self.shape = backend, rank, shape
        self._vector = VectorType(call.n, index_dtype(call.n), accumulator)

    def begin(self, number: int, label: int, memory: MessageMemory, incomplete: bool = False) -> bytes:
        """Prepare for call ``number`` of the transport, and return `signature`."""
        if label != self._label:
            self.signature = self.signature[:LABEL_AT] + label.to_bytes(4, "little")
            self._label = label
        self._number, self.memory, self.incomplete = number, memory, incomplete
        return self.signature

    def entries(self, entries: SparseVector, wire: Wire, round_no: int) -> Bytes:
        """Return the message of a sparse vector."""
        parts: list[Any] = wire.parts(entries, self._backend)
        nbytes = 0
        for part in parts:
            nbytes += part.nbytes
        if self.memory is HOST and nbytes < _LONG:
            header = self._header(round_no, entries.nnz, nbytes)
            return np.frombuffer(bytearray().join((header, *parts)), np.uint8)
        message = self._new(round_no, entries.nnz, nbytes)
        self._put(parts, message, HEADER_BYTES)
        return message

    def read_entries(self, message: Bytes, wire: Wire, source: int, round_no: int) -> SparseVector:
        """Return the sparse vector in a message, without checking the order of its entries."""
        items = self._items(message, source, round_no)
        return self._decode(message[HEADER_BYTES:], items, wire, source)

    def parcel(self, vectors: Sequence[SparseVector], words: Sequence[int], wire: Wire, round_no: int) -> Bytes:
        """Return the message of at most 65,535 vectors, and of words: integers from 0 to 2^64 - 1.

        After the header come a table of each vector's number of entries and of bytes, the words, and the encoded
        entries. The item count in the header contains the number of vectors (16 bits), the codes of the integer widths
        in the table and in the words (2 bits each), whether the words are compressed (1 bit), and the number of words.
        Compressed words are the first bytes of all words, then the second bytes and so on, in zlib's format. Their
        length is then the last integer of the table.
        """
        parts = [wire.parts(vector, self._backend) for vector in vectors]
        lengths = [sum(array.nbytes for array in arrays) for arrays in parts]
        numbers = _narrow(words)
        table, encoded = [n for v, length in zip(vectors, lengths, strict=True) for n in (v.nnz, length)], b""
        if numbers.nbytes >= _MANY:
            encoded = zlib.compress(numbers.view(np.uint8).reshape(-1, numbers.itemsize).T.tobytes(), 1)
        compressed = 0 < len(encoded) < numbers.nbytes
        narrow = _narrow([*table, len(encoded)] if compressed else table)
        head = narrow.tobytes() + (encoded if compressed else numbers.tobytes())
        head += bytes(-len(head) % 8)
        items = len(vectors) | _WIDTHS[narrow.itemsize] << 16 | _WIDTHS[numbers.itemsize] << 18
        items |= compressed << 20 | len(words) << 21
        message = self._new(round_no, items, len(head) + sum(map(_padded, lengths)), head)
        begin = HEADER_BYTES + len(head)
        for arrays, length in zip(parts, lengths, strict=True):
            end = begin + _padded(length)
            message[self._put(arrays, message, begin) : end] = 0
            begin = end
        return message

    def read_parcel(
        self, message: Bytes, wire: Wire, source: int, round_no: int, expected: int, *, or_none: bool = False
    ) -> tuple[list[SparseVector], list[int]]:
        """Return the vectors and words in a message, without checking the order of entries.

        There must be ``expected`` vectors, or none if ``or_none``.
        """
        items = self._items(message, source, round_no)
        count, compressed, num_words = items & 0xFFFF, items >> 20 & 1, items >> 21
        width, word_width = 1 << (items >> 16 & 3), 1 << (items >> 18 & 3)
        middle, nbytes = HEADER_BYTES + (2 * count + compressed) * width, num_words * word_width
        if compressed:  # the last integer of the table
            nbytes = int.from_bytes(self.memory.header(message, middle)[-width:], "little")
        begin = HEADER_BYTES + _padded(middle - HEADER_BYTES + nbytes)
        if (count != expected and (count or not or_none)) or begin > len(message):
            raise self.broken(source, f"{count} vectors in {len(message)} bytes instead of {expected} vectors")
        head = self.memory.header(message, begin)
        table = np.frombuffer(head[HEADER_BYTES:middle], f"<u{width}").tolist()
        if compressed:
            if num_words > self.call.n + _MAX_WORDS:  # a few bytes would become gigabytes
                raise self.broken(source, f"{num_words} numbers")
            numbers = _decompressed(head[middle : middle + nbytes], num_words, word_width)
            if numbers is None:
                raise self.broken(source, f"{num_words} numbers that cannot be decompressed")
        else:
            numbers = np.frombuffer(head, f"<u{word_width}", num_words, middle)
        words: list[int] = numbers.tolist()
        vectors = []
        for nnz, length in zip(table[0 : 2 * count : 2], table[1 : 2 * count : 2], strict=True):
            vectors.append(self._decode(message[begin : begin + length], nnz, wire, source))
            begin += _padded(length)
        if begin != len(message):
            raise self.broken(source, f"vectors of {begin} bytes in a message of {len(message)}")
        return vectors, words

    def max_bytes(self, count: int, wire: Wire) -> int:
        """Return an upper bound of the size of a message with ``count`` entries."""
        return HEADER_BYTES + wire.max_bytes(count, self._vector)

    def dense(self, segment: Array, round_no: int) -> Bytes:
        """Return the message of a flat dense array of the accumulator dtype."""
        message = self._new(round_no, len(segment), segment.nbytes)
        self.memory.put(segment, message[HEADER_BYTES:])
        return message

    def read_dense(self, message: Bytes, source: int, round_no: int, expected: int) -> Array:
        """Return the dense array of ``expected`` elements in a message."""
        items, dtype = self._items(message, source, round_no), self._vector.values
        if items != expected or len(message) - HEADER_BYTES != expected * dtype.itemsize:
            raise self.broken(source, f"{items} elements in {len(message)} bytes instead of {expected} elements")
        return self.memory.get(message[HEADER_BYTES:], dtype)

    def mismatch(self, header: bytes, peer: int) -> CollectiveMismatchError:
        """Return the error for the ``header`` of a message from ``peer`` about another call."""
        return self._call().mismatch(self._rank, header, peer)

    def broken(self, source: int, seen: str) -> CollectiveMismatchError:
        """Return the error for an unexpected message from ``source`` with the content ``seen``."""
        return CollectiveMismatchError(
            f"rank {self._rank} received from rank {source} {seen}, in the call {self._call().describe()}; make the "
            "same calls in the same order on all ranks"
        )

    def _call(self) -> CallSignature:
        return replace(self.call, label=self._label)

    def _new(self, round_no: int, items: int, nbytes: int, table: bytes = b"") -> Bytes:
        """Return a message with ``nbytes`` after its header. Only the header and ``table``, which follows, are set."""
        message = self.memory.empty(HEADER_BYTES + nbytes)
        self.memory.put_header(self._header(round_no, items, nbytes) + table, message)
        return message

    def _header(self, round_no: int, items: int, nbytes: int) -> bytes:
        flagged = round_no | INCOMPLETE if self.incomplete else round_no
        return HEADER.pack(self.signature, self._number, self._rank, flagged, items, nbytes)

    def _put(self, arrays: list[Array], message: Bytes, begin: int) -> int:
        """Write arrays into a message at ``begin``; return the position after them."""
        for array in arrays:
            end = begin + array.nbytes
            self.memory.put(array, message[begin:end])
            begin = end
        return begin

    def _items(self, message: Bytes, source: int, round_no: int) -> int:
        """Check the header of a message; return its item count."""
        data: Any = message if self.memory is HOST else self.memory.header(message, HEADER_BYTES)
        if len(data) < HEADER_BYTES:
            if bytes(data[:CALL_BYTES]) == self.signature:
                raise self.broken(source, f"a message of {len(data)} bytes")
            raise self.mismatch(bytes(data), source)
        call, number, sender, flagged, items, nbytes = HEADER.unpack_from(data)
        round_seen = flagged & ~INCOMPLETE
        if call != self.signature:
            raise self.mismatch(bytes(data[:HEADER_BYTES]), source)
        if number != self._number:
            raise self.broken(source, f"a message of call {number} in call {self._number}")
        if len(message) != HEADER_BYTES + nbytes:
            expected = HEADER_BYTES + nbytes
            raise self.broken(source, f"a message of {len(message)} bytes whose header says {expected} bytes")
        if sender != source or round_seen != round_no:
            seen = f"a message of rank {sender}, round {round_seen}"
            raise self.broken(source, f"{seen}, instead of rank {source}, round {round_no}")
        if flagged != round_seen:
            self.incomplete = True
        return int(items)

    def _decode(self, data: Bytes, count: int, wire: Wire, source: int) -> SparseVector:
        try:
            indices, values = wire.decode(data, count, self._vector, self._backend, self.memory)
        except ValueError as error:
            raise self.broken(source, str(error)) from error
        return SparseVector.trusted(indices, values, self.call.n, self.shape)


def _narrow(words: Sequence[int]) -> Array:
    """Return integers in the narrowest dtype of 1, 2, 4 or 8 bytes that holds all of them."""
    numbers: Array = np.array(words, np.uint64)
    narrow: Array = numbers.astype(np.min_scalar_type(numbers.max(initial=0)))
    return narrow


def _decompressed(data: bytes, count: int, width: int) -> Array | None:
    """Return ``count`` integers of ``width`` bytes; None if ``data`` is not their compressed form."""
    decompressor, nbytes = zlib.decompressobj(), count * width
    try:
        columns = decompressor.decompress(data, nbytes + 1)  # no more, whatever the data
    except zlib.error:
        return None
    if len(columns) != nbytes or not decompressor.eof or decompressor.unused_data:
        return None
    rows = np.frombuffer(columns, np.uint8).reshape(width, count).T
    return np.ascontiguousarray(rows).view(f"<u{width}").ravel()


def _padded(nbytes: int) -> int:
    return -(-nbytes // 8) * 8
