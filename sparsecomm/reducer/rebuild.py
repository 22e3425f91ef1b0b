"""The comparison of ranks that continue on a new communicator, and its result."""

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
    """The result of `Reducer.rebuild`, the same on all ranks.

    Attributes:
        size: the new number of ranks.
        ranks_lost: ranks that are gone, as numbered in the previous communicator. Their residuals and velocities are
            lost, with their gradients of steps that did not count.
        elements_lost: the number of elements of these residuals.
        ranks_joined: new ranks, as numbered in the new communicator. Their residuals are zeros.
        step: the number of the next step.
        steps_apart: the difference between the ranks' steps. If it is above 0, some ranks have applied an update that
            others have not: broadcast the weights.
        unit: the unit of ``step``. It is "round" for `LocalSteps`, which broadcasts the weights itself.
    """

    size: int
    ranks_lost: tuple[int, ...]
    elements_lost: int
    ranks_joined: tuple[int, ...]
    step: int
    steps_apart: int = 0
    unit: str = "step"

    def __str__(self) -> str:
        """Return a sentence for logs."""
        text = f"{self.size} ranks continue with {self.unit} {self.step}"
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
    """One rank's message to all ranks.

    Attributes:
        joining: the rank is new, and takes the state of the other ranks.
        step: its next step, or the number of its steps.
        rank, size: its rank and the world size in the previous communicator; -1 and 0 if there was none.
        words: other ints that all ranks need, equally many on all ranks.
    """

    joining: bool
    step: int
    rank: int
    size: int
    words: list[int]


class Members:
    """The ranks of a new communicator.

    Attributes:
        all: the members in order of rank.
        stay: the members that do not join.
        lead: the rank of the first of these.
    """

    def __init__(
        self, transport: Transport, before: Comm, joining: bool, step: int, words: Sequence[int], label: int
    ) -> None:
        """Gather the messages of all ranks. Collective.

        Args:
            transport: of the new communicator.
            before: this rank's previous communicator, or its transport.
            joining, step, words: see `Member`.
            label: must be equal on all ranks.

        Raises:
            InvalidInputError: all ranks join.
            CollectiveMismatchError, TransportError: a rank makes another call, did not answer, or died.
        """
        step, rank, size = (0, -1, 0) if joining else (step, *_rank_and_size(before))
        gather = WordsGather(transport, [joining, step, rank + 1, size, *words], label)
        queue_of(transport).submit(gather).wait()
        count = len(gather.words) // transport.size
        messages = [gather.words[i : i + count] for i in range(0, len(gather.words), count)]
        self.all = [Member(bool(new), step, rank - 1, size, words) for new, step, rank, size, *words in messages]
        self.stay = [member for member in self.all if not member.joining]
        if not self.stay:
            raise InvalidInputError(
                f"rank {transport.rank}: all {transport.size} ranks join; pass joining=False on at least one rank, "
                "which continues with its state"
            )
        self.lead = self.all.index(self.stay[0])

    def rebuilt(self, elements: int, *, steps_of_unit: int = 1, unit: str = "step") -> Rebuilt:
        """Return the result of the comparison.

        Args:
            elements: size of each rank's residuals.
            steps_of_unit, unit: the number of steps in a unit, and its name.
        """
        steps = [member.step for member in self.stay]
        lost = sorted(set(range(max(member.size for member in self.stay))) - {member.rank for member in self.stay})
        new = [rank for rank, member in enumerate(self.all) if member.joining]
        step, apart = max(steps) // steps_of_unit, max(steps) - min(steps)
        return Rebuilt(len(self.all), tuple(lost), len(lost) * elements, tuple(new), step, apart, unit)


def _rank_and_size(comm: Comm) -> tuple[int, int]:
    """Return rank and size in a communicator that may not have been used yet; -1 and 0 if they are not known."""
    if isinstance(comm, Transport):
        return comm.rank, comm.size
    MPI = sys.modules.get("mpi4py.MPI")
    if MPI is not None and isinstance(comm, MPI.Comm) and comm != MPI.COMM_NULL:
        return comm.Get_rank(), comm.Get_size()
    return -1, 0
