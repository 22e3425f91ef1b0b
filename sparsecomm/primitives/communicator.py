"""The ranks of one collective call, as an algorithm sees them: entries out, entries in, every message checked."""

from __future__ import annotations

from collections.abc import Sequence

from sparsecomm.backends.base import Backend
from sparsecomm.feedback import Contribution
from sparsecomm.tensors.sparse import Array, SparseVector
from sparsecomm.transport.base import Transport
from sparsecomm.transport.memory import HOST, Bytes
from sparsecomm.wire import EXACT, HEADER_BYTES, PLAIN, Messages, Wire

__all__ = ["Communicator"]

_STAGES = 20  # bits of a message's round that are left to the rounds of one stage


class Communicator:
    """``size`` ranks in one call, of which this is number ``rank``.

    Attributes:
        rank, size: as in MPI.
        node_of_rank: the number of the machine on which each rank is.
        backend: the arithmetic of the device on which this rank's gradient is.
    """

    def __init__(self, transport: Transport, backend: Backend, messages: Messages, wire: Wire) -> None:
        """Starts the call; `end` or `abort` ends it."""
        messages.number = transport.begin(messages.packed, messages.mismatch)
        self._transport, self._messages, self.backend = transport, messages, backend
        self._enter(range(transport.size), transport.rank, transport.node_of_rank, wire, 0)

    def of(self, members: Sequence[int], stage: int, *, plain: bool = False) -> Communicator:
        """Some of these ranks, this one among them, in a stage of the algorithm of their own.

        Args:
            members: their numbers here, in the order of their numbers there.
            stage: above that of this comm, and another one for every group that a rank is in.
            plain: send entries as they are, whatever the format of the call is.
        """
        made = Communicator.__new__(Communicator)
        made._transport, made._messages, made.backend = self._transport, self._messages, self.backend
        ranks, nodes = [self._ranks[m] for m in members], [self.node_of_rank[m] for m in members]
        made._enter(ranks, ranks.index(self._ranks[self.rank]), nodes, PLAIN if plain else self._wire, stage)
        return made

    def _enter(self, ranks: Sequence[int], rank: int, nodes: Sequence[int], wire: Wire, stage: int) -> None:
        self._ranks, self.rank, self.size, self.node_of_rank = ranks, rank, len(ranks), nodes
        self._wire, self._stage, self._memory = wire, stage << _STAGES, self._messages.memory
        self._max_bytes = self._messages.max_bytes(self._messages.call.k, wire)

    def entry_bytes(self, k: int, n: int) -> float:
        """What each of k entries of n elements takes on the way."""
        return self._messages.bytes_per_entry(k, n, self._wire)

    # -- entries ------------------------------------------------------------------------------------------------------

    def quantized(
        self, entries: SparseVector, gradient: Contribution, place: int = 0, members: int = 1
    ) -> SparseVector:
        """The entries as the others will see them: rounded, if the format's values are narrow.

        What rounding takes away is put back; ``members`` ranks hold the same entries, and number ``place`` of them
        puts back its share. Everything that is sent has been rounded; doing it again changes nothing.
        """
        if self._wire.kind is EXACT:
            return entries
        narrow, errors = self.backend.quantize(entries, self._wire.kind)
        gradient.put_back(errors.shard(place, members))
        return narrow

    def send(self, entries: SparseVector, to: int, round_no: int) -> None:
        """Send, and wait until they are gone."""
        message = self._messages.entries(entries, self._wire, self._stage + round_no)
        self._transport.isend(message, self._ranks[to], self._memory).wait()

    def receive(self, source: int, round_no: int) -> SparseVector:
        message = self._transport.receive(self._ranks[source], self._memory, self._max_bytes)
        return self._read(message, source, round_no)

    def exchange(self, entries: SparseVector, to: int, source: int, round_no: int) -> SparseVector:
        """Send to one rank and receive from one, at once."""
        message = self._messages.entries(entries, self._wire, self._stage + round_no)
        received = self._transport.exchange(
            message, self._ranks[to], self._ranks[source], self._memory, self._max_bytes
        )
        return self._read(received, source, round_no)

    def exchange_lists(
        self, mine: list[SparseVector], to: int, expected: int, source: int, round_no: int
    ) -> list[SparseVector]:
        """Send several vectors to one rank, and receive ``expected`` ones from another."""
        message = self._messages.vectors(mine, self._wire, self._stage + round_no)
        sender, most = self._ranks[source], expected * self._max_bytes
        received = self._transport.exchange(message, self._ranks[to], sender, self._memory, most)
        vectors = self._messages.read_vectors(received, self._wire, sender, self._stage + round_no, expected)
        return [self._checked(v, sender) for v in vectors]

    # -- other numbers ------------------------------------------------------------------------------------------------

    def exchange_dense(self, segment: Array, to: int, source: int, expected: int, round_no: int) -> Array:
        """Send a dense segment to ``to``, and receive one of ``expected`` elements from ``source``."""
        most = HEADER_BYTES + expected * segment.itemsize
        message = self._messages.dense(segment, self._stage + round_no)
        received = self._transport.exchange(message, self._ranks[to], self._ranks[source], self._memory, most)
        theirs: Array = self._messages.read_dense(received, self._ranks[source], self._stage + round_no, expected)
        return theirs

    def send_dense(self, segment: Array, to: int, round_no: int) -> None:
        message = self._messages.dense(segment, self._stage + round_no)
        self._transport.isend(message, self._ranks[to], self._memory).wait()

    def receive_dense(self, source: int, expected: int, itemsize: int, round_no: int) -> Array:
        most = HEADER_BYTES + expected * itemsize
        message = self._transport.receive(self._ranks[source], self._memory, most)
        segment: Array = self._messages.read_dense(message, self._ranks[source], self._stage + round_no, expected)
        return segment

    def send_words(self, words: list[int], to: int, round_no: int) -> None:
        """Whole numbers from 0 to 2^64 - 1."""
        self._transport.isend(self._messages.words(words, self._stage + round_no), self._ranks[to]).wait()

    def receive_words(self, source: int, expected: int, round_no: int) -> list[int]:
        message = self._transport.receive(self._ranks[source], HOST, HEADER_BYTES + 8 * expected)
        return self._messages.read_words(message, self._ranks[source], self._stage + round_no, expected)

    def exchange_words(self, words: list[int], to: int, source: int, expected: int, round_no: int) -> list[int]:
        message = self._messages.words(words, self._stage + round_no)
        most = HEADER_BYTES + 8 * expected
        received = self._transport.exchange(message, self._ranks[to], self._ranks[source], HOST, most)
        return self._messages.read_words(received, self._ranks[source], self._stage + round_no, expected)

    # -- the call -----------------------------------------------------------------------------------------------------

    def end(self) -> None:
        self._transport.end()

    def abort(self, error: BaseException) -> None:
        self._transport.abort(error)

    def _read(self, message: Bytes, source: int, round_no: int) -> SparseVector:
        sender = self._ranks[source]
        return self._checked(self._messages.read_entries(message, self._wire, sender, self._stage + round_no), sender)

    def _checked(self, entries: SparseVector, sender: int) -> SparseVector:
        if not self.backend.well_formed(entries):
            raise self._messages.broken(sender, "entries that are not sorted, not in range, or zero")
        return entries
