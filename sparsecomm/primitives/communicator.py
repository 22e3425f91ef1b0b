"""The ranks of one collective call, as an algorithm sees them: entries out, entries in, every message checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from sparsecomm.backends.base import Backend
from sparsecomm.errors import CollectiveMismatchError
from sparsecomm.primitives.costs import Costs, Link
from sparsecomm.primitives.fold import Fold
from sparsecomm.tensors.arrays import Array, Bytes
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.transport.base import Transport
from sparsecomm.transport.memory import HOST, MessageMemory
from sparsecomm.wire import EXACT, HEADER_BYTES, MEAN_OF_CONTRIBUTORS, OPS, PLAIN, Messages, Wire

__all__ = ["Communicator", "Drops", "Parcel", "Range"]

Parcel = tuple[Sequence[SparseVector], Sequence[int]]  # vectors, and whole numbers from 0 to 2^64 - 1
Range = tuple[int, int]  # of indices: the first one, and the one after the last


class Drops(Protocol):
    """Who records what is dropped: a `Contribution`, or what records it only to tell that later."""

    def drop(self, entries: SparseVector) -> None:
        """Record entries that this rank has dropped."""


_FAR = Costs(Link(alpha=1.0, beta=0.0, gap=1 / 16))  # where trips matter most

_ENTRY_BYTES = 12  # of an entry and the key of its value, about
_ROUND_BITS = 20  # of the round number in a header, below the number of the stage


class Communicator:
    """``size`` ranks that make calls of one signature, of which this is number ``rank``.

    `begin` begins a call, and `end` or `abort` ends it; all that is sent and received belongs to the call under way.

    Methods that send block until their arguments may be changed; methods that receive block until the message is here.
    What they return is new and belongs to the caller; its arrays may be views of the message, which they keep alive.
    Ranks are numbered within this communicator, in errors as in the transport. Both sides of a message give the same
    ``round_no``, from 0 to 2^20 - 1.

    All of them raise, as `Transport.receive` does, `TimeoutError`, `RankFailedError` or `TransportError` where a rank
    does not answer, and `CollectiveMismatchError` where it makes another call or its message is not the one expected.

    Attributes:
        rank, size: as in MPI.
        node_of_rank: for each rank, the number of the node that it runs on.
        backend: the arithmetic of the device on which this rank's gradient is.
        kept: what the algorithm keeps from call to call. It may differ between ranks, after calls that some of them
            left: what must not differ is compared in the next call.
    """

    def __init__(
        self, transport: Transport, backend: Backend, messages: Messages, wire: Wire, costs: Costs | None = None
    ) -> None:
        """Prepare calls on all ranks of ``transport``.

        Args:
            transport: between the ranks.
            backend: of the device of the gradient.
            messages: of the calls.
            wire: the format in which entries travel.
            costs: of messages, the same on all ranks; ``None``: those of a network with long delays.
        """
        self._costs = costs or _FAR
        self.kept: dict[str, Any] = {}
        self._transport, self._messages, self.backend = transport, messages, backend
        self._memory: MessageMemory = messages.memory
        self._set_ranks(range(transport.size), transport.rank, transport.node_of_rank, wire, 0)

    @property
    def description(self) -> str:
        """What the ranks of its calls must agree on, in words."""
        return self._messages.call.describe()

    def begin(self, label: int = 0, *, incomplete: bool = False) -> None:
        """Begin the next call.

        Args:
            label: a checksum of what the ranks' calls must have in common besides.
            incomplete: this rank's contribution lacks a part; `incomplete` then tells all ranks.

        Raises:
            InvalidInputError: the call cannot be made; none has begun.
            TransportError: another rank has left this call already. `abort` must follow.
        """
        messages, transport = self._messages, self._transport
        self._memory = self.backend.memory(transport.device_memory)
        call = messages.begin(transport.number + 1, label, self._memory, incomplete)
        transport.begin(call, messages.mismatch)

    def subgroup(self, ranks: Sequence[int], stage: int, *, plain: bool = False) -> Communicator:
        """Return a communicator of some of these ranks, this one among them, for a stage of the algorithm.

        It belongs to the same call, and no message is sent.

        Args:
            ranks: their numbers here, in the order of their numbers there.
            stage: above that of this communicator, and another one for every subgroup that a rank is in.
            plain: send entries in the plain format, whatever that of the call is.
        """
        group = Communicator.__new__(Communicator)
        group._transport, group._messages, group.backend = self._transport, self._messages, self.backend
        group._memory, group._costs, group.kept = self._memory, self._costs, self.kept
        members, node_of_rank = [self._ranks[r] for r in ranks], [self.node_of_rank[r] for r in ranks]
        wire = PLAIN if plain else self._wire
        group._set_ranks(members, members.index(self._ranks[self.rank]), node_of_rank, wire, stage)
        return group

    def _set_ranks(self, ranks: Sequence[int], rank: int, node_of_rank: Sequence[int], wire: Wire, stage: int) -> None:
        """Set the members: ``ranks`` are their numbers in the transport, ``rank`` is this one's number here."""
        self._ranks, self.rank, self.size, self.node_of_rank = ranks, rank, len(ranks), node_of_rank
        self._fold: Fold | None = None
        self._wire, self._stage = wire, stage << _ROUND_BITS
        self._max_bytes = self._messages.max_bytes(self._messages.call.k, wire)

    @property
    def fold(self) -> Fold:
        """This rank's part in recursive doubling."""
        if self._fold is None:
            self._fold = Fold.of(self.rank, self.size)
        return self._fold

    @property
    def averages(self) -> bool:
        """Whether each entry of the result is to be the mean over the ranks that contributed to it."""
        return OPS[self._messages.call.op] == MEAN_OF_CONTRIBUTORS

    @property
    def shows_sums(self) -> bool:
        """Whether the values that travel are sums, bit for bit: neither rounded nor divided."""
        return self._wire.kind is EXACT and not self.averages

    @property
    def incomplete(self) -> bool:
        """Whether a rank's contribution lacks a part: the same on all ranks when the algorithm has returned."""
        return self._messages.incomplete

    @property
    def num_elements(self) -> int:
        """Elements of the gradient."""
        return self._messages.call.n

    @property
    def number(self) -> int:
        """The number of the call, the same on all ranks."""
        return self._transport.number

    @property
    def reaches_all_at_once(self) -> bool:
        """Whether small messages go to all ranks at once rather than from rank to rank: see `Costs.at_once`."""
        return self._costs.at_once(self.size, len(set(self.node_of_rank)))

    def is_less_than_a_trip(self, entries: int) -> bool:
        """Return whether so many entries of the gradient, for each rank, take less time to send than a trip."""
        return self.takes_less_than_a_trip(entries, self._costs)

    @staticmethod
    def takes_less_than_a_trip(entries: int, costs: Costs) -> bool:
        """Return what `is_less_than_a_trip` returns at these costs."""
        return entries * _ENTRY_BYTES * costs.link.beta < costs.link.alpha

    # -- entries ------------------------------------------------------------------------------------------------------

    def quantized(self, entries: SparseVector, gradient: Drops, shard: int = 0, num_shards: int = 1) -> SparseVector:
        """Return entries as the other ranks will see them: with values rounded to the wire format's kind.

        ``gradient`` records what rounding takes away. Everything that `send` and its kin are given has been
        quantized; doing it again changes nothing. Where the format is exact, these are the same entries.

        Args:
            entries: are not changed.
            gradient: of this rank.
            shard, num_shards: where ``num_shards`` ranks hold the same entries and quantize them, this rank records
                only shard number ``shard`` of what rounding takes.
        """
        if self._wire.kind is EXACT:
            return entries
        narrow, errors = self.backend.quantize(entries, self._wire.kind)
        gradient.drop(errors.shard(shard, num_shards))
        return narrow

    def quantized_means(self, sums: SparseVector, counts: Array, gradient: Drops) -> SparseVector:
        """Return sums divided by ``counts``, shape ``(nnz,)``, as the other ranks will see them: see `quantized`.

        Rounded means times counts, and what ``gradient`` records, add up to the sums.
        """
        means = self.backend.means(sums, counts)
        if self._wire.kind is EXACT:
            return means
        narrow, _ = self.backend.quantize(means, self._wire.kind)
        gradient.drop(self.backend.remainder(sums, counts, narrow))
        return narrow

    def send(self, entries: SparseVector, to: int, round_no: int) -> None:
        """Send entries, quantized before, to rank ``to``."""
        message = self._messages.entries(entries, self._wire, self._stage + round_no)
        self._transport.isend(message, self._ranks[to], self._memory).wait()

    def receive(self, source: int, round_no: int, max_entries: int | None = None) -> SparseVector:
        """Return the entries that rank ``source`` sends: well formed, with the gradient's size and shape.

        ``max_entries``: how many these may be; ``None``: any number.
        """
        message = self._transport.receive(self._ranks[source], self._memory, self._max_bytes)
        entries = self._read(message, source, round_no)
        if max_entries is not None and entries.nnz > max_entries:
            raise self.broken(source, f"{entries.nnz} entries instead of at most {max_entries}")
        return entries

    def exchange(self, entries: SparseVector, to: int, source: int, round_no: int) -> SparseVector:
        """Send entries to rank ``to`` and return those of rank ``source``, both under way at once."""
        message = self._messages.entries(entries, self._wire, self._stage + round_no)
        received = self._transport.exchange(
            message, self._ranks[to], self._ranks[source], self._memory, self._max_bytes
        )
        return self._read(received, source, round_no)

    def exchange_lists(
        self, mine: list[SparseVector], to: int, ranges: Sequence[Range], source: int, round_no: int
    ) -> list[SparseVector]:
        """Send several vectors to rank ``to`` in one message, and return those of rank ``source``.

        ``ranges``: for each vector to be received, the range in which its indices must lie.
        """
        message = self._messages.parcel(mine, (), self._wire, self._stage + round_no)
        sender, max_bytes = self._ranks[source], len(ranges) * self._max_bytes
        received = self._transport.exchange(message, self._ranks[to], sender, self._memory, max_bytes)
        vectors, _ = self._messages.read_parcel(received, self._wire, sender, self._stage + round_no, len(ranges))
        return [self._checked(v, sender, each) for v, each in zip(vectors, ranges, strict=True)]

    def exchange_parcels(
        self,
        parcels: Mapping[int, Parcel],
        sources: Sequence[int],
        num_vectors: int,
        round_no: int,
        count: int = 0,
        *,
        or_none: bool = False,
        range_of: Callable[[int, Sequence[int]], Range | None] | None = None,
    ) -> dict[int, Parcel]:
        """Send some ranks vectors and words, and return those of the ``sources``, all under way at once: in one trip.

        Args:
            parcels: by rank; many may be given the same object, and this one's is not looked at.
            sources: other ranks.
            num_vectors: of a parcel.
            round_no: see above.
            count: about how many entries a parcel has; if more come, they are copied once more.
            or_none: a parcel may have no vectors.
            range_of: ``range_of(source, words)`` returns the range in which the indices of a parcel's vectors must lie;
                ``None``: anywhere.
        """
        made: dict[int, Bytes] = {}
        sends = []
        for distance in range(1, self.size):  # no rank is the first of all
            to = (self.rank + distance) % self.size
            if to in parcels:
                vectors, words = parcels[to]
                if id(parcels[to]) not in made:
                    made[id(parcels[to])] = self._messages.parcel(vectors, words, self._wire, self._stage + round_no)
                sends.append((self._ranks[to], made[id(parcels[to])]))
        order = sorted(sources, key=lambda source: (self.rank - source) % self.size)
        senders = [self._ranks[source] for source in order]
        expected = self._messages.max_bytes(count, self._wire) + 256
        received = self._transport.exchange_all(sends, senders, self._memory, expected)
        found: dict[int, Parcel] = {}
        for source, sender, message in zip(order, senders, received, strict=True):
            vectors, words = self._messages.read_parcel(
                message, self._wire, sender, self._stage + round_no, num_vectors, or_none=or_none
            )
            within = None if range_of is None else range_of(source, words)
            found[source] = [self._checked(v, sender, within) for v in vectors], words
        return found

    def exchange_segments(
        self, segments: Mapping[int, Array], lengths: Mapping[int, int], round_no: int
    ) -> dict[int, Array]:
        """Send each other rank a flat array of the accumulator's dtype, and return theirs: in one trip.

        ``segments``: by rank, what it is sent; ``lengths``: by rank, how many elements come from it.
        """
        made: dict[int, Bytes] = {}
        sends, sources = [], []
        for distance in range(1, self.size):
            to = (self.rank + distance) % self.size
            if id(segments[to]) not in made:
                made[id(segments[to])] = self._messages.dense(segments[to], self._stage + round_no)
            sends.append((self._ranks[to], made[id(segments[to])]))
            sources.append((self.rank - distance) % self.size)
        max_bytes = HEADER_BYTES + max(lengths.values()) * segments[self.rank].itemsize
        received = self._transport.exchange_all(sends, [self._ranks[s] for s in sources], self._memory, max_bytes)
        found = {}
        for source, message in zip(sources, received, strict=True):
            sender, expected = self._ranks[source], lengths[source]
            found[source] = self._messages.read_dense(message, sender, self._stage + round_no, expected)
        return found

    def exchange_dense(self, segment: Array, to: int, source: int, expected: int, round_no: int) -> Array:
        """Send a flat array of the accumulator's dtype to rank ``to`` and return that of rank ``source``.

        It has ``expected`` elements.
        """
        max_bytes = HEADER_BYTES + expected * segment.itemsize
        message = self._messages.dense(segment, self._stage + round_no)
        received = self._transport.exchange(message, self._ranks[to], self._ranks[source], self._memory, max_bytes)
        return self._messages.read_dense(received, self._ranks[source], self._stage + round_no, expected)

    # -- words: whole numbers from 0 to 2^64 - 1, on the host ---------------------------------------------------------

    def send_words(self, words: list[int], to: int, round_no: int) -> None:
        """Send words to rank ``to``."""
        self._transport.isend(self._messages.words(words, self._stage + round_no), self._ranks[to]).wait()

    def receive_words(self, source: int, expected: int, round_no: int) -> list[int]:
        """Return the ``expected`` words that rank ``source`` sends."""
        message = self._transport.receive(self._ranks[source], HOST, HEADER_BYTES + 8 * expected)
        return self._messages.read_words(message, self._ranks[source], self._stage + round_no, expected)

    def exchange_words(self, words: list[int], to: int, source: int, expected: int, round_no: int) -> list[int]:
        """Send words to rank ``to`` and return the ``expected`` ones of rank ``source``."""
        message = self._messages.words(words, self._stage + round_no)
        max_bytes = HEADER_BYTES + 8 * expected
        received = self._transport.exchange(message, self._ranks[to], self._ranks[source], HOST, max_bytes)
        return self._messages.read_words(received, self._ranks[source], self._stage + round_no, expected)

    # -- the call -----------------------------------------------------------------------------------------------------

    def broken(self, source: int, seen: str) -> CollectiveMismatchError:
        """Return the error for what rank ``source`` has sent, if it does not fit: ``seen``."""
        return self._messages.broken(self._ranks[source], seen)

    def end(self) -> None:
        """Mark the call as complete on this rank."""
        self._transport.end()

    def abort(self, error: BaseException) -> None:
        """Leave the call with ``error``, and tell the other ranks, which leave it too: see `Transport.abort`.

        What the algorithm has kept is forgotten: wrong numbers of a peer may be in it.
        """
        self.kept.clear()
        self._transport.abort(error)

    def _read(self, message: Bytes, source: int, round_no: int) -> SparseVector:
        sender = self._ranks[source]
        return self._checked(self._messages.read_entries(message, self._wire, sender, self._stage + round_no), sender)

    def _checked(self, entries: SparseVector, sender: int, within: Range | None = None) -> SparseVector:
        begin, end = within or (0, entries.size)
        if not self.backend.well_formed(entries, begin, end):
            seen = f"entries whose indices do not increase, or are not in [{begin}, {end}), or whose values are zero"
            raise self._messages.broken(sender, seen)
        return entries
