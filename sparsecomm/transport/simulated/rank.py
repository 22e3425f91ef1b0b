"""`SimulatedTransport`: one simulated rank, with its clock and its messages. `World` is the state that ranks share."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from sparsecomm.errors import InvalidInputError, SparseCommError, TransportError
from sparsecomm.signals import poll
from sparsecomm.transport.base import HOST, Bytes, MessageMemory, Request
from sparsecomm.transport.control import REALIGN, WAITING, ControlMessage, FailureDetector
from sparsecomm.transport.simulated.network import Network
from sparsecomm.transport.simulated.scheduler import Scheduler

__all__ = ["SimulatedTransport", "World"]


@dataclass
class _Message:
    data: Bytes  # a copy
    nbytes: int  # size used for times and counters
    start: float  # when it begins to leave the sender


@dataclass(eq=False)
class _SendRequest(Request):
    """A request that raises if the sender reuses the bytes too early, which over MPI would sometimes send garbage."""

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
        """Make one transport per rank of ``network``. ``weigh`` returns the size that a message stands for."""
        self.network, self.scheduler, self.weigh = network, scheduler, weigh
        num_nodes = len(set(network.node_of_rank))
        self.ranks = [SimulatedTransport(self, rank, num_nodes) for rank in range(len(network.node_of_rank))]

    def break_deadlock(self) -> None:
        """Raise on at least one rank what it would raise over MPI, because all ranks wait.

        Ranks that wait in `realign` continue to wait as long as another rank has a reason to raise.
        """
        stuck = [(t, t._source) for t in self.ranks if t._source is not None]
        if [t for t, _ in stuck if t._wake_if_raises(t._check_leavers)]:
            return
        for t, source in stuck:
            t._send_control(source, WAITING, t._call)
        if [t for t, _ in stuck if t._wake_if_raises(t._check_waiters)]:
            return
        for_finished = [(t, source) for t, source in stuck if not self.ranks[source]._sleeps]
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
        self._source: int | None = None  # the rank whose message this rank waits for
        self._error: SparseCommError | None = None  # to be raised by the wait
        self._listening = False  # waits for control messages

    def compute(self, seconds: float) -> None:
        """Advance this rank's clock by ``seconds`` of work."""
        self.seconds += seconds

    # -- calls --------------------------------------------------------------------------------------------------------

    def _prepare_call(self) -> None:
        self._forget_before(self.number)
        self._drop_old_control()
        if self.skipped:
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
        receiver = self._world.ranks[to]
        receiver._add_control(ControlMessage(self.rank, self.number, kind, text))
        receiver._control_arrived = self.seconds + self._world.network.between.alpha
        if kind == REALIGN and receiver._listening:
            receiver.wake(receiver._control_arrived)

    def _receive_control(self, seconds: float) -> None:
        if seconds:
            self._listening = True
            self._world.scheduler.sleep()
            self.seconds = max(self.seconds, self._control_arrived)

    # -- messages -----------------------------------------------------------------------------------------------------

    def isend(self, data: Bytes, to: int, memory: MessageMemory = HOST) -> Request:
        self._check_peer(to)
        memory.ready(data, len(data))
        if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
            raise InvalidInputError(f"data has dtype {data.dtype} and shape {data.shape}; expected contiguous bytes")
        world, receiver, nbytes = self._world, self._world.ranks[to], self._world.weigh(data)
        costs, link = world.network.egress(self.rank, to)
        if link is not None:
            world.scheduler.yield_until(self.rank, self.seconds)
        start, transfer = max(self.seconds, self._next_send), costs.beta * nbytes
        if link is not None:
            start += link.take(start, transfer)
        self._next_send = start + (costs.gap + transfer)
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
        start, transfer = max(self._next_receive, message.start + costs.alpha), costs.beta * message.nbytes
        if link is not None:
            start += link.take(start, transfer)
        self.seconds = max(self.seconds, start + transfer)
        self._next_receive = start + (transfer + costs.gap)
        return self._deliver(message.data, message.nbytes, memory)

    # -- waiting ------------------------------------------------------------------------------------------------------

    def _wait(self, source: int) -> None:
        poll()
        self._source = source
        self._world.scheduler.sleep()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wake(self, seconds: float = 0.0) -> None:
        """End this rank's wait, at time ``seconds`` or at its clock, whichever is later."""
        self._source, self._listening = None, False
        self._world.scheduler.wake(self.rank, max(self.seconds, seconds))

    @property
    def _sleeps(self) -> bool:
        return self._source is not None or self._listening

    def _wake_if_raises(self, check: Callable[[], None]) -> bool:
        """Call ``check``. If it raises, make this rank's wait raise the same error, and return true."""
        try:
            check()
        except SparseCommError as error:
            self.seconds, self._error = max(self.seconds, self._control_arrived), error
            self.wake()
            return True
        return False

    def _time_out(self, source: int, state: str) -> None:
        self.compute(self.timeout)
        raise self._timed_out(source, state)
