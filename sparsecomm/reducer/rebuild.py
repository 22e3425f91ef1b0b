"""What the ranks of a new communicator tell each other before they go on together, and what they found."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from sparsecomm.calls.agreement import WordsGather
from sparsecomm.calls.queue import queue_of
from sparsecomm.errors import InvalidInputError
from sparsecomm.transport import Transport
from sparsecomm.transport.control import format_ranks

__all__ = ["Member", "Rebuilt", "gather_members", "position", "rebuilt_of"]


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


@dataclass(frozen=True)
class Member:
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
    words: Sequence[int]


def gather_members(ranks: Transport, mine: Member, label: int) -> list[Member]:
    """Tell all ranks ``mine``; return what each says, in order of rank. Collective.

    Args:
        label: what the ranks must have in common.

    Raises:
        InvalidInputError: all ranks join.
        CollectiveMismatchError, TransportError: a rank makes another call, did not answer, or died.
    """
    gather = WordsGather(ranks, [mine.joining, mine.step, mine.rank + 1, mine.size, *mine.words], label)
    queue_of(ranks).submit(gather).wait()
    each, members = len(gather.words) // ranks.size, []
    for rank in range(ranks.size):
        words = gather.words[rank * each : (rank + 1) * each]
        members.append(Member(bool(words[0]), words[1], words[2] - 1, words[3], words[4:]))
    if all(member.joining for member in members):
        raise InvalidInputError(
            f"rank {ranks.rank}: all {ranks.size} ranks join; expected one at least that goes on with what it has"
        )
    return members


def rebuilt_of(members: Sequence[Member], elements: int, *, steps_of_unit: int = 1, unit: str = "step") -> Rebuilt:
    """Return what these members find.

    Args:
        elements: of the residuals of each rank.
        steps_of_unit, unit: how many steps a unit has, and its name.
    """
    stay = [member for member in members if not member.joining]
    steps = [member.step for member in stay]
    lost = sorted(set(range(max(member.size for member in stay))) - {member.rank for member in stay})
    return Rebuilt(
        len(members),
        tuple(lost),
        len(lost) * elements,
        tuple(rank for rank, member in enumerate(members) if member.joining),
        max(steps) // steps_of_unit,
        max(steps) - min(steps),
        unit,
    )


def position(comm: object) -> tuple[int, int]:
    """Return rank and size in a communicator that was not used yet; -1 and 0 where that cannot be said."""
    if isinstance(comm, Transport):
        return comm.rank, comm.size
    MPI = sys.modules.get("mpi4py.MPI")
    if MPI is not None and isinstance(comm, MPI.Comm) and comm != MPI.COMM_NULL:
        return comm.Get_rank(), comm.Get_size()
    return -1, 0
