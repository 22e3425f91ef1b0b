"""The deadline of exchanges, and the thread that takes part in place of a program that is late."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol
from weakref import finalize, ref

from sparsecomm.calls.agreement import NO_ENTRIES
from sparsecomm.calls.queue import queue_of
from sparsecomm.errors import TransportError
from sparsecomm.local_steps.exchange import gather_of
from sparsecomm.signals import PollingLock
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.transport import Transport

__all__ = ["Deadline"]

_log = logging.getLogger("sparsecomm")
_MIN_PAUSE, _MAX_PAUSE = 0.05, 1.0  # seconds between two questions whether another rank waits
_MAX_WAIT = 1e6  # seconds


class Program(Protocol):
    """The local steps that a deadline watches. It calls these methods with its lock held.

    ``expected_seconds`` returns the expected time from a step of the schedule to the next exchange, or ``None`` if no
    deadline holds; ``leave_out`` begins this exchange without the program; after ``rest`` no deadline holds until the
    next local step.
    """

    def expected_seconds(self, step: int) -> float | None: ...

    def leave_out(self) -> None: ...

    def rest(self) -> None: ...


@dataclass
class _Exchange:
    """The exchange that began last, after ``step`` of the schedule, and when its calls ended."""

    transport: Transport
    step: int
    ended: float | None = None


class Deadline:
    """Leaves this rank out of an exchange if its program comes too late.

    The time runs from the end of the last exchange on this rank, so clocks need not agree. It is over after ``factor``
    times the expected time of the local steps since then. If another rank waits by then, a thread begins the exchange
    in place of the program. With a ``factor`` of 0 only the lock is used, which the program and the thread hold while
    they use the local steps.
    """

    def __init__(self, factor: float) -> None:
        self.factor, self.lock = factor, PollingLock()
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._last: _Exchange | None = None
        self._idle = True  # the thread sleeps until it is woken
        self._started = False

    def exchange_begun(self, transport: Transport, step: int) -> None:
        """Count the time of the next exchange from the end of this one."""
        self._last = _Exchange(transport, step)
        self._wake.put(None)

    def reset(self) -> None:
        """Let no deadline hold until an exchange begins."""
        self._last = None

    def step_begun(self, program: Program) -> None:
        """Watch a local step of the program."""
        if not self._started:
            self._started = True
            finalize(program, self._wake.put, None)
            threading.Thread(target=self._serve, args=(ref(program),), name="sparsecomm deadline", daemon=True).start()
        if self._idle:
            self._wake.put(None)

    def _serve(self, program: ref[Program]) -> None:
        seconds: float | None = None
        while True:
            with suppress(Empty):
                self._wake.get(timeout=None if seconds is None else min(seconds, _MAX_WAIT))
            watched = program()
            if watched is None:
                return
            try:
                seconds = self.check(watched)
            except Exception as error:
                with self.lock:
                    self._idle, seconds = True, None
                    watched.rest()
                _log.warning("no deadline holds until the next local step: %s", error)
            del watched

    def check(self, program: Program) -> float | None:
        """Leave the program out if it is late. Return the seconds until the next check; ``None``: when woken."""
        # The lock is not held while this waits for calls in the queue, so that the program's local steps continue.
        if (last := self._last) is None:
            return None
        if last.ended is None:
            last.ended = _probe(last.transport).time
        remaining = self._remaining(program, last)
        if remaining is None or remaining > 0:
            return remaining
        waits = _probe(last.transport).awaited
        with self.lock:
            remaining = self._remaining(program, last)
            if remaining is None or remaining > 0:
                return remaining
            if not waits:
                return min(_MAX_PAUSE, _MIN_PAUSE - remaining / 10)
            program.leave_out()
            return 0.0

    def _remaining(self, program: Program, last: _Exchange) -> float | None:
        """Return the seconds until the deadline is over; ``None``: no deadline holds."""
        with self.lock:
            expected = program.expected_seconds(last.step) if last is self._last else None
            self._idle = expected is None
            if expected is None or last.ended is None:
                return None
            return last.ended + self.factor * expected - last.transport.clock()


class _Probe:
    """A task that only notes when its turn in the call queue comes, and whether another rank's exchange waits then."""

    def __init__(self, transport: Transport) -> None:
        self.time, self.awaited, self._transport = 0.0, False, transport

    def run(self) -> SparseVector:
        self.time = self._transport.clock()
        with suppress(TransportError):  # which the next call raises
            self.awaited = self._transport.awaited(gather_of(self._transport).description)
        return NO_ENTRIES

    def leave(self, error: BaseException) -> None:
        self.time = self._transport.clock()


def _probe(transport: Transport) -> _Probe:
    """Return a probe that has had its turn in the call queue."""
    probe = _Probe(transport)
    with suppress(TransportError):  # which the program's next call raises
        queue_of(transport).call(probe)
    return probe
