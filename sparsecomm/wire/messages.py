"""Whole messages of one call: header and payload, made and checked."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsecomm.errors import CollectiveMismatchError
from sparsecomm.tensors.sparse import Array, SparseVector, index_dtype
from sparsecomm.transport.memory import HOST, Bytes, MessageMemory
from sparsecomm.wire.base import Packer, Wire
from sparsecomm.wire.header import CALL_BYTES, HEADER_BYTES, CallSignature, Part

__all__ = ["Messages"]


class Messages:
    """What this rank sends in one call, and what it accepts from others."""

    def __init__(
        self,
        call: CallSignature,
        rank: int,
        value: np.dtype[Any],
        shape: tuple[int, ...],
        packer: Packer,
        memory: MessageMemory = HOST,
    ) -> None:
        """``value``: the type in which sums are carried; ``shape``: that of the gradient."""
        self.call = call
        self.packed = call.pack()
        self.number = 0
        self.memory = memory
        self._packer = packer
        self._rank = rank
        self._shape = shape
        self._index, self._value = index_dtype(call.n), value

    def entries(self, entries: SparseVector, wire: Wire, round_no: int) -> Bytes:
        """The message of entries."""
        parts = wire.parts(entries, self._packer)
        message = self._empty(round_no, entries.nnz, sum(part.nbytes for part in parts))
        begin = HEADER_BYTES
        for part in parts:
            self.memory.put(part, message[begin : begin + part.nbytes])
            begin += part.nbytes
        return message

    def dense(self, segment: Array, round_no: int) -> Bytes:
        """The message of a dense segment."""
        message = self._empty(round_no, len(segment), segment.nbytes)
        self.memory.put(segment, message[HEADER_BYTES:])
        return message

    def words(self, words: list[int], round_no: int) -> Bytes:
        """The message, in host memory, of whole numbers from 0 to 2^64 - 1."""
        payload = np.array(words, np.uint64)
        header = self.packed + Part(self.number, self._rank, round_no, len(words), payload.nbytes).pack()
        return np.concatenate([np.frombuffer(header, np.uint8), payload.view(np.uint8)])

    def read_words(self, message: Bytes, source: int, round_no: int, expected: int) -> list[int]:
        """``expected`` numbers in a message from ``source``."""
        part = self.part(message, source, HOST)
        self._expect(part, source, round_no)
        if part.items != expected or len(message) != HEADER_BYTES + 8 * expected:
            raise self.broken(source, f"{part.items} numbers in {len(message)} bytes instead of {expected} numbers")
        found: list[int] = message[HEADER_BYTES:].view(np.uint64).tolist()
        return found

    def vectors(self, vectors: list[SparseVector], wire: Wire, round_no: int) -> Bytes:
        """The message of several vectors: a table of their numbers of entries and bytes, then the entries of each."""
        parts = [wire.parts(v, self._packer) for v in vectors]
        lengths = [sum(part.nbytes for part in its) for its in parts]
        table = np.array([(v.nnz, length) for v, length in zip(vectors, lengths, strict=True)], np.uint64).tobytes()
        total = len(table) + sum(map(_whole, lengths))
        message = self._empty(round_no, len(vectors), total, table)
        begin = HEADER_BYTES + len(table)
        for its, length in zip(parts, lengths, strict=True):
            at = begin
            for part in its:
                self.memory.put(part, message[at : at + part.nbytes])
                at += part.nbytes
            begin += _whole(length)
            message[at:begin] = 0
        return message

    def read_entries(self, message: Bytes, wire: Wire, source: int, round_no: int) -> SparseVector:
        """The entries in a message from ``source``. Their order is not checked here."""
        part = self.part(message, source)
        self._expect(part, source, round_no)
        return self._decoded(message[HEADER_BYTES:], part.items, wire, source)

    def read_vectors(self, message: Bytes, wire: Wire, source: int, round_no: int, expected: int) -> list[SparseVector]:
        """``expected`` vectors in a message from ``source``. The order of their entries is not checked here."""
        part = self.part(message, source)
        self._expect(part, source, round_no)
        begin = HEADER_BYTES + 16 * expected
        table = self.memory.header(message, begin)[HEADER_BYTES:]
        if part.items != expected or len(table) != 16 * expected:
            raise self.broken(source, f"{part.items} vectors in {len(message)} bytes instead of {expected} vectors")
        found = []
        for nnz, length in np.frombuffer(table, np.uint64).reshape(-1, 2).tolist():
            found.append(self._decoded(message[begin : begin + length], nnz, wire, source))
            begin += _whole(length)
        if begin != len(message):
            raise self.broken(source, f"vectors of {begin} bytes in a message of {len(message)}")
        return found

    def _decoded(self, data: Bytes, count: int, wire: Wire, source: int) -> SparseVector:
        try:
            indices, values = wire.decode(data, count, self.call.n, self._index, self._value, self._packer, self.memory)
        except ValueError as error:
            raise self.broken(source, str(error)) from error
        return SparseVector.trusted(indices, values, self.call.n, self._shape)

    def read_dense(self, message: Bytes, source: int, round_no: int, expected: int) -> Array:
        """The dense segment of ``expected`` elements in a message from ``source``."""
        part = self.part(message, source)
        self._expect(part, source, round_no)
        if part.items != expected or len(message) - HEADER_BYTES != expected * self._value.itemsize:
            raise self.broken(source, f"{part.items} elements in {len(message)} bytes instead of {expected} elements")
        return self.memory.get(message[HEADER_BYTES:], self._value)

    def max_bytes(self, count: int, wire: Wire) -> int:
        """Bytes of a message of so many entries, at most."""
        return HEADER_BYTES + wire.max_bytes(count, self.call.n, self._index, self._value)

    def bytes_per_entry(self, k: int, n: int, wire: Wire) -> float:
        return wire.bytes_per_entry(k, n, self._index, self._value)

    def part(self, message: Bytes, source: int, memory: MessageMemory | None = None) -> Part:
        """What the header says of its message; it must be of this call."""
        header = (memory or self.memory).header(message, HEADER_BYTES)
        if header[:CALL_BYTES] != self.packed:
            raise self.mismatch(header, source)
        if len(header) < HEADER_BYTES:
            raise self.broken(source, f"a message of {len(header)} bytes")
        part = Part.unpack(header)
        if part.number != self.number:
            raise self.broken(source, f"a message of call {part.number} in call {self.number}")
        return part

    def mismatch(self, theirs: bytes, rank: int) -> CollectiveMismatchError:
        return self.call.mismatch(self._rank, theirs, rank)

    def broken(self, source: int, seen: str) -> CollectiveMismatchError:
        return CollectiveMismatchError(
            f"rank {self._rank} received from rank {source} {seen}, in the call {self.call.describe()}; make the same "
            "calls in the same order on all ranks"
        )

    def _empty(self, round_no: int, count: int, length: int, begins: bytes = b"") -> Bytes:
        message = self.memory.empty(HEADER_BYTES + length)
        header = self.packed + Part(self.number, self._rank, round_no, count, length).pack()
        self.memory.put_header(header + begins, message)
        return message

    def _expect(self, part: Part, source: int, round_no: int) -> None:
        if (part.sender, part.round_no) != (source, round_no):
            raise self.broken(
                source,
                f"a message of rank {part.sender}, round {part.round_no}, instead of rank {source}, round {round_no}",
            )


def _whole(nbytes: int) -> int:
    """So many bytes, rounded up to words of 8."""
    return -(-nbytes // 8) * 8
