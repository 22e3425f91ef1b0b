"""`Deadline`, which begins an exchange without the program if the program is late."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol
from weakref import finalize, ref

from sparsecomm.calls.queue import NO_ENTRIES, queue_of
from sparsecomm.errors import TransportError, log
from sparsecomm.local_steps.exchange import words_gather
from sparsecomm.signals import PollingLock
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.transport import Transport

_MIN_PAUSE, _MAX_PAUSE = 0.05, 1.0  # seconds between two checks of whether another rank waits
_MAX_WAIT = 1e6  # seconds


class Program(Protocol):
    """The methods of `LocalSteps` that a deadline calls."""

    def expected_seconds(self, step: int) -> float | None: ...

    def leave_out(self) -> None: ...

    def rest(self) -> None: ...


@dataclass
class _LastExchange:
    """The latest exchange: it began after ``step`` of the schedule, and its calls ended at the time ``ended``."""

    transport: Transport
    step: int
    ended: float | None = None


class Deadline:
    """Leaves this rank out of an exchange if its program reaches the exchange too late.

    The deadline starts when the last exchange ends on this rank. It lasts ``factor`` times the expected time of the
    local steps until the next exchange. If ``factor`` is 0, there is no deadline. If another rank waits after the
    deadline, a thread begins the exchange without the program. The program and the thread hold `lock` while they use
    the local steps.
    """

    def __init__(self, factor: float) -> None:
        self.factor, self.lock = factor, PollingLock()
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._last: _LastExchange | None = None
        self._idle = True  # the thread sleeps until it is woken
        self._started = False

    def exchange_begun(self, transport: Transport, step: int) -> None:
        """Record that an exchange began after ``step``. The next deadline counts from the end of this exchange."""
        if self.factor:
            self._last = _LastExchange(transport, step)
            self._wake.put(None)

    def reset(self) -> None:
        """Disable the deadline until an exchange begins."""
        self._last = None

    def step_begun(self, program: Program) -> None:
        """Start the thread, or wake it if it sleeps, because the program begins a local step."""
        if not self._started:
            self._started = True
            finalize(program, self._wake.put, None)
            threading.Thread(target=self._watch, args=(ref(program),), name="sparsecomm deadline", daemon=True).start()
        if self._idle:
            self._wake.put(None)

    def _watch(self, program: ref[Program]) -> None:
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
                log.warning("the deadline is disabled until the next local step: %s", error)
            del watched

    def check(self, program: Program) -> float | None:
        """Leave the program out if it is late. Return the seconds until the next check; ``None``: wait to be woken."""
        # `_probe` waits for calls, so it runs without the lock, which the program's local steps need.
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

    def _remaining(self, program: Program, last: _LastExchange) -> float | None:
        """Return the seconds until the deadline; ``None``: there is none now."""
        with self.lock:
            expected = program.expected_seconds(last.step) if last is self._last else None
            self._idle = expected is None
            if expected is None or last.ended is None:
                return None
            return last.ended + self.factor * expected - last.transport.clock()


class _Probe:
    """A task that sends nothing. It records when the calls before it ended, and whether another rank waits now."""

    def __init__(self, transport: Transport) -> None:
        self.time, self.awaited, self._transport = 0.0, False, transport

    def run(self) -> SparseVector:
        self.time = self._transport.clock()
        with suppress(TransportError):  # the next call raises it again
            self.awaited = self._transport.awaited(words_gather(self._transport).description)
        return NO_ENTRIES

    def leave(self, error: BaseException) -> None:
        self.time = self._transport.clock()


def _probe(transport: Transport) -> _Probe:
    """Run a probe in the call queue, and return it."""
    probe = _Probe(transport)
    with suppress(TransportError):  # the program's next call raises it again
        queue_of(transport).call(probe)
    return probe
