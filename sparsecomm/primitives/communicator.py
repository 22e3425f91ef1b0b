"""`Communicator`: the ranks of one collective call, as an algorithm sees them; gathers and broadcasts on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from sparsecomm.backends.base import Backend
from sparsecomm.errors import CollectiveMismatchError
from sparsecomm.primitives.costs import Costs, Link, Problem, log2_ceil
from sparsecomm.tensors.arrays import Array, Bytes
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.transport.base import MessageMemory, Transport
from sparsecomm.wire import EXACT, HEADER_BYTES, MEAN_OF_CONTRIBUTORS, OPS, Messages, Wire

Parcel = tuple[Sequence[SparseVector], Sequence[int]]  # vectors, and integers ("words") from 0 to 2^64 - 1
Range = tuple[int, int]  # of indices: the first one, and the one after the last

_LONG_DELAYS = Costs(Link(alpha=1.0, beta=0.0, gap=1 / 16))  # a network where the number of trips matters most
ROUNDS = 64  # maximum rounds of a gather or a broadcast, which numbers them from its ``round_no``
_MIN_ENTRIES = 16  # minimum entries per range; for fewer entries, fewer ranks own ranges
_T = TypeVar("_T")
_ROUND_BITS = 20  # low bits of the round field of a header; the stage is in the bits above


class Drops(Protocol):
    """An object that records dropped entries: a `Contribution`, or a list that is passed to one later."""

    def record_dropped(self, entries: SparseVector) -> None:
        """Record entries that this rank has dropped."""


class Communicator:
    """The ranks that make calls of one signature, seen from rank ``rank`` of ``size``.

    A method that sends returns when its arguments may be changed; a method that receives returns when the message has
    arrived. Received arrays belong to the caller; they may be views of the message, which they keep alive. Sender and
    receiver of a message pass the same ``round_no``, from 0 to 2^20 - 1. Errors contain the transport's rank numbers.

    Like `Transport.receive`, all methods raise `TimeoutError`, `RankFailedError` or `TransportError` if a rank does not
    answer, and `CollectiveMismatchError` if it makes another call or sends an unexpected message.
    """

    def __init__(
        self, transport: Transport, backend: Backend, messages: Messages, wire: Wire, costs: Costs | None = None
    ) -> None:
        """Prepare calls on all ranks of ``transport``.

        ``costs`` must be equal on all ranks; ``None``: a network with long delays.
        """
        self._costs = costs or _LONG_DELAYS
        # Data by class that the algorithm keeps from call to call. After a call that failed on some ranks it may differ
        # between ranks, so algorithms compare it in the next call.
        self.cache: dict[type, object] = {}
        self.backend = backend  # of the device of this rank's gradient
        self._transport, self._messages = transport, messages
        self._memory: MessageMemory = messages.memory
        self._set_ranks(range(transport.size), transport.rank, transport.node_of_rank, wire, 0)

    def cached(self, kind: type[_T]) -> _T | None:
        """Return the object of class ``kind`` in the cache, or ``None``."""
        data = self.cache.get(kind)
        return data if isinstance(data, kind) else None

    def begin(self, label: int = 0, *, incomplete: bool = False) -> None:
        """Begin the next call, which `Transport.end` or `Transport.abort` must end, also after a `TransportError`.

        It raises the errors of `Transport.begin`.

        Args:
            label: a checksum that must be equal on all ranks.
            incomplete: this rank's contribution lacks a part. The property `incomplete` then becomes true on all ranks.
        """
        messages, transport = self._messages, self._transport
        self._memory = self.backend.memory(transport.device_memory)
        call = messages.begin(transport.number + 1, label, self._memory, incomplete)
        transport.begin(call, messages.mismatch)

    def subgroup(self, ranks: Sequence[int], stage: int, *, wire: Wire | None = None) -> Communicator:
        """Return a communicator of some ranks for a stage of the algorithm. Sends no message.

        Args:
            ranks: rank numbers of this communicator, this rank among them; their order numbers them in the subgroup.
            stage: larger than the stage of this communicator, and different for each subgroup of a rank.
            wire: the format of entries; ``None``: that of this communicator.
        """
        group = Communicator.__new__(Communicator)
        group._transport, group._messages, group.backend = self._transport, self._messages, self.backend
        group._memory, group._costs, group.cache = self._memory, self._costs, self.cache
        members, node_of_rank = [self._ranks[r] for r in ranks], [self.node_of_rank[r] for r in ranks]
        group._set_ranks(members, members.index(self._ranks[self.rank]), node_of_rank, wire or self._wire, stage)
        return group

    def _set_ranks(self, ranks: Sequence[int], rank: int, node_of_rank: Sequence[int], wire: Wire, stage: int) -> None:
        """Set the members: ``ranks`` are numbers in the transport, ``rank`` is this rank's number here."""
        self._ranks, self.rank, self.size, self.node_of_rank = ranks, rank, len(ranks), node_of_rank
        self._wire, self._stage, call = wire, stage << _ROUND_BITS, self._messages.call
        self._max_bytes = self._messages.max_bytes(call.k, wire)
        # Whether small messages go to all ranks at once instead of being forwarded.
        self.sends_directly = self._costs.direct_is_faster(self.size, len(set(node_of_rank)))
        self.num_elements = call.n  # of the gradient
        self._averages = OPS[call.op] == MEAN_OF_CONTRIBUTORS
        self.sends_exact_sums = wire.kind is EXACT and not self._averages  # neither rounded nor divided

    # -- properties of the call ---------------------------------------------------------------------------------------

    @property
    def description(self) -> str:
        """The call signature as text."""
        return self._messages.call.describe()

    @property
    def contents(self) -> list[tuple[str, object]]:
        """The fields of the call signature by name, without the label."""
        return self._messages.call.contents(self._messages.shape)

    @property
    def number(self) -> int:
        """The number of the call, the same on all ranks."""
        return self._transport.number

    @property
    def incomplete(self) -> bool:
        """Whether a rank's contribution lacks a part. Equal on all ranks when the algorithm has returned."""
        return self._messages.incomplete

    def is_latency_bound(self, entries: int) -> bool:
        """Return whether the bytes of ``entries`` entries take less time than the latency of a trip."""
        return entries < self._costs.latency_entries

    # -- entries ------------------------------------------------------------------------------------------------------

    def round_and_record(
        self, entries: SparseVector, gradient: Drops, shard: int = 0, num_shards: int = 1
    ) -> SparseVector:
        """Return the entries with values rounded to the wire format's kind, as other ranks receive them.

        Quantize all entries before sending them; quantizing twice changes nothing. If the format is exact, the same
        entries are returned. ``gradient`` records the rounding errors; if ``num_shards`` ranks quantize the same
        entries, it records only shard number ``shard``.
        """
        if self._wire.kind is EXACT:
            return entries
        narrow, errors = self.backend.quantize(entries, self._wire.kind)
        if num_shards > 1:
            errors = errors.at(self.backend.not_zero(errors.values)).shard(shard, num_shards)
        gradient.record_dropped(errors)  # shares the indices of ``entries``
        return narrow

    def sums(self, vectors: list[SparseVector]) -> tuple[SparseVector, SparseVector | None]:
        """Return the sum of ``vectors``, one per rank; with ``op="mean_of_contributors"``, also their number per index.

        `averaged` divides the sums by these counts. Only separate vectors of ranks can be counted, because messages
        contain no counts.
        """
        return self.backend.sum_and_count(vectors) if self._averages else (self.backend.sum_in_pairs(vectors), None)

    def averaged(self, sums: SparseVector, counts: SparseVector | None, gradient: Drops) -> SparseVector:
        """Return some of the `sums`, divided by their counts if there are any, and quantized.

        ``gradient`` records the rounding errors: sums - counts * rounded means.
        """
        if counts is None:
            return self.round_and_record(sums, gradient)
        numbers = self.backend.values_at(counts, sums)
        means = self.backend.means(sums, numbers)
        if self._wire.kind is EXACT:
            return means
        narrow, _ = self.backend.quantize(means, self._wire.kind)
        gradient.record_dropped(self.backend.remainder(sums, numbers, narrow))
        return narrow

    def send(self, entries: SparseVector, to: int, round_no: int) -> None:
        """Send quantized entries to rank ``to``."""
        message = self._messages.entries(entries, self._wire, self._stage + round_no)
        self._transport.isend(message, self._ranks[to], self._memory).wait()

    def receive(self, source: int, round_no: int, max_entries: int | None = None) -> SparseVector:
        """Return the entries that rank ``source`` sends: well formed, at most ``max_entries`` if given."""
        message = self._transport.receive(self._ranks[source], self._memory, self._max_bytes)
        entries = self._read(message, source, round_no)
        if max_entries is not None and entries.nnz > max_entries:
            raise self.broken(source, f"{entries.nnz} entries instead of at most {max_entries}")
        return entries

    def exchange(self, entries: SparseVector, to: int, source: int, round_no: int) -> SparseVector:
        """Send quantized entries to rank ``to`` while receiving from rank ``source``; return the received entries."""
        message = self._messages.entries(entries, self._wire, self._stage + round_no)
        sender, memory = self._ranks[source], self._memory
        received = self._transport.exchange(message, self._ranks[to], sender, memory, self._max_bytes)
        return self._read(received, source, round_no)

    # -- several messages at once, in one trip ------------------------------------------------------------------------

    def exchange_parcels(
        self,
        parcels: Mapping[int, Parcel],
        sources: Iterable[int],
        num_vectors: int,
        round_no: int,
        count: int = 0,
        *,
        or_none: bool = False,
        expected: Callable[[int, Sequence[int]], Sequence[Range] | None] | None = None,
    ) -> dict[int, Parcel]:
        """Send parcels to some ranks while receiving from others; return the received parcels by rank.

        Args:
            parcels: by destination. The same object for several ranks is encoded once. This rank's parcel is ignored.
            sources: other ranks.
            num_vectors: number of vectors in a received parcel.
            round_no: see the class.
            count: approximate number of entries in a parcel; a larger parcel is copied once more.
            or_none: a parcel may also have no vectors.
            expected: ``expected(source, words)`` returns, for each vector of a parcel, the range of its indices;
                ``None``: all indices are allowed.
        """
        step, wire = self._stage + round_no, self._wire
        length = self._messages.max_bytes(count, wire) + 256
        messages = self._exchange_all(parcels, lambda x: self._messages.parcel(x[0], x[1], wire, step), sources, length)
        received: dict[int, Parcel] = {}
        for source, message in messages:
            sender = self._ranks[source]
            vectors, words = self._messages.read_parcel(message, wire, sender, step, num_vectors, or_none=or_none)
            ranges = None if expected is None else expected(source, words)
            for i, vector in enumerate(vectors):
                self._check(vector, sender, None if ranges is None else ranges[i])
            received[source] = vectors, words
        return received

    def send_words(self, words: Sequence[int], to: int, round_no: int) -> None:
        """Send words to rank ``to``."""
        self.exchange_parcels({to: ((), words)}, (), 0, round_no)

    def receive_words(self, source: int, expected: int, round_no: int) -> Sequence[int]:
        """Return the ``expected`` words that rank ``source`` sends."""
        _, words = self.exchange_parcels({}, (source,), 0, round_no)[source]
        return self.checked_words(source, words, expected)

    def checked_words(self, source: int, words: Sequence[int], expected: int) -> Sequence[int]:
        """Return the words of rank ``source``; raise unless there are ``expected`` words."""
        if len(words) != expected:
            raise self.broken(source, f"{len(words)} numbers instead of {expected}")
        return words

    def exchange_segments(
        self, segments: Mapping[int, Array], lengths: Mapping[int, int], round_no: int
    ) -> dict[int, Array]:
        """Send flat arrays of the accumulator dtype to some ranks while receiving from others; return received arrays.

        ``segments`` are by destination, as the parcels of `exchange_parcels`; ``lengths`` are numbers of elements by
        source. Both may include this rank, which is ignored.
        """
        step, itemsize = self._stage + round_no, next(iter(segments.values())).itemsize
        sources = [source for source in lengths if source != self.rank]
        length = HEADER_BYTES + max(lengths.values()) * itemsize
        received = self._exchange_all(segments, lambda x: self._messages.dense(x, step), sources, length)
        read = self._messages.read_dense
        return {source: read(message, self._ranks[source], step, lengths[source]) for source, message in received}

    def _exchange_all(
        self, items: Mapping[int, Any], encode: Callable[[Any], Bytes], sources: Iterable[int], expected: int
    ) -> Iterable[tuple[int, Bytes]]:
        """Send encoded items to ranks while receiving from ``sources``; return pairs of source and message."""
        messages: dict[int, Bytes] = {}  # by the identity of the item
        sends = []
        for to in sorted(items, key=lambda to: (to - self.rank) % self.size):  # spread the load over receivers
            if to != self.rank:
                item = items[to]
                if id(item) not in messages:
                    messages[id(item)] = encode(item)
                sends.append((self._ranks[to], messages[id(item)]))
        order = sorted(sources, key=lambda source: (self.rank - source) % self.size)
        senders = [self._ranks[source] for source in order]
        return zip(order, self._transport.exchange_all(sends, senders, self._memory, expected), strict=True)

    # -- checks -------------------------------------------------------------------------------------------------------

    def broken(self, source: int, seen: str) -> CollectiveMismatchError:
        """Return the error for an unexpected message from rank ``source`` with the content ``seen``."""
        return self._messages.broken(self._ranks[source], seen)

    def _read(self, message: Bytes, source: int, round_no: int) -> SparseVector:
        sender = self._ranks[source]
        entries = self._messages.read_entries(message, self._wire, sender, self._stage + round_no)
        self._check(entries, sender)
        return entries

    def _check(self, entries: SparseVector, sender: int, within: Range | None = None) -> None:
        begin, end = within or (0, entries.size)
        if not self.backend.well_formed(entries, begin, end):
            seen = f"entries whose indices do not increase, or are not in [{begin}, {end}), or whose values are zero"
            raise self._messages.broken(sender, seen)


def num_owners(P: int, k: int) -> int:
    """Return the number of ranks that own a range of indices."""
    return min(P, max(1, k // _MIN_ENTRIES))


# -- gathers and broadcasts -------------------------------------------------------------------------------------------

# If delays are long, each rank sends to all others at once, in one trip. Otherwise ranks forward received messages in
# log2 P steps. `Costs.direct_is_faster` decides between the two, and decides the same on all ranks.


def gather(
    comm: Communicator, own: SparseVector, round_no: int, ranges: Sequence[Range] | None = None
) -> list[SparseVector]:
    """Return the vectors of all ranks, ordered by rank.

    ``ranges``: gather only the vectors of the first ``len(ranges)`` ranks, whose indices must be in these ranges.
    """
    parcels = gather_parcels(comm, ((own,), ()), round_no, ranges)
    return [vector for vectors, _ in parcels for vector in vectors]


def gather_parcels(
    comm: Communicator, own: Parcel, round_no: int, ranges: Sequence[Range] | None = None
) -> list[Parcel]:
    """Return the parcels of all ranks, ordered by rank. All have the same numbers of vectors and words.

    ``ranges``: as in `gather`, for all vectors of a parcel.
    """
    count, num_senders = max((vector.nnz for vector in own[0]), default=0), comm.size if ranges is None else len(ranges)
    if comm.sends_directly:
        return exchange_with_all(comm, own, len(own[0]), round_no, count, num_senders, ranges=ranges)
    return _bruck(comm, own, round_no, count, num_senders, ranges)


def gather_words(comm: Communicator, words: list[int], round_no: int) -> list[list[int]]:
    """Return the words of all ranks, ordered by rank. All ranks must pass the same number of words."""
    parcels = gather_parcels(comm, ((), words), round_no)
    return [list(comm.checked_words(rank, received, len(words))) for rank, (_, received) in enumerate(parcels)]


def broadcast_words(comm: Communicator, words: list[int], round_no: int) -> list[int]:
    """Return the words of rank 0, which sends them to all ranks at once or along a binomial tree.

    In step j of the tree, each rank below 2^j sends to the rank 2^j above it.
    """
    rank, size = comm.rank, comm.size
    if comm.sends_directly:
        (_, received), *_ = exchange_with_all(comm, ((), words), 0, round_no, num_senders=1)
        return list(comm.checked_words(0, received, len(words)))
    for step in range(log2_ceil(size)):
        distance = 1 << step
        if rank < distance and rank + distance < size:
            comm.send_words(words, rank + distance, round_no + step)
        elif distance <= rank < 2 * distance:
            words = list(comm.receive_words(rank - distance, len(words), round_no + step))
    return words


def exchange_with_all(
    comm: Communicator,
    own: Parcel,
    num_vectors: int,
    round_no: int,
    count: int = 0,
    num_senders: int | None = None,
    *,
    or_none: bool = False,
    ranges: Sequence[Range] | None = None,
) -> list[Parcel]:
    """Return the parcels of all ranks, or of the first ``num_senders``, ordered by rank, in one trip.

    Arguments are as in `Communicator.exchange_parcels`. ``ranges``: for each sender, the range of its vectors' indices.
    """
    senders = range(comm.size if num_senders is None else num_senders)
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    sends = dict.fromkeys(others, own) if comm.rank in senders else {}
    sources = [sender for sender in senders if sender != comm.rank]
    expected = None if ranges is None else lambda sender, words: [ranges[sender]] * num_vectors
    received = comm.exchange_parcels(sends, sources, num_vectors, round_no, count, or_none=or_none, expected=expected)
    received[comm.rank] = own
    return [received[sender] for sender in senders]


def _bruck(
    comm: Communicator, own: Parcel, round_no: int, count: int, num_senders: int, ranges: Sequence[Range] | None
) -> list[Parcel]:
    """Return the same as `exchange_with_all`, in log2 P steps (Bruck et al., IEEE TPDS 1997, Section 3).

    All parcels must have the same numbers of vectors and words.

        rank       0      1      2      3      4      5      6
        at first   0      1      2      3      4      5      6
        step 0     01     12     23     34     45     56     60      from rank + 1
        step 1     0123   1234   2345   3456   4560   5601   6012    from rank + 2
        step 2     all: the three parcels missing, from rank + 4
    """
    rank, size, num_vectors, num_words = comm.rank, comm.size, len(own[0]), len(own[1])

    def senders_among(first: int, length: int) -> list[int]:
        return [sender % size for sender in range(first, first + length) if sender % size < num_senders]

    parcels, senders = dict.fromkeys(senders_among(rank, 1), own), list[int]()

    def expected(source: int, words: Sequence[int]) -> list[Range] | None:
        return None if ranges is None else [ranges[sender] for sender in senders for _ in range(num_vectors)]

    for step in range(log2_ceil(size)):
        distance = 1 << step
        length = min(distance, size - distance)
        sent = [parcels[sender] for sender in senders_among(rank, length)]
        senders = senders_among(rank + distance, length)
        parcel = [v for vectors, _ in sent for v in vectors], [word for _, words in sent for word in words]
        dst, src = (rank - distance) % size, (rank + distance) % size
        vectors, words = comm.exchange_parcels(
            {dst: parcel}, (src,), num_vectors * len(senders), round_no + step, count * len(senders), expected=expected
        )[src]
        comm.checked_words(src, words, num_words * len(senders))
        for i, sender in enumerate(senders):
            parcels[sender] = vectors[i * num_vectors :][:num_vectors], words[i * num_words :][:num_words]
    return [parcels[sender] for sender in range(num_senders)]


def gather_time(problem: Problem, costs: Costs, entries: float, num_senders: int | None = None) -> float:
    """Return the predicted seconds of `gather`. ``entries`` is the total over all senders, which send equal shares.

    If only some ranks are senders, some ranks have all entries before the last step and send them more than once.
    """
    P = problem.P
    num_senders = P if num_senders is None else num_senders
    if costs.direct_is_faster(P, problem.P if problem.num_nodes is None else problem.num_nodes):
        sent = (P - 1) / num_senders  # by one sender to all ranks, as a fraction of ``entries``
        nbytes = max(sent, 1 - 1 / num_senders if num_senders == P else 1) * entries * problem.entry_bytes
        return problem.link(costs).trip(P - 1, nbytes + 24 * (P - 1))
    repeats = 1.0 if num_senders == P else (1 + log2_ceil(-(-P // num_senders))) * P / (P - 1)
    nbytes = repeats * entries * problem.entry_bytes + 16 * num_senders
    seconds = 0.0
    for step in range(log2_ceil(P)):  # up to 2^step ranks of a node share its link in a step
        link = problem.link(costs, sharing=min(1 << step, problem.per_node))
        seconds += link.alpha + min(1 << step, P - (1 << step)) / P * nbytes * link.beta
    return seconds
