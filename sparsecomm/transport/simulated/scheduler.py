"""The scheduler of simulated ranks, which runs the rank that can run at the lowest virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from sparsecomm.errors import TransportError, pip_install
from sparsecomm.signals import swap

if TYPE_CHECKING:
    from greenlet import greenlet

__all__ = ["Scheduler"]


class Scheduler:
    """Runs one greenlet per rank, each until it sleeps or ends. It knows times and ranks, but no messages."""

    def __init__(self) -> None:
        """Prepare to run tasks.

        Raises:
            TransportError: greenlet is not installed.
        """
        try:
            import greenlet
        except ImportError as error:
            raise TransportError(f"simulated ranks need greenlet: {pip_install('simulated')}") from error
        self._greenlet = greenlet.greenlet
        self._hub: greenlet = greenlet.getcurrent()
        self._ready: list[tuple[float, int]] = []  # a heap of (earliest time to run, rank)

    def run(self, task: Callable[[int], None], starts: Sequence[float], break_deadlock: Callable[[], None]) -> None:
        """Run ``task(rank)`` for every rank until all have returned.

        Args:
            task: must not raise.
            starts: start time of each rank.
            break_deadlock: called when all ranks that have not returned sleep; must wake at least one.
        """
        greenlets = [self._greenlet(task, parent=self._hub) for _ in starts]
        self._ready = [(time, rank) for rank, time in enumerate(starts)]
        heapify(self._ready)
        while True:
            while self._ready:
                rank = heappop(self._ready)[1]
                greenlets[rank].switch(rank)  # only the first switch passes the argument to the task
            if all(each.dead for each in greenlets):
                return
            break_deadlock()

    def sleep(self) -> None:
        """Run other ranks until `wake` is called for this one. Must be called on this rank's greenlet."""
        gate = swap()
        try:
            self._hub.switch()
        finally:
            swap(gate)

    def wake(self, rank: int, time: float) -> None:
        """Let a sleeping rank run from ``time`` on."""
        heappush(self._ready, (time, rank))

    def yield_until(self, rank: int, time: float) -> None:
        """Run the ranks that can run before ``time`` first. Must be called on the greenlet of ``rank``."""
        if self._ready and self._ready[0] < (time, rank):
            self.wake(rank, time)
            self.sleep()
