"""The transport over a process group of `torch.distributed`, for programs that ``torchrun`` starts without MPI.

    torch.distributed.init_process_group("nccl")  # or "gloo"
    sparsecomm.sparse_allreduce(gradient, 0.01)  # comm=group for another group than the default one

Bytes travel over gloo, on connections of its own between the ranks of the group, so that its messages never meet the
user's, whatever the group's backend is. Entries on a GPU go through pinned host memory.

The module `gloo` moves the messages, and puts completions in a queue, on which calls wait. Next to data there are
control messages, as over MPI (`sparsecomm.transport.control`), and *goodbye*, the last message of a rank that ends in
order.
"""

from __future__ import annotations

import _thread
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import Empty

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from sparsecomm import config
from sparsecomm.errors import InvalidInputError, RankFailedError, TimeoutError, TransportError
from sparsecomm.transport import job
from sparsecomm.transport.base import Request
from sparsecomm.transport.control import ControlMessage, FailureDetector, unreadable_error
from sparsecomm.transport.memory import HOST, Bytes, MessageMemory
from sparsecomm.transport.process_group.gloo import (
    DATA,
    DISCONNECTED,
    GOODBYE,
    SENT,
    UNREADABLE,
    Completion,
    Connections,
    Gloo,
    allgather_bytes,
)
from sparsecomm.transport.process_group.rendezvous import rendezvous
from sparsecomm.transport.scheduling import check_signals

__all__ = ["ProcessGroupTransport", "existing", "of"]

_PING = 0.25  # seconds until a peer is told that it is waited for; doubles every time
_CHECK = 1.0  # seconds after which a wait looks for signals that came just before it


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

    device_memory = False  # gloo moves host memory: entries of a GPU are copied there and back
    threaded = True

    def __init__(self, group: dist.ProcessGroup, gloo: Gloo | None, nodes: Sequence[int]) -> None:
        """Connect the ranks.

        Args:
            gloo: one of the same ranks that nobody else uses; None where there is one rank.
            nodes: for each rank, the number of its node.
        """
        super().__init__(nodes)
        self.rank, self.size = group.rank(), group.size()
        self.library = f"gloo of torch {torch.__version__}"
        self.limit = config.max_message_bytes()
        self._group = weakref.ref(group)
        self._process = os.getpid()
        self._open = True
        self._lost: dict[int, TransportError] = {}  # rank -> why nothing will come from it any more
        self._messages: dict[tuple[int, int], deque[Bytes]] = {}  # (source, call) -> what has come
        self._connections = Connections(gloo, self.rank, self.size, self.limit)

    # -- calls ------------------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if os.getpid() != self._process:
            raise InvalidInputError(
                "this process was forked from the one whose transport this is: make a process group in it, by "
                "`init_process_group`, or start it by the method 'spawn'"
            )
        group = self._group()
        if not self._open or group is None or not _registered(group):
            raise InvalidInputError("this transport is closed: its process group was destroyed")

    def _start(self) -> None:
        if self._messages:
            self._messages = {key: queue for key, queue in self._messages.items() if key[1] >= self.number}
        self._drop_old_control()
        self._listen(0.0)
        super()._start()

    # -- bytes ------------------------------------------------------------------------------------------------------

    def isend(self, data: Bytes, to: int, memory: MessageMemory = HOST) -> Request:
        self._check_peer(to)
        memory.ready(data, len(data))
        self._count_sent(len(data))
        request = _Request(self, to)
        if to == self.rank:
            self._take(Completion(DATA, to, self.number, np.array(data)))
            request.out = True
            return request
        try:
            request.out = self._connections.send(to, self.number, data, request)
        except RuntimeError as error:  # gloo's: wait for how the connection has broken
            self._wait(to, lambda: False, error)
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
        self.broadcast_tensor(torch.from_numpy(data), root)

    def broadcast_tensor(self, data: torch.Tensor, root: int) -> None:
        """Do as `broadcast`, with a tensor of any type and device.

        It goes over the group itself if that has a backend for the device of ``data``, otherwise through host memory
        over the connections of this transport.

        Args:
            data: contiguous, of the same size and type on all ranks.

        Raises:
            TransportError: a rank died, or the group was destroyed.
        """
        group = self._group()
        if group is None:
            raise TransportError(f"rank {self.rank}: the process group of this transport was destroyed")
        try:
            if f"{data.device.type}:" in dist.get_backend_config(group):
                dist.broadcast(data, dist.get_global_rank(group, root), group)
            else:
                host = data.cpu()
                self._connections.broadcast(host, root)
                data.copy_(host)
        except RuntimeError as error:
            raise TransportError(f"rank {self.rank}: the broadcast from rank {root} failed: {error}") from error

    def _send_control(self, to: int, kind: int, text: bytes) -> None:
        self._connections.send_control(to, kind, self.number, text)

    # -- waiting ----------------------------------------------------------------------------------------------------

    def _wait(self, peer: int, done: Callable[[], bool], broken: RuntimeError | None = None) -> None:
        """Wait until ``done()``, for ``peer``, to which the connection may be known to be ``broken``."""
        if done():
            return
        began, next_ping = time.monotonic(), _PING
        while True:
            self._take_all()
            if done():
                return
            if peer in self._lost:
                raise self._lost[peer] from broken
            check_signals()
            waited = time.monotonic() - began
            if ping := waited >= next_ping:
                next_ping = 2 * next_ping + _PING
            self._check_wait(peer, waited, ping=ping)
            self._take_next(min(next_ping - waited, self.timeout - waited, _CHECK))

    def _listen(self, seconds: float) -> None:
        self._take_all()
        if seconds:
            self._take_next(seconds)
        for lost in self._lost.values():
            raise lost

    def _take_all(self) -> None:
        for _ in range(self._connections.completions.qsize()):  # not of what comes meanwhile: that may be without end
            self._take_next(0.0)

    def _take_next(self, seconds: float) -> None:
        """Take in what happens next on the connections, within so many seconds."""
        try:
            completion = self._connections.completions.get(timeout=max(0.0, seconds))
        except Empty:
            return
        self._take(completion)

    def _take(self, completion: Completion) -> None:
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
            f"rank {rank} died: its connection to rank {self.rank} (call {self.number}) broke. {advice} gloo says: "
            f"{reason}",
            (rank,),
        )

    # -- the end ----------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        """Say goodbye and end the threads: when the group is gone, or when the interpreter ends."""
        if self._open and os.getpid() == self._process:  # a forked process has none of the threads
            self._open = False
            self._connections.close()


# -- one transport per group ------------------------------------------------------------------------------------------

_joinings: weakref.WeakKeyDictionary[dist.ProcessGroup, _Joining] = weakref.WeakKeyDictionary()  # the last ones
_lock = threading.RLock()  # of `_joinings`; nobody waits while holding it
_POLL = 0.05  # seconds after which a thread that waits for a joining looks again


def existing(group: dist.ProcessGroup) -> ProcessGroupTransport | None:
    """Return the transport of a process group, if there is one."""
    joining = _joinings.get(group)
    return None if joining is None else joining.transport


def of(group: dist.ProcessGroup | int) -> ProcessGroupTransport:
    """Return the transport of a process group; see `sparsecomm.transport.of`.

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
    rank, size = group.rank(), group.size()
    gloo: Gloo | None = None
    marks = [job.node_id()]
    try:
        if size > 1:
            theirs = dist.distributed_c10d._get_process_group_store(group)
            if hasattr(theirs, "clone"):  # in later versions of torch: a connection for this thread alone, on which no
                theirs = theirs.clone()  # other waits while this one waits for a key
            number = rendezvous(PrefixStore("sparsecomm", theirs), rank, size, timeout)  # a new group may have its name
            store = PrefixStore(f"sparsecomm {number}", theirs)
            gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))
            marks = allgather_bytes(gloo, marks[0], size, timeout)
        transport = ProcessGroupTransport(group, gloo, job.number_nodes(marks))
    except RuntimeError as error:  # gloo's and the store's
        raise TransportError(f"rank {rank} cannot connect to the other ranks of its group: {error}") from error
    weakref.finalize(group, transport.close)  # also when the interpreter ends
    return transport
