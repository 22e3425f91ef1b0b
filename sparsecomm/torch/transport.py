"""The transport over a process group of `torch.distributed`, for programs that ``torchrun`` starts without MPI.

    torch.distributed.init_process_group("nccl")  # or "gloo"
    sparsecomm.sparse_allreduce(gradient, 0.01, comm=sparsecomm.torch.transport.of())

Bytes travel over gloo, on connections of its own between the ranks of the group, so that its messages never meet the
user's, whatever the group's backend is. Entries on a GPU go through pinned host memory.

gloo cannot be asked whether a message has come: a wait blocks, and one that times out closes all connections. So
every peer has a thread that receives whatever it sends, at once, and puts it in a queue, on which calls wait. That a
peer always receives is also why sends are soon complete. Next to data there are control messages, as over MPI
(`sparsecomm.transport.mpi`): *left*, *waiting*, and *goodbye*, the last one of a rank that ends in order.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import struct
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable
from datetime import timedelta
from itertools import chain, repeat
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from sparsecomm import config
from sparsecomm.errors import (
    CollectiveMismatchError,
    InvalidInputError,
    RankFailedError,
    TimeoutError,
    TransportError,
)
from sparsecomm.memory import HOST, Bytes, Memory
from sparsecomm.transport import Counters, Mismatch, Sending, Transport

__all__ = ["ProcessGroupTransport", "of"]

# What the threads put in the queue: (kind, rank, number of the call, bytes of the message). The kinds that travel:
_DATA, _WAITING, _GOODBYE, _LEFT = 0, 1, 2, 3  # from `_LEFT` on they say with which error a rank left
_LEFT_WITH = (TransportError, CollectiveMismatchError, RankFailedError)
_SENT, _GONE = -1, -2  # those that do not: a long message is out; a connection has broken

_PREFIX = struct.Struct("<qqqq")  # kind, number of the call, bytes, bytes in a piece or 0: they follow at once
_SHORT = 2**14  # bytes that travel with the prefix
_KEPT = 64  # short messages to one peer that may be under way before a thread looks which are out
_LONGEST_TEXT = 1000
_LONGEST_CALL = 256
_FOREVER = timedelta(days=10_000)
_MOMENT = timedelta(milliseconds=1)
_PARTING = 1.0  # seconds for which a rank that ends waits until its goodbyes are out
_ENQUIRE = 0.25  # seconds until a peer is told that it is waited for; doubles every time

_Event = tuple[int, int, int, Any]


class _Inbox(threading.Thread):
    """Receives all that one peer sends, until it says goodbye or its connection breaks."""

    def __init__(self, gloo: Any, source: int, events: SimpleQueue[_Event]) -> None:
        super().__init__(name=f"sparsecomm from rank {source}", daemon=True)
        self._gloo, self._source, self._events = gloo, source, events

    def run(self) -> None:
        first = np.empty(_PREFIX.size + _SHORT, np.uint8)
        kind = _DATA
        try:
            while kind != _GOODBYE:
                self._receive(first)
                kind, number, nbytes, piece = _PREFIX.unpack_from(first.data)
                data = np.empty(nbytes, np.uint8)
                if piece == 0:
                    data[:] = first[_PREFIX.size : _PREFIX.size + nbytes]
                else:
                    for begin in range(0, nbytes, piece):
                        self._receive(data[begin : begin + piece])
                self._events.put((kind, self._source, number, data))
        except Exception as error:  # gloo's are RuntimeErrors
            self._events.put((_GONE, self._source, 0, str(error)))

    def _receive(self, to: Bytes) -> None:
        self._gloo.recv([torch.from_numpy(to)], self._source, 0).wait(_FOREVER)  # what comes may be shorter


class _Outbox:
    """What is on its way to one peer.

    gloo must not lose a message before it is out, and says that it is only to who waits. A thread does, where
    somebody wants to know, and now and then.
    """

    def __init__(self, gloo: Any, to: int, events: SimpleQueue[_Event]) -> None:
        self._gloo, self._to, self._events = gloo, to, events
        self._under_way: deque[Any] = deque()  # gloo's handles, and after those of a long message, its `_UnderWay`
        self._wake: SimpleQueue[bool] = SimpleQueue()  # false: end
        self._thread: threading.Thread | None = None

    def send(self, parts: list[Bytes], long: _UnderWay | None = None) -> None:
        # In one step of the interpreter, which no Ctrl-C divides: a message of which a part is missing would take
        # the beginning of the next one for it.
        parts = [[torch.from_numpy(part)] for part in parts]
        handles = map(self._gloo.send, parts, repeat(self._to), repeat(0))
        self._under_way.extend(chain(handles, (long,)) if long is not None else handles)
        if long is not None or len(self._under_way) >= _KEPT:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"sparsecomm to rank {self._to}", daemon=True)
                self._thread.start()
            self._wake.put(True)

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError):  # the connection has broken: the inbox tells
            while self._wake.get():
                self._see_out(_FOREVER)

    def _see_out(self, timeout: timedelta) -> None:
        while self._under_way:
            handle = self._under_way.popleft()
            if isinstance(handle, _UnderWay):
                self._events.put((_SENT, self._to, 0, handle))
            else:
                handle.wait(timeout)

    def close(self, seconds: float) -> None:
        """Wait until everything is out, but not for long."""
        if self._thread is not None:
            self._wake.put(True)
            self._wake.put(False)
            self._thread.join(seconds)
        else:  # none can be started while the interpreter ends
            with contextlib.suppress(RuntimeError):
                self._see_out(timedelta(seconds=seconds))

    def join(self, seconds: float) -> None:
        if self._thread is not None:
            self._thread.join(seconds)


class _Out(Sending):
    """A message of which a copy is under way."""

    def wait(self) -> None:
        pass


class _UnderWay(Sending):
    def __init__(self, transport: ProcessGroupTransport, to: int) -> None:
        self._transport, self._to, self.out = transport, to, False

    def wait(self) -> None:
        self._transport._wait(self._to, lambda: self.out)


_OUT = _Out()


class ProcessGroupTransport(Transport):
    """Bytes between the ranks of a process group; ``rank`` is that in the group. Made by `of`, once per group.

    It has one thread per peer, and another one per peer that long messages go to; none of them is ever busy for long.
    One call at a time may be made on it, from any thread.
    """

    device_memory = False  # gloo moves host memory: entries of a GPU are copied there and back
    threaded = True

    def __init__(self, group: dist.ProcessGroup, gloo: Any) -> None:
        """``gloo``: a `ProcessGroupGloo` of the same ranks that nobody else uses; None where there is one rank."""
        self.rank, self.size = group.rank(), group.size()
        self.counters = Counters()
        self.library = f"gloo of torch {torch.__version__}"
        self.limit = config.max_message_bytes()
        self._group = weakref.ref(group)
        self._gloo = gloo
        self._process = os.getpid()
        self._open = True
        self._number = 0
        self._timeout = 0.0
        self._call = b""
        self._mismatch: Mismatch | None = None
        self._inside = False  # between `begin` and `end` or `abort`
        self._told = False  # the other ranks know already that this call has failed
        self._news: list[_Event] = []  # of ranks that left or wait, of this call and later ones
        self._seen: dict[int, int] = {}  # rank -> the call in which it said that it waits
        self._lost: dict[int, TransportError] = {}  # rank -> why nothing will come from it any more
        self._messages: dict[tuple[int, int], deque[Bytes]] = {}  # (source, call) -> what has come
        self._events: SimpleQueue[_Event] = SimpleQueue()
        self.nodes = self._find_nodes()
        self.machines = len(set(self.nodes))
        peers = [rank for rank in range(self.size) if rank != self.rank]
        self._outboxes = {peer: _Outbox(gloo, peer, self._events) for peer in peers}
        self._inboxes = [_Inbox(gloo, peer, self._events) for peer in peers]
        for inbox in self._inboxes:
            inbox.start()

    def _find_nodes(self) -> list[int]:
        if self.size == 1:
            return [0]
        mine = torch.frombuffer(bytearray(_machine()), dtype=torch.uint8)
        everyones = [torch.empty_like(mine) for _ in range(self.size)]
        self._gloo.allgather([everyones], [mine]).wait(timedelta(seconds=config.timeout()))
        machines = [bytes(machine.tolist()) for machine in everyones]
        numbers = {machine: number for number, machine in enumerate(dict.fromkeys(machines))}
        return [numbers[machine] for machine in machines]

    # -- calls ------------------------------------------------------------------------------------------------------

    def begin(self, call: bytes, mismatch: Mismatch) -> int:
        timeout = config.timeout()
        if len(call) > _LONGEST_CALL:
            raise InvalidInputError(f"call: {len(call)} bytes, at most {_LONGEST_CALL} are allowed")
        if os.getpid() != self._process:
            raise InvalidInputError(
                "this process was forked from the one whose transport this is: make a process group in it, by "
                "`init_process_group`, or start it by the method 'spawn'"
            )
        group = self._group()
        if not self._open or group is None or not _registered(group):
            raise InvalidInputError("this transport is closed: its process group was destroyed")
        self._number += 1
        self._call, self._mismatch, self._timeout = call, mismatch, timeout
        self._inside, self._told = True, False
        self._messages = {key: queue for key, queue in self._messages.items() if key[1] >= self._number}
        self._news = [news for news in self._news if news[2] >= self._number]
        self._take_all()
        for lost in self._lost.values():
            raise lost
        self._heed_leavers()
        return self._number

    def end(self) -> None:
        self._inside = False

    def abort(self, error: BaseException) -> None:
        if not self._inside:
            return
        self._inside = False
        if self._told:
            return  # the rank that told this one has told all
        kind = _LEFT + (_LEFT_WITH.index(type(error)) if type(error) in _LEFT_WITH else 0)
        text = f"{type(error).__name__}: {error}".encode()[:_LONGEST_TEXT]
        for peer in self._outboxes:
            self._tell(peer, kind, text)

    # -- bytes ------------------------------------------------------------------------------------------------------

    def post(self, data: Bytes, to: int, memory: Memory = HOST) -> Sending:
        self._check(to)
        nbytes = len(data)
        memory.ready(data, nbytes)
        self.counters.messages_sent += 1
        self.counters.bytes_sent += nbytes
        if to == self.rank:
            self._take((_DATA, to, self._number, np.array(data)))
            return _OUT
        outbox, sending = self._outboxes[to], _UnderWay(self, to)
        try:
            if nbytes <= min(_SHORT, self.limit):
                outbox.send([_message(_DATA, self._number, data)])
                return _OUT
            if not data.flags.writeable:
                data = data.copy()  # torch knows no memory that is read only
            pieces = [data[begin : begin + self.limit] for begin in range(0, nbytes, self.limit)]
            prefix = np.frombuffer(bytearray(_PREFIX.pack(_DATA, self._number, nbytes, self.limit)), np.uint8)
            outbox.send([prefix, *pieces], sending)
        except RuntimeError as error:  # gloo's; the connection has broken, and the inbox says how, in a moment
            self._wait(to, lambda: False, error)
        return sending

    def receive(self, source: int, memory: Memory = HOST, expected: int = 0) -> Bytes:
        self._check(source)
        key = source, self._number
        self._wait(source, lambda: key in self._messages)
        queue = self._messages[key]
        message = queue.popleft()
        if not queue:
            del self._messages[key]
        self.counters.messages_received += 1
        self.counters.bytes_received += len(message)
        if memory is HOST:
            return message
        mine = memory.empty(len(message))
        mine[:] = message
        return mine

    def _check(self, peer: int) -> None:
        if not 0 <= peer < self.size:
            raise TransportError(f"rank {self.rank} names rank {peer} as its peer: there are {self.size} ranks")

    def _tell(self, to: int, kind: int, text: bytes) -> None:
        """Send a control message, unless the peer is gone."""
        with contextlib.suppress(RuntimeError):
            self._outboxes[to].send([_message(kind, self._number, np.frombuffer(text, np.uint8))])

    # -- waiting ----------------------------------------------------------------------------------------------------

    def _wait(self, peer: int, done: Callable[[], bool], broken: RuntimeError | None = None) -> None:
        """Until ``done()``, for ``peer``, to which the connection may be known to be ``broken``."""
        if done():
            return
        began = time.monotonic()
        enquire = _ENQUIRE
        while True:
            self._take_all()
            if done():
                return
            if peer in self._lost:
                raise self._lost[peer]
            self._heed_leavers()
            self._heed_waiters()
            waited = time.monotonic() - began
            if waited >= self._timeout:
                raise self._timed_out(peer) from broken
            if waited >= enquire:
                enquire = 2 * enquire + _ENQUIRE
                if peer != self.rank:
                    self._tell(peer, _WAITING, self._call)
            with contextlib.suppress(Empty):
                self._take(self._events.get(timeout=min(enquire, self._timeout) - waited))

    def _take_all(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                self._take(self._events.get_nowait())

    def _take(self, event: _Event) -> None:
        kind, rank, number, what = event
        if kind == _DATA:
            if number >= self._number:  # else of a call that was abandoned
                self._messages.setdefault((rank, number), deque()).append(what)
        elif kind == _SENT:
            what.out = True
        elif kind in (_GOODBYE, _GONE):
            self._lost.setdefault(rank, self._loss(kind, rank, what))
        else:
            if kind == _WAITING:
                self._seen[rank] = number
            if number >= self._number:
                self._news.append((kind, rank, number, what.tobytes()))

    def _heed_leavers(self) -> None:
        """Leave this call if another rank has."""
        for kind, rank, number, text in self._news:
            if number == self._number and kind != _WAITING:
                self._told = True
                error = _LEFT_WITH[kind - _LEFT] if kind < _LEFT + len(_LEFT_WITH) else TransportError
                reason = text.decode(errors="replace")
                raise error(f"rank {rank} left call {number}, which rank {self.rank} is in. {reason}")

    def _heed_waiters(self) -> None:
        """Raise if a rank that waits takes the call for another. News about later calls is kept."""
        now = [news for news in self._news if news[2] == self._number]
        self._news = [news for news in self._news if news[2] > self._number]
        for _, rank, _, theirs in now:
            if theirs != self._call and self._mismatch is not None:
                raise self._mismatch(theirs, rank)

    # -- errors -----------------------------------------------------------------------------------------------------

    def _timed_out(self, peer: int) -> TimeoutError:
        seen = self._seen.get(peer)
        doing = f"; rank {peer} last said that it waits in call {seen}" if seen not in (None, self._number) else ""
        return TimeoutError(
            f"rank {self.rank} waited {self._timeout:g} s for rank {peer} in call {self._number}{doing}. "
            f"Rank {peer} may be stuck, or may not make this call: all ranks must make the same calls in the same "
            "order. If it is only slow, set SPARSECOMM_TIMEOUT to more seconds."
        )

    def _loss(self, kind: int, rank: int, why: Any) -> TransportError:
        advice = "The transport cannot be used any more: restart the job, or make new process groups."
        if kind == _GOODBYE:
            return TransportError(
                f"rank {rank} has ended, or destroyed the process group, and rank {self.rank} (call {self._number}) "
                f"still makes calls. {advice}"
            )
        return RankFailedError(
            f"rank {rank} died: its connection to rank {self.rank} (call {self._number}) broke. {advice} gloo says: "
            f"{why}"
        )

    # -- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Say goodbye and end the threads. Happens by itself when the group is gone, or the interpreter ends."""
        if not self._open or os.getpid() != self._process:  # a forked process has none of the threads
            return
        self._open = False
        deadline = time.monotonic() + _PARTING

        def left() -> float:
            return max(1e-3, deadline - time.monotonic())

        for peer in self._outboxes:
            self._tell(peer, _GOODBYE, b"")
        for outbox in self._outboxes.values():
            outbox.close(left())
        for peer in self._outboxes:  # a wait that times out is the only way to end those of other threads
            with contextlib.suppress(RuntimeError):
                self._gloo.recv([torch.empty(1, dtype=torch.uint8)], peer, 1).wait(_MOMENT)
        deadline = time.monotonic() + _PARTING
        for inbox in self._inboxes:
            inbox.join(left())
        for outbox in self._outboxes.values():
            outbox.join(left())


def _message(kind: int, number: int, data: Bytes) -> Bytes:
    """A short message, with its prefix."""
    message = np.empty(_PREFIX.size + len(data), np.uint8)
    _PREFIX.pack_into(message.data, 0, kind, number, len(data), 0)
    message[_PREFIX.size :] = data
    return message


def _machine() -> bytes:
    """8 bytes that tell machines apart: the name of the host, and when its kernel started."""
    try:
        booted = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        booted = ""
    return hashlib.sha256(f"{socket.gethostname()} {booted}".encode()).digest()[:8]


# -- one transport per group ------------------------------------------------------------------------------------------

_lock = threading.RLock()
_met: Counter[str] = Counter()  # how often the ranks of a group of that name have met: a new group may have an old name
_transports: weakref.WeakKeyDictionary[dist.ProcessGroup, ProcessGroupTransport] = weakref.WeakKeyDictionary()


def of(group: dist.ProcessGroup | None = None) -> ProcessGroupTransport:
    """The transport of a process group, to be given to `sparsecomm.sparse_allreduce` and others as ``comm``.

    The first call for a group is collective over its ranks: it connects them. The connections use the network
    interface that gloo would (``GLOO_SOCKET_IFNAME``). It ends with the group, or with the process.

    Args:
        group: of any backend; ``None`` is the default group.

    Raises:
        InvalidInputError: not a process group, one that was destroyed or of which this process is no member, or
            `torch.distributed` is not initialised.
        TimeoutError: a rank did not make the first call within ``SPARSECOMM_TIMEOUT`` seconds. It may be tried again.
        TransportError: the ranks could not be connected.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise InvalidInputError(
            "torch.distributed is not initialised, or its groups were destroyed: call "
            "`torch.distributed.init_process_group` first, in a program that torchrun has started"
        )
    given: Any = dist.group.WORLD if group is None else group
    if isinstance(given, int) and given == dist.GroupMember.NON_GROUP_MEMBER:
        raise InvalidInputError("this process is not a member of the group: ranks outside a group must not call")
    if not isinstance(given, dist.ProcessGroup):
        raise InvalidInputError(
            f"group is {given!r} of type {type(given).__name__}: expected a torch.distributed.ProcessGroup, or None "
            "for the default group"
        )
    if not _registered(given):
        raise InvalidInputError("group was destroyed: make it again, or give another one")
    with _lock:
        found = _transports.get(given)
        if found is None:
            found = _transports[given] = _join(given)
        return found


def _registered(group: dist.ProcessGroup) -> bool:
    try:
        return dist.get_rank(group) >= 0
    except (ValueError, RuntimeError):  # of a group that was destroyed, and if there is none at all
        return False


def _join(group: dist.ProcessGroup) -> ProcessGroupTransport:
    """Connect the ranks of ``group``, without trusting that all of them come."""
    rank, size, timeout = group.rank(), group.size(), config.timeout()
    gloo = None
    try:
        if size > 1:
            name = group.group_name
            theirs = dist.distributed_c10d._get_process_group_store(group)
            store = PrefixStore(f"sparsecomm {_met[name]}", theirs)
            _meet(store, rank, size, timeout)
            _met[name] += 1
            gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))
        transport = ProcessGroupTransport(group, gloo)
    except RuntimeError as error:  # gloo's and the store's
        raise TransportError(f"rank {rank} cannot connect to the other ranks of its group: {error}") from error
    weakref.finalize(group, transport.close)  # also when the interpreter ends
    return transport


def _meet(store: Store, rank: int, size: int, timeout: float) -> None:
    """Wait until all ranks are here. All of them find that they are, or none does, and all may try again."""
    deadline, nap = time.monotonic() + timeout, 1e-3
    here = _say(store, rank, size, "1")
    while "0" in here and time.monotonic() < deadline:
        time.sleep(nap)
        nap = min(1.5 * nap, 0.05)
        here = _text(store.get("here"))
    if "0" not in here or "0" not in (here := _say(store, rank, size, "0")):
        return
    missing = [other for other in range(size) if here[other] == "0" and other != rank]
    raise TimeoutError(
        f"rank {rank} waited {timeout:g} s for the first call on this process group, which all its ranks must make: "
        f"{_ranks(missing)} not called. If it is only slow, set SPARSECOMM_TIMEOUT to more seconds."
    )


def _say(store: Store, rank: int, size: int, what: str) -> str:
    """Say that this rank is here ("1") or goes ("0"); return what all have said. When all are here, none can go."""
    before, here = "", "0" * size  # the store's word for "there is no such key", and what that means
    while True:
        wanted = here[:rank] + what + here[rank + 1 :]
        here = _text(store.compare_set("here", before, wanted))
        if here == wanted or "0" not in here:
            return here
        before = here


def _text(value: bytes) -> str:
    return value.decode()


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    shown = ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]} ... {ranks[-1]} ({len(ranks)} ranks)"
    return f"ranks {shown} have"
