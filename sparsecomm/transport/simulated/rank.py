"""`SimulatedTransport`: the transport of a simulated rank. `World` has the network and the scheduler of all ranks."""

from __future__ import annotations

import random
import zlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush
from threading import Lock, Thread
from typing import NamedTuple

import numpy as np

from sparsecomm.errors import InvalidInputError, RankFailedError, SparseCommError, TransportError, pip_install
from sparsecomm.signals import poll, swap
from sparsecomm.transport.base import HOST, Bytes, MessageMemory, Request
from sparsecomm.transport.control import WAITING, ControlMessage, FailureDetector

_PACKET_BYTES = 1448  # of data, over Ethernet
_RETRANSMISSION = 0.2  # seconds after which TCP sends a lost packet again: the minimum of Linux


class MessageCost(NamedTuple):
    """Seconds of delay, seconds per byte, and seconds between two messages of one rank in addition to their bytes."""

    alpha: float
    beta: float
    gap: float


class SharedLink:
    """A node's link in one direction, with the time intervals in which it is busy."""

    def __init__(self) -> None:
        self._begins: list[float] = []  # of the intervals, ascending
        self._ends: list[float] = []

    def take(self, earliest: float, seconds: float) -> float:
        """Occupy the link for ``seconds``, at ``earliest`` or as soon as possible after it; return the delay."""
        if not seconds:
            return 0.0
        begin, i = earliest, bisect_right(self._ends, earliest)
        while i < len(self._begins) and self._begins[i] < begin + seconds:
            begin = self._ends[i]
            i += 1
        if i and self._ends[i - 1] == begin:
            self._ends[i - 1] = begin + seconds
        else:
            self._begins.insert(i, begin)
            self._ends.insert(i, begin + seconds)
        return begin - earliest


class Network:
    """The nodes, and their links, all idle at first."""

    def __init__(
        self, node_of_rank: Sequence[int], between: MessageCost, inside: MessageCost, loss: float = 0.0, seed: int = 0
    ) -> None:
        """Make links between nodes, which lose a share ``loss`` of all packets.

        ``between``, ``inside``: the costs of a message between nodes, and inside a node.
        """
        self.node_of_rank, self.between, self.inside = node_of_rank, between, inside
        self._loss, self._random = loss, random.Random(seed)
        shared = [node for node, ranks in Counter(node_of_rank).items() if ranks > 1]  # one rank alone never waits
        self._out = {node: SharedLink() for node in shared}
        self._in = {node: SharedLink() for node in shared}

    def path(self, sender: int, receiver: int) -> tuple[MessageCost, SharedLink | None, SharedLink | None]:
        """Return the cost of a message, and the links out of one node and into the other; None if not shared."""
        source, target = self.node_of_rank[sender], self.node_of_rank[receiver]
        if source == target:
            return self.inside, None, None
        return self.between, self._out.get(source), self._in.get(target)

    def retransmission(self, sender: int, receiver: int, nbytes: int) -> float:
        """Return the seconds by which lost packets delay a message."""
        if not self._loss or self.node_of_rank[sender] == self.node_of_rank[receiver]:
            return 0.0
        no_loss = (1 - self._loss) ** -(-max(nbytes, 1) // _PACKET_BYTES)  # the probability
        return 0.0 if self._random.random() < no_loss else _RETRANSMISSION


class Killed(BaseException):
    """Ends the program of a rank that `SimulatedTransport.kill` has killed."""


class Scheduler(ABC):
    """Runs one rank at a time: of those that can run, the one with the lowest time, until it sleeps or ends."""

    def __init__(self) -> None:
        self._ready: list[tuple[float, int]] = []  # a heap of (earliest time to run, rank)

    def run(self, task: Callable[[int], None], starts: Sequence[float], break_deadlock: Callable[[], None]) -> None:
        """Run ``task(rank)``, which must not raise, for every rank from ``starts[rank]`` on, until all have returned.

        ``break_deadlock`` is called when all ranks that have not returned sleep; it must wake at least one.
        """
        self._ready = [(time, rank) for rank, time in enumerate(starts)]
        heapify(self._ready)
        try:
            while True:
                while self._ready:
                    self._continue(heappop(self._ready)[1], task)
                if self._all_returned(len(starts)):
                    return
                break_deadlock()
        finally:
            self._stop()

    @abstractmethod
    def _continue(self, rank: int, task: Callable[[int], None]) -> None:
        """Let a rank run until it sleeps or returns."""

    @abstractmethod
    def _all_returned(self, size: int) -> bool:
        """Return whether the tasks of all ranks have returned."""

    def _stop(self) -> None:  # noqa: B027  # most schedulers have nothing to stop
        """End the ranks that sleep, after an exception that is not part of a program."""

    @abstractmethod
    def sleep(self, rank: int) -> None:
        """Run other ranks until `wake` is called for this one. Must be called by this rank."""

    def wake(self, rank: int, time: float) -> None:
        """Let a sleeping rank run from ``time`` on."""
        heappush(self._ready, (time, rank))

    def yield_until(self, rank: int, time: float) -> None:
        """Run the ranks that can run before ``time`` first. Must be called by ``rank``."""
        if self._ready and self._ready[0] < (time, rank):
            self.wake(rank, time)
            self.sleep(rank)


class Greenlets(Scheduler):
    """Runs each rank in a greenlet of the calling thread. Fast, even with thousands of ranks."""

    def __init__(self) -> None:
        """Raise `TransportError` if greenlet is not installed."""
        super().__init__()
        try:
            import greenlet
        except ImportError as error:
            raise TransportError(f"simulated ranks need greenlet: {pip_install('simulated')}") from error
        self._greenlet = greenlet.greenlet
        self._hub: greenlet.greenlet = greenlet.getcurrent()
        self._greenlets: dict[int, greenlet.greenlet] = {}

    def _continue(self, rank: int, task: Callable[[int], None]) -> None:
        if rank not in self._greenlets:
            self._greenlets[rank] = self._greenlet(task, parent=self._hub)
        self._greenlets[rank].switch(rank)  # only the first switch passes the argument to the task

    def _all_returned(self, size: int) -> bool:
        return all(greenlet.dead for greenlet in self._greenlets.values())

    def sleep(self, rank: int) -> None:
        gate = swap()
        try:
            self._hub.switch()
        finally:
            swap(gate)


class Threads(Scheduler):
    """Runs each rank in a thread of its own, as PyTorch and JAX need: both keep state by thread."""

    def __init__(self) -> None:
        super().__init__()
        self._turns: dict[int, Lock] = {}  # a rank runs when it can acquire its lock
        self._hub = Lock()  # `_continue` returns when it can acquire this lock
        self._hub.acquire()
        self._running: dict[int, Thread] = {}
        self._error: BaseException | None = None  # raised by a task
        self._stopped = False

    def _continue(self, rank: int, task: Callable[[int], None]) -> None:
        if rank in self._turns:
            self._turns[rank].release()
        else:
            self._turns[rank] = Lock()
            self._turns[rank].acquire()
            self._running[rank] = Thread(target=self._run, args=(rank, task), daemon=True, name=f"rank {rank}")
            self._running[rank].start()
        self._hub.acquire()
        if self._error is not None:
            raise self._error

    def _run(self, rank: int, task: Callable[[int], None]) -> None:
        try:
            task(rank)
        except BaseException as error:
            self._error = error
        del self._running[rank]
        if not self._stopped:
            self._hub.release()

    def _all_returned(self, size: int) -> bool:
        return not self._running

    def _stop(self) -> None:
        self._stopped = True
        for rank, thread in list(self._running.items()):
            self._turns[rank].release()
            thread.join()

    def sleep(self, rank: int) -> None:
        if not self._stopped:
            self._hub.release()
            self._turns[rank].acquire()
        if self._stopped:
            raise Killed(f"rank {rank} was stopped, since another rank raised an exception")


@dataclass
class _Message:
    data: Bytes  # a copy
    nbytes: int  # size used for times and counters
    start: float  # when it begins to leave the sender


@dataclass(eq=False)
class _SendRequest(Request):
    """A request that raises if the sender changed the bytes before `wait`, which would corrupt messages over MPI."""

    sender: SimulatedTransport
    to: int
    data: Bytes
    checksum: int
    free_at: float  # when the bytes may be reused

    def wait(self) -> None:
        if self not in self.sender._pending:
            return
        self.sender._pending.remove(self)
        self.check()
        self.sender.seconds = max(self.sender.seconds, self.free_at)

    def check(self) -> None:
        if zlib.crc32(self.data.data) != self.checksum:
            raise TransportError(
                f"rank {self.sender.rank} changed the bytes of a message in flight to rank {self.to}: call `wait` first"
            )


class World:
    """The state that simulated ranks share."""

    def __init__(self, network: Network, scheduler: Scheduler, weigh: Callable[[Bytes], int]) -> None:
        """Make one transport per rank of ``network``. ``weigh`` returns the size of a message."""
        self.network, self.scheduler, self.weigh = network, scheduler, weigh
        num_nodes = len(set(network.node_of_rank))
        self.ranks = [SimulatedTransport(self, rank, num_nodes) for rank in range(len(network.node_of_rank))]

    def break_deadlock(self) -> None:
        """Make at least one rank raise the error that it would raise over MPI, when all ranks wait.

        Ranks in `realign` time out only if no other rank raises.
        """
        stuck = [(t, t._source) for t in self.ranks if t._source is not None]
        if [t for t, _ in stuck if t._wake_if_raises(t._check_leavers)]:
            return
        if [t for t, source in stuck if t._wake_if_raises(partial(t._check_alive, source))]:
            return
        for t, source in stuck:
            t._send_control(source, WAITING, t._call)
        if [t for t, _ in stuck if t._wake_if_raises(t._check_waiters)]:
            return
        if unanswered := [t for t in self.ranks if t._listening and t._in_call]:
            for t in unanswered:
                t.compute(t.timeout)
                t.wake()
            return
        sleeping = {t.rank for t in self.ranks if t._source is not None or t._listening}
        for_finished = [(t, source) for t, source in stuck if source not in sleeping]
        for t, source in for_finished or stuck:
            state = f"rank {source} has finished" if for_finished else ""
            t._wake_if_raises(partial(t._time_out, source, state))
        for t in () if stuck else self.ranks:
            if t._listening:
                t.compute(t.timeout)
                t.wake()


class SimulatedTransport(FailureDetector):
    """The transport of one simulated rank. ``seconds`` is its clock.

    A rank that waits in a call reads control messages only when all ranks wait: see `World.break_deadlock`.
    """

    library, simulated = "simulated", True

    def __init__(self, world: World, rank: int, num_nodes: int) -> None:
        super().__init__(world.network.node_of_rank, num_nodes)
        self.rank, self.size = rank, len(self.node_of_rank)
        self.seconds = 0.0
        self._world = world
        self._next_send = 0.0  # when the next message may begin to leave
        self._next_receive = 0.0  # when the next message may begin to arrive
        self._control_arrived = 0.0  # when the latest control message had arrived
        self._pending: list[_SendRequest] = []
        self._inbox: dict[tuple[int, int], deque[_Message]] = {}  # (source, call) -> messages
        self._source: int | None = None  # the rank for whose message this rank waits
        self._error: SparseCommError | None = None  # to be raised by the wait
        self._listening = False  # waits for control messages
        self.dead = False
        self._messages_left: int | None = None  # until this rank dies; None if it does not

    def compute(self, seconds: float) -> None:
        """Advance this rank's clock by ``seconds`` of work."""
        self.seconds += seconds

    def kill(self, messages: int = 0) -> None:
        """Let this rank die, as by ``kill -9``: when it has sent ``messages`` more messages, and would send another.

        Its program ends there. The ranks that wait for it raise `RankFailedError`.
        """
        self._messages_left = messages
        if not messages:
            self._die()

    def _die(self) -> None:
        self.dead = True
        raise Killed(f"rank {self.rank} was killed")

    # -- calls --------------------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self.dead:
            self._die()

    def _prepare_call(self) -> None:
        self._forget_before(self.number)
        self._drop_old_control()
        if self.skip_reason:
            self._check_leavers()

    def end(self) -> None:
        super().end()
        unfinished, self._pending = self._pending, []
        for request in unfinished:
            request.check()
        if unfinished:
            raise TransportError(f"rank {self.rank} never waited for a message to rank {unfinished[0].to}")

    def abort(self, error: BaseException) -> None:
        super().abort(error)
        self._pending.clear()

    def _forget_before(self, number: int) -> None:
        if self._inbox:
            self._inbox = {key: queue for key, queue in self._inbox.items() if key[1] >= number}

    def _continue_after(self, number: int) -> None:
        super()._continue_after(number)
        self._forget_before(number + 1)

    # -- control messages ---------------------------------------------------------------------------------------------

    def clock(self) -> float:
        return self.seconds

    def _send_control(self, to: int, kind: int, text: bytes) -> None:
        if self.dead:
            return
        receiver = self._world.ranks[to]
        receiver._add_control(ControlMessage(self.rank, self.number, kind, text))
        receiver._control_arrived = self.seconds + self._world.network.between.alpha
        if kind != WAITING and receiver._listening:
            receiver.wake(receiver._control_arrived)

    def _receive_control(self, seconds: float) -> None:
        if seconds:
            self._listening = True
            self._world.scheduler.sleep(self.rank)
            self.seconds = max(self.seconds, self._control_arrived)

    # -- messages -----------------------------------------------------------------------------------------------------

    def isend(self, data: Bytes, to: int, memory: MessageMemory = HOST) -> Request:
        self._check_peer(to)
        if self._messages_left is not None:
            if not self._messages_left:
                self._die()
            self._messages_left -= 1
        memory.ready(data, len(data))
        if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
            raise InvalidInputError(f"data has dtype {data.dtype} and shape {data.shape}; expected contiguous bytes")
        world, receiver, nbytes = self._world, self._world.ranks[to], self._world.weigh(data)
        costs, link, _ = world.network.path(self.rank, to)
        if link is not None:
            world.scheduler.yield_until(self.rank, self.seconds)
        start, transfer = max(self.seconds, self._next_send), costs.beta * nbytes
        if link is not None:
            start += link.take(start, transfer)
        self._next_send = start + (costs.gap + transfer)
        start += world.network.retransmission(self.rank, to, nbytes)
        key = self.rank, self.number
        receiver._inbox.setdefault(key, deque()).append(_Message(data.copy(), nbytes, start))
        if receiver._source == self.rank and receiver.number == self.number:
            receiver.wake(start)
        self._count_sent(nbytes)
        request = _SendRequest(self, to, data, zlib.crc32(data.data), self._next_send)
        self._pending.append(request)
        return request

    def receive(self, source: int, memory: MessageMemory = HOST, expected: int = 0) -> Bytes:
        self._check_peer(source)
        world = self._world
        costs, _, link = world.network.path(source, self.rank)
        key = source, self.number
        if key not in self._inbox:
            self._wait(source)
        elif link is not None:
            world.scheduler.yield_until(self.rank, max(self.seconds, self._inbox[key][0].start))
        queue = self._inbox[key]
        message = queue.popleft()
        if not queue:
            del self._inbox[key]
        start, transfer = max(self._next_receive, message.start + costs.alpha), costs.beta * message.nbytes
        if link is not None:
            start += link.take(start, transfer)
        self.seconds = max(self.seconds, start + transfer)
        self._next_receive = start + (transfer + costs.gap)
        return self._deliver(message.data, message.nbytes, memory)

    # -- waiting ------------------------------------------------------------------------------------------------------

    def _wait(self, source: int) -> None:
        self._check_usable()
        poll()
        self._source = source
        self._world.scheduler.sleep(self.rank)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wake(self, seconds: float = 0.0) -> None:
        """End this rank's wait, at time ``seconds`` or at its clock, whichever is later."""
        self._source, self._listening = None, False
        self._world.scheduler.wake(self.rank, max(self.seconds, seconds))

    def _wake_if_raises(self, check: Callable[[], None]) -> bool:
        """Call ``check``. If it raises, make this rank's wait raise the same error, and return true."""
        try:
            check()
        except SparseCommError as error:
            self.seconds, self._error = max(self.seconds, self._control_arrived), error
            self.wake()
            return True
        return False

    def _check_alive(self, source: int) -> None:
        if self._world.ranks[source].dead:
            text = f"rank {source} died: rank {self.rank} ({self.describe_call()}) waits for a message from it"
            raise RankFailedError(text, (source,))

    def _time_out(self, source: int, state: str) -> None:
        self.compute(self.timeout)
        raise self._timed_out(source, state)
