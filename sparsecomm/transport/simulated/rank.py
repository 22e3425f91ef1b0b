"""Simulated ranks: their clocks, their messages, and what they wait for."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sparsecomm.errors import InvalidInputError, SparseCommError, TransportError
from sparsecomm.transport.base import Mismatch, Request, TrafficCounters
from sparsecomm.transport.control import REALIGN, ControlMessage, FailureDetector
from sparsecomm.transport.memory import HOST, Bytes, MessageMemory
from sparsecomm.transport.simulated.network import Network
from sparsecomm.transport.simulated.scheduler import Scheduler

__all__ = ["PendingReceive", "SimulatedTransport", "World"]


@dataclass
class _Message:
    data: Bytes  # a copy
    nbytes: int  # that it stands for
    start: float  # when it begins to leave the sender


@dataclass(eq=False)
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


@dataclass
class PendingReceive:
    """A wait of a rank: for a message from ``source`` in call ``number``. It wakes with that or with an error."""

    source: int
    number: int
    error: SparseCommError | None = None


class World:
    """The state that simulated ranks share."""

    def __init__(self, network: Network, scheduler: Scheduler, weigh: Callable[[Bytes], int]) -> None:
        """Make one transport per rank of ``network``. ``weigh``: the bytes that a message stands for."""
        self.network, self.scheduler, self.weigh = network, scheduler, weigh
        num_nodes = len(set(network.node_of_rank))
        self.ranks = [SimulatedTransport(self, rank, num_nodes) for rank in range(len(network.node_of_rank))]


class SimulatedTransport(FailureDetector):
    """One simulated rank's end. ``seconds`` is its clock.

    A rank that waits in a call reads control messages when no rank can go on: see `break_deadlock`.
    """

    library = "simulated"

    def __init__(self, world: World, rank: int, num_nodes: int) -> None:
        super().__init__(world.network.node_of_rank, num_nodes)
        self.rank, self.size = rank, len(self.node_of_rank)
        self.counters = TrafficCounters()
        self.seconds = 0.0
        self._world = world
        self._out = 0.0  # when all messages sent so far have left
        self._in = 0.0  # when all messages received so far were in
        self._told = 0.0  # when the last control message was in
        self._pending: list[_SendRequest] = []
        self._inbox: dict[tuple[int, int], deque[_Message]] = {}  # (source, call) -> messages
        self._waiting: PendingReceive | None = None
        self._listening = False

    def compute(self, seconds: float) -> None:
        """Let this rank work for ``seconds`` of virtual time."""
        self.seconds += seconds

    # -- calls --------------------------------------------------------------------------------------------------------

    def begin(self, call: bytes, mismatch: Mismatch) -> int:
        number = self._begin_call(call, mismatch)
        self._forget_before(number)
        self._drop_old_control()
        if self.skipped:
            self._check_leavers()
        return number

    def end(self) -> None:
        super().end()
        forgotten, self._pending = self._pending, []
        for request in forgotten:
            request.check()
        if forgotten:
            raise TransportError(f"rank {self.rank} never waited for a message to rank {forgotten[0].to}")

    def abort(self, error: BaseException) -> None:
        super().abort(error)
        self._pending.clear()

    def _forget_before(self, number: int) -> None:
        if self._inbox:
            self._inbox = {key: queue for key, queue in self._inbox.items() if key[1] >= number}

    # -- control messages ---------------------------------------------------------------------------------------------

    def _clock(self) -> float:
        return self.seconds

    def _send_control(self, to: int, kind: int, text: bytes) -> None:
        receiver = self._world.ranks[to]
        receiver._add_control(ControlMessage(self.rank, self.number, kind, text))
        receiver._told = self.seconds + self._world.network.between.alpha
        if kind == REALIGN and receiver._listening:
            receiver.wake(receiver._told)

    def _listen(self, seconds: float) -> None:
        if seconds:
            self._listening = True
            self._world.scheduler.sleep()
            self.seconds = max(self.seconds, self._told)

    def _go_on_from(self, number: int) -> None:
        super()._go_on_from(number)
        self._forget_before(number + 1)

    # -- bytes --------------------------------------------------------------------------------------------------------

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
        message = _Message(data.copy(), nbytes, start)
        receiver._inbox.setdefault(key, deque()).append(message)
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
        self._waiting, self._listening = None, False
        self._world.scheduler.wake(self.rank, max(self.seconds, seconds))
