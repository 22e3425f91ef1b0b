"""The number of local steps that each rank takes in a round, which may follow the ranks' speeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import median

from sparsecomm.checks import flag, number, shown
from sparsecomm.errors import InvalidInputError
from sparsecomm.local_steps.fragments import SyncSchedule

__all__ = ["Pace", "Pacing", "StepTimer"]

_GAIN = 1.03  # the pace changes only if rounds get shorter by this factor: measured speeds are never quite the same
_ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class Pace:
    """The numbers of local steps in rounds: the same on all ranks.

    Attributes:
        round: the first round to which it applies.
        steps: by rank; empty: ``sync_every`` each.
        seconds: the expected duration of a round without its exchanges; 0: unknown.
    """

    round: int = 0
    steps: tuple[int, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Pacing:
    """The rule by which `Pace` follows from the measured speeds of the ranks.

    Attributes:
        sync_every: local steps of a round: of each rank, or by speed on average over the ranks.
        by_speed: whether faster ranks take more local steps.
        deadline: see `sparsecomm.LocalSteps`; 0: none.
        min_steps: the smallest number of local steps of a rank in a round: at least one falls between the application
            of a fragment and the beginning of its next exchange.
    """

    sync_every: int
    by_speed: bool = False
    deadline: float = 0.0
    min_steps: int = 1

    @classmethod
    def of(cls, schedule: SyncSchedule, by_speed: object, deadline: object) -> Pacing:
        """Return the rule for these arguments of `sparsecomm.LocalSteps`.

        Raises:
            InvalidInputError: an argument is out of range.
        """
        factor = 0.0 if deadline is None else number(deadline)
        if deadline is not None and not 1 < factor < math.inf:
            raise InvalidInputError(
                f"deadline={shown(deadline)}: must be a factor above 1 of the expected time of local steps, or None"
            )
        min_steps = -(-schedule.sync_every // (schedule.sync_every - schedule.delay))
        return cls(schedule.sync_every, flag("by_speed", by_speed), factor, min_steps)

    def after(self, pace: Pace, round_no: int, seconds: Sequence[float], late: Collection[int] = ()) -> Pace:
        """Return the pace from a round on.

        Args:
            pace: the pace until then.
            round_no: the round.
            seconds: duration of a local step, by rank; 0: not measured.
            late: ranks that were left out: ``seconds`` is a lower bound for them.
        """
        if min(seconds) <= 0 or len(late) == len(seconds):
            return Pace(round_no, pace.steps, pace.seconds)
        if not self.by_speed:
            return Pace(round_no, (), self.sync_every * median(t for i, t in enumerate(seconds) if i not in late))
        until = _least_idle(self.sync_every * len(seconds), seconds)
        new = tuple(max(self.min_steps, _steps_within(until, t)) for t in seconds)
        old = pace.steps if len(pace.steps) == len(seconds) else (self.sync_every,) * len(seconds)
        if abs(sum(new) - sum(old)) < len(seconds) and _busy(new, seconds) <= _GAIN * _busy(old, seconds):
            new = old
        return Pace(round_no, new, until)


def _steps_within(until: float, seconds: float) -> int:
    """Return the number of steps that end within a time, or together with it."""
    return int(until / seconds * _ROUNDING)


def _busy(steps: Sequence[int], seconds: Sequence[float]) -> float:
    """Return how many ranks compute on average while a round lasts."""
    each = [n * t for n, t in zip(steps, seconds, strict=True)]
    return sum(each) / max(each)


def _least_idle(total: int, seconds: Sequence[float]) -> float:
    """Return the duration of a round of about ``total`` steps in which ranks are idle for the smallest share of it.

    The number of steps of all ranks may differ from ``total`` by less than the number of ranks. Of several such
    durations, the one whose number is closest to it is taken.
    """
    rate, slack = sum(1 / t for t in seconds), len(seconds)
    first, last = max(1, total - slack + 1) / rate, (total + 2 * slack) / rate
    found = []
    for end in {n * t for t in seconds for n in range(math.ceil(first / t / _ROUNDING), int(last / t) + 1)}:
        steps = [_steps_within(end, t) for t in seconds]
        if abs(sum(steps) - total) < slack:
            found.append((-round(_busy(steps, seconds), 9), abs(sum(steps) - total), end))
    return min(found)[2]


class StepTimer:
    """Measures the local steps of this rank, from the end of one call of `LocalSteps.step` to the next call.

    Attributes:
        started: when the current local step began; ``None``: none is being measured.
        estimate: seconds of a local step, as measured so far.
    """

    started: float | None

    def __init__(self, clock: Callable[[], float], estimate: float = 0.0) -> None:
        self.clock, self.started, self.estimate = clock, None, estimate
        self._spent, self._steps = 0.0, 0

    def start(self) -> None:
        """Begin to measure a local step."""
        self.started = self.clock()

    def stop(self) -> None:
        """End the measurement of a local step."""
        if self.started is not None:
            self._spent += self.clock() - self.started
            self._steps += 1
            self.started = None

    def cancel(self) -> None:
        """Do not measure the current local step."""
        self.started = None

    def nanoseconds(self) -> int:
        """Return the duration of a local step since the last call of this method; 0: unknown.

        A slower rank holds up the others, so the estimate rises at once and falls gradually.
        """
        if self._steps:
            mean = self._spent / self._steps
            self.estimate = max(mean, math.sqrt(mean * self.estimate))
            self._spent, self._steps = 0.0, 0
        running = 0.0 if self.started is None else self.clock() - self.started  # for a rank that is late
        seconds = max(self.estimate, running)
        return min(max(1, round(1e9 * seconds)), 1 << 62) if seconds > 0 else 0
