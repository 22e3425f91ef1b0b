"""Signals at random times, whose handlers raise."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType
from typing import Any

from greenlet import getcurrent

from sparsecomm.transport import simulated

__all__ = ["Alarm", "Interrupted"]

_SIMULATED = str(Path(simulated.__file__).parent) + os.sep


class Interrupted(BaseException):
    """What a handler raises."""


class Alarm:
    """A signal at a random time, whose handler raises once, within a ``with`` block, also of several greenlets.

    Attributes:
        where: the handler last raised: the innermost place in Python code; empty: it has not since `set`.
    """

    def __init__(self, error: type[BaseException] = Interrupted) -> None:
        self.where = ""
        self._error, self._armed = error, set[Any]()
        signal.signal(signal.SIGALRM, self._handle)

    def may_raise(self, frame: FrameType | None) -> bool:
        """Return whether the handler raises here: not in what stands for MPI and the network."""
        return frame is None or not frame.f_code.co_filename.startswith(_SIMULATED)

    def _handle(self, _: int, frame: FrameType | None) -> None:
        if getcurrent() in self._armed and self.may_raise(frame):
            self._armed = set()
            code = frame.f_code if frame is not None else self._handle.__code__
            self.where = f"{os.path.relpath(code.co_filename)}:{code.co_name}"
            raise self._error
        if self._armed:  # soon
            signal.setitimer(signal.ITIMER_REAL, 2e-5)

    def set(self, seconds: float) -> None:
        """Raise in so many seconds, once a greenlet is within; never: 0."""
        self.where = ""
        signal.setitimer(signal.ITIMER_REAL, seconds and max(seconds, 1e-6))

    def __enter__(self) -> None:
        self._armed.add(getcurrent())

    def __exit__(self, *_: object) -> None:  # the signal may still come in here
        self._armed.discard(getcurrent())
