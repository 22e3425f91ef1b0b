"""Sends a signal whose handler raises, at the n-th place in the library where it makes a difference.

Python runs handlers in the main thread between bytecode instructions: after calls, at the beginning of functions and
at backward jumps. A trace function sees each instruction of the library and sends the signal at the n-th such place.
Within the gate of `sparsecomm.signals`, the handler waits for the next poll or the end of the gate, so only the first
place between two polls counts.
"""

from __future__ import annotations

import opcode
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from greenlet import getcurrent

import sparsecomm
from sparsecomm import signals
from sparsecomm.transport import simulated
from sparsecomm.transport.simulated import SimulatedTransport

LIBRARY = str(Path(sparsecomm.__file__).parent)
SIMULATED = str(Path(simulated.__file__).parent)  # replaces compiled code: MPI and the network
AFTER = frozenset(
    number
    for name, number in opcode.opmap.items()
    if (name.startswith("CALL_") and not name.startswith("CALL_INTRINSIC"))  # no handler runs after these
    or name in ("CALL", "RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
)


class InterruptError(Exception):
    """Raised by the handler: an ordinary exception, as handlers of SIGALRM often raise."""


SIGNAL = signal.SIGUSR1
WAITS = "begin", "isend", "receive"  # methods of transports that may wait


def interrupt(number: int, frame: object) -> None:
    raise InterruptError


class Points:
    """Counts the points at which the library can be interrupted, and interrupts it at some.

    Attributes:
        passed: number of points so far.
        outside: number of points outside the gate, where handlers run at once.
        interrupts: number of signals sent.
        where: the place of the last signal, or an empty string.
        roots: the files or folders whose code is interrupted.
    """

    where = ""
    roots: tuple[str, ...] = (LIBRARY, "<string>")  # constructors of data classes and named tuples

    def __init__(self, *at: int) -> None:
        """Send the signal at the points with the numbers ``at``, ascending from 0."""
        self.passed = self.outside = self.interrupts = 0
        self._at, self._gate = list(at), (False, -1)
        self._greenlet = getcurrent()  # the rank, if this one is simulated

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Trace a frame, if it is the library's."""
        file = frame.f_code.co_filename
        of_library = file.startswith(self.roots) and not file.startswith(SIMULATED)
        of_library = of_library and frame.f_code.co_name != "__del__"  # Python ignores its exceptions
        if event != "call" or not of_library or getcurrent() is not self._greenlet:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        code, last = frame.f_code.co_code, -1

        def local(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal last
            if event != "opcode":
                return local
            before, last = last, frame.f_lasti
            if before >= 0 and code[before] in AFTER and self._counts():
                self.passed += 1
                if self._at and self._at[0] == self.passed - 1:
                    self._at.pop(0)
                    self.interrupts += 1
                    file = frame.f_code.co_filename.removeprefix(f"{LIBRARY}/")
                    self.where = f"{file}:{frame.f_lineno} {frame.f_code.co_name}"
                    signal.raise_signal(SIGNAL)  # outside the gate, the handler raises here and tracing ends
            return local

        frame.f_trace = local
        return local

    def _counts(self) -> bool:
        """Return whether a signal here has a different effect than at the previous place."""
        before, self._gate = self._gate, signals.state()
        self.outside += not self._gate[0]
        return not self._gate[0] or self._gate != before

    def resume(self, frame: FrameType, event: str, argument: Any) -> None:
        """Resume tracing after an interrupt. This is the profile function, which an exception does not remove."""
        if event == "call" and sys.gettrace() is None and self._at and getcurrent() is self._greenlet:
            sys.settrace(self.trace)
            self.trace(frame, event, argument)


@contextmanager
def interrupted(*at: int, points: Points | None = None) -> Iterator[Points]:
    """Interrupt the library in the with block at the points ``at``, or as ``points`` says, and count all points."""
    points = Points(*at) if points is None else points
    traced, handler = sys.gettrace(), signal.signal(SIGNAL, interrupt)
    with pytest.MonkeyPatch.context() as patch:
        for name in WAITS:
            patch.setattr(SimulatedTransport, name, _polling(getattr(SimulatedTransport, name)))
        try:
            if len(at) > 1:
                sys.setprofile(points.resume)
            sys.settrace(points.trace)
            yield points
        finally:
            sys.settrace(traced)
            sys.setprofile(None)
            signal.signal(SIGNAL, handler)


def _polling(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that polls before and after ``method``, as transports over a network may."""

    def polled(*args: Any, **kwargs: Any) -> Any:
        signals.poll()
        result = method(*args, **kwargs)
        signals.poll()
        return result

    return polled
