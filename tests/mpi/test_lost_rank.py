"""Survivors of a lost rank: see `lost_rank`. Also the error where MPI cannot survive it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from mpi4py import MPI

import sparsecomm as sc
from tests.processes import mpirun, needs_survivors

# If Open MPI 5.0.11 hears of a death while it makes a communicator, it ends with a segmentation fault of its own, about
# once in ten such deaths (docs/guides/lost-rank.md). Only the output of this crash justifies another attempt.
CRASH = "(ompi_comm_revoke_local+"


@needs_survivors
@pytest.mark.parametrize(
    ("program", "survivors"),
    [
        ("everywhere", 3),
        ("while_one_computes", 3),
        ("at_a_random_time", 3),
        ("one_leaves_or_dies_when_all_have_the_result", 3),
        ("one_never_makes_the_call", 4),
        ("another_dies_meanwhile", 2),
    ],
)
def test_a_lost_rank(program: str, survivors: int, tmp_path: Path) -> None:
    for attempt in "once", "again", "a third time":
        folder = tmp_path / attempt
        folder.mkdir()
        arguments = ["-m", "tests.mpi.lost_rank", str(folder), program, str(survivors)]
        _, said = mpirun(4, *arguments, options=("--with-ft", "ulfm"))
        if program != "another_dies_meanwhile" or CRASH not in said:
            break
    assert said.count(": well") == survivors, said
    assert ": failed" not in said, said


@pytest.mark.parametrize("function", [sc.shrink, sc.grow])
def test_ranks_of_something_else_are_refused(function: Callable[..., object]) -> None:
    with pytest.raises(sc.InvalidInputError, match=r"mpi4py communicator\. The ranks of a process group are fixed"):
        function("group")
    with pytest.raises(sc.InvalidInputError, match="COMM_NULL"):
        function(MPI.COMM_NULL)


def test_a_process_that_is_alone() -> None:
    assert sc.join() is None
    with pytest.raises(sc.TransportError, match=r"mpirun --with-ft ulfm.*checkpoint"):
        sc.shrink()
    for count in (0, -1, 1.5, True):
        with pytest.raises(sc.InvalidInputError, match="count="):
            sc.grow(count=count)  # type: ignore[arg-type]
