"""Messages over gloo, to every other rank of a group, and a queue of all that comes from them.

gloo cannot be asked whether a message has come: a wait blocks, and one that times out closes all connections. So
every peer has a thread that receives whatever it sends, at once, and puts it in the queue. That a peer always receives
is also why sends are soon complete.

A message begins with a prefix: its kind, the number of its call, its length, and the length of its pieces. A short one
follows at once, in the same message of gloo; a long one in pieces of its own.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections import deque
from datetime import timedelta
from itertools import chain, repeat
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from sparsecomm.calls.scheduling import be_prompt
from sparsecomm.transport import Request
from sparsecomm.transport.memory import Bytes

__all__ = ["DATA", "GONE", "GOODBYE", "SENT", "Connections", "Event", "everyones"]

# (kind, rank, number of the call, what): what comes from the other ranks, with the bytes of the message. Kinds from 0
# on are those of `sparsecomm.transport.control`.
Event = tuple[int, int, int, Any]
DATA = -1
GOODBYE = -2  # the last message of a rank that ends in order
SENT, GONE = -3, -4  # these do not travel: a long message, its `Sending`, is out; a connection has broken, for a reason

_PREFIX = struct.Struct("<qqqq")  # kind, number of the call, bytes, bytes in a piece or 0: they follow at once
_SHORT = 2**17  # bytes that travel with the prefix
_KEPT = 64  # short messages to one peer that may be under way before a thread looks which are out
_FOREVER = timedelta(days=10_000)
_MOMENT = timedelta(milliseconds=1)
_PARTING = 1.0  # seconds for which a rank that ends waits until its goodbyes are out


class _Inbox(threading.Thread):
    """Receives all that one peer sends, until it says goodbye or its connection breaks."""

    def __init__(self, gloo: Any, source: int, events: SimpleQueue[Event]) -> None:
        super().__init__(name=f"sparsecomm from rank {source}", daemon=True)
        self._gloo, self._source, self._events = gloo, source, events

    def run(self) -> None:
        be_prompt()
        first = np.empty(_PREFIX.size + _SHORT, np.uint8)
        kind = DATA
        try:
            while kind != GOODBYE:
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
            self._events.put((GONE, self._source, 0, str(error)))

    def _receive(self, to: Bytes) -> None:
        self._gloo.recv([torch.from_numpy(to)], self._source, 0).wait(_FOREVER)  # what comes may be shorter


class _Outbox:
    """What is on its way to one peer.

    gloo must not lose a message before it is out, and says that it is only to who waits. A thread does, where
    somebody wants to know, and now and then.
    """

    def __init__(self, gloo: Any, to: int, events: SimpleQueue[Event]) -> None:
        self._gloo, self._to, self._events = gloo, to, events
        self._under_way: deque[Any] = deque()  # gloo's handles, and after those of a long message, its `Sending`
        self._wake: SimpleQueue[bool] = SimpleQueue()  # false: end
        self._thread: threading.Thread | None = None

    def send(self, parts: list[Bytes], long: Request | None = None) -> None:
        # In one step of the interpreter, which no Ctrl-C divides: a message of which a part is missing would take
        # the beginning of the next one for it.
        tensors = [[torch.from_numpy(part)] for part in parts]
        handles = map(self._gloo.send, tensors, repeat(self._to), repeat(0))
        self._under_way.extend(chain(handles, (long,)) if long is not None else handles)
        if long is not None or len(self._under_way) >= _KEPT:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"sparsecomm to rank {self._to}", daemon=True)
                self._thread.start()
            self._wake.put(True)

    def _run(self) -> None:
        be_prompt()
        with contextlib.suppress(RuntimeError):  # the connection has broken: the inbox tells
            while self._wake.get():
                self._see_out(_FOREVER)

    def _see_out(self, timeout: timedelta) -> None:
        while self._under_way:
            handle = self._under_way.popleft()
            if isinstance(handle, Request):
                self._events.put((SENT, self._to, 0, handle))
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


class Connections:
    """To all other ranks. ``events`` has what came over them, in the order in which each rank sent it.

    There is one thread per peer, and another one per peer that long messages go to; none of them is ever busy for long.
    """

    def __init__(self, gloo: Any, rank: int, size: int, limit: int) -> None:
        """``gloo``: a `ProcessGroupGloo` that nobody else uses; None for one rank. ``limit``: bytes in a piece."""
        self.events: SimpleQueue[Event] = SimpleQueue()
        self._gloo, self._limit = gloo, limit
        peers = [peer for peer in range(size) if peer != rank]
        self._outboxes = {peer: _Outbox(gloo, peer, self.events) for peer in peers}
        self._inboxes = [_Inbox(gloo, peer, self.events) for peer in peers]
        for inbox in self._inboxes:
            inbox.start()

    def send(self, to: int, number: int, data: Bytes, request: Request) -> bool:
        """Send data; whether a copy of it is sent. Otherwise the event `SENT` with ``sending`` says when it is out.

        Raises:
            RuntimeError: of gloo, where the connection has broken. The event `GONE` says how, in a moment.
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
        with contextlib.suppress(RuntimeError):
            self._outboxes[to].send([_message(kind, number, np.frombuffer(text, np.uint8))])

    def close(self) -> None:
        """Say goodbye and end the threads."""
        deadline = time.monotonic() + _PARTING

        def left() -> float:
            return max(1e-3, deadline - time.monotonic())

        for peer in self._outboxes:
            self.send_control(peer, GOODBYE, 0, b"")
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


def everyones(gloo: Any, mine: bytes, size: int, seconds: float) -> list[bytes]:
    """What each of ``size`` ranks gives, of equal lengths; before there are `Connections` over the same gloo."""
    given = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    found = [torch.empty_like(given) for _ in range(size)]
    gloo.allgather([found], [given]).wait(timedelta(seconds=seconds))
    return [bytes(each.tolist()) for each in found]
