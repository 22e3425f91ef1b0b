"""Simulated ranks: their clocks, their messages, and what they wait for."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from sparsecomm import config
from sparsecomm.errors import CollectiveMismatchError, InvalidInputError, SparseCommError, TransportError, describe
from sparsecomm.transport.base import MAX_CALL_BYTES, Mismatch, Request, TrafficCounters, Transport
from sparsecomm.transport.control import behind_error
from sparsecomm.transport.memory import HOST, Bytes, MessageMemory
from sparsecomm.transport.simulated.network import Network
from sparsecomm.transport.simulated.scheduler import Scheduler

__all__ = ["LeftCall", "PendingReceive", "SimulatedTransport", "World"]


@dataclass
class _Message:
    data: Bytes  # a copy
    nbytes: int  # that it stands for
    start: float  # when it begins to leave the sender


@dataclass
class _SendRequest(Request):
    """A request that raises if its bytes are reused too early, which over MPI would send garbage now and then."""

    sender: SimulatedTransport
    to: int
    data: Bytes
    checksum: int
    out: float  # when the bytes may be reused

    def wait(self) -> None:
        if self not in self.sender._pending:
            return
        self.sender._pending.remove(self)
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
class LeftCall:
    """A rank has left a call with an error."""

    rank: int
    seconds: float
    mismatch: bool
    reason: str
    apart: bool = False  # ranks in later calls must leave these, too
    told: set[int] = field(default_factory=set)  # ranks that have, or need not


@dataclass
class PendingReceive:
    """A wait of a rank: for a message from ``source`` in call ``number``. It wakes with that or with an error.

    In `SimulatedTransport.realign` the number is that of the round, below 0.
    """

    source: int
    number: int
    error: SparseCommError | None = None


class LaterRoundError(SparseCommError):
    """Another rank is in a later round of `SimulatedTransport.realign`."""


class World:
    """The state that simulated ranks share."""

    def __init__(self, network: Network, scheduler: Scheduler, weigh: Callable[[Bytes], int]) -> None:
        """Make one transport per rank of ``network``. ``weigh``: the bytes that a message stands for."""
        self.network, self.scheduler, self.weigh = network, scheduler, weigh
        self.left: dict[int, list[LeftCall]] = {}  # call -> the ranks that left it with an error
        num_nodes = len(set(network.node_of_rank))
        self.ranks = [SimulatedTransport(self, rank, num_nodes) for rank in range(len(network.node_of_rank))]


class SimulatedTransport(Transport):
    """One simulated rank's end. ``seconds`` is its clock."""

    def __init__(self, world: World, rank: int, num_nodes: int) -> None:
        self.rank, self.size = rank, len(world.network.node_of_rank)
        self.counters = TrafficCounters()
        self.node_of_rank, self.num_nodes, self.library = world.network.node_of_rank, num_nodes, "simulated"
        self.seconds = 0.0
        self._world = world
        self.number = 0
        self._call = b""
        self._mismatch: Mismatch | None = None
        self._timeout = 0.0
        self._in_call = False
        self._others_know = False  # the other ranks know already that this call has failed
        self._apart = False  # it failed since the ranks' calls do not pair any more
        self._round = 0  # of `realign`
        self._out = 0.0  # when all messages sent so far have left
        self._in = 0.0  # when all messages received so far were in
        self._pending: list[_SendRequest] = []
        self._inbox: dict[tuple[int, int], deque[_Message]] = {}  # (source, call) -> messages
        self._waiting: PendingReceive | None = None

    def compute(self, seconds: float) -> None:
        """Let this rank work for ``seconds`` of virtual time."""
        self.seconds += seconds

    def begin(self, call: bytes, mismatch: Mismatch) -> int:
        self._timeout = config.timeout()
        if len(call) > MAX_CALL_BYTES:
            raise InvalidInputError(f"call: {len(call)} bytes, at most {MAX_CALL_BYTES} are allowed")
        self.number += 1
        self._call, self._mismatch = call, mismatch
        self._in_call, self._others_know, self._apart = True, False, False
        self._forget_before(self.number)
        for left in self._world.left.get(self.number, ()):
            if self.skipped and left.rank != self.rank:
                self._apart = True
                raise behind_error(self, left.rank)
        return self.number

    def _forget_before(self, number: int) -> None:
        rounds = {key: queue for key, queue in self._inbox.items() if key[1] < -self._round}
        self._inbox = {key: queue for key, queue in self._inbox.items() if key[1] >= number} | rounds

    def realign(self) -> None:
        self._timeout = config.timeout()
        self._in_call, self.skipped, last = False, "", self.number
        try:
            self._round, numbers = max(self._round + 1, self.latest_round()), {self.rank: last}
            while len(numbers) < self.size:
                self._exchange_numbers(last, numbers)
            last = max(numbers.values())
        finally:
            self.number = last
            self._pending.clear()
        self._forget_before(last + 1)
        for left in chain.from_iterable(self._world.left.values()):
            left.told.add(self.rank)

    def _exchange_numbers(self, mine: int, numbers: dict[int, int]) -> None:
        """Fill ``numbers`` by rank in a round of `realign`, or only adopt a later one."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        self.number = -self._round
        try:
            for rank in others:
                self.isend(np.frombuffer(mine.to_bytes(8, "big"), np.uint8), rank)
            for rank in others:
                numbers[rank] = int.from_bytes(self.receive(rank).tobytes(), "big")
        except LaterRoundError:
            self._round = self.latest_round()
            for rank in others:
                numbers.pop(rank, None)

    def latest_round(self) -> int:
        """Return the last round of `realign` of which another rank has told."""
        return max((-number for _, number in self._inbox), default=0)

    def end(self) -> None:
        self._in_call, self.skipped, self.counted = False, "", self.number
        forgotten, self._pending = self._pending, []
        for request in forgotten:
            request.check()
        if forgotten:
            raise TransportError(f"rank {self.rank} never waited for a message to rank {forgotten[0].to}")

    def abort(self, error: BaseException) -> None:
        if self._in_call and not self._others_know:
            reason = describe(error)
            left = LeftCall(self.rank, self.seconds, isinstance(error, CollectiveMismatchError), reason, self._apart)
            left.told.add(self.rank)
            self._world.left.setdefault(self.number, []).append(left)  # twice after an interrupt, which does not matter
        self._in_call = False
        self._pending.clear()

    def isend(self, data: Bytes, to: int, memory: MessageMemory = HOST) -> Request:
        receiver = self._peer(to)
        memory.ready(data, len(data))
        if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
            raise InvalidInputError(f"data of dtype {data.dtype} and shape {data.shape}: expected contiguous bytes")
        world, nbytes = self._world, self._world.weigh(data)
        costs, link = world.network.egress(self.rank, to)
        if link is not None:
            world.scheduler.yield_until(self.rank, self.seconds)
        start, moving = max(self.seconds, self._out), costs.beta * nbytes
        if link is not None:
            start += link.take(start + costs.alpha, moving)
        self._out = start + (costs.alpha + moving)
        key = self.rank, self.number
        receiver._inbox.setdefault(key, deque()).append(_Message(data.copy(), nbytes, start))
        if receiver._waiting is not None and (receiver._waiting.source, receiver._waiting.number) == key:
            receiver.wake(start)
        self.counters.messages_sent += 1
        self.counters.bytes_sent += nbytes
        request = _SendRequest(self, to, data, zlib.crc32(data.data), self._out)
        self._pending.append(request)
        return request

    def receive(self, source: int, memory: MessageMemory = HOST, expected: int = 0) -> Bytes:
        self._peer(source)
        world = self._world
        costs, link = world.network.ingress(source, self.rank)
        key = source, self.number
        if key not in self._inbox:
            self._wait(source)
        elif link is not None:
            world.scheduler.yield_until(self.rank, max(self.seconds, self._inbox[key][0].start))
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
        received = memory.empty(message.data.nbytes)
        received[:] = message.data
        return received

    def _peer(self, rank: int) -> SimulatedTransport:
        if not 0 <= rank < self.size:
            raise TransportError(f"rank {self.rank} names rank {rank} as its peer: there are {self.size} ranks")
        return self._world.ranks[rank]

    def _wait(self, source: int) -> None:
        self._waiting = waiting = PendingReceive(source, self.number)
        self._world.scheduler.sleep()
        if waiting.error is not None:
            raise waiting.error

    def wake(self, seconds: float = 0.0) -> None:
        """End this rank's wait; ``seconds``: the time at which what it waits for happens."""
        self._waiting = None
        self._world.scheduler.wake(self.rank, max(self.seconds, seconds))
