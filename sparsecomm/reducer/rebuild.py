"""What the ranks of a new communicator tell each other before they go on together, and what they found."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sparsecomm.calls.agreement import WordsGather
from sparsecomm.calls.queue import queue_of
from sparsecomm.errors import InvalidInputError
from sparsecomm.transport import Comm, Transport
from sparsecomm.transport.control import format_ranks

__all__ = ["Members", "Rebuilt"]


@dataclass(frozen=True)
class Rebuilt:
    """What `Reducer.rebuild` found: the same on all ranks.

    Attributes:
        size: how many ranks there are now.
        ranks_lost: those that are gone, by their numbers in the communicator before. Gone with them are their residuals
            and velocities, and so also their gradients of steps that did not count.
        elements_lost: elements of these residuals.
        ranks_joined: those that are new, by their numbers in the communicator now. Their residuals begin with zeros.
        step: the number of the next step.
        steps_apart: by how many steps the ranks differed. Above 0 some have applied what others have not, which cannot
            be where ranks vote: broadcast the weights.
        unit: what ``step`` counts; "round" where `LocalSteps` is rebuilt, which broadcasts by itself.
    """

    size: int
    ranks_lost: tuple[int, ...]
    elements_lost: int
    ranks_joined: tuple[int, ...]
    step: int
    steps_apart: int = 0
    unit: str = "step"

    def __str__(self) -> str:
        """Return what happened, in words."""
        text = f"{self.size} ranks go on with {self.unit} {self.step}"
        if self.ranks_lost:
            text += (
                f"; lost: {format_ranks(self.ranks_lost)}, with residuals and velocities of {self.elements_lost:,} "
                f"elements, and with gradients of {self.unit}s that did not count"
            )
        if self.ranks_joined:
            text += f"; new: {format_ranks(self.ranks_joined)}, with residuals of zeros"
        if self.steps_apart:
            text += f"; ranks differed by {self.steps_apart} in their steps"
            text += ": broadcast the weights" if self.unit == "step" else ""
        return text


class Member(NamedTuple):
    """What one rank says.

    Attributes:
        joining: it is new, and takes what the others have.
        step: its next one, or how many it has taken.
        rank, size: its place in the communicator before; -1 and 0: it had none.
        words: what else all must know: whole numbers, as many on all ranks.
    """

    joining: bool
    step: int
    rank: int
    size: int
    words: list[int]


class Members:
    """The ranks of a new communicator, which have told each other who they are.

    Attributes:
        all: in order of rank.
        stay: those that do not join.
        lead: the rank of the first of these.
    """

    def __init__(
        self, transport: Transport, before: Comm, joining: bool, step: int, words: Sequence[int], label: int
    ) -> None:
        """Tell all ranks who this one is. Collective.

        Args:
            ranks: the new ones.
            before: the communicator of this rank until now, or its transport.
            joining, step, words: see `Member`.
            label: what the ranks must have in common.

        Raises:
            InvalidInputError: all ranks join.
            CollectiveMismatchError, TransportError: a rank makes another call, did not answer, or died.
        """
        step, rank, size = (0, -1, 0) if joining else (step, *_position(before))
        gather = WordsGather(transport, [joining, step, rank + 1, size, *words], label)
        queue_of(transport).submit(gather).wait()
        each = len(gather.words) // transport.size
        found = [gather.words[i : i + each] for i in range(0, len(gather.words), each)]
        self.all = [Member(bool(new), step, place - 1, size, words) for new, step, place, size, *words in found]
        self.stay = [member for member in self.all if not member.joining]
        if not self.stay:
            raise InvalidInputError(
                f"rank {transport.rank}: all {transport.size} ranks join; expected one at least "
                "that goes on with what it has"
            )
        self.lead = self.all.index(self.stay[0])

    def rebuilt(self, elements: int, *, steps_of_unit: int = 1, unit: str = "step") -> Rebuilt:
        """Return what these members find.

        Args:
            elements: of the residuals of each rank.
            steps_of_unit, unit: how many steps a unit has, and its name.
        """
        steps = [member.step for member in self.stay]
        lost = sorted(set(range(max(member.size for member in self.stay))) - {member.rank for member in self.stay})
        new = [rank for rank, member in enumerate(self.all) if member.joining]
        step, apart = max(steps) // steps_of_unit, max(steps) - min(steps)
        return Rebuilt(len(self.all), tuple(lost), len(lost) * elements, tuple(new), step, apart, unit)


def _position(comm: Comm) -> tuple[int, int]:
    """Return rank and size in a communicator that may not have been used yet; -1 and 0 where that cannot be said."""
    if isinstance(comm, Transport):
        return comm.rank, comm.size
    MPI = sys.modules.get("mpi4py.MPI")
    if MPI is not None and isinstance(comm, MPI.Comm) and comm != MPI.COMM_NULL:
        return comm.Get_rank(), comm.Get_size()
    return -1, 0
