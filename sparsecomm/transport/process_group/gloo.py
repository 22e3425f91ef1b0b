"""Messages over gloo, to every other rank of a group, and a queue of completions.

gloo cannot be asked whether a message has come: a wait blocks, and one that times out closes all connections. So
every peer has a thread that receives whatever it sends, at once, and puts a completion in the queue. That a peer always
receives is also why sends are soon complete.

One thread for all would have to receive from any peer. gloo posts such a receive on no connection: it does not notice
that a peer has died, and every message waits at its sender for a round trip. A thread that sleeps in a receive costs
less: `_SHORT` bytes and its stack. So each of P ranks has P - 1 of them.

A message begins with a prefix: its kind, the number of its call, its length, and the length of its pieces. A short
message travels with its prefix, in one message of gloo; a long one follows in pieces of its own.
"""

from __future__ import annotations

import _thread
import contextlib
import struct
import threading
import time
from collections import deque
from datetime import timedelta
from queue import SimpleQueue
from threading import Lock
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from sparsecomm.transport.base import Request
from sparsecomm.transport.memory import Bytes
from sparsecomm.transport.scheduling import be_prompt

__all__ = [
    "DATA",
    "DISCONNECTED",
    "GOODBYE",
    "SENT",
    "UNREADABLE",
    "Completion",
    "Connections",
    "Gloo",
    "allgather_bytes",
    "parse_prefix",
]

Gloo: TypeAlias = Any  # `torch.distributed.ProcessGroupGloo`, whose declaration lacks `send` and others

# Kinds of messages; those from 0 on are control messages of `sparsecomm.transport.control`.
DATA = -1
GOODBYE = -2  # the last message of a rank that ends in order
SENT, DISCONNECTED, UNREADABLE = -3, -4, -5  # kinds of completions that are no messages

_PREFIX = struct.Struct("<qqqq")  # kind, call, length, and that of each of its pieces; 0: it follows at once
_MAX_KIND, _MAX_NUMBER, _MAX_BYTES = 255, 2**62, 2**48  # that a prefix may tell of
_SHORT = 2**17  # bytes that travel with the prefix
_MAX_UNREAPED = 64  # short messages to one peer that may be under way before a thread looks which are out
_FOREVER = timedelta(days=10_000)
_MOMENT = timedelta(milliseconds=1)
_CLOSE_TIMEOUT = 1.0  # seconds for which a rank that ends waits until its goodbyes are out


class Completion(NamedTuple):
    """A message that has come, a long message that is out, or a connection that is of no use any more.

    Attributes:
        kind: of the message; `SENT`, `DISCONNECTED` or `UNREADABLE`.
        rank: the peer.
        number: of the message's call.
        what: the message's data; the request of the message that is out; how the connection has broken, or what has
            come that is no message.
    """

    kind: int
    rank: int
    number: int
    what: Any


def parse_prefix(data: Bytes) -> tuple[int, int, int, int]:
    """Return the prefix that ``data`` begins with: kind, number of the call, length of the message and of its pieces.

    Raises:
        ValueError: it is none; says what is there instead.
    """
    kind, number, nbytes, piece = _PREFIX.unpack_from(data.data)
    known = kind in (DATA, GOODBYE) or 0 <= kind <= _MAX_KIND
    long = kind == DATA and 0 < piece <= _MAX_BYTES and 0 < nbytes <= _MAX_BYTES
    short = piece == 0 and 0 <= nbytes <= _SHORT
    if not (known and 0 <= number < _MAX_NUMBER and (long or short)):
        raise ValueError(f"a message of kind {kind} for call {number} with {nbytes} bytes, in pieces of {piece} bytes")
    return kind, number, nbytes, piece


class _Inbox(threading.Thread):
    """A thread that receives all that one peer sends, until it says goodbye or its connection breaks."""

    def __init__(self, gloo: Gloo, source: int, completions: SimpleQueue[Completion]) -> None:
        super().__init__(name=f"sparsecomm from rank {source}", daemon=True)
        self._gloo, self._source, self._completions = gloo, source, completions

    def run(self) -> None:
        be_prompt()
        first = np.empty(_PREFIX.size + _SHORT, np.uint8)
        kind = DATA
        try:
            while kind != GOODBYE:
                first[: _PREFIX.size] = 255  # no prefix: what comes may be shorter
                self._receive(first)
                kind, number, nbytes, piece = parse_prefix(first)
                data = _memory_for(nbytes)
                if piece == 0:
                    data[:] = first[_PREFIX.size : _PREFIX.size + nbytes]
                else:
                    for begin in range(0, nbytes, piece):
                        self._receive(data[begin : begin + piece])
                self._completions.put(Completion(kind, self._source, number, data))
        except ValueError as error:  # where the next message begins is not known
            self._completions.put(Completion(UNREADABLE, self._source, 0, str(error)))
        except Exception as error:  # gloo's are RuntimeErrors
            self._completions.put(Completion(DISCONNECTED, self._source, 0, str(error)))

    def _receive(self, to: Bytes) -> None:
        # gloo fills less of `to` if less comes, and aborts the process if more does, which no rank sends.
        self._gloo.recv([torch.from_numpy(to)], self._source, 0).wait(_FOREVER)


class _Outbox:
    """The messages on their way to one peer.

    The memory of a message must live until it is out, and gloo says that it is only to those who wait for it. A thread
    waits where a request asks for it, and now and then.
    """

    def __init__(self, gloo: Gloo, to: int, completions: SimpleQueue[Completion]) -> None:
        self._gloo, self._to, self._completions = gloo, to, completions
        self._under_way: deque[dist.Work | Request] = deque()  # a long message's request comes after its handles
        self._wake: SimpleQueue[bool] = SimpleQueue()  # of the thread; false: end
        self._reaping = False  # there is a thread
        self._ended = Lock()  # held until the thread has ended

    def send(self, parts: list[Bytes], long: Request | None = None) -> None:
        """Start sending; ``long``: the request for which a completion is put when all parts are out."""
        for part in parts:
            self._under_way.append(self._gloo.send([torch.from_numpy(part)], self._to, 0))
        if long is not None:
            self._under_way.append(long)
        if long is not None or len(self._under_way) >= _MAX_UNREAPED:
            if not self._reaping:
                self._ended.acquire()
                _thread.start_new_thread(self._reap, ())
                self._reaping = True
            self._wake.put(True)

    def _reap(self) -> None:
        try:
            be_prompt()
            while self._wake.get():
                self._drain(_FOREVER)
        except RuntimeError:  # the connection has broken: the inbox tells
            pass
        finally:
            self._ended.release()

    def _drain(self, timeout: timedelta) -> None:
        while self._under_way:
            handle = self._under_way.popleft()
            if isinstance(handle, dist.Work):
                handle.wait(timeout)
            else:
                self._completions.put(Completion(SENT, self._to, 0, handle))

    def close(self, seconds: float) -> None:
        """Wait until everything is out, but not for long."""
        if self._reaping:
            self._wake.put(True)
            self._wake.put(False)
            self.join(seconds)
        else:  # no thread can be started while the interpreter ends
            with contextlib.suppress(RuntimeError):
                self._drain(timedelta(seconds=seconds))

    def join(self, seconds: float) -> None:
        """Wait until its thread has ended, but not for long."""
        if self._ended.acquire(timeout=seconds):
            self._ended.release()


class Connections:
    """The connections to all other ranks.

    There is one thread per peer, and another one per peer that long messages go to; none of them is ever busy for long.

    Attributes:
        completions: what has happened on them; messages of a rank in the order in which it sent them.
    """

    def __init__(self, gloo: Gloo, rank: int, size: int, limit: int) -> None:
        """Start the threads. ``gloo``: one that nobody else uses, None for one rank; ``limit``: bytes in a piece."""
        self.completions: SimpleQueue[Completion] = SimpleQueue()
        self._gloo, self._limit = gloo, limit
        peers = [peer for peer in range(size) if peer != rank and gloo is not None]
        self._outboxes = {peer: _Outbox(gloo, peer, self.completions) for peer in peers}
        self._inboxes = [_Inbox(gloo, peer, self.completions) for peer in peers]
        for inbox in self._inboxes:
            inbox.start()

    def send(self, to: int, number: int, data: Bytes, request: Request) -> bool:
        """Start sending the data of call ``number``.

        Returns:
            Whether a copy of it is sent. Otherwise the completion `SENT` says when ``request`` is out.

        Raises:
            RuntimeError: of gloo, where the connection has broken. The completion `DISCONNECTED` soon says how.
        """
        nbytes, outbox = len(data), self._outboxes[to]
        if nbytes <= min(_SHORT, self._limit):
            outbox.send([_message(DATA, number, data)])
            return True
        if not data.flags.writeable:
            data = data.copy()  # torch knows no memory that is read only
        pieces = [data[begin : begin + self._limit] for begin in range(0, nbytes, self._limit)]
        prefix = np.frombuffer(bytearray(_PREFIX.pack(DATA, number, nbytes, self._limit)), np.uint8)
        outbox.send([prefix, *pieces], request)
        return False

    def send_control(self, to: int, kind: int, number: int, text: bytes) -> None:
        """Send a control message of at most `_SHORT` bytes, unless the peer is gone."""
        try:  # noqa: SIM105  # suppress() is bytecode
            self._outboxes[to].send([_message(kind, number, np.frombuffer(text, np.uint8))])
        except RuntimeError:
            pass  # it is gone

    def broadcast(self, data: torch.Tensor, root: int) -> None:
        """Give all ranks the data of rank ``root``, in place, by gloo's broadcast: contiguous, in host memory.

        Raises:
            RuntimeError: of gloo, where a connection has broken.
        """
        if self._gloo is not None:
            self._gloo.broadcast(data, root).wait(_FOREVER)

    def close(self) -> None:
        """Say goodbye and end the threads."""
        deadline = time.monotonic() + _CLOSE_TIMEOUT

        def left() -> float:
            return max(1e-3, deadline - time.monotonic())

        for peer in self._outboxes:
            self.send_control(peer, GOODBYE, 0, b"")
        for outbox in self._outboxes.values():
            outbox.close(left())
        for peer in self._outboxes:  # a wait that times out is the only way to end those of other threads
            with contextlib.suppress(RuntimeError):
                self._gloo.recv([torch.empty(1, dtype=torch.uint8)], peer, 1).wait(_MOMENT)
        deadline = time.monotonic() + _CLOSE_TIMEOUT
        for inbox in self._inboxes:
            inbox.join(left())
        for outbox in self._outboxes.values():
            outbox.join(left())


def _memory_for(nbytes: int) -> Bytes:
    """Return memory for a message that a peer has announced; the system provides it as the bytes come."""
    try:
        return np.empty(nbytes, np.uint8)
    except MemoryError:
        raise ValueError(f"a message of {nbytes} bytes, more than there is memory for") from None


def _message(kind: int, number: int, data: Bytes) -> Bytes:
    """Return a short message with its prefix."""
    message = np.empty(_PREFIX.size + len(data), np.uint8)
    _PREFIX.pack_into(message.data, 0, kind, number, len(data), 0)
    message[_PREFIX.size :] = data
    return message


def allgather_bytes(gloo: Gloo, data: bytes, size: int, seconds: float) -> list[bytes]:
    """Return the data of each of ``size`` ranks, of equal lengths, within so many seconds.

    To be used before there are `Connections` over the same gloo.
    """
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    gathered = [torch.empty_like(own) for _ in range(size)]
    gloo.allgather([gathered], [own]).wait(timedelta(seconds=seconds))
    return [bytes(each.tolist()) for each in gathered]
