"""Waits for events instead of fixed times, which would be too short on a busy machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

SOON = 60  # seconds, enough on a busy machine, and less than the library's timeout of 300


def until(holds: Callable[[], T], what: str = "", seconds: float = SOON) -> T:
    """Wait until ``holds()`` is true and return its value. Fail after ``seconds``, naming ``what``."""
    deadline = time.monotonic() + seconds
    while not (value := holds()):
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain for {what or holds}"
        time.sleep(1e-3)
    return value


def until_awaited(transport: Any) -> None:
    """Wait until another rank reports that it waits for this one in a call that this one has not begun."""

    def awaited() -> bool:
        transport._receive_control(0.1)
        return max(transport._waiting_in.values(), default=0) > transport.number

    until(awaited, "a rank that waits for this one")
