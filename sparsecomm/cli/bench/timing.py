"""The measuring core of all benchmarks: calls that all ranks begin together, and what each call took on every rank."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsecomm.calls.measurement import measured_links
from sparsecomm.cli.world import ProcessGroupWorld, World
from sparsecomm.primitives.costs import log2_ceil
from sparsecomm.tensors.arrays import Array
from sparsecomm.transport import Transport
from sparsecomm.tuning import clocks

__all__ = ["CommonStart", "Runner", "Timer", "Timing", "quiet_barrier", "uninterrupted"]


_SECONDS = 0.2  # for which links are measured
_LONG, _MARGIN = 1e-3, 0.01  # seconds: of a trip that makes a link long; until a moment, beside the trips


def quiet_barrier(comm: World) -> None:
    """Wait for all ranks, leaving the cores to those that are still at work."""
    if not isinstance(comm, ProcessGroupWorld):  # which sleeps while it waits
        request = comm.Ibarrier()
        while not request.Test():
            time.sleep(100e-6)
    comm.Barrier()  # by now all are here: aligns them


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Keep Python's garbage collector from running."""
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class CommonStart:
    """Has calls begin on all ranks at one moment. All methods are collective.

    Over a long link, ranks leave a barrier up to some trips apart. On short links a barrier is precise enough.
    """

    def __init__(self, comm: World, transport: Transport) -> None:
        """Measure links, and by how much the clocks of the ranks differ."""
        self._comm, self._clock, links = comm, transport.clock, measured_links(transport, _SECONDS)
        self._ahead = clocks.offsets(range(transport.size), links.fastest)[transport.rank].seconds
        alpha = links.slowest.alpha
        self._pause = 4 * log2_ceil(transport.size) * alpha + _MARGIN if transport.size > 1 and alpha > _LONG else 0.0

    def wait(self) -> None:
        """Return at the time chosen by rank 0, far enough ahead that every rank knows it by then."""
        if self._pause:
            moment = self._comm.bcast(self._clock() + self._pause) + self._ahead
            time.sleep(max(0.0, moment - self._clock()))


class Runner:
    """A contender at work. Its actions are methods without arguments, which all ranks call: `step`, and others."""

    def before(self, action: str) -> None:
        """Set up what a call starts from, outside the time."""

    def step(self) -> Any:
        """Go from gradient and residual to the dense sum in ``out``."""
        raise NotImplementedError

    def wait(self) -> None:
        """Return when all that was started on a device is done."""

    def traffic(self) -> Sequence[float]:
        """Return bytes that this rank has sent, and received, so far."""
        return ()

    def parts(self) -> dict[str, float]:
        """Return seconds of each part of the last calls, if they are timed."""
        return {}

    def close(self) -> None:
        """Give back what was opened."""


@dataclass(frozen=True)
class Timing:
    """The times of the calls of one action. The same on all ranks.

    Attributes:
        seconds: of a call, by rank and round; NaN in rounds in which it was not called.
        parts: the same for each part of a call, if they were timed.
        traffic: bytes per call that a rank sent, received, and so on, as its runner counts them, by rank.
    """

    seconds: Array
    parts: dict[str, Array]
    traffic: Array

    @property
    def slowest(self) -> Array:
        """Seconds of each round on the rank that took longest."""
        slowest: Array = self.seconds.max(axis=0)
        return slowest

    @property
    def median(self) -> float:
        """The median over the rounds of `slowest`."""
        return float(np.nanmedian(self.slowest))


class Timer:
    """Times one action of a runner, round by round. All methods are collective.

    Args:
        rounds: how many there will be.
        calls: made one after another in each round, whose time is their mean.
        ready: called after the barrier and before the time.
        settle: whether to wait for all ranks before traffic is counted, so that what was sent has left.
    """

    def __init__(
        self,
        comm: World,
        runner: Runner,
        action: str,
        rounds: int,
        *,
        calls: int = 1,
        ready: Callable[[], None] = lambda: None,
        settle: bool = False,
    ) -> None:
        self._comm, self._runner, self._action, self._calls = comm, runner, action, calls
        self._ready, self._settle = ready, settle
        self._seconds, self._parts = np.full(rounds, np.nan), dict[str, Array]()
        self._traffic, self._counted = np.zeros(len(runner.traffic())), 0

    def run(self, round_no: int) -> Any:
        """Make the calls of a round; a negative one warms up and is not kept. Return what the last call returned."""
        runner, call = self._runner, getattr(self._runner, self._action)
        runner.before(self._action)
        quiet_barrier(self._comm)
        self._ready()
        traffic = np.array(runner.traffic())
        start = time.perf_counter()
        for _ in range(self._calls):
            result = call()
        runner.wait()
        seconds = (time.perf_counter() - start) / self._calls
        if self._settle:
            quiet_barrier(self._comm)  # whose own bytes are few
        if round_no >= 0:
            self._seconds[round_no] = seconds
            self._traffic += np.array(runner.traffic()) - traffic
            self._counted += self._calls
            for part, its in runner.parts().items():
                self._parts.setdefault(part, np.full(len(self._seconds), np.nan))[round_no] = its / self._calls
        return result

    def timing(self) -> Timing:
        """Return what was measured, of all ranks."""
        every = self._comm.allgather((self._seconds, self._parts, self._traffic / self._counted))
        seconds, parts, traffic = zip(*every, strict=True)
        return Timing(
            np.array(seconds), {name: np.array([its[name] for its in parts]) for name in parts[0]}, np.array(traffic)
        )
