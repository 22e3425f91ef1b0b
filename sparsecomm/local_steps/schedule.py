"""The schedule of rounds: when fragments are exchanged, and how many local steps each rank takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from sparsecomm.checks import quote, to_bool, to_float, to_int
from sparsecomm.errors import InvalidInputError

__all__ = ["Event", "Pace", "Pacing", "StepTimer", "SyncSchedule"]

_GAIN = 1.03  # the pace changes only if rounds get shorter by this factor: measured speeds are never quite the same
_ROUNDING = 1 + 1e-9


class Event(NamedTuple):
    """The beginning, or the application, of the exchange of a fragment for a round."""

    fragment: int
    round: int
    begins: bool


@dataclass(frozen=True)
class SyncSchedule:
    """After which steps the exchange of each fragment begins, and after which it is applied.

    Fragment i of F is applied after step (i + 1) * sync_every // F of each round (Streaming DiLoCo: Douillard et al.,
    2025, Section 2). Its exchange begins ``delay`` steps earlier, but not before the first step of the training.

    Steps are counted over all rounds, in local steps of a rank that takes ``sync_every`` in a round. `passed` converts
    the local steps of other ranks. So all ranks begin and apply the same exchanges in the same order.

    Attributes:
        sync_every: number of steps in a round.
        fragments: number of fragments.
        delay: number of steps from the beginning of an exchange to its application.

    Raises:
        InvalidInputError: an argument is out of range.
    """

    sync_every: int
    fragments: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
        if (sync_every := to_int(self.sync_every, 1)) is None:
            raise InvalidInputError(f"sync_every={quote(self.sync_every)}: must be a number of local steps, at least 1")
        if (delay := to_int(self.delay, 0, sync_every - 1)) is None:
            raise InvalidInputError(
                f"fragment_sync_delay={quote(self.delay)} with sync_every={sync_every}: must be at least 0 and below "
                "sync_every, so that an exchange ends before the fragment's next one begins"
            )
        object.__setattr__(self, "sync_every", sync_every)
        object.__setattr__(self, "delay", delay)
        if sync_every < self.fragments:
            raise InvalidInputError(
                f"sync_every={sync_every} with {self.fragments} fragments: each fragment needs a local step of its "
                "own; raise sync_every or use fewer fragments"
            )

    def applied_at(self, fragment: int, round_no: int) -> int:
        """Return the step after which the exchange of a fragment for a round is applied."""
        return round_no * self.sync_every + (fragment + 1) * self.sync_every // self.fragments

    def begun_at(self, fragment: int, round_no: int) -> int:
        """Return the step after which the exchange of a fragment for a round begins."""
        return max(1, self.applied_at(fragment, round_no) - self.delay)

    def begins(self, step: int) -> list[Event]:
        """Return the exchanges that begin after a step."""
        last = (step - 1 + self.delay) // self.sync_every
        rounds = range(max(0, last - 1), last + 1)
        return [Event(i, r, True) for r in rounds for i in range(self.fragments) if self.begun_at(i, r) == step]

    def applies(self, step: int) -> list[Event]:
        """Return the exchanges that are applied after a step."""
        round_no = (step - 1) // self.sync_every
        return [Event(i, round_no, False) for i in range(self.fragments) if self.applied_at(i, round_no) == step]

    def events(self, first: int, last: int) -> list[Event]:
        """Return what is due after the steps ``first + 1`` to ``last``, in order."""
        return [e for step in range(first + 1, last + 1) for e in (*self.begins(step), *self.applies(step))]

    def passed(self, local_step: int, local_steps: int) -> int:
        """Return the number of steps of a round that have passed for a rank that takes ``local_steps`` in it."""
        return min(self.sync_every, local_step * self.sync_every // local_steps)

    def next_beginning(self, step: int) -> int:
        """Return the first step after ``step`` after which an exchange begins."""
        return next(later for later in range(step + 1, step + 2 * self.sync_every + 1) if self.begins(later))

    def steps_between(self, fragment: int, round_no: int) -> int:
        """Return the number of steps since the fragment's previous exchange began."""
        before = self.begun_at(fragment, round_no - 1) if round_no else 0
        return self.begun_at(fragment, round_no) - before


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
        factor = 0.0 if deadline is None else to_float(deadline)
        if deadline is not None and not 1 < factor < math.inf:
            raise InvalidInputError(
                f"deadline={quote(deadline)}: must be a factor above 1 of the expected time of local steps, or None"
            )
        min_steps = -(-schedule.sync_every // (schedule.sync_every - schedule.delay))
        return cls(schedule.sync_every, to_bool("by_speed", by_speed), factor, min_steps)

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
        total = self.sync_every * len(seconds)
        until = _least_idle(total, seconds)
        fitting = [_steps_within(until, t) for t in seconds]
        new = tuple(max(self.min_steps, n) for n in fitting)
        old = pace.steps if len(pace.steps) == len(seconds) else (self.sync_every,) * len(seconds)
        excess = sum(new) - sum(fitting)  # of ranks that are too slow even for `min_steps`
        if abs(sum(old) - excess - total) < len(seconds) and _busy(new, seconds) <= _GAIN * _busy(old, seconds):
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
