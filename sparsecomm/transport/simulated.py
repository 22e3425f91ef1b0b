"""Many ranks in one process, in virtual time.

Every rank is a greenlet that runs until it waits for a message, so the shipped algorithms themselves run at any
number of ranks, without MPI, and tell what they would cost on a given network.

The model has one link per rank, which carries one message out and one message in at a time. A message of B bytes
occupies each end for ``T = alpha + beta * B`` seconds:

- the sender starts it when its earlier messages are out, and may reuse the bytes T later;
- the receiver takes it in from then on, or when the message that it received before is in, and has it T later.

A receiver takes its messages in in the order in which it asks for them. Thus all times follow from the programs
alone, not from the order in which greenlets happen to run, and every run gives the same.
"""

from __future__ import annotations

import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from sparsecomm import config
from sparsecomm.errors import (
    CollectiveMismatchError,
    InvalidInputError,
    SparseCommError,
    TimeoutError,
    TransportError,
)
from sparsecomm.memory import HOST, Bytes, Memory
from sparsecomm.transport.base import Counters, Mismatch, Sending, Transport

if TYPE_CHECKING:
    from greenlet import greenlet

__all__ = ["Result", "SimulatedTransport", "run"]

T = TypeVar("T")


@dataclass(frozen=True)
class Result(Generic[T]):
    """What became of one rank."""

    value: T | None  # what the program returned
    error: Exception | None  # what it raised
    seconds: float  # the virtual time at which it finished
    counters: Counters


def run(
    size: int,
    program: Callable[[SimulatedTransport], T],
    *,
    alpha: float = 0.0,
    beta: float = 0.0,
    nodes: Sequence[int] | None = None,
    catch: bool = False,
) -> list[Result[T]]:
    """Run ``program(transport)`` on ``size`` ranks, and return what became of each, by rank.

    Args:
        alpha: seconds per message.
        beta: seconds per byte.
        nodes: for each rank, the number of its machine; ``None``: each has its own.
        catch: put errors into the results; otherwise the error of the lowest rank that failed is raised.
    """
    if size < 1 or alpha < 0 or beta < 0:
        raise InvalidInputError(f"size={size}, alpha={alpha}, beta={beta}: expected one rank at least and costs >= 0")
    world = _World(size, alpha, beta, range(size) if nodes is None else nodes)
    results = world.run(program)
    errors = [result.error for result in results if result.error is not None]
    if errors and not catch:
        raise errors[0]
    return results


@dataclass
class _Message:
    data: Bytes  # of the receiver's own
    start: float  # when it begins to leave the sender


@dataclass
class _Sent(Sending):
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
class _Left:
    """A rank has left a call with an error."""

    rank: int
    seconds: float
    mismatch: bool
    reason: str


@dataclass
class _Waiting:
    """What a rank waits for, and what wakes it: a message or an error."""

    source: int
    number: int
    error: SparseCommError | None = field(default=None)


class SimulatedTransport(Transport):
    """One simulated rank's end. ``seconds`` is its clock."""

    def __init__(self, world: _World, rank: int) -> None:
        self.rank = rank
        self.size = world.size
        self.counters = Counters()
        self.nodes, self.machines, self.library = world.nodes, len(set(world.nodes)), "simulated"
        self.seconds = 0.0
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
        self._waiting: _Waiting | None = None

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
            left = _Left(self.rank, self.seconds, isinstance(error, CollectiveMismatchError), reason)
            self._world.left.setdefault(self._number, []).append(left)
        self._inside = False
        self._under_way.clear()

    def post(self, data: Bytes, to: int, memory: Memory = HOST) -> Sending:
        receiver = self._peer(to)
        memory.ready(data, len(data))
        if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
            raise InvalidInputError(f"data of dtype {data.dtype} and shape {data.shape}: expected contiguous bytes")
        start = max(self.seconds, self._out)
        self._out = start + self._world.seconds(data.nbytes)
        key = self.rank, self._number
        receiver._inbox.setdefault(key, deque()).append(_Message(data.copy(), start))
        if receiver._waiting is not None and (receiver._waiting.source, receiver._waiting.number) == key:
            self._world.wake(receiver)
        self.counters.messages_sent += 1
        self.counters.bytes_sent += data.nbytes
        sent = _Sent(self, to, data, zlib.crc32(data.data), self._out)
        self._under_way.append(sent)
        return sent

    def receive(self, source: int, memory: Memory = HOST, expected: int = 0) -> Bytes:
        self._peer(source)
        key = source, self._number
        if key not in self._inbox:
            self._wait(source)
        queue = self._inbox[key]
        message = queue.popleft()
        if not queue:
            del self._inbox[key]
        self._in = max(self._in, message.start) + self._world.seconds(message.data.nbytes)
        self.seconds = max(self.seconds, self._in)
        self.counters.messages_received += 1
        self.counters.bytes_received += message.data.nbytes
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
        self._waiting = waiting = _Waiting(source, self._number)
        self._world.sleep()
        if waiting.error is not None:
            raise waiting.error


class _World:
    """The ranks, which of them can run, and what is done when none can."""

    def __init__(self, size: int, alpha: float, beta: float, nodes: Sequence[int]) -> None:
        try:
            import greenlet
        except ImportError as error:
            raise TransportError("simulated ranks need greenlet: `pip install sparsecomm[simulated]`") from error
        self.size, self.nodes = size, nodes
        self.left: dict[int, list[_Left]] = {}  # call -> the ranks that left it with an error
        self.ranks = [SimulatedTransport(self, rank) for rank in range(size)]
        self._alpha, self._beta = alpha, beta
        self._greenlet = greenlet.greenlet
        self._hub: greenlet = greenlet.getcurrent()
        self._tasks: list[greenlet] = []
        self._ready: deque[int] = deque()
        self._waiters: dict[tuple[int, int], list[SimulatedTransport]] = {}  # (rank waited for, call) -> who waits

    def seconds(self, nbytes: int) -> float:
        return self._alpha + self._beta * nbytes

    def run(self, program: Callable[[SimulatedTransport], T]) -> list[Result[T]]:
        results: dict[int, Result[T]] = {}

        def task(transport: SimulatedTransport) -> None:
            value, error = None, None
            try:
                value = program(transport)
            except Exception as raised:
                error = raised
            results[transport.rank] = Result(value, error, transport.seconds, transport.counters)

        self._tasks = [self._greenlet(task, parent=self._hub) for _ in self.ranks]
        for transport, greenlet in zip(self.ranks, self._tasks, strict=True):
            greenlet.switch(transport)
            self._go_on()
        while len(results) < self.size:
            self._break_deadlock()
            self._go_on()
        return [results[rank] for rank in range(self.size)]

    def sleep(self) -> None:
        """Called on a rank's greenlet: run others until something wakes it."""
        self._hub.switch()

    def wake(self, transport: SimulatedTransport) -> None:
        self._ready.append(transport.rank)
        transport._waiting = None

    def _go_on(self) -> None:
        while self._ready:
            self._tasks[self._ready.popleft()].switch()

    def _break_deadlock(self) -> None:
        """No rank can run: give those that wait the error that they would get from MPI, the surest reason first."""
        stuck = [(t, t._waiting) for t in self.ranks if t._waiting is not None]
        self._waiters = defaultdict(list)
        for t, waiting in stuck:
            self._waiters[waiting.source, waiting.number].append(t)
        for find in (self._left, self._different, self._missing, self._circle):
            errors = [(t, waiting, error) for t, waiting in stuck if (error := find(t, waiting)) is not None]
            for transport, waiting, error in errors:
                waiting.error = error
                self.wake(transport)
            if errors:
                return

    def _left(self, t: SimulatedTransport, waiting: _Waiting) -> SparseCommError | None:
        for left in self.left.get(waiting.number, ()):
            if left.rank != t.rank:
                t._told = True
                t.seconds = max(t.seconds, left.seconds + self._alpha)
                kind = CollectiveMismatchError if left.mismatch else TransportError
                where = f"call {waiting.number}, which rank {t.rank} is in"
                return kind(f"rank {left.rank} left {where}. {left.reason}")
        return None

    def _different(self, t: SimulatedTransport, waiting: _Waiting) -> SparseCommError | None:
        """A rank that waits for ``t`` in the same call takes it for another one."""
        for other in self._waiters[t.rank, waiting.number]:
            if other._call != t._call and t._mismatch is not None:
                return t._mismatch(other._call, other.rank)
        return None

    def _missing(self, t: SimulatedTransport, waiting: _Waiting) -> SparseCommError | None:
        """The rank waited for has finished."""
        if self.ranks[waiting.source]._waiting is not None:
            return None
        return self._timed_out(t, waiting, f"rank {waiting.source} has finished")

    def _circle(self, t: SimulatedTransport, waiting: _Waiting) -> SparseCommError | None:
        theirs = self.ranks[waiting.source]._waiting
        assert theirs is not None  # or `_missing` has found an error
        return self._timed_out(
            t, waiting, f"rank {waiting.source} waits for rank {theirs.source} in call {theirs.number}"
        )

    def _timed_out(self, t: SimulatedTransport, waiting: _Waiting, doing: str) -> TimeoutError:
        t.seconds += t._timeout
        return TimeoutError(
            f"rank {t.rank} waited {t._timeout:g} s for rank {waiting.source} in call {waiting.number}: {doing}. "
            "All ranks must make the same calls in the same order."
        )
