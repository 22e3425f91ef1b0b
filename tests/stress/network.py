"""Ranks as greenlets in one process, in an order that a seed determines, with late messages and failing ranks.

Each call of a transport draws the next event: some rank runs, or some message arrives. Only data between the same two
ranks arrives in order. If no event is possible, time passes.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from greenlet import getcurrent, greenlet

from sparsecomm.transport.base import HOST, Bytes, MessageMemory, Mismatch, Request
from sparsecomm.transport.control import WAITING, ControlMessage, FailureDetector

TWICE = 0.1  # probability that a control message arrives twice
MAX_EVENTS = 3_000_000  # more events mean that the program does not end


class Crash(BaseException):
    """The end of a rank without notice to other ranks."""


@dataclass(eq=False)
class Message(Request):
    sender: Rank
    to: int
    number: int
    data: Bytes
    out: bool

    def __post_init__(self) -> None:
        self.checksum = zlib.crc32(self.data.data)

    def wait(self) -> None:
        self.sender._wait(self.to, lambda: self.out)
        if self in self.sender._unfinished:
            self.sender._unfinished.remove(self)


class Network:
    """Ranks, the messages between them, and the choice of events. ``violations``: forbidden uses of a transport."""

    def __init__(self, node_of_rank: Sequence[int], seed: int) -> None:
        self.random = random.Random(seed)
        self.violations: list[str] = []
        self.ranks = [Rank(self, rank, node_of_rank) for rank in range(len(node_of_rank))]
        self._hub = getcurrent()
        self._ready: list[Rank] = []
        self.data: dict[tuple[int, int], deque[Message]] = {}
        self.control: list[tuple[int, ControlMessage]] = []
        self._met: list[Rank] = []

    def run(self, program: Callable[[Rank], None]) -> None:
        """Run ``program(rank)``, which may raise only `Crash`, until all ranks have returned or crashed."""

        def task(rank: Rank) -> None:
            try:
                program(rank)
            except Crash:
                rank.crashed = True
            self._release()

        for rank in self.ranks:
            rank.greenlet = greenlet(task, parent=self._hub)
        self._ready = list(self.ranks)
        for _ in range(MAX_EVENTS):
            if all(rank.greenlet.dead for rank in self.ranks):
                return
            self._happen()
        raise AssertionError(f"no end after {MAX_EVENTS} events: {self.ranks}")

    def step(self, rank: Rank) -> None:
        """Let others run, perhaps. Called first in each call of a transport."""
        rank.steps += 1
        if rank.steps == rank.fault_step and rank.fault is not None:
            error, rank.fault = rank.fault, None
            if isinstance(error, Crash):
                rank.crashed = True
            raise error
        if rank.crashed:
            raise Crash
        if self.random.random() < 0.5:
            self._ready.append(rank)
            self._hub.switch()

    def sleep(self, rank: Rank, peer: int) -> bool:
        """Wait until a message arrives for ``rank``; return whether time has passed instead."""
        rank.waits_for, rank.aged = peer, False
        self._hub.switch()
        rank.waits_for = None
        return rank.aged

    def barrier(self, rank: Rank) -> None:
        """Wait for all ranks that have neither crashed nor ended."""
        self._met.append(rank)
        self._release()
        self._hub.switch()

    def _release(self) -> None:
        if len(self._met) == sum(not rank.crashed for rank in self.ranks):
            self._ready += self._met
            self._met = []

    def _happen(self) -> None:
        links, controls = list(self.data), len(self.control)
        what = self.random.randrange(max(1, len(self._ready) + len(links) + controls))
        if not self._ready and not links and not controls:
            self._pass_time()
        elif what < len(self._ready):
            rank = self._ready.pop(what)
            rank.greenlet.switch(rank)  # the argument is used when the program begins
        elif what < len(self._ready) + len(links):
            self._deliver(links[what - len(self._ready)])
        else:
            to, message = self.control.pop(what - len(self._ready) - len(links))
            self.ranks[to].arrived.append(message)
            self.wake(self.ranks[to])

    def _deliver(self, link: tuple[int, int]) -> None:
        queue = self.data[link]
        message = queue.popleft()
        if not queue:
            del self.data[link]
        source, to = link
        if zlib.crc32(message.data.data) != message.checksum:
            self.violations.append(f"rank {source} changed a message to rank {to} that was under way")
        self.ranks[to].inbox.setdefault((source, message.number), deque()).append(message)
        self.wake(self.ranks[to])

    def wake(self, rank: Rank) -> None:
        if rank.waits_for is not None and rank not in self._ready:
            self._ready.append(rank)

    def _pass_time(self) -> None:
        waiting = [rank for rank in self.ranks if rank.waits_for is not None and not rank.greenlet.dead]
        if not waiting:
            raise AssertionError(f"nobody can go on: {self.ranks}")
        quiet = [rank for rank in waiting if not rank.pinged]
        for rank in quiet or [self.random.choice(waiting)]:
            rank.aged = True
            self.wake(rank)


class Rank(FailureDetector):
    """One rank's transport, which raises ``fault`` at step ``fault_step``. After a crash it sends nothing."""

    library = "stress"
    greenlet: greenlet

    def __init__(self, network: Network, rank: int, node_of_rank: Sequence[int]) -> None:
        super().__init__(node_of_rank)
        self.rank, self.size, self._network = rank, len(node_of_rank), network
        self.fault: BaseException | None = None
        self.fault_step, self.steps, self.sent, self.crashed = -1, 0, 0, False
        self.damage: Callable[[Bytes], Bytes] | None = None  # returns the message to send in place of one
        self.inbox: dict[tuple[int, int], deque[Message]] = {}
        self.arrived: list[ControlMessage] = []
        self.waits_for: int | None = None
        self.aged = self.pinged = False  # time has passed; this rank has pinged the rank that it waits for
        self._unfinished: list[Message] = []
        self._ticks = 0

    def clock(self) -> float:
        """Return a time that depends only on the number of calls, so that measurements do not depend on the order."""
        self._ticks += 1
        return 1e-4 * self._ticks

    def __repr__(self) -> str:
        return f"rank {self.rank}: call {self.number}, waits for {self.waits_for}, ended {self.greenlet.dead}"

    # -- calls ------------------------------------------------------------------------------------------------------

    def begin(self, call: bytes, mismatch: Mismatch) -> int:
        self._network.step(self)
        number = self._begin_call(call, mismatch)
        self._network.step(self)
        self._unfinished = []
        self._take_control()
        self.inbox = {key: queue for key, queue in self.inbox.items() if key[1] >= number}
        self._check_leavers()
        return number

    def conclude(self) -> None:
        self._network.step(self)

    def end(self) -> None:
        self._network.step(self)
        if self._unfinished:
            self._network.violations.append(f"rank {self.rank} never waited for a message")
        super().end()

    def _send_control(self, to: int, kind: int, text: bytes) -> None:
        message, network = ControlMessage(self.rank, self.number, kind, text), self._network
        if not self.crashed:
            network.control += [(to, message)] * (2 if network.random.random() < TWICE else 1)

    # -- messages ---------------------------------------------------------------------------------------------------

    def isend(self, data: Bytes, to: int, memory: MessageMemory = HOST) -> Request:
        self._network.step(self)
        self._check_peer(to)
        self.sent += 1
        data = data if self.damage is None else self.damage(data)
        eager = self._network.random.random() < 0.5
        message = Message(self, to, self.number, data.copy() if eager else data, eager)
        self._unfinished.append(message)
        self._network.data.setdefault((self.rank, to), deque()).append(message)
        return message

    def receive(self, source: int, memory: MessageMemory = HOST, expected: int = 0) -> Bytes:
        key = source, self.number
        self._wait(source, lambda: key in self.inbox)
        queue = self.inbox[key]
        message = queue.popleft()
        if not queue:
            del self.inbox[key]
        message.out = True
        self._network.wake(message.sender)
        return np.array(message.data)

    # -- waiting ----------------------------------------------------------------------------------------------------

    def _wait(self, peer: int, done: Callable[[], bool]) -> None:
        self._network.step(self)
        self.pinged = False
        while not done():
            self._take_control()
            self._check_leavers()
            self._check_waiters()
            if not self._network.sleep(self, peer):
                self._network.step(self)
            elif self.pinged:
                raise self._timed_out(peer)
            else:
                self.pinged = True
                if peer != self.rank:
                    self._send_control(peer, WAITING, self._call)

    def _receive_control(self, seconds: float) -> None:
        if seconds and not self.arrived:
            self._network.sleep(self, self.rank)
        self._take_control()

    def _take_control(self) -> None:
        arrived, self.arrived = self.arrived, []
        for message in arrived:
            self._add_control(message)
        self._drop_old_control()
