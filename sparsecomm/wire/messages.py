"""Whole messages of one call: header and payload, made and checked."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsecomm.errors import CollectiveMismatchError
from sparsecomm.sparse import Array, SparseVector, index_dtype
from sparsecomm.wire.header import CALL_BYTES, HEADER_BYTES, Call, Part
from sparsecomm.wire.plain import Plain

__all__ = ["Messages", "joined"]

_Bytes = NDArray[np.uint8]


class Messages:
    """What this rank sends in one call, and what it accepts from others."""

    def __init__(self, call: Call, wire: Plain, rank: int, value: np.dtype[Any], shape: tuple[int, ...]) -> None:
        """``value``: the type in which sums are carried; ``shape``: that of the gradient."""
        self.call = call
        self.packed = call.pack()
        self.number = 0
        self._wire = wire
        self._rank = rank
        self._shape = shape
        self._index, self._value = index_dtype(call.n), value

    def entries(self, entries: SparseVector, maker: int, round: int) -> _Bytes:
        """The message of entries that rank ``maker`` selected or merged."""
        indices, values = entries.indices, entries.values
        length = self._wire.length(indices, values)
        message = self._empty(maker, round, len(values), length)
        self._wire.encode(indices, values, message[HEADER_BYTES:])
        return message

    def dense(self, segment: Array, round: int) -> _Bytes:
        """The message of a dense segment."""
        message = self._empty(self._rank, round, len(segment), segment.nbytes)
        message[HEADER_BYTES:] = segment.view(np.uint8)
        return message

    def read_entries(self, message: _Bytes, source: int, maker: int, round: int) -> SparseVector:
        """The entries in a message from ``source``. Their order is not checked here."""
        part = self.part(message, source)
        self._expect(part, source, maker, round)
        try:
            indices, values = self._wire.decode(message[HEADER_BYTES:], part.items, self._index, self._value)
        except ValueError as error:
            raise self.broken(source, str(error)) from error
        return SparseVector.trusted(indices, values, self.call.n, self._shape)

    def read_dense(self, message: _Bytes, source: int, round: int, expected: int) -> Array:
        """The dense segment of ``expected`` elements in a message from ``source``."""
        part = self.part(message, source)
        self._expect(part, source, source, round)
        if part.items != expected or len(message) - HEADER_BYTES != expected * self._value.itemsize:
            raise self.broken(source, f"{part.items} elements in {len(message)} bytes instead of {expected} elements")
        return message[HEADER_BYTES:].view(self._value)

    def part(self, message: _Bytes, source: int) -> Part:
        """What the header says of its message; it must be of this call."""
        header = message[:HEADER_BYTES].tobytes()
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

    def _empty(self, maker: int, round: int, count: int, length: int) -> _Bytes:
        message = np.empty(HEADER_BYTES + length, np.uint8)
        header = self.packed + Part(self.number, maker, round, count, length).pack()
        message[:HEADER_BYTES] = np.frombuffer(header, np.uint8)
        return message

    def _expect(self, part: Part, source: int, maker: int, round: int) -> None:
        if (part.sender, part.round) != (maker, round):
            raise self.broken(
                source, f"a message of rank {part.sender}, round {part.round}, instead of rank {maker}, round {round}"
            )


def joined(messages: list[_Bytes]) -> _Bytes:
    """Messages in a row."""
    return messages[0] if len(messages) == 1 else np.concatenate(messages)
