"""The ranks of one collective call, as an algorithm sees them: entries out, entries in, every message checked."""

from __future__ import annotations

from sparsecomm.memory import Bytes
from sparsecomm.ops.base import Ops
from sparsecomm.sparse import Array, SparseVector
from sparsecomm.transport.base import Transport
from sparsecomm.wire import HEADER_BYTES, Messages

__all__ = ["Group"]


class Group:
    """``size`` ranks in one call, of which this is number ``rank``.

    Attributes:
        rank, size: as in MPI.
        ops: the arithmetic of the device on which this rank's gradient is.
    """

    def __init__(self, transport: Transport, ops: Ops, messages: Messages) -> None:
        """Starts the call; `end` or `abort` ends it."""
        self.rank, self.size, self.ops = transport.rank, transport.size, ops
        self._transport = transport
        self._messages = messages
        self._memory, self._most = messages.memory, messages.most(messages.call.k)
        messages.number = transport.begin(messages.packed, messages.mismatch)

    def send(self, entries: SparseVector, to: int, round: int) -> None:
        """Send, and wait until they are gone."""
        self._transport.post(self._messages.entries(entries, self.rank, round), to, self._memory).wait()

    def receive(self, source: int, round: int) -> SparseVector:
        return self._read(self._transport.receive(source, self._memory, self._most), source, source, round)

    def exchange(self, entries: SparseVector, peer: int, round: int) -> SparseVector:
        """Send to and receive from ``peer``, at once."""
        message = self._messages.entries(entries, self.rank, round)
        return self._read(self._transport.exchange(message, peer, peer, self._memory, self._most), peer, peer, round)

    def exchange_lists(
        self, mine: list[SparseVector], to: int, theirs: range, source: int, round: int
    ) -> list[SparseVector]:
        """Send vectors made by ranks ``rank``, ``rank + 1``, ...; receive those made by ranks ``theirs``."""
        out = [self._messages.entries(v, (self.rank + i) % self.size, round) for i, v in enumerate(mine)]
        most = len(theirs) * self._most
        rest = self._transport.exchange(self._messages.joined(out), to, source, self._memory, most)
        received = []
        for maker in theirs:
            end = HEADER_BYTES + self._messages.part(rest, source).nbytes
            received.append(self._read(rest[:end], source, maker % self.size, round))
            rest = rest[end:]
        if len(rest):
            raise self._messages.broken(source, f"{len(rest)} bytes too many in round {round}")
        return received

    def exchange_dense(self, segment: Array, to: int, source: int, expected: int, round: int) -> Array:
        """Send a dense segment to ``to``, and receive one of ``expected`` elements from ``source``."""
        most = HEADER_BYTES + expected * segment.itemsize
        message = self._transport.exchange(self._messages.dense(segment, round), to, source, self._memory, most)
        received: Array = self._messages.read_dense(message, source, round, expected)
        return received

    def end(self) -> None:
        self._transport.end()

    def abort(self, error: BaseException) -> None:
        self._transport.abort(error)

    def _read(self, message: Bytes, source: int, maker: int, round: int) -> SparseVector:
        entries = self._messages.read_entries(message, source, maker, round)
        if not self.ops.well_formed(entries):
            raise self._messages.broken(source, "entries that are not sorted, not in range, or zero")
        return entries
