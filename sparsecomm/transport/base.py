"""`Transport`: point-to-point messages between ranks. A wait that would never end raises an error.

A transport numbers its collective calls, so that it never mistakes a message of an aborted call for one of a later
call. A call "counts" if its result is valid. `MessageMemory` builds messages.
"""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar, cast

import numpy as np
from numpy.typing import DTypeLike

from sparsecomm.errors import InvalidInputError, SparseCommError
from sparsecomm.signals import deferred
from sparsecomm.tensors.arrays import Array
from sparsecomm.tensors.arrays import Bytes as Bytes

if TYPE_CHECKING:
    import torch.distributed
    from mpi4py import MPI

MAX_CALL_BYTES = 256  # maximum size of the call description passed to `Transport.begin`
MAX_CONTENTS_BYTES = 200_000  # maximum size of the contents passed to `Transport.exchange_contents`

Comm: TypeAlias = "MPI.Intracomm | torch.distributed.ProcessGroup | Transport | None"
Mismatch = Callable[[bytes, int], SparseCommError]
_T = TypeVar("_T")
_attaching = Lock()


class MessageMemory:
    """Memory that a transport sends from and receives into. This class uses host memory: NumPy arrays.

    The sender builds a message with `empty`, `put_header` and `put`. The transport calls `ready` before it sends the
    message. On the other rank, the transport allocates the message with `empty`, and the receiver reads it with
    `header` and `get`. If the message arrives in several pieces, the transport also calls `landed` and `move`.

    Subclasses for devices override these methods; their copies may be asynchronous.
    """

    def empty(self, nbytes: int) -> Bytes:
        """Allocate ``nbytes`` of uninitialized memory."""
        return np.empty(nbytes, np.uint8)

    def put_header(self, header: bytes, to: Bytes) -> None:
        """Copy ``header`` from host memory to the beginning of the message ``to``."""
        to[: len(header)] = np.frombuffer(header, np.uint8)

    def put(self, array: Array, to: Bytes) -> None:
        """Start copying an array of the device to ``to``, a part of a message with the same number of bytes.

        Do not change the array until `ready` has returned for these bytes.
        """
        to[:] = array.view(np.uint8)

    def ready(self, message: Bytes, nbytes: int) -> None:
        """Wait until the first ``nbytes`` of a message are written and may be sent."""

    def landed(self, message: Bytes, begin: int, end: int) -> None:
        """Called when bytes ``begin`` to ``end`` of a message in several pieces have arrived."""

    def move(self, part: Bytes, to: Bytes) -> None:
        """Copy ``part``, the pieces that have arrived, to the beginning of ``to``, which is larger."""
        to[: len(part)] = part

    def header(self, message: Bytes, nbytes: int) -> bytes:
        """Copy the first ``nbytes`` of a message, or all of a shorter one, to host memory."""
        return message[:nbytes].tobytes()

    def get(self, data: Bytes, dtype: DTypeLike) -> Array:
        """Return the items in a part of a message as a flat array of the device, if possible as a view."""
        return data.view(dtype)


HOST = MessageMemory()


@dataclass(slots=True)
class TrafficCounters:
    """Number of messages of one rank, and their bytes without framing, since its transport was made."""

    bytes_sent: int = 0
    bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    _sums: tuple[int, int] = 0, 0  # bytes sent and received in sums
    _before: tuple[int, int] | None = None  # bytes sent and received when the current sum began

    @property
    def setup(self) -> tuple[int, int]:
        """Bytes sent and received outside of sums: to measure links, and to compare arguments."""
        sent, received = self._before or (self.bytes_sent, self.bytes_received)
        return sent - self._sums[0], received - self._sums[1]

    def begin_sum(self) -> None:
        """Count traffic as part of a sum from now on."""
        self._before = self.bytes_sent, self.bytes_received

    def end_sum(self) -> None:
        """Count traffic as set-up traffic again."""
        assert self._before is not None
        (sent, received), before = self._sums, self._before
        self._sums = sent + self.bytes_sent - before[0], received + self.bytes_received - before[1]
        self._before = None


@dataclass(frozen=True, slots=True)
class PeerTraffic:
    """The traffic with one peer since the transport was made."""

    rank: int  # the peer
    bytes_sent: int  # over process groups, including framing
    bytes_received: int
    seconds: float  # with queued or unacknowledged bytes to the peer. Over MPI: time spent waiting for the peer
    round_trip: float = 0.0  # the shortest observed, in seconds; 0 if unknown, as over MPI
    retransmits: int = 0  # TCP segments; 0 over MPI
    connections: int = 0  # of TCP; 0 if unknown, as over MPI

    @property
    def rate(self) -> float:
        """Bytes per second sent to the peer while any were in flight; 0 if none were."""
        return self.bytes_sent / self.seconds if self.seconds > 0 else 0.0


class DenseCollectives(Protocol):
    """Dense collectives between the ranks of a node for arrays on their devices, such as NCCL's."""

    def reduce_scatter(self, slices: Array, own: Array) -> None:
        """Set ``own`` to the ranks' sum of this rank's slice. ``slices`` has a slice for each rank, of equal length."""

    def all_gather(self, own: Array, gathered: Array) -> None:
        """Set ``gathered`` to the arrays of all ranks."""


class Request(ABC):
    """A message in flight. Its bytes must not change until `wait` returns."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until the bytes may be reused. A second wait returns immediately. Raises as `Transport.receive`."""


class Transport(ABC):
    """Point-to-point messages between ``size`` ranks. Messages between two ranks arrive in the order sent."""

    rank: int  # as in MPI
    size: int
    number: int  # of the latest call; 0 before the first
    last_success = 0  # number of the latest call that succeeded on this rank; 0 if none has
    counters: TrafficCounters  # of this rank
    node_of_rank: Sequence[int]  # nodes are numbered from 0 in the order of their first ranks
    num_nodes: int
    timeout: float  # maximum seconds of a wait, in the latest call
    contents: Callable[[], Iterable[tuple[str, object]]] = tuple  # the latest call's names and values, for errors
    library: str  # name and version of the library that moves the bytes
    device_memory = False  # whether `isend` and `receive` accept CUDA device memory
    simulated = False  # whether the ranks run in one process, in virtual time
    threaded = False  # whether one thread may make calls while other threads use the same library
    # The name of the error that kept this rank from beginning a call, so that the rank may be one call behind the
    # others. Empty if there was none since its last successful call.
    skip_reason = ""
    # Closes the transport with the function passed, after the calls in flight; None if no upper layer makes calls.
    close_after_calls: Callable[[Callable[[], object]], object] | None = None
    _attached: Mapping[Callable[[Transport], object], object] = MappingProxyType({})

    def attached(self, kind: Callable[[Transport], _T]) -> _T:
        """Return the object of class ``kind`` that belongs to this transport, and make it on first use.

        Upper layers keep here what lives as long as the transport, such as its queue of calls.
        """
        attached = self._attached.get(kind)
        if attached is None:
            with _attaching:
                if kind not in self._attached:
                    self._attached = {**self._attached, kind: kind(self)}
                attached = self._attached[kind]
        return attached  # type: ignore[return-value]

    def clock(self) -> float:
        """Return this rank's clock in seconds since an arbitrary time. Simulated ranks return virtual time."""
        return time.monotonic()

    def describe_call(self) -> str:
        """Return the number of the latest call, and its name."""
        contents = dict(self.contents())
        name = f", {contents['call']}" if "call" in contents else ""
        return f"call {self.number}{name}".replace(", a step", f", step {contents.get('step')}")

    @property
    def members(self) -> Sequence[int]:
        """The number of each rank in the whole job; 0 to size - 1 if the job is unknown."""
        return range(self.size)

    def has_collectives(self, device: str) -> bool:
        """Return whether there are `collectives` for a kind of device. The same on all ranks. If not, use messages."""
        return False

    def collectives(self, ranks: Sequence[int], device: str) -> DenseCollectives:
        """Return dense collectives between some ranks. Collective over ``ranks``; call it between calls."""
        raise NotImplementedError

    def peers(self) -> list[PeerTraffic]:
        """Return the traffic with each peer, ordered by rank; empty if it is not measured."""
        return []

    # -- calls --------------------------------------------------------------------------------------------------------

    @abstractmethod
    def begin(self, call: bytes, mismatch: Mismatch) -> int:
        """Begin the next collective call and return its number. Ranks that make the same calls get the same numbers.

        Args:
            call: an opaque description of the call, at most `MAX_CALL_BYTES`. During a long wait, a rank sends it to
                its peer, which compares both descriptions. This detects ranks that wait in different calls.
            mismatch: ``mismatch(other, rank)`` returns the error for the description of a rank that differs.

        Raises:
            InvalidInputError: the transport is closed, or an argument or a setting is invalid. No call has begun.
            TransportError: another rank has already left this call. `abort` must follow.
        """

    def conclude(self) -> None:  # noqa: B027  # most transports do not vote
        """Vote that this rank has completed the current call. If this returns, the call counts on this rank.

        If MPI survives dead ranks, wait for all votes: the call counts on all ranks or on none. Otherwise do nothing.
        After a `TransportError` or `CollectiveMismatchError` the call counts on no rank, and `abort` must follow.
        """

    @property
    def concluded(self) -> bool:
        """Whether the current call counts although `conclude` raised an exception while it waited."""
        return False

    @abstractmethod
    def end(self) -> None:
        """Mark the current call as complete on this rank. All its requests must have been waited for."""

    @abstractmethod
    def abort(self, error: BaseException) -> None:
        """Leave the current call with ``error`` and notify all other ranks, without waiting for them.

        Ranks that wait in the same call raise `CollectiveMismatchError` if ``error`` is one, and otherwise a
        `TransportError` with this rank and its reason. Does nothing outside of a call.
        """

    def exchange_contents(self, peer: int, contents: bytes) -> bytes | None:
        """Exchange the contents of the current call with ``peer``, whose call differs, before `abort`.

        Returns the peer's contents, perhaps damaged, or ``None`` if they do not arrive within a few seconds. Meanwhile,
        signal handlers wait. Raises `CollectiveMismatchError` or `TransportError` if a rank leaves the call.
        """
        return None

    def awaited(self, call: bytes) -> bool:
        """Return whether another rank has reported that it waits for this rank in the next call. Call it between calls.

        ``call``: the description of the next call.
        """
        return False

    @abstractmethod
    def realign(self) -> None:
        """Agree with all ranks on the number of the next call. Collective; must be called between calls.

        Messages of earlier calls are discarded. Ranks that are in a call raise `CollectiveMismatchError`.

        Raises:
            InvalidInputError: the transport is closed, or a setting is invalid.
            TimeoutError, RankFailedError, TransportError: a rank did not take part. Try again on all ranks.
        """

    # -- messages -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def isend(self, data: Bytes, to: int, memory: MessageMemory = HOST) -> Request:
        """Start sending ``data`` to rank ``to`` and return without waiting for the receiver.

        Args:
            data: contiguous bytes in ``memory``; may be empty. Do not change them until `Request.wait` returns.
            to: a rank; may be this one.
            memory: in host memory, or on a device if `device_memory` is set. The transport calls its `ready` before it
                reads ``data``.

        Raises:
            TransportError: there is no such rank, or the underlying library failed.
        """

    @abstractmethod
    def receive(self, source: int, memory: MessageMemory = HOST, expected: int = 0) -> Bytes:
        """Wait for the next message of the current call from rank ``source``, and return it in new ``memory``.

        Args:
            source: a rank; may be this one.
            memory: where to put the message.
            expected: the expected maximum size in bytes. It saves copying a long message; longer messages work, too.

        Raises:
            TimeoutError: nothing arrived for `timeout` seconds.
            RankFailedError: the rank is dead, according to MPI or to a broken connection.
            TransportError: a rank left the call with an error, or the underlying library failed.
            CollectiveMismatchError: a rank found that the calls do not match.
        """

    def exchange(self, data: Bytes, to: int, source: int, memory: MessageMemory = HOST, expected: int = 0) -> Bytes:
        """Send ``data`` to rank ``to`` while receiving from rank ``source``; return the received message."""
        return self.exchange_all([(to, data)], [source], memory, expected)[0]

    def exchange_all(
        self,
        sends: Sequence[tuple[int, Bytes]],
        sources: Sequence[int],
        memory: MessageMemory = HOST,
        expected: int = 0,
    ) -> list[Bytes]:
        """Send to several ranks and receive one message from each of several ranks, all at once: in one trip.

        Args:
            sends: pairs of a rank and its message. Several ranks may get the same bytes.
            sources: ranks to receive from, each at most once. Messages are returned in this order.
            memory: of all messages.
            expected: of each received message, as in `receive`.
        """
        requests = [self.isend(data, to, memory) for to, data in sends]
        messages = [self.receive(source, memory, expected) for source in sources]
        for request in requests:
            request.wait()
        return messages

    @deferred
    def broadcast(self, data: Bytes, root: int) -> None:
        """Copy ``data`` of rank ``root`` to all ranks, in place. Collective; must be called between calls.

        ``data``: contiguous bytes in host memory, of the same length on all ranks. After a `TimeoutError` it may still
        be overwritten. Other errors: as `receive`.
        """
        if self.rank == root:
            for request in [self.isend(data, to) for to in range(self.size) if to != root]:
                request.wait()
        else:
            data[:] = self.receive(root)


def existing_transport(comm: Comm = None) -> Transport | None:
    """Return the transport of ``comm``, as `transport_of`, or ``None`` if it has none yet."""
    mpi4py: Any = sys.modules.get("mpi4py.MPI")
    if mpi4py is None or not isinstance(comm, mpi4py.Comm):
        if comm is not None and isinstance(comm, Transport):
            return comm
        if (group := group_of(comm)) is not None:
            return None if type(group) is int else _existing("sparsecomm.transport.process_group", group)
        if comm is not None:
            raise InvalidInputError(
                f"comm is {comm!r} of type {type(comm).__name__}; expected an mpi4py communicator, a process group of "
                "torch.distributed, a transport, or None for all ranks of the job"
            )
    return _existing("sparsecomm.transport.mpi", comm)


def _existing(module: str, comm: Any) -> Transport | None:
    """Return the transport of ``comm`` if the module for such communicators has been imported and has one."""
    find: Any = getattr(sys.modules.get(module), "existing", None)
    return None if find is None else find(comm)


def members_of(comm: object) -> Sequence[int]:
    """Return the `Transport.members` of a communicator, even if it has no transport yet. Sends nothing.

    A process group that is destroyed has none.
    """
    transport = existing_transport(comm)  # type: ignore[arg-type]
    if transport is not None:
        return transport.members
    if (group := group_of(comm)) is not None:
        with suppress(KeyError):
            return () if type(group) is int else sys.modules["torch.distributed"].get_process_group_ranks(group)
        return ()
    MPI, group = sys.modules["mpi4py.MPI"], cast(Any, comm).group
    numbers: Sequence[int] = MPI.Group.Translate_ranks(group, None, MPI.COMM_WORLD.group)
    return numbers


def group_of(comm: object) -> Any:
    """Return ``comm`` if it is a process group, or the default group if it is ``None``; otherwise return ``None``.

    `GroupMember.NON_GROUP_MEMBER`, which `torch.distributed` gives to processes outside of a group, counts as a group.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available():
        return None
    if comm is None:
        return dist.group.WORLD if dist.is_initialized() else None
    outside = type(comm) is int and comm == dist.GroupMember.NON_GROUP_MEMBER
    return comm if outside or isinstance(comm, dist.ProcessGroup) else None
