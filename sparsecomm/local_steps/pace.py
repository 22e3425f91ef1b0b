"""How many local steps each rank takes in a round, and how that follows the speeds of the ranks."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import median

from sparsecomm.checks import quote, to_bool, to_float
from sparsecomm.errors import InvalidInputError
from sparsecomm.local_steps.fragments import SyncSchedule

__all__ = ["Pace", "Pacing", "StepTimer"]

_WORTH = 1.03  # a table stays until another one makes the round shorter by this factor: speeds are never quite the same


@dataclass(frozen=True)
class Pace:
    """The local steps of rounds: the same on all ranks.

    Attributes:
        round: the first one for which it holds.
        steps: by rank; empty: ``sync_every`` each.
        seconds: that a round is expected to take, without its exchanges; 0: not known.
    """

    round: int = 0
    steps: tuple[int, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Pacing:
    """The rule by which the local steps of a round are divided.

    Attributes:
        sync_every: local steps of each rank in a round; by speed: of a rank on average, give or take less than one, and
            of each in the first round.
        by_speed: whether the faster ranks take more.
        round_seconds: that a round is to take; 0: as long as ``sync_every`` local steps of a rank on average.
        deadline: what comes later than so many times the expected time is left out; 0: everybody waits.
        min_steps: local steps that a rank takes at least.

    Raises:
        InvalidInputError: one of them cannot be used.
    """

    sync_every: int
    by_speed: bool = False
    round_seconds: float = 0.0
    deadline: float = 0.0
    min_steps: int = 1

    @classmethod
    def of(cls, schedule: SyncSchedule, by_speed: object, round_seconds: object, deadline: object) -> Pacing:
        """Return that of arguments; ``None``: there is no such bound.

        A rank takes one local step at least from where a fragment is applied to where its next exchange begins.
        """
        seconds = 0.0 if round_seconds is None else to_float(round_seconds)
        if round_seconds is not None and not 0 < seconds < math.inf:
            raise InvalidInputError(f"round_seconds={quote(round_seconds)}: expected seconds above 0, or None")
        factor = 0.0 if deadline is None else to_float(deadline)
        if deadline is not None and not 1 < factor < math.inf:
            raise InvalidInputError(
                f"deadline={quote(deadline)}: expected a factor above 1, of the time that local steps are expected to "
                "take, or None"
            )
        min_steps = -(-schedule.sync_every // (schedule.sync_every - schedule.delay))
        return cls(schedule.sync_every, to_bool("by_speed", by_speed) or seconds > 0, seconds, factor, min_steps)

    def after(self, pace: Pace, round_no: int, seconds: Sequence[float], late: Collection[int] = ()) -> Pace:
        """Return the pace from a round on.

        Args:
            pace: until then.
            round_no: of the round.
            seconds: of a local step, by rank; 0: it has not been measured.
            late: ranks that were left out, of which it is the time until then. The time that a round is expected to
                take, from which deadlines are counted, is not theirs: it would grow with every round that they miss.
        """
        before = pace.steps if len(pace.steps) == len(seconds) else (self.sync_every,) * len(seconds)
        in_time = [each for rank, each in enumerate(seconds) if rank not in late]
        if min(seconds) <= 0 or not in_time:
            return Pace(round_no, pace.steps, pace.seconds)
        if not self.by_speed:
            return Pace(round_no, (), self.sync_every * median(in_time))
        total = self.sync_every * len(seconds)
        if self.round_seconds:
            until = self.round_seconds
        else:
            until = _most_busy(max(1, total - len(seconds) + 1), total + len(seconds) - 1, total, seconds)
        steps = [_within(until, each) for each in seconds]
        # Ranks that are so slow that they take the least number, and hold up the others, are left out of account.
        ranks = [each for each in zip(before, steps, seconds, strict=True) if not each[0] == self.min_steps > each[1]]
        busy, longest = sum(old * t for old, _, t in ranks), max((old * t for old, _, t in ranks), default=0.0)
        if self.round_seconds:
            stays = all(old * t <= _WORTH * until < _WORTH**2 * (old + 1) * t for old, _, t in ranks)
            longest = until
        else:
            stays = abs(sum(steps) + sum(old - new for old, new, _ in ranks) - total) < len(seconds)
            stays = stays and busy / longest * _WORTH >= sum(new * t for _, new, t in ranks) / until
        if stays:
            if late and not self.round_seconds:
                longest = max(
                    old * t for rank, (old, t) in enumerate(zip(before, seconds, strict=True)) if rank not in late
                )
            return Pace(round_no, before, longest)
        return Pace(round_no, tuple(max(self.min_steps, n) for n in steps), until)


def _within(until: float, seconds: float) -> int:
    """Return how many steps of so many seconds end until a time, which may be the end of one."""
    return int(until / seconds * (1 + 1e-9))


def _most_busy(min_total: int, max_total: int, total: int, seconds: Sequence[float]) -> float:
    """Return a time until which ranks make so many steps in all, and wait for the smallest part of it.

    Args:
        min_total, max_total: bounds of the steps of all ranks.
        total: which of several such times: that with the number of steps closest to it.
        seconds: of a step, by rank.
    """
    begin = min_total / sum(1 / each for each in seconds)  # when there were so many if steps could be divided
    steps = [_within(begin, each) for each in seconds]
    made, busy = sum(steps), sum(n * each for n, each in zip(steps, seconds, strict=True))
    ends = [((n + 1) * each, rank) for rank, (n, each) in enumerate(zip(steps, seconds, strict=True))]
    heapq.heapify(ends)
    found = []
    if made >= min_total:
        found.append((-busy / begin, abs(made - total), begin))
    while True:
        end, rank = ends[0]
        steps[rank], made, busy = steps[rank] + 1, made + 1, busy + seconds[rank]
        heapq.heapreplace(ends, ((steps[rank] + 1) * seconds[rank], rank))
        if ends[0][0] <= end * (1 + 1e-9):  # another rank's step ends now, too
            continue
        if made > max_total and found:
            return min(found)[2]
        if made >= min_total:
            found.append((-round(busy / end, 9), abs(made - total), end))


class StepTimer:
    """Measures the local steps of this rank: from the end of a call to the beginning of the next one.

    Attributes:
        left: when the last call ended; ``None``: within a call, or the program does other things.
    """

    def __init__(self, clock: Callable[[], float], estimate: float = 0.0) -> None:
        """Begin; ``estimate``: seconds of a local step, as they were measured before."""
        self.clock, self.left, self.estimate = clock, None, estimate
        self._spent, self._steps = 0.0, 0

    left: float | None

    def leave(self) -> None:
        """Take note that the program goes on."""
        self.left = self.clock()

    def enter(self) -> None:
        """Take note that a local step has ended."""
        if self.left is not None:
            self._spent += self.clock() - self.left
            self._steps += 1
            self.left = None

    def rest(self) -> None:
        """Leave the time out until `leave` is called again."""
        self.left = None

    def nanoseconds(self) -> int:
        """Return the time of a local step: that of those since this was asked last; 0 if there have been none.

        A rank that has become slower holds up the others, so that is believed at once; that it has become faster,
        by and by.
        """
        if self._steps:
            mean = self._spent / self._steps
            self.estimate = max(mean, math.sqrt(mean * self.estimate))
            self._spent, self._steps = 0.0, 0
        running = 0.0 if self.left is None else self.clock() - self.left  # where this rank is late
        seconds = max(self.estimate, running)
        return min(max(1, round(1e9 * seconds)), 1 << 62) if seconds > 0 else 0
