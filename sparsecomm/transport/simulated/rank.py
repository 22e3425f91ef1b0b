"""One simulated rank: its clock, its messages, and what it waits for."""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from sparsecomm import config
from sparsecomm.errors import CollectiveMismatchError, InvalidInputError, SparseCommError, TransportError
from sparsecomm.transport.base import Mismatch, Request, TrafficCounters, Transport
from sparsecomm.transport.memory import HOST, Bytes, MessageMemory

if TYPE_CHECKING:
    from sparsecomm.transport.simulated.world import World

__all__ = ["Left", "SimulatedTransport", "Waiting"]


@dataclass
class _Message:
    data: Bytes  # of the receiver's own
    nbytes: int  # that it stands for
    start: float  # when it begins to leave the sender


@dataclass
class _Sent(Request):
    """Notices a caller that reuses the bytes too early, which over MPI would send garbage now and then."""

    sender: SimulatedTransport
    to: int
    data: Bytes
    checksum: int
    out: float  # when the bytes may be reused

    def wait(self) -> None:
        if self not in self.sender._under_way:
            return
        self.sender._under_way.remove(self)
        self.check()
        self.sender.seconds = max(self.sender.seconds, self.out)

    def check(self) -> None:
        if zlib.crc32(self.data.data) != self.checksum:
            raise TransportError(
                f"rank {self.sender.rank} changed the bytes of a message to rank {self.to} that was under way: "
                "call `wait` on it first"
            )

    __eq__ = object.__eq__
    __hash__ = object.__hash__


@dataclass
class Left:
    """A rank has left a call with an error."""

    rank: int
    seconds: float
    mismatch: bool
    reason: str


@dataclass
class Waiting:
    """What a rank waits for, and what wakes it: a message or an error."""

    source: int
    number: int
    error: SparseCommError | None = field(default=None)


class SimulatedTransport(Transport):
    """One simulated rank's end. ``seconds`` is its clock."""

    def __init__(self, world: World, rank: int) -> None:
        self.rank = rank
        self.size = world.size
        self.counters = TrafficCounters()
        self.node_of_rank, self.num_nodes, self.library = world.network.node_of_rank, world.num_nodes, "simulated"
        self.seconds = world.delays[rank]
        self._world = world
        self._number = 0
        self._call = b""
        self._mismatch: Mismatch | None = None
        self._timeout = 0.0
        self._inside = False
        self._told = False
        self._out = 0.0  # when all messages sent so far have left
        self._in = 0.0  # when all messages received so far were in
        self._under_way: list[_Sent] = []
        self._inbox: dict[tuple[int, int], deque[_Message]] = {}  # (source, call) -> messages
        self._waiting: Waiting | None = None

    def compute(self, seconds: float) -> None:
        """Let this rank work for some time."""
        self.seconds += seconds

    def begin(self, call: bytes, mismatch: Mismatch) -> int:
        self._timeout = config.timeout()
        if len(call) > 256:
            raise InvalidInputError(f"call: {len(call)} bytes, at most 256 are allowed")
        self._number += 1
        self._call, self._mismatch = call, mismatch
        self._inside, self._told = True, False
        self._inbox = {key: queue for key, queue in self._inbox.items() if key[1] >= self._number}
        return self._number

    def end(self) -> None:
        self._inside = False
        left, self._under_way = self._under_way, []
        for sent in left:
            sent.check()
        if left:
            raise TransportError(f"rank {self.rank} never waited for a message to rank {left[0].to}")

    def abort(self, error: BaseException) -> None:
        if self._inside and not self._told:
            reason = f"{type(error).__name__}: {error}"
            left = Left(self.rank, self.seconds, isinstance(error, CollectiveMismatchError), reason)
            self._world.left.setdefault(self._number, []).append(left)
        self._inside = False
        self._under_way.clear()

    def isend(self, data: Bytes, to: int, memory: MessageMemory = HOST) -> Request:
        receiver = self._peer(to)
        memory.ready(data, len(data))
        if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
            raise InvalidInputError(f"data of dtype {data.dtype} and shape {data.shape}: expected contiguous bytes")
        world, nbytes = self._world, self._world.weigh(data)
        costs, link = world.network.way_out(self.rank, to)
        if link is not None:
            world.turn(self, self.seconds)
        start, moving = max(self.seconds, self._out), costs.beta * nbytes
        if link is not None:
            start += link.take(start + costs.alpha, moving)
        self._out = start + (costs.alpha + moving)
        key = self.rank, self._number
        receiver._inbox.setdefault(key, deque()).append(_Message(data.copy(), nbytes, start))
        if receiver._waiting is not None and (receiver._waiting.source, receiver._waiting.number) == key:
            world.wake(receiver, start)
        self.counters.messages_sent += 1
        self.counters.bytes_sent += nbytes
        sent = _Sent(self, to, data, zlib.crc32(data.data), self._out)
        self._under_way.append(sent)
        return sent

    def receive(self, source: int, memory: MessageMemory = HOST, expected: int = 0) -> Bytes:
        self._peer(source)
        world = self._world
        costs, link = world.network.way_in(source, self.rank)
        key = source, self._number
        if key not in self._inbox:
            self._wait(source)
        elif link is not None:
            world.turn(self, max(self.seconds, self._inbox[key][0].start))
        queue = self._inbox[key]
        message = queue.popleft()
        if not queue:
            del self._inbox[key]
        start, moving = max(self._in, message.start), costs.beta * message.nbytes
        if link is not None:
            start += link.take(start + costs.alpha, moving)
        self._in = start + (costs.alpha + moving)
        self.seconds = max(self.seconds, self._in)
        self.counters.messages_received += 1
        self.counters.bytes_received += message.nbytes
        if memory is HOST:
            return message.data  # a copy already
        mine = memory.empty(message.data.nbytes)
        mine[:] = message.data
        return mine

    def _peer(self, rank: int) -> SimulatedTransport:
        if not 0 <= rank < self.size:
            raise TransportError(f"rank {self.rank} names rank {rank} as its peer: there are {self.size} ranks")
        return self._world.ranks[rank]

    def _wait(self, source: int) -> None:
        self._waiting = waiting = Waiting(source, self._number)
        self._world.sleep()
        if waiting.error is not None:
            raise waiting.error
