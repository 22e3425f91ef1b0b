"""The thread that takes part in exchanges to which its rank's program does not come in time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Protocol
from weakref import finalize, ref

__all__ = ["Watch"]

_MAX_SECONDS = 1e6  # of a wait


class Watched(Protocol):
    """What is watched."""

    def keep_up(self) -> float | None:
        """Do what is due. Return in how many seconds something may be due again; ``None``: not before `Watch.wake`."""


class Watch:
    """A thread that calls `Watched.keep_up` of an object for as long as that lives.

    Attributes:
        wake: have it called now; from any thread, and without waiting.
    """

    wake: Callable[[], object]

    def __init__(self, watched: Watched) -> None:
        """Start it."""
        awake: SimpleQueue[None] = SimpleQueue()
        self.wake = lambda: awake.put(None)
        finalize(watched, self.wake)
        name = "sparsecomm deadline"
        threading.Thread(target=_watch, args=(ref(watched), awake), name=name, daemon=True).start()


def _watch(watched: ref[Watched], awake: SimpleQueue[None]) -> None:
    seconds: float | None = None
    while True:
        with suppress(Empty):
            awake.get(timeout=None if seconds is None else min(seconds, _MAX_SECONDS))
        found = watched()
        if found is None:
            return
        seconds = found.keep_up()
        del found
