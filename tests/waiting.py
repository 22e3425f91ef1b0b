"""Waits for what happens, and never for a time that is long enough on an idle machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

SOON = 60  # seconds, also beside programs that take all cores; far from the 300 that the library waits for a peer


def until(holds: Callable[[], T], what: str = "", seconds: float = SOON) -> T:
    """Wait until ``holds()`` is true, and return it; fail after so many seconds, and say for ``what``."""
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain for {what or holds}"
        time.sleep(1e-3)
    return found


def until_awaited(transport: Any) -> None:
    """Wait until another rank has reported that it waits for this one, in a call that this one has not begun."""

    def awaited() -> bool:
        transport._receive_control(0.1)
        return max(transport._waiting_in.values(), default=0) > transport.number

    until(awaited, "a rank that waits for this one")
