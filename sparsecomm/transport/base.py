"""What a transport is: bytes between ranks, in order, and the news that a rank has given up.

A transport knows nothing of sparsity. It numbers the collective calls made on it, so that bytes of an abandoned
call are never taken for those of a later one, and it turns every way in which a peer can fail to answer into an
error that names the rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sparsecomm.errors import SparseCommError
from sparsecomm.transport.memory import HOST, Bytes, Memory

__all__ = ["Calls", "Mismatch", "Request", "TrafficCounters", "Transport"]

Mismatch = Callable[[bytes, int], SparseCommError]


@dataclass
class TrafficCounters:
    """What this rank has moved since the transport was made: payload bytes and messages, without framing by MPI."""

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0


class Request(ABC):
    """A message under way. Its bytes must not change until `wait` returns."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until the bytes may be reused.

        Raises:
            TimeoutError, RankFailedError, TransportError, CollectiveMismatchError: as `Transport.receive`.
        """


class Calls(Protocol):
    """Calls that were submitted on a transport."""

    def finish(self) -> None:
        """Make those that have not been made: other ranks may be waiting for them. The last thing done with it."""


class Transport(ABC):
    """Point-to-point bytes between ``size`` ranks. Messages between two ranks arrive in the order sent."""

    rank: int
    size: int
    counters: TrafficCounters
    node_of_rank: Sequence[int]  # for each rank, the number of the machine that it is on, counted from 0 as they appear
    num_nodes: int  # how many there are
    library: str  # what moves the bytes, with its version
    device_memory = False  # whether it sends from and receives into memory of a CUDA device
    threaded = False  # whether one thread may make its calls while others do other things
    queue: Calls | None = None  # of the calls on it, see `sparsecomm.calls.queue`

    @abstractmethod
    def begin(self, call: bytes, mismatch: Mismatch) -> int:
        """Start the next collective call; return its number, the same on all ranks that call in the same order.

        ``call`` is an opaque description of the call, at most 256 bytes. A rank that waits for long sends it to the
        rank that it waits for, which compares it with its own: ranks that wait for each other in calls that do not
        match find out. ``mismatch(theirs, rank)`` makes the error for a description that differs from ours.
        """

    @abstractmethod
    def end(self) -> None:
        """The call begun last is complete on this rank."""

    @abstractmethod
    def abort(self, error: BaseException) -> None:
        """This rank leaves the call begun last with ``error``: tell every other rank, and wait for none.

        Does nothing if no call has begun, or it has ended.

        The others, waiting in the same call, raise: `CollectiveMismatchError` if that is what ``error`` is,
        `TransportError` naming this rank and its reason otherwise. The next call starts afresh.
        """

    @abstractmethod
    def isend(self, data: Bytes, to: int, memory: Memory = HOST) -> Request:
        """Start sending ``data`` (contiguous bytes, any length, also 0) to rank ``to``.

        They were made by ``memory``, which is on the host, or on a device if the transport takes `device_memory`; the
        transport asks it whether they are ready.
        """

    @abstractmethod
    def receive(self, source: int, memory: Memory = HOST, expected: int = 0) -> Bytes:
        """The next message from rank ``source`` that belongs to the current call, made by ``memory``.

        ``expected``: about how many bytes, at most; a long message then needs no copying. It may be longer.

        Raises:
            TimeoutError: nothing came for `sparsecomm.config.timeout` seconds; names the rank waited for.
            RankFailedError: MPI reports, or a broken connection shows, that the rank is dead.
            TransportError: a rank left the call with an error, or the library that moves the bytes failed.
            CollectiveMismatchError: a rank found that the calls do not match.
        """

    def exchange(self, data: Bytes, to: int, source: int, memory: Memory = HOST, expected: int = 0) -> Bytes:
        """Send ``data`` to rank ``to`` and receive from rank ``source``, both under way at once."""
        request = self.isend(data, to, memory)
        message = self.receive(source, memory, expected)
        request.wait()
        return message
