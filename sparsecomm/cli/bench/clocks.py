"""The parts of a call's time: a clock that observes them."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from sparsecomm.calls.queue import queue_of
from sparsecomm.tracing.observers import PARTS
from sparsecomm.transport import Transport

__all__ = ["Clock", "clock_of"]


class Clock:
    """Seconds in each part, since the last `reset`.

    Args:
        wait: returns when what a part started elsewhere, on a CUDA device, is done; it is in that part.
    """

    def __init__(self, wait: Callable[[], None] = lambda: None) -> None:
        self._wait = wait
        self.reset()

    def reset(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)

    def around(self, part: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` with its time counted in ``part``."""

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._wait()
                self.seconds[part] += time.perf_counter() - start

        return timed


def clock_of(transport: Transport, wait: Callable[[], None]) -> Clock:
    """Return the clock of the calls on a transport: one for all who ask."""
    queue = queue_of(transport)
    found = next((observer for observer in queue.observers if isinstance(observer, Clock)), None)
    if found is None:
        found = Clock(wait)
        queue.observe(transport, found)
    return found
