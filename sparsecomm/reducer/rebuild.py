"""What the ranks of a new communicator tell each other, so that their reducers go on together."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from sparsecomm.calls.agreement import WordsGather
from sparsecomm.calls.queue import CallQueue
from sparsecomm.errors import InvalidInputError
from sparsecomm.transport import Transport
from sparsecomm.transport.control import format_ranks

__all__ = ["Member", "Rebuilt", "agree", "position"]

_log = logging.getLogger("sparsecomm")


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
        step: its next one.
        rank, size: its place in the communicator before; -1 and 0: it had none.
        bucket_bytes: as in `Reducer`.
        order: numbers of tensors; empty: not known yet.
    """

    joining: bool
    step: int
    rank: int
    size: int
    bucket_bytes: int
    order: tuple[int, ...]

    def words(self, names: int) -> list[int]:
        """Return it as words, for ``names`` tensors."""
        order = self.order or (0,) * names
        return [self.joining, self.step, self.rank + 1, self.size, self.bucket_bytes, bool(self.order), *order]

    @classmethod
    def of(cls, words: Sequence[int]) -> Member:
        """Return what `words` stand for."""
        joining, step, place, size, bucket_bytes, ordered, *order = words
        return cls(bool(joining), step, place - 1, size, bucket_bytes, tuple(order) if ordered else ())


def agree(
    ranks: Transport, queue: CallQueue, mine: Member, names: int, elements: int, label: int
) -> tuple[Member, Rebuilt]:
    """Tell all ranks ``mine``; return what they go on with, and what they were. Collective.

    Args:
        names: how many tensors there are.
        elements: of all tensors.
        label: what the ranks' reducers must have in common.

    Raises:
        InvalidInputError: all ranks join.
        CollectiveMismatchError, TransportError: the reducers have other tensors, or a rank did not answer, or died.
    """
    told = WordsGather(ranks, mine.words(names), label)
    queue.submit(told).wait()
    each = len(told.words) // ranks.size
    members = [Member.of(told.words[rank * each : (rank + 1) * each]) for rank in range(ranks.size)]
    stay = [member for member in members if not member.joining]
    if not stay:
        raise InvalidInputError(
            f"rank {ranks.rank}: all {ranks.size} ranks join; expected one at least that goes on with what it has"
        )
    before = max(member.size for member in stay)
    lost = tuple(sorted(set(range(before)) - {member.rank for member in stay}))
    steps = [member.step for member in stay]
    lead = next((member for member in stay if member.order), stay[0])
    chosen = Member(False, max(steps), ranks.rank, ranks.size, stay[0].bucket_bytes, lead.order)
    rebuilt = Rebuilt(
        ranks.size,
        lost,
        len(lost) * elements,
        tuple(rank for rank, member in enumerate(members) if member.joining),
        max(steps),
        max(steps) - min(steps),
    )
    level = logging.WARNING if lost or rebuilt.steps_apart else logging.INFO
    _log.log(level, "rank %s: %s", ranks.rank, rebuilt)
    return chosen, rebuilt


def position(comm: object) -> tuple[int, int]:
    """Return rank and size in a communicator that was not used yet; -1 and 0 where that cannot be said."""
    if isinstance(comm, Transport):
        return comm.rank, comm.size
    MPI = sys.modules.get("mpi4py.MPI")
    if MPI is not None and isinstance(comm, MPI.Comm) and comm != MPI.COMM_NULL:
        return comm.Get_rank(), comm.Get_size()
    return -1, 0
