"""`Clock`, which separates the work of simulated ranks from the time that their messages take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparsecomm.transport import simulated
from sparsecomm.transport.base import Request


class Clock:
    """Adds up the seconds that simulated ranks spend on moving messages, which is not work of the library.

    The transport copies messages within the process, and checks that senders do not change them. It switches from rank
    to rank only within its methods. Time therefore counts from when any rank enters a method until any rank leaves one.
    """

    def __init__(self, wait: Callable[[], float]) -> None:
        """``wait`` waits for the device and returns the time."""
        self.messages, self._wait = 0.0, wait
        self._begun: float | None = None

    def watch(self, transport: simulated.SimulatedTransport) -> None:
        """Time the methods of a transport. Must be called when its rank begins."""
        self._end()
        for name in ("isend", "receive", "_receive_control"):
            setattr(transport, name, self.timed(getattr(transport, name)))

    def _end(self) -> None:
        if self._begun is not None:
            self.messages += self._wait() - self._begun
            self._begun = None

    def timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method, so that its time counts as time of messages."""

        def call(*arguments: Any, **options: Any) -> Any:
            if self._begun is None:
                self._begun = self._wait()
            try:
                result = method(*arguments, **options)
            finally:
                self._end()
            if isinstance(result, Request):
                result.wait = self.timed(result.wait)  # type: ignore[method-assign]
            return result

        return call
