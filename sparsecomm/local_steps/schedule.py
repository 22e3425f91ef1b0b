"""The division of a model into fragments, and of training into rounds and steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from sparsecomm.checks import is_real, quote, to_bool, to_float, to_int
from sparsecomm.errors import InvalidInputError, did_you_mean, listed

_GAIN = 1.03  # the pace changes only if it makes ranks busier by this factor, because measured speeds fluctuate
_ROUNDING = 1 + 1e-9


def split_names(sizes: Mapping[str, int], fragments: Any) -> tuple[tuple[str, ...], ...]:
    """Return the names of each fragment. ``fragments`` is their number, or their names; ``sizes`` is by tensor."""
    if is_real(fragments):
        if (number := to_int(fragments, 1, len(sizes))) is None:
            raise InvalidInputError(f"fragments={quote(fragments)}: must be from 1 to {len(sizes)}, one tensor in each")
        return split_by_size(sizes, number)
    is_lists = isinstance(fragments, Sequence) and not isinstance(fragments, str)
    if not is_lists or not all(isinstance(part, Sequence) and part and not isinstance(part, str) for part in fragments):
        raise InvalidInputError(f"fragments={quote(fragments)}: expected a number, or lists of at least one name")
    names = known_names([name for part in fragments for name in part], sizes, "fragments")
    count = Counter(names)
    missing, twice = [name for name in sizes if name not in count], [name for name in names if count[name] > 1]
    if missing or twice:
        raise InvalidInputError(
            f"fragments: {listed(missing)} missing, {listed(twice)} repeated; list each tensor exactly once"
        )
    return tuple(map(tuple, fragments))


def known_names(names: Any, known: Collection[str], argument: str = "names") -> list[str]:
    """Return ``names`` (one name, or several; ``None``: all) after checking that they are ``known`` parameters."""
    listing = known if names is None else [names] if isinstance(names, str) else names
    if not isinstance(listing, Iterable):
        raise InvalidInputError(f"{argument}={quote(names)}: expected names of parameters, or None for all of them")
    wanted = list(listing)
    if unknown := [name for name in wanted if not isinstance(name, str) or name not in known]:
        raise InvalidInputError(
            f"{argument}: {quote(unknown[0])} is not one of the {len(known)} parameters, {listed(known)}"
            f"{did_you_mean(unknown[0], known)}"
        )
    return wanted


def split_by_size(sizes: Mapping[str, int], count: int) -> tuple[tuple[str, ...], ...]:
    """Split names into ``count`` groups of neighbours, each with at least one name and about equally many elements."""
    names, total = list(sizes), sum(sizes.values())
    parts: list[list[str]] = [[]]
    done = 0
    for position, name in enumerate(names):
        after, left = count - len(parts), len(names) - position
        middle = done + sizes[name] / 2
        if parts[-1] and after and (left <= after or middle * count >= len(parts) * total):
            parts.append([])
        parts[-1].append(name)
        done += sizes[name]
    return tuple(map(tuple, parts))


class Event(NamedTuple):
    """The beginning, or the application, of the exchange of a fragment for a round."""

    fragment: int
    round: int
    begins: bool


@dataclass(frozen=True)
class Pace:
    """Each rank's number of local steps in a round, from the round ``round`` on. The same on all ranks."""

    round: int = 0
    steps: tuple[int, ...] = ()  # by rank; empty: ``sync_every`` each
    seconds: float = 0.0  # the expected duration of a round without its exchanges; 0: unknown


@dataclass(frozen=True)
class SyncSchedule:
    """The steps after which the exchange of each fragment begins and is applied, and the local steps of each rank.

    Fragment i of F is applied after step (i + 1) * sync_every // F of each round (Streaming DiLoCo: Douillard et al.,
    2025, Section 2). Its exchange begins ``delay`` steps earlier, but not before the first step of the training.

    A round has ``sync_every`` steps of the schedule, which are counted over all rounds. A rank may take more or fewer
    local steps in a round; `passed` converts them to steps of the schedule, so that all ranks begin and apply the same
    exchanges in the same order.

    The attributes are arguments of `sparsecomm.LocalSteps`; ``fragments`` is a number, and ``deadline`` 0 for none.
    """

    sync_every: int
    fragments: int = 1
    delay: int = 0
    by_speed: bool = False
    deadline: float | None = None

    def __post_init__(self) -> None:
        if (sync_every := to_int(self.sync_every, 1)) is None:
            raise InvalidInputError(f"sync_every={quote(self.sync_every)}: must be a number of local steps, at least 1")
        if (delay := to_int(self.delay, 0, sync_every - 1)) is None:
            raise InvalidInputError(
                f"fragment_sync_delay={quote(self.delay)} with sync_every={sync_every}: must be at least 0 and below "
                "sync_every, so that an exchange ends before the fragment's next one begins"
            )
        if sync_every < self.fragments:
            raise InvalidInputError(
                f"sync_every={sync_every} with {self.fragments} fragments: each fragment needs a local step of its "
                "own; raise sync_every or use fewer fragments"
            )
        deadline = 0.0 if self.deadline is None else to_float(self.deadline)
        if self.deadline is not None and not 1 < deadline < math.inf:
            raise InvalidInputError(
                f"deadline={quote(self.deadline)}: must be a factor above 1 of the expected time of local steps, or "
                "None"
            )
        checked = {"sync_every": sync_every, "delay": delay, "deadline": deadline}
        for name, value in {**checked, "by_speed": to_bool("by_speed", self.by_speed)}.items():
            object.__setattr__(self, name, value)

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
        """Return the events after the steps ``first + 1`` to ``last``, in order."""
        return [e for step in range(first + 1, last + 1) for e in (*self.begins(step), *self.applies(step))]

    def passed(self, local_step: int, local_steps: int) -> int:
        """Return how many steps of the schedule have passed in a round after ``local_step`` local steps.

        ``local_steps``: the number of local steps that the rank takes in the whole round.
        """
        return min(self.sync_every, local_step * self.sync_every // local_steps)

    def next_beginning(self, step: int) -> int:
        """Return the next step, later than ``step``, after which an exchange begins."""
        return next(later for later in range(step + 1, step + 2 * self.sync_every + 1) if self.begins(later))

    def steps_between(self, fragment: int, round_no: int) -> int:
        """Return the number of steps since the fragment's previous exchange began."""
        before = self.begun_at(fragment, round_no - 1) if round_no else 0
        return self.begun_at(fragment, round_no) - before

    def pace_after(self, pace: Pace, round_no: int, seconds: Sequence[float], late: Collection[int] = ()) -> Pace:
        """Return the pace from the round ``round_no`` on, which follows ``pace``.

        ``seconds`` is the duration of each rank's local step: 0 if unknown, a lower bound for ``late`` ranks.
        """
        if min(seconds) <= 0 or len(late) == len(seconds):
            return Pace(round_no, pace.steps, pace.seconds)
        if not self.by_speed:
            return Pace(round_no, (), self.sync_every * median(t for i, t in enumerate(seconds) if i not in late))
        total = self.sync_every * len(seconds)
        duration = _round_seconds(total, seconds)
        fitting = [_steps_in(duration, t) for t in seconds]
        # Between the application of a fragment and the beginning of its next exchange, each rank needs a local step.
        min_steps = -(-self.sync_every // (self.sync_every - self.delay))
        new = tuple(max(min_steps, n) for n in fitting)
        old = pace.steps if len(pace.steps) == len(seconds) else (self.sync_every,) * len(seconds)
        excess = sum(new) - sum(fitting)  # of ranks that are too slow for `min_steps`
        if abs(sum(old) - excess - total) < len(seconds) and _busy(new, seconds) <= _GAIN * _busy(old, seconds):
            new = old
        return Pace(round_no, new, duration)


def _steps_in(duration: float, seconds: float) -> int:
    return int(duration / seconds * _ROUNDING)


def _busy(steps: Sequence[int], seconds: Sequence[float]) -> float:
    """Return how many ranks compute, on average over a round."""
    busy = [n * t for n, t in zip(steps, seconds, strict=True)]
    return sum(busy) / max(busy)


def _round_seconds(total: int, seconds: Sequence[float]) -> float:
    """Return the duration of a round that keeps ranks busiest, in which they take about ``total`` local steps in all.

    That number may differ from ``total`` by less than the number of ranks. The closest one decides ties.
    """
    rate, slack = sum(1 / t for t in seconds), len(seconds)
    first, last = max(1, total - slack) / rate, (total + 2 * slack) / rate
    rated = []  # how good each duration is, with the duration
    for end in {n * t for t in seconds for n in range(math.ceil(first / t / _ROUNDING), int(last / t) + 1)}:
        steps = [_steps_in(end, t) for t in seconds]
        if abs(sum(steps) - total) < slack:
            rated.append((-round(_busy(steps, seconds), 9), abs(sum(steps) - total), end))
    return min(rated)[2]


class StepTimer:
    """Measures the local steps of this rank, each from the end of a call of `LocalSteps.step` to the next call."""

    def __init__(self, clock: Callable[[], float], estimate: float = 0.0) -> None:
        self.clock, self.estimate = clock, estimate  # the latest estimate in seconds of a local step
        self.started: float | None = None  # when the current local step began; ``None``: it is not measured
        self._spent, self._steps = 0.0, 0

    def stop(self) -> None:
        """End the measurement of a local step."""
        if self.started is not None:
            self._spent += self.clock() - self.started
            self._steps += 1
            self.started = None

    def nanoseconds(self) -> int:
        """Update the estimate by the steps since the last call, and return it; 0: unknown.

        The estimate rises at once and falls gradually, because a rank that is slower than estimated delays the others.
        """
        if self._steps:
            mean = self._spent / self._steps
            self.estimate = max(mean, math.sqrt(mean * self.estimate))
            self._spent, self._steps = 0.0, 0
        running = 0.0 if self.started is None else self.clock() - self.started  # long if this rank is late
        seconds = max(self.estimate, running)
        return min(max(1, round(1e9 * seconds)), 1 << 62) if seconds > 0 else 0
