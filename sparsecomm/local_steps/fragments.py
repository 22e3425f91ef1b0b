"""The fragments of a model, and the schedule of their exchanges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sparsecomm.checks import is_real, shown, whole
from sparsecomm.errors import InvalidInputError
from sparsecomm.hints import did_you_mean, listed

__all__ = ["Event", "SyncSchedule", "split_by_size", "split_names"]


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
        if (sync_every := whole(self.sync_every, 1)) is None:
            raise InvalidInputError(f"sync_every={shown(self.sync_every)}: must be a number of local steps, at least 1")
        if (delay := whole(self.delay, 0, sync_every - 1)) is None:
            raise InvalidInputError(
                f"fragment_sync_delay={shown(self.delay)} with sync_every={sync_every}: must be at least 0 and below "
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


def split_names(sizes: Mapping[str, int], fragments: object) -> tuple[tuple[str, ...], ...]:
    """Return the names of each fragment.

    Args:
        sizes: number of elements of each tensor, by name.
        fragments: the number of fragments, or the names of each.

    Raises:
        InvalidInputError: the number exceeds that of the tensors, or the names do not list each tensor exactly once.
    """
    if is_real(fragments):
        if (count := whole(fragments, 1, len(sizes))) is None:
            raise InvalidInputError(f"fragments={shown(fragments)}: must be from 1 to {len(sizes)}, one tensor in each")
        return split_by_size(sizes, count)
    if not isinstance(fragments, Sequence) or isinstance(fragments, str) or not fragments:
        raise InvalidInputError(
            f"fragments={shown(fragments)}: expected a number, or lists of names"
        )
    seen: set[str] = set()
    for number, names in enumerate(fragments):
        if not isinstance(names, Sequence) or isinstance(names, str) or not names:
            raise InvalidInputError(f"fragments[{number}]={shown(names)}: expected a list of at least one name")
        for name in names:
            if not isinstance(name, str) or name not in sizes:
                raise InvalidInputError(
                    f"fragments[{number}]: {shown(name)} is not one of the {len(sizes)} tensors, {listed(sizes)}"
                    f"{did_you_mean(name, sizes)}"
                )
            if name in seen:
                raise InvalidInputError(f"fragments[{number}]: {name!r} appears twice; list each tensor exactly once")
            seen.add(name)
    if missing := [name for name in sizes if name not in seen]:
        raise InvalidInputError(f"fragments: {listed(missing)} missing; list each tensor exactly once")
    return tuple(tuple(names) for names in fragments)


def split_by_size(sizes: Mapping[str, int], count: int) -> tuple[tuple[str, ...], ...]:
    """Split names into ``count`` runs of neighbours, each with at least one name and about equally many elements."""
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
