"""The fragments of a model, and when each of them is synchronised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparsecomm.checks import is_real, quote, to_int
from sparsecomm.errors import InvalidInputError, did_you_mean, listed

__all__ = ["SyncSchedule", "split_by_size", "split_names"]


@dataclass(frozen=True)
class SyncSchedule:
    """When the exchange of each fragment begins, and when it is applied: after which steps.

    Fragment i of F is applied after step (i + 1) * sync_every // F of each round, and begins ``delay`` steps before; in
    the first round after the first step at the earliest. Streaming DiLoCo (Douillard et al., 2025), Section 2.

    Steps are local steps of a rank that takes ``sync_every`` of them in a round. One that takes others has passed as
    much of the round as `passed` says. So all ranks begin and apply the same exchanges in the same order.

    Attributes:
        sync_every: steps of a round.
        fragments: how many there are.
        delay: steps from the beginning of an exchange to its application.

    Raises:
        InvalidInputError: one of them cannot be used.
    """

    sync_every: int
    fragments: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
        if (sync_every := to_int(self.sync_every, 1)) is None:
            raise InvalidInputError(f"sync_every={quote(self.sync_every)}: expected a number of local steps, from 1 on")
        if (delay := to_int(self.delay, 0, sync_every - 1)) is None:
            raise InvalidInputError(
                f"fragment_sync_delay={quote(self.delay)} with sync_every={sync_every}: expected a number of local "
                "steps from 0 to below sync_every, so that an exchange ends before the fragment's next one begins"
            )
        object.__setattr__(self, "sync_every", sync_every)
        object.__setattr__(self, "delay", delay)
        if self.sync_every < self.fragments:
            raise InvalidInputError(
                f"sync_every={self.sync_every} with {self.fragments} fragments: expected a local step at least for "
                "each; make rounds longer, or fragments fewer"
            )

    def applied_at(self, fragment: int, round_no: int) -> int:
        """Return after which step, counted from 1 on over all rounds, a fragment of a round is applied."""
        return round_no * self.sync_every + (fragment + 1) * self.sync_every // self.fragments

    def begun_at(self, fragment: int, round_no: int) -> int:
        """Return after which step the exchange of a fragment that is applied in a round begins."""
        return max(1, self.applied_at(fragment, round_no) - self.delay)

    def begins(self, step: int) -> list[tuple[int, int]]:
        """Return the fragments whose exchange begins after a step, each with the round of its application."""
        last = (step - 1 + self.delay) // self.sync_every
        rounds = range(max(0, last - 1), last + 1)
        return [(i, r) for r in rounds for i in range(self.fragments) if self.begun_at(i, r) == step]

    def applies(self, step: int) -> list[int]:
        """Return the fragments that are applied after a step."""
        round_no = (step - 1) // self.sync_every
        return [i for i in range(self.fragments) if self.applied_at(i, round_no) == step]

    def passed(self, local_step: int, local_steps: int) -> int:
        """Return how many steps of a round have passed after a local step of a rank that takes so many in it."""
        return min(self.sync_every, local_step * self.sync_every // local_steps)

    def next_beginning(self, step: int) -> int:
        """Return after which step, later than this one, an exchange begins."""
        return next(later for later in range(step + 1, step + 2 * self.sync_every + 1) if self.begins(later))

    def steps_between(self, fragment: int, round_no: int) -> int:
        """Return how many steps an exchange sums up: those since the fragment's last one began."""
        before = self.begun_at(fragment, round_no - 1) if round_no else 0
        return self.begun_at(fragment, round_no) - before


def split_names(sizes: Mapping[str, int], fragments: object) -> tuple[tuple[str, ...], ...]:
    """Return the names of each fragment.

    Args:
        sizes: elements of each tensor, by name.
        fragments: how many, or the names of each.

    Raises:
        InvalidInputError: there are more than tensors, or their names are not each of the tensors', once.
    """
    if is_real(fragments):
        if (count := to_int(fragments, 1, len(sizes))) is None:
            raise InvalidInputError(
                f"fragments={quote(fragments)}: expected a number from 1 to {len(sizes)}, which is that of the tensors"
            )
        return split_by_size(sizes, count)
    if not isinstance(fragments, Sequence) or isinstance(fragments, str) or not fragments:
        raise InvalidInputError(f"fragments={quote(fragments)}: expected a number, or the names of each fragment")
    seen: set[str] = set()
    for number, names in enumerate(fragments):
        if not isinstance(names, Sequence) or isinstance(names, str) or not names:
            raise InvalidInputError(f"fragments[{number}]={quote(names)}: expected a list of names, of one at least")
        for name in names:
            if not isinstance(name, str) or name not in sizes:
                raise InvalidInputError(
                    f"fragments[{number}]: {quote(name)} is no name of the {len(sizes)} tensors, {listed(sizes)}"
                    f"{did_you_mean(name, sizes)}"
                )
            if name in seen:
                raise InvalidInputError(f"fragments[{number}]: {name!r} is there twice; expected each tensor once")
            seen.add(name)
    if missing := [name for name in sizes if name not in seen]:
        raise InvalidInputError(
            f"fragments: {missing[0]!r}{f' and {len(missing) - 1} others are' if missing[1:] else ' is'} in none; "
            "expected each tensor in one"
        )
    return tuple(tuple(names) for names in fragments)


def split_by_size(sizes: Mapping[str, int], count: int) -> tuple[tuple[str, ...], ...]:
    """Split names into ``count`` runs of neighbours, each of one name at least, of about equally many elements."""
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
