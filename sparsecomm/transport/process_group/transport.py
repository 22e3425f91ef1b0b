"""The transport over a process group of `torch.distributed`, for programs that ``torchrun`` starts without MPI.

    torch.distributed.init_process_group("nccl")  # or "gloo"
    sparsecomm.sparse_allreduce(gradient, 0.01)  # comm=group for another group than the default one

Bytes travel over TCP connections of its own between the ranks of the group, so that its messages never meet the user's,
whatever the group's backend is. Of the group it uses the store, in which the ranks find each other's addresses. Entries
on a GPU go through pinned host memory.

`connections.hpp` beside this moves the messages, and has a queue of completions, on which calls wait. Next to data
there are control messages, as over MPI (`sparsecomm.transport.control`), and *goodbye*, the last message of a rank that
ends in order.
"""

from __future__ import annotations

import _thread
import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from sparsecomm import config
from sparsecomm.errors import InvalidInputError, RankFailedError, SparseCommError, TimeoutError, TransportError
from sparsecomm.transport import job
from sparsecomm.transport.base import PeerTraffic, Request
from sparsecomm.transport.control import ControlMessage, FailureDetector, format_ranks, unreadable_error
from sparsecomm.transport.memory import HOST, Bytes, MessageMemory
from sparsecomm.transport.process_group import _connections
from sparsecomm.transport.process_group.addresses import own_address
from sparsecomm.transport.process_group.rendezvous import rendezvous
from sparsecomm.transport.scheduling import be_prompt, check_signals

__all__ = ["ProcessGroupTransport", "existing", "of"]

Connections = _connections.Connections
DATA, GOODBYE, SENT = _connections.DATA, _connections.GOODBYE, _connections.SENT
DISCONNECTED, UNREADABLE = _connections.DISCONNECTED, _connections.UNREADABLE

_PING = 0.25  # seconds until a peer is told that it is waited for; doubles every time
_CHECK = 1.0  # seconds after which a wait looks for signals that came just before it
_CLOSE_TIMEOUT = 1.0  # seconds for which a rank that ends waits for peers that take nothing of what it has sent
_MIN_SILENCE = 120.0  # seconds after which a host that does not answer is dead, or the timeout, if that is longer
_CHAINED = 2**20  # bytes from which on a broadcast goes from rank to rank, in pieces of so many
_PREFIX = "sparsecomm"  # of keys in the store
_VERSION = "3"  # of what ranks tell each other


class _Request(Request):
    """A message that may be under way to rank ``to``. ``out``: whether its bytes may be reused."""

    out = False

    def __init__(self, transport: ProcessGroupTransport, to: int) -> None:
        self._transport, self._to = transport, to

    def wait(self) -> None:
        self._transport._wait(self._to, lambda: self.out)


class ProcessGroupTransport(FailureDetector):
    """Bytes between the ranks of a process group; ``rank`` is that in the group. Made by `of`, once per group.

    One call at a time may be made on it, from any thread.
    """

    device_memory = False  # entries of a GPU are copied to host memory and back
    threaded = True

    def __init__(self, group: dist.ProcessGroup, connections: Connections, nodes: Sequence[int]) -> None:
        """Take over connections to all other ranks. ``nodes``: for each rank, the number of its node."""
        super().__init__(nodes)
        self.rank, self.size = group.rank(), group.size()
        self.library = "TCP"
        self._group = weakref.ref(group)
        self._process = os.getpid()
        self._open = True
        self._lost: dict[int, TransportError] = {}  # rank -> why nothing will come from it any more
        self._messages: dict[tuple[int, int], deque[Bytes]] = {}  # (source, call) -> what has come
        self._connections = connections

    @property
    def members(self) -> Sequence[int]:
        """For each rank, the number that it has in the job; ranks in their order, where that is not known."""
        group = self._group()
        return range(self.size) if group is None else dist.get_process_group_ranks(group)

    # -- calls ------------------------------------------------------------------------------------------------------

    def _is_usable(self) -> bool:
        """Return whether the process group still exists."""
        group = self._group()
        return self._open and group is not None and _registered(group)

    def _check_usable(self) -> None:
        if os.getpid() != self._process:
            raise InvalidInputError(
                "this process was forked from the one whose transport this is: make a process group in it, by "
                "`init_process_group`, or start it by the method 'spawn'"
            )
        if not self._is_usable():
            raise InvalidInputError("this transport is closed: its process group was destroyed")

    def _start(self) -> None:
        if self._messages:
            self._messages = {key: queue for key, queue in self._messages.items() if key[1] >= self.number}
        self._take_all()
        self._drop_old_control()
        super()._start()
        self._check_lost()

    # -- bytes ------------------------------------------------------------------------------------------------------

    def isend(self, data: Bytes, to: int, memory: MessageMemory = HOST) -> Request:
        self._check_peer(to)
        memory.ready(data, len(data))
        self._count_sent(len(data))
        request = _Request(self, to)
        if to == self.rank:
            self._take((DATA, to, self.number, np.array(data)))
            request.out = True
            return request
        out = self._connections.send(to, self.number, data, request)
        if out is None:  # wait for how the connection has broken
            self._wait(to, lambda: False)
        elif out:
            request.out = True
        return request

    def receive(self, source: int, memory: MessageMemory = HOST, expected: int = 0) -> Bytes:
        self._check_peer(source)
        key = source, self.number
        self._wait(source, lambda: key in self._messages)
        queue = self._messages[key]
        message = queue.popleft()
        if not queue:
            del self._messages[key]
        return self._deliver(message, len(message), memory)

    def broadcast(self, data: Bytes, root: int) -> None:
        """As of `Transport`; long data goes from rank to rank in pieces, so that each sends all of it once."""
        if len(data) * (self.size - 1) <= _CHAINED:
            super().broadcast(data, root)
            return
        requests, before, after = [], (self.rank - 1) % self.size, (self.rank + 1) % self.size
        for begin in range(0, len(data), _CHAINED):
            piece = data[begin : begin + _CHAINED]
            if self.rank != root:
                piece[:] = self.receive(before)
            if after != root:
                requests.append(self.isend(piece, after))
        for request in requests:
            request.wait()

    def broadcast_tensor(self, data: torch.Tensor, root: int) -> None:
        """Do as `broadcast`, with a tensor of any type and device.

        From a GPU it goes over the group itself if that has a backend for it, otherwise through host memory.

        Args:
            data: contiguous, of the same size and type on all ranks.

        Raises:
            TimeoutError, RankFailedError: as `broadcast`.
            TransportError: a rank died, or the group was destroyed.
        """
        group = self._group()
        if group is None:
            raise TransportError(f"rank {self.rank}: the process group of this transport was destroyed")
        if data.device.type == "cpu" or f"{data.device.type}:" not in dist.get_backend_config(group):
            host = data.detach().cpu()
            self.broadcast(host.view(-1).view(torch.uint8).numpy(), root)
            if host.data_ptr() != data.data_ptr():
                data.copy_(host)
            return
        try:
            dist.broadcast(data, dist.get_global_rank(group, root), group)
        except RuntimeError as error:
            raise TransportError(f"rank {self.rank}: the broadcast from rank {root} failed: {error}") from error

    def peers(self) -> list[PeerTraffic]:
        if os.getpid() != self._process:
            return []  # a forked process has no connections
        others = [rank for rank in range(self.size) if rank != self.rank]
        return [PeerTraffic(rank, *self._connections.traffic(rank)) for rank in others]

    def _send_control(self, to: int, kind: int, text: bytes) -> None:
        self._connections.send_control(to, kind, self.number, text)

    # -- waiting ----------------------------------------------------------------------------------------------------

    def _wait(self, peer: int, done: Callable[[], bool]) -> None:
        """Wait until ``done()``, for ``peer``."""
        if done():
            return
        began, next_ping = time.monotonic(), _PING
        while True:
            self._take_all()
            if done():
                return
            if peer in self._lost:
                self._check_leavers()  # who leaves a call and ends says first why
                raise self._lost[peer]
            check_signals()
            waited = time.monotonic() - began
            if waited >= _PING and not self._is_usable():
                raise TransportError(
                    f"rank {self.rank}: the process group was destroyed while call {self.number} waited for rank "
                    f"{peer}. Destroy a group only when its calls have ended."
                )
            if ping := waited >= next_ping:
                next_ping = 2 * next_ping + _PING
            self._check_wait(peer, waited, ping=ping)
            self._take_next(min(next_ping - waited, self.timeout - waited, _CHECK))

    def _listen(self, seconds: float) -> None:
        self._take_all()
        if seconds:
            self._take_next(seconds)
        self._check_lost()

    def _check_lost(self) -> None:
        for lost in self._lost.values():
            raise lost

    def _take_all(self) -> None:
        for _ in range(self._connections.pending):  # not of what comes meanwhile: that may be without end
            self._take_next(0.0)

    def _take_next(self, seconds: float) -> None:
        """Take in what happens next on the connections, within so many seconds."""
        completion = self._connections.next(seconds)
        if completion is not None:
            self._take(completion)

    def _take(self, completion: tuple[int, int, int, Any]) -> None:
        """Take in what `Connections.next` returns."""
        kind, rank, number, what = completion
        if kind == DATA:
            if number >= self.number:  # else of a call that was abandoned
                self._messages.setdefault((rank, number), deque()).append(what)
        elif kind == SENT:
            what.out = True
        elif kind in (GOODBYE, DISCONNECTED, UNREADABLE):
            self._lost.setdefault(rank, self._loss(kind, rank, what))
        else:
            self._add_control(ControlMessage(rank, number, kind, what.tobytes()))

    # -- errors -----------------------------------------------------------------------------------------------------

    def _loss(self, kind: int, rank: int, reason: str) -> TransportError:
        advice = "The transport cannot be used any more: restart the job, or make new process groups."
        advice += job.advice_for_restart()
        if kind == UNREADABLE:
            return TransportError(f"{unreadable_error(self.rank, rank, reason)}. {advice}")
        if kind == GOODBYE:
            return TransportError(
                f"rank {rank} has ended, or destroyed the process group, and rank {self.rank} (call {self.number}) "
                f"still makes calls. {advice}"
            )
        return RankFailedError(
            f"rank {rank} died: its connection to rank {self.rank} (call {self.number}) broke ({reason}). {advice}",
            (rank,),
        )

    # -- the end ----------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        """Say goodbye and end the connections: when the group is gone, or when the interpreter ends.

        A rank that left its last call because another one did passes on why: its goodbye may be read before what the
        other one has said.
        """
        if self._open and os.getpid() == self._process:  # a forked process has no connections
            self._open = False
            if (reason := self._reason) is not None and reason.number == self.number:
                for rank in range(self.size):
                    if rank not in (self.rank, reason.rank):
                        self._send_control(rank, reason.kind, reason.text)
            self._connections.close(_CLOSE_TIMEOUT)


# -- one transport per group ------------------------------------------------------------------------------------------

_joinings: weakref.WeakKeyDictionary[dist.ProcessGroup, _Joining] = weakref.WeakKeyDictionary()  # the last ones
_lock = threading.RLock()  # of `_joinings`; nobody waits while holding it
_POLL = 0.05  # seconds after which a thread that waits for a joining looks again, and a joining whether to end
_LAST_TRIPS = 5.0  # seconds for which an interpreter that ends waits for answers of the store
_ending = threading.Event()  # the interpreter ends


@atexit.register
def _end_joinings() -> None:
    """End the joinings that are under way, whose callers were interrupted.

    In a thread that comes back from torch's C++ when the interpreter has ended, torch ends the process by SIGABRT.
    """
    _ending.set()
    deadline = time.monotonic() + _LAST_TRIPS
    for joining in list(_joinings.values()):
        joining.end(deadline)


def existing(group: dist.ProcessGroup) -> ProcessGroupTransport | None:
    """Return the transport of a process group, if there is one."""
    joining = _joinings.get(group)
    return None if joining is None else joining.transport


def of(group: dist.ProcessGroup | int) -> ProcessGroupTransport:
    """Return the transport of a process group; see `sparsecomm.transport.transport_of`.

    The first call connects the ranks, over the network interface that gloo would use (``GLOO_SOCKET_IFNAME``). The
    connections end with the group, or with the process.

    Args:
        group: of any backend, or what torch gives to a process that is no member of it.

    Raises:
        InvalidInputError: this process is no member of the group, or the group was destroyed.
        TimeoutError: a rank did not make the first call within ``SPARSECOMM_TIMEOUT`` seconds. It may be tried again.
        TransportError: the ranks could not be connected.
    """
    if isinstance(group, int):  # what torch gives to others
        raise InvalidInputError("this process is not a member of the group: ranks outside a group must not call")
    if not _registered(group):
        raise InvalidInputError("group was destroyed: make it again, or give another one")
    if (found := existing(group)) is not None:
        return found
    if group is dist.group.WORLD and group.size() == 1:
        job.check_alone(
            "the default process group of torch.distributed has one",
            "Let torch.distributed.init_process_group() take the number of ranks from the environment.",
        )
    timeout, own = config.timeout(), None
    while True:
        with _lock:
            joining = _joinings.get(group)
            if joining is None or joining.error is not None:
                joining = _joinings[group] = own = _Joining(group, timeout)
            joining.start()
        joining.wait()
        if joining.transport is not None:
            return joining.transport
        # One that was begun before, and whose wait was interrupted, had less time.
        if joining is own or not isinstance(joining.error, TimeoutError):
            assert joining.error is not None
            try:
                raise joining.error
            finally:
                del joining, own  # the error holds this frame


def _registered(group: dist.ProcessGroup) -> bool:
    try:
        return dist.get_rank(group) >= 0
    except (ValueError, RuntimeError):  # of a group that was destroyed, and if there is none at all
        return False


class _Joining:
    """The first call on a group: a thread connects the ranks, without trusting that all of them come.

    In a thread no signal handler runs, and what connects is torch's Python code. So what the ranks do together is not
    divided by an interrupt on one of them, which ends only the wait: the next call finds the transport, or goes on
    waiting.

    Attributes:
        transport: ``None`` until the ranks are connected.
        error: why they could not be.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        """Prepare it: ``timeout`` is in seconds."""
        self.transport: ProcessGroupTransport | None = None
        self.error: BaseException | None = None
        self._group: dist.ProcessGroup | None = group  # until it has ended
        self._timeout = timeout
        self._started = False
        self._under_way = threading.Lock()

    def start(self) -> None:
        """Start the thread, if that has not been done."""
        if not self._started:
            self._under_way.acquire()
            _thread.start_new_thread(self._run, ())
            self._started = True

    def wait(self) -> None:
        """Wait until it has ended."""
        while not self._under_way.acquire(timeout=_POLL):
            check_signals()
        self._under_way.release()

    def end(self, deadline: float) -> None:
        """Wait until it has ended, or until the deadline."""
        if self._started and self._under_way.acquire(timeout=max(deadline - time.monotonic(), 0.0)):
            self._under_way.release()

    def _run(self) -> None:
        group, self._group = self._group, None
        assert group is not None
        try:
            self.transport = _connect(group, self._timeout)
        except BaseException as error:
            self.error = error.with_traceback(None)
        finally:
            self._under_way.release()


def _connect(group: dist.ProcessGroup, timeout: float) -> ProcessGroupTransport:
    """Return the transport of a group, when all its ranks have come."""
    rank, size = group.rank(), group.size()
    connections = Connections(rank, size, config.max_message_bytes(), config.connections())
    node_ids = [job.node_id()]
    try:
        if size > 1:
            members = _meet(group, connections, node_ids[0], timeout)
            _join(connections, members, rank, timeout)
            node_ids = [member.node_id for member in members]
    except SparseCommError:
        raise
    except (RuntimeError, OSError, ValueError) as error:  # of the store and of the system
        raise TransportError(f"rank {rank} cannot connect to the other ranks of its group: {error}") from error
    transport = ProcessGroupTransport(group, connections, job.number_nodes(node_ids))
    weakref.finalize(group, transport.close)  # also when the interpreter ends
    return transport


class _Member(NamedTuple):
    """A rank, as it tells of itself at the rendezvous."""

    address: str
    port: int
    token: bytes
    node_id: bytes


def _meet(group: dist.ProcessGroup, connections: Connections, node_id: bytes, timeout: float) -> list[_Member]:
    """Return the members of a group, by rank; this one listens for the others."""
    token, address = os.urandom(_connections.TOKEN_BYTES), own_address()
    port = connections.listen(address, token)
    store = dist.distributed_c10d._get_process_group_store(group)
    another = None
    if hasattr(store, "clone"):  # in later versions of torch: a connection for this thread alone
        another = partial(_clone, store)
    told = f"{_VERSION} {address} {port} {token.hex()} {node_id.hex()}"
    lines = rendezvous(
        PrefixStore(_PREFIX, store), group.rank(), group.size(), timeout, token.hex(), told, _ending.is_set, another
    )
    members = []
    for rank, line in enumerate(lines):
        version, *fields = line.split()
        if version != _VERSION:
            raise ValueError(f"rank {rank} has another version of sparsecomm: install one version on all ranks")
        address, number, token_text, node_text = fields
        members.append(_Member(address, int(number), bytes.fromhex(token_text), bytes.fromhex(node_text)))
    return members


def _clone(store: Any) -> Any:
    return PrefixStore(_PREFIX, store.clone())


def _join(connections: Connections, members: list[_Member], rank: int, timeout: float) -> None:
    """Connect this rank with all others."""
    others = [other for other in range(len(members)) if other != rank]
    for other in others:
        connections.set_peer(other, members[other].address, members[other].port, members[other].token)
    connections.start(max(timeout, _MIN_SILENCE))
    be_prompt(connections.thread_id)
    deadline = time.monotonic() + timeout
    while not _ending.is_set():
        if connections.join(min(_POLL, deadline - time.monotonic())):
            return
        if time.monotonic() >= deadline or any(map(connections.failure, others)):
            break
    for other in others:
        if why := connections.failure(other):
            raise TransportError(
                f"rank {rank} cannot connect to rank {other} at {members[other].address}, port {members[other].port}: "
                f"{why}. {_ADVICE}"
            )
    missing = [other for other in others if not connections.is_connected(other)]
    raise TimeoutError(
        f"rank {rank} at {members[rank].address} waited {timeout:g} s for connections with {format_ranks(missing)}, at "
        f"{', '.join(members[other].address for other in missing[:8])}. {_ADVICE}"
    )


_ADVICE = (
    "Are these addresses those of the network between the machines? GLOO_SOCKET_IFNAME names its interface. A firewall "
    "must let TCP through, to any port. See docs/how-to/two-machines.md"
)
