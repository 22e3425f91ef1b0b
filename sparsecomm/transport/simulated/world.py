"""All simulated ranks: which of them can run, and what is done when none can."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Generic, TypeVar

from sparsecomm.errors import CollectiveMismatchError, SparseCommError, TimeoutError, TransportError
from sparsecomm.transport.base import TrafficCounters
from sparsecomm.transport.memory import Bytes
from sparsecomm.transport.simulated.network import Network
from sparsecomm.transport.simulated.rank import Left, SimulatedTransport, Waiting

if TYPE_CHECKING:
    from greenlet import greenlet

__all__ = ["Result", "World"]

T = TypeVar("T")


@dataclass(frozen=True)
class Result(Generic[T]):
    """What became of one rank."""

    value: T | None  # what the program returned
    error: Exception | None  # what it raised
    seconds: float  # the virtual time at which it finished
    counters: TrafficCounters


class World:
    """The ranks, which of them can run, and what is done when none can."""

    def __init__(self, network: Network, delays: Sequence[float], weigh: Callable[[Bytes], int]) -> None:
        try:
            import greenlet
        except ImportError as error:
            raise TransportError("simulated ranks need greenlet: `pip install sparsecomm[simulated]`") from error
        self.network, self.delays, self.weigh = network, delays, weigh
        self.size, self.num_nodes = len(network.node_of_rank), len(set(network.node_of_rank))
        self.left: dict[int, list[Left]] = {}  # call -> the ranks that left it with an error
        self.ranks = [SimulatedTransport(self, rank) for rank in range(self.size)]
        self._greenlet = greenlet.greenlet
        self._hub: greenlet = greenlet.getcurrent()
        self._tasks: list[greenlet] = []
        self._ready: list[tuple[float, int]] = []  # a heap of ranks, by the time from which they can run
        self._waiters: dict[tuple[int, int], list[SimulatedTransport]] = {}  # (rank waited for, call) -> who waits

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
        self._ready = [(seconds, rank) for rank, seconds in enumerate(self.delays)]
        heapify(self._ready)
        self._go_on()
        while len(results) < self.size:
            self._break_deadlock()
            self._go_on()
        return [results[rank] for rank in range(self.size)]

    def sleep(self) -> None:
        """Called on a rank's greenlet: run others until something wakes it."""
        self._hub.switch()

    def wake(self, transport: SimulatedTransport, seconds: float = 0.0) -> None:
        """``seconds``: the time at which what it waits for happens."""
        heappush(self._ready, (max(transport.seconds, seconds), transport.rank))
        transport._waiting = None

    def turn(self, transport: SimulatedTransport, seconds: float) -> None:
        """Called on a rank's greenlet: let those run first that can before that time."""
        now = seconds, transport.rank
        if self._ready and self._ready[0] < now:
            heappush(self._ready, now)
            self.sleep()

    def _go_on(self) -> None:
        while self._ready:
            rank = heappop(self._ready)[1]
            self._tasks[rank].switch(self.ranks[rank])  # what it is given counts when it begins

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

    def _left(self, t: SimulatedTransport, waiting: Waiting) -> SparseCommError | None:
        for left in self.left.get(waiting.number, ()):
            if left.rank != t.rank:
                t._told = True
                t.seconds = max(t.seconds, left.seconds + self.network.between.alpha)
                kind = CollectiveMismatchError if left.mismatch else TransportError
                where = f"call {waiting.number}, which rank {t.rank} is in"
                return kind(f"rank {left.rank} left {where}. {left.reason}")
        return None

    def _different(self, t: SimulatedTransport, waiting: Waiting) -> SparseCommError | None:
        """A rank that waits for ``t`` in the same call takes it for another one."""
        for other in self._waiters[t.rank, waiting.number]:
            if other._call != t._call and t._mismatch is not None:
                return t._mismatch(other._call, other.rank)
        return None

    def _missing(self, t: SimulatedTransport, waiting: Waiting) -> SparseCommError | None:
        """The rank waited for has finished."""
        if self.ranks[waiting.source]._waiting is not None:
            return None
        return self._timed_out(t, waiting, f"rank {waiting.source} has finished")

    def _circle(self, t: SimulatedTransport, waiting: Waiting) -> SparseCommError | None:
        theirs = self.ranks[waiting.source]._waiting
        assert theirs is not None  # or `_missing` has found an error
        return self._timed_out(
            t, waiting, f"rank {waiting.source} waits for rank {theirs.source} in call {theirs.number}"
        )

    def _timed_out(self, t: SimulatedTransport, waiting: Waiting, doing: str) -> TimeoutError:
        t.seconds += t._timeout
        return TimeoutError(
            f"rank {t.rank} waited {t._timeout:g} s for rank {waiting.source} in call {waiting.number}: {doing}. "
            "All ranks must make the same calls in the same order."
        )
