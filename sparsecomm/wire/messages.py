"""Whole messages of one call: header and payload, made and checked."""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsecomm.errors import CollectiveMismatchError
from sparsecomm.memory import HOST, Array, Bytes, Memory
from sparsecomm.sparse import SparseVector, index_dtype
from sparsecomm.wire.header import CALL_BYTES, HEADER_BYTES, Call, Part
from sparsecomm.wire.plain import Plain

__all__ = ["Messages"]


class Messages:
    """What this rank sends in one call, and what it accepts from others."""

    def __init__(
        self,
        call: Call,
        wire: Plain,
        rank: int,
        value: np.dtype[Any],
        shape: tuple[int, ...],
        memory: Memory = HOST,
    ) -> None:
        """``value``: the type in which sums are carried; ``shape``: that of the gradient."""
        self.call = call
        self.packed = call.pack()
        self.number = 0
        self.memory = memory
        self._wire = wire
        self._rank = rank
        self._shape = shape
        self._index, self._value = index_dtype(call.n), value

    def entries(self, entries: SparseVector, maker: int, round: int) -> Bytes:
        """The message of entries that rank ``maker`` selected or merged."""
        indices, values = entries.indices, entries.values
        length = self._wire.length(indices, values)
        message = self._empty(maker, round, len(values), length)
        self._wire.encode(indices, values, message[HEADER_BYTES:], self.memory)
        return message

    def dense(self, segment: Array, round: int) -> Bytes:
        """The message of a dense segment."""
        message = self._empty(self._rank, round, len(segment), segment.nbytes)
        self.memory.put(segment, message[HEADER_BYTES:])
        return message

    def read_entries(self, message: Bytes, source: int, maker: int, round: int) -> SparseVector:
        """The entries in a message from ``source``. Their order is not checked here."""
        part = self.part(message, source)
        self._expect(part, source, maker, round)
        try:
            indices, values = self._wire.decode(
                message[HEADER_BYTES:], part.items, self._index, self._value, self.memory
            )
        except ValueError as error:
            raise self.broken(source, str(error)) from error
        return SparseVector.trusted(indices, values, self.call.n, self._shape)

    def read_dense(self, message: Bytes, source: int, round: int, expected: int) -> Array:
        """The dense segment of ``expected`` elements in a message from ``source``."""
        part = self.part(message, source)
        self._expect(part, source, source, round)
        if part.items != expected or len(message) - HEADER_BYTES != expected * self._value.itemsize:
            raise self.broken(source, f"{part.items} elements in {len(message)} bytes instead of {expected} elements")
        return self.memory.get(message[HEADER_BYTES:], self._value)

    def joined(self, messages: list[Bytes]) -> Bytes:
        """Messages in a row."""
        if len(messages) == 1:
            return messages[0]
        row, begin = self.memory.empty(sum(len(m) for m in messages)), 0
        for message in messages:
            self.memory.ready(message, len(message))
            row[begin : begin + len(message)] = message
            begin += len(message)
        return row

    def most(self, count: int) -> int:
        """Bytes of a message of so many entries."""
        return HEADER_BYTES + self._wire.most(count, self._index, self._value)

    def part(self, message: Bytes, source: int) -> Part:
        """What the header says of its message; it must be of this call."""
        header = self.memory.header(message, HEADER_BYTES)
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

    def _empty(self, maker: int, round: int, count: int, length: int) -> Bytes:
        message = self.memory.empty(HEADER_BYTES + length)
        self.memory.put_header(self.packed + Part(self.number, maker, round, count, length).pack(), message)
        return message

    def _expect(self, part: Part, source: int, maker: int, round: int) -> None:
        if (part.sender, part.round) != (maker, round):
            raise self.broken(
                source, f"a message of rank {part.sender}, round {part.round}, instead of rank {maker}, round {round}"
            )
