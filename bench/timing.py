"""Times the actions of benchmarks, round by round, on all ranks at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsecomm.tensors.arrays import Array
from sparsecomm.tools import timing
from sparsecomm.tools.timing import quiet_barrier
from sparsecomm.tools.world import World


def seconds(action: Callable[[], Any]) -> float:
    """Return the seconds that a call takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


class Runner:
    """Something to measure. Its actions are methods without arguments that all ranks call, such as `step`."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self.step = step

    def before(self, action: str) -> None:
        """Prepare a call, outside its time."""

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


class Ours(timing.Ours, Runner):
    """An algorithm of sparsecomm."""

    def before(self, action: str) -> None:
        self.reset()

    def wait(self) -> None:
        self.vectors.memory.wait()

    def traffic(self) -> Sequence[float]:
        return self.moved()

    def parts(self) -> dict[str, float]:
        return {} if self.clock is None else dict(self.clock.seconds)


@dataclass(frozen=True)
class Timing:
    """Times of the calls of one action, the same on all ranks."""

    seconds: Array  # of a call, by rank and round; NaN in rounds without a call
    parts: dict[str, Array]  # the same for each part of a call, if they were timed
    traffic: Array  # bytes per call by rank, in the columns of `Runner.traffic`

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
        settle: whether to wait for all ranks before counting traffic, so that all bytes have been sent.
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
            quiet_barrier(self._comm)  # sends few bytes
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
        by_part = {name: np.array([of_rank[name] for of_rank in parts]) for name in parts[0]}
        return Timing(np.array(seconds), by_part, np.array(traffic))
