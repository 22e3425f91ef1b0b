"""`shrink`, `grow` and `join`: continue without dead ranks, and with new ones."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from sparsecomm.checks import to_int
from sparsecomm.errors import InvalidInputError, TransportError

if TYPE_CHECKING:
    from mpi4py import MPI


def shrink(comm: MPI.Intracomm | None = None) -> MPI.Intracomm:
    """Return a communicator of the surviving ranks of ``comm``, in their order. Collective over the surviving ranks.

    Call it after `RankFailedError` on every surviving rank, and pass the result to all later calls and to
    `Reducer.rebuild`. Calls in flight on ``comm`` fail on all ranks, and ``comm`` can no longer be used. Ranks that die
    during this call are left out, too. Requires Open MPI 5 and ``mpirun --with-ft ulfm``.

    Args:
        comm: an mpi4py communicator. ``None`` is COMM_WORLD, which does not change: ``comm=None`` in a later call would
            still include the dead ranks.

    Raises:
        InvalidInputError: ``comm`` is not an mpi4py communicator. A process group cannot be shrunk: make a new one.
        TransportError: this MPI cannot continue after a rank has died, or it failed.
        TimeoutError: a surviving rank did not call it within ``SPARSECOMM_TIMEOUT`` seconds.
    """
    membership, usable = _mpi(comm, "shrink")
    smaller: MPI.Intracomm = membership.shrink(usable)
    return smaller


def grow(comm: MPI.Intracomm | None = None, count: int = 1, command: Sequence[str] | None = None) -> MPI.Intracomm:
    """Start processes, and return a communicator of all ranks, the new ones last. Collective.

    A new process calls `join`, which returns the same communicator. Broadcast the weights and the optimizer's state to
    it; `Reducer.rebuild`, called on all ranks, provides the rest. Requires an MPI that can start processes.

    Args:
        comm: an mpi4py communicator. ``None`` is COMM_WORLD, which does not change.
        count: number of processes to start.
        command: program and arguments. Defaults to this program with its arguments.

    Raises:
        InvalidInputError: ``comm`` is not an mpi4py communicator, or ``count`` is not a positive int.
        RankFailedError, TransportError: a rank died, or MPI could not start the processes.
        TimeoutError: the new processes did not join within ``SPARSECOMM_TIMEOUT`` seconds.
    """
    number = to_int(count, 1)
    if number is None:
        raise InvalidInputError(f"count={count!r}: expected a number of processes of at least 1")
    membership, usable = _mpi(comm, "grow")
    larger: MPI.Intracomm = membership.grow(usable, number, command or [sys.executable, *sys.orig_argv[1:]])
    return larger


def join() -> MPI.Intracomm | None:
    """Return the communicator of all ranks in a process that `grow` started; ``None`` in any other process.

    Call it once, before the first call of the library. Collective with `grow` on the other ranks, and raises the same.
    """
    membership, _ = _mpi(None, "join")
    merged: MPI.Intracomm | None = membership.join()
    return merged


def _mpi(comm: object, function: str) -> tuple[ModuleType, MPI.Intracomm]:
    """Return `sparsecomm.transport.membership`, and the communicator after checks."""
    MPI = sys.modules.get("mpi4py.MPI")
    if comm is not None and (MPI is None or not isinstance(comm, MPI.Comm)):
        raise InvalidInputError(
            f"comm is {comm!r} of type {type(comm).__name__}: {function} takes an mpi4py communicator. The ranks of a "
            "process group are fixed: make a new group of the surviving ranks, and pass it to Reducer.rebuild; see "
            "docs/guides/lost-rank.md"
        )
    try:
        from sparsecomm.transport import membership, mpi  # here, so that importing sparsecomm does not start MPI
    except (ImportError, RuntimeError) as error:
        raise TransportError(f"{function} needs MPI, and mpi4py cannot be loaded ({error})") from error
    return membership, mpi.usable(comm)
