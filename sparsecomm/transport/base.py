"""The interface of a transport: bytes between ranks, in order, and errors instead of endless waits.

A transport knows nothing of sparsity. It numbers the collective calls made on it, so that the bytes of an abandoned
call are never taken for those of a later one. It turns every way in which a peer can fail to answer into an error that
names the rank.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sparsecomm.errors import SparseCommError
from sparsecomm.transport.memory import HOST, Bytes, MessageMemory

__all__ = ["MAX_CALL_BYTES", "Mismatch", "PeerTraffic", "PendingCalls", "Request", "TrafficCounters", "Transport"]

MAX_CALL_BYTES = 256  # of the description of a call that `Transport.begin` takes

Mismatch = Callable[[bytes, int], SparseCommError]


@dataclass(slots=True)
class TrafficCounters:
    """The traffic of a rank since its transport was made: payload bytes and messages, without framing by MPI."""

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    _sums: tuple[int, int] = 0, 0  # bytes sent and received in sums
    _before: tuple[int, int] | None = None  # bytes sent and received when the sum under way began

    @property
    def setup(self) -> tuple[int, int]:
        """Bytes sent and received outside of sums: to measure links, and to agree."""
        sent, received = self._before or (self.bytes_sent, self.bytes_received)
        return sent - self._sums[0], received - self._sums[1]

    def begin_sum(self) -> None:
        """Count traffic as that of a sum from now on."""
        self._before = self.bytes_sent, self.bytes_received

    def end_sum(self) -> None:
        """Count traffic as that of set-up again."""
        sent, received = self.setup
        self._sums, self._before = (self.bytes_sent - sent, self.bytes_received - received), None


@dataclass(frozen=True, slots=True)
class PeerTraffic:
    """The traffic with one peer since the transport was made, as far as the transport knows it.

    Attributes:
        rank: the peer.
        bytes_sent, bytes_received: with framing.
        seconds: for which bytes were under way to it: sent, or waiting to be sent, and not yet acknowledged. Over MPI:
            in which messages to it, or from it, were waited for.
        round_trip: seconds, the shortest that was seen; 0: not known, as over MPI.
        retransmits: segments that were sent again.
        connections: to it; 0: not known.
    """

    rank: int
    bytes_sent: int
    bytes_received: int
    seconds: float
    round_trip: float = 0.0
    retransmits: int = 0
    connections: int = 0

    @property
    def rate(self) -> float:
        """Bytes per second to it, while some were under way; 0 if none were."""
        return self.bytes_sent / self.seconds if self.seconds > 0 else 0.0


class Request(ABC):
    """A message under way. Its bytes must not change until `wait` returns."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until the bytes may be reused. A second wait returns at once.

        Raises:
            TimeoutError, RankFailedError, TransportError, CollectiveMismatchError: as `Transport.receive`.
        """


class PendingCalls(Protocol):
    """The calls submitted on a transport, as the transport sees them: a `sparsecomm.calls.queue.CallQueue`."""

    def finish(self, then: Callable[[], object] | None = None) -> None:
        """Make the calls that have not been made, since other ranks may wait for them; then call ``then``.

        Nothing is submitted later. From within a call, as by the garbage collector, this returns at once, and all of it
        happens when that call has ended.
        """


class Transport(ABC):
    """Point-to-point bytes between ``size`` ranks. Messages between two ranks arrive in the order sent.

    Attributes:
        rank, size: as in MPI.
        number: of the call begun last; 0 before the first one.
        counted: the number of the last call that counts on this rank; 0 before the first one.
        counters: what this rank has sent and received.
        node_of_rank: for each rank, the number of the node that it runs on, counted from 0 in order of rank.
        num_nodes: how many nodes there are.
        skipped: why a call was not begun that this rank was asked to make, until a later one goes well; empty: none.
        library: the name and version of the library that moves the bytes.
        device_memory: whether `isend` and `receive` take memory of a CUDA device.
        simulated: whether its time and its network are computed, and its ranks are in one process.
        threaded: whether one thread may make calls while others do other things.
        queue: the calls submitted on this transport; None until the first one.
    """

    rank: int
    size: int
    number: int
    counted = 0
    counters: TrafficCounters
    node_of_rank: Sequence[int]
    num_nodes: int
    library: str
    device_memory = False
    simulated = False
    threaded = False
    skipped = ""
    queue: PendingCalls | None = None

    def clock(self) -> float:
        """Return the seconds since some time in the past, by a clock of this rank; virtual ones of a simulated rank."""
        return time.monotonic()

    @property
    def members(self) -> Sequence[int]:
        """For each rank, the number that it has in the job; ranks in their order, where that is not known."""
        return range(self.size)

    @abstractmethod
    def begin(self, call: bytes, mismatch: Mismatch) -> int:
        """Start the next collective call; return its number, the same on all ranks that call in the same order.

        Args:
            call: an opaque description of the call, at most `MAX_CALL_BYTES`. A rank that waits for long sends it to
                the rank that it waits for, which compares it with its own. Ranks that wait for each other in calls
                that do not match find out in this way.
            mismatch: ``mismatch(theirs, rank)`` returns the error for a description that differs from ``call``.

        Raises:
            InvalidInputError: the transport is closed, or an argument or a setting cannot be used. No call has begun.
            TransportError: another rank has left this call already. `abort` must follow.
        """

    @abstractmethod
    def conclude(self) -> None:
        """Say that the call begun last went well on this rank, which must count it if this returns.

        Where ranks may die one by one it counts on all of them or on none, and this waits for their votes. Otherwise it
        does nothing.

        Raises:
            TransportError, CollectiveMismatchError: it counts on no rank. `abort` must follow.
        """

    def awaited(self, call: bytes) -> bool:
        """Return whether another rank has said that it waits for this one in the next call. None is under way.

        Args:
            call: the description of that call which it has given to `begin`.
        """
        return False

    def peers(self) -> list[PeerTraffic]:
        """Return the traffic with each peer, by rank; nothing where the library that moves the bytes does not tell."""
        return []

    @property
    def concluded(self) -> bool:
        """Whether the call begun last counts, although an exception came while `conclude` waited."""
        return False

    @abstractmethod
    def end(self) -> None:
        """Mark the call begun last as complete on this rank. Every request of it has been waited for."""

    @abstractmethod
    def abort(self, error: BaseException) -> None:
        """Leave the call begun last with ``error``: tell every other rank, and wait for none.

        The others, waiting in the same call, raise `CollectiveMismatchError` if that is what ``error`` is, and
        otherwise `TransportError` naming this rank and its reason. The next call starts afresh. Without a call under
        way this does nothing.
        """

    @abstractmethod
    def realign(self) -> None:
        """Agree with all ranks on the number of the next call; without a call under way, on all ranks.

        What still comes of calls before is discarded. Ranks that make calls instead raise `CollectiveMismatchError`.

        Raises:
            InvalidInputError: the transport is closed, or a setting cannot be used.
            TimeoutError, RankFailedError, TransportError: a rank did not take part. Try again, on all ranks.
        """

    @abstractmethod
    def isend(self, data: Bytes, to: int, memory: MessageMemory = HOST) -> Request:
        """Start sending ``data`` to rank ``to``, and return without waiting for the receiver.

        Args:
            data: contiguous bytes of any length, also 0. They were made by ``memory``, belong to the transport until
                `Request.wait` returns, and are only read.
            to: a rank, also this one.
            memory: on the host, or on a device if the transport takes `device_memory`. The transport asks it whether
                the bytes have been written.

        Raises:
            TransportError: there is no such rank, or the library that moves the bytes failed.
        """

    @abstractmethod
    def receive(self, source: int, memory: MessageMemory = HOST, expected: int = 0) -> Bytes:
        """Wait for the next message from rank ``source`` that belongs to the current call; return its bytes.

        The bytes are new memory, made by ``memory``, which belongs to the caller.

        Args:
            source: a rank, also this one.
            memory: where the message is to be.
            expected: an upper bound of its bytes, if the caller knows one: a long message then needs no copying. The
                message may be longer.

        Raises:
            TimeoutError: nothing came for `sparsecomm.config.timeout` seconds; names the rank waited for.
            RankFailedError: MPI reports, or a broken connection shows, that the rank is dead.
            TransportError: a rank left the call with an error, or the library that moves the bytes failed.
            CollectiveMismatchError: a rank found that the calls do not match.
        """

    @abstractmethod
    def exchange(self, data: Bytes, to: int, source: int, memory: MessageMemory = HOST, expected: int = 0) -> Bytes:
        """Send ``data`` to rank ``to`` and receive from rank ``source``, both under way at once.

        As `isend`, `receive` and `Request.wait` in a row: ``data`` may be reused when it returns.
        """

    def exchange_all(
        self,
        sends: Sequence[tuple[int, Bytes]],
        sources: Sequence[int],
        memory: MessageMemory = HOST,
        expected: int = 0,
    ) -> list[Bytes]:
        """Send to several ranks and receive a message from each of several others, all under way at once.

        As `isend` of each, then `receive` of each, and `Request.wait`. So it takes one trip, however many there are.

        Args:
            sends: ranks, and what each is sent; the same bytes may go to many.
            sources: whom a message is received from, in the order in which they are returned; each once.
            memory: of all messages.
            expected: of each received message, as in `receive`.
        """
        requests = [self.isend(data, to, memory) for to, data in sends]
        messages = [self.receive(source, memory, expected) for source in sources]
        for request in requests:
            request.wait()
        return messages

    @abstractmethod
    def broadcast(self, data: Bytes, root: int) -> None:
        """Give all ranks the ``data`` of rank ``root``, in place. All ranks must have agreed to do so.

        It is no part of a call: none is under way, and the last one went well on all ranks.

        Args:
            data: contiguous bytes in host memory, of the same length on all ranks.
            root: whose; a rank.

        Raises:
            TimeoutError: it did not come within `sparsecomm.config.timeout` seconds; it may still be written to.
            RankFailedError, TransportError: a rank died, or the library that moves the bytes failed.
        """
