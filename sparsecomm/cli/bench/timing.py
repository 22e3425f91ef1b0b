"""The measuring core of all benchmarks: calls that all ranks begin together, timed on every rank."""

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

_SECONDS = 0.2  # budget of the measurement of links
_LONG, _MARGIN = 1e-3, 0.01  # seconds: trips of a long link; margin of a common start, besides trips


def quiet_barrier(comm: World) -> None:
    """Wait for all ranks, leaving the cores to ranks that still work."""
    if not isinstance(comm, ProcessGroupWorld):  # its barrier sleeps anyway
        request = comm.Ibarrier()
        while not request.Test():
            time.sleep(100e-6)
    comm.Barrier()  # all ranks have arrived; this one aligns them


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Keep Python's garbage collector from running."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class CommonStart:
    """Starts calls on all ranks at one moment. All methods are collective.

    Over a long link, ranks leave a barrier several trips apart. On short links a barrier is precise enough.
    """

    def __init__(self, comm: World, transport: Transport) -> None:
        """Measure the links and the clock offsets of the ranks."""
        self._comm, self._clock, links = comm, transport.clock, measured_links(transport, _SECONDS)
        self._offset = clocks.offsets(range(transport.size), links.fastest)[transport.rank].seconds
        alpha = links.slowest.alpha
        self._pause = 4 * log2_ceil(transport.size) * alpha + _MARGIN if transport.size > 1 and alpha > _LONG else 0.0

    def wait(self) -> None:
        """Return at a time that rank 0 chooses, late enough for all ranks to know it by then."""
        if self._pause:
            moment = self._comm.bcast(self._clock() + self._pause) + self._offset
            time.sleep(max(0.0, moment - self._clock()))


class Runner:
    """A contender. Its actions are methods without arguments that all ranks call: `step`, and others."""

    def before(self, action: str) -> None:
        """Prepare a call, outside its time."""

    def step(self) -> Any:
        """Compute the dense sum in ``out`` from gradient and residual."""
        raise NotImplementedError

    def wait(self) -> None:
        """Wait for the work of a device."""

    def traffic(self) -> Sequence[float]:
        """Return the bytes that this rank has sent, and received, so far."""
        return ()

    def parts(self) -> dict[str, float]:
        """Return the seconds of each part of the last calls, if they are timed."""
        return {}

    def close(self) -> None:
        """Release resources."""


@dataclass(frozen=True)
class Timing:
    """Times of the calls of one action, the same on all ranks.

    Attributes:
        seconds: of a call, by rank and round; NaN in rounds without a call.
        parts: the same for each part of a call, if they were timed.
        traffic: bytes per call by rank, in the columns of `Runner.traffic`.
    """

    seconds: Array
    parts: dict[str, Array]
    traffic: Array

    @property
    def slowest(self) -> Array:
        """Seconds of each round on its slowest rank."""
        slowest: Array = self.seconds.max(axis=0)
        return slowest

    @property
    def median(self) -> float:
        """The median of `slowest`."""
        return float(np.nanmedian(self.slowest))


class Timer:
    """Times one action of a runner, round by round. All methods are collective.

    Args:
        rounds: number of rounds.
        calls: number of consecutive calls per round; the time is their mean.
        ready: called after the barrier and before the time starts.
        settle: whether to wait for all ranks before counting traffic, so that everything sent has left.
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
        """Make the calls of a round; negative rounds only warm up. Return the result of the last call."""
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
            quiet_barrier(self._comm)  # its own bytes are few
        if round_no >= 0:
            self._seconds[round_no] = seconds
            self._traffic += np.array(runner.traffic()) - traffic
            self._counted += self._calls
            for part, total in runner.parts().items():
                self._parts.setdefault(part, np.full(len(self._seconds), np.nan))[round_no] = total / self._calls
        return result

    def timing(self) -> Timing:
        """Return the times of all ranks."""
        every = self._comm.allgather((self._seconds, self._parts, self._traffic / self._counted))
        seconds, parts, traffic = zip(*every, strict=True)
        by_part = {name: np.array([each[name] for each in parts]) for name in parts[0]}
        return Timing(np.array(seconds), by_part, np.array(traffic))
