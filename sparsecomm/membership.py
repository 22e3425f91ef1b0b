"""Going on without ranks that died, and with new ones in their place."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from sparsecomm.errors import InvalidInputError, TransportError

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["grow", "join", "shrink"]


def shrink(comm: MPI.Intracomm | None = None) -> MPI.Intracomm:
    """Return a communicator of the ranks of ``comm`` that live, in their order. Collective over these.

    Call it after `RankFailedError`, on every rank that lives, and give what it returns to every later call, and to
    `Reducer.rebuild`. What is in flight on ``comm`` fails on all ranks; ``comm`` itself is not used any more. If more
    ranks die meanwhile, they are left out, too. Needs Open MPI 5 and ``mpirun --with-ft ulfm``.

    Args:
        comm: an mpi4py communicator. ``None`` is COMM_WORLD, which stays what it is: ``comm=None`` in a later call
            would be the world with its dead ranks.

    Raises:
        InvalidInputError: it is no mpi4py communicator. A process group cannot be shrunk: make a new one.
        TransportError: MPI does not survive dead ranks here, or failed.
        TimeoutError: a rank that lives did not come within ``SPARSECOMM_TIMEOUT`` seconds.
    """
    membership, found = _mpi(comm, "shrink")
    smaller: MPI.Intracomm = membership.shrink(found)
    return smaller


def grow(comm: MPI.Intracomm | None = None, count: int = 1, command: Sequence[str] | None = None) -> MPI.Intracomm:
    """Start processes, and return the communicator of all ranks: the new ones come last. Collective.

    A new process calls `join`, which returns the same communicator to it. Weights and the state of the optimizer come
    by broadcast, and `Reducer.rebuild`, which all ranks call, gives it the rest. Needs an MPI that can start processes.

    Args:
        comm: an mpi4py communicator; ``None`` is COMM_WORLD, which does not grow by this.
        count: how many.
        command: program and arguments; ``None``: this program again, with its arguments.

    Raises:
        InvalidInputError: ``comm`` is no mpi4py communicator, or ``count`` no number of processes.
        RankFailedError: a rank died meanwhile.
        TransportError: MPI could not start them.
        TimeoutError: they did not come within ``SPARSECOMM_TIMEOUT`` seconds.
    """
    if not isinstance(count, int) or count < 1:
        raise InvalidInputError(f"count={count!r}: expected a number of processes, from 1 on")
    membership, found = _mpi(comm, "grow")
    larger: MPI.Intracomm = membership.grow(found, count, command or [sys.executable, *sys.orig_argv[1:]])
    return larger


def join() -> MPI.Intracomm | None:
    """Return the communicator that this process was started to join, by `grow`; ``None`` if nobody started it so.

    Once, and before the first call of the library. Collective, with `grow` on those who started it.

    Raises:
        RankFailedError, TransportError, TimeoutError: as `grow`.
    """
    membership, _ = _mpi(None, "join")
    found: MPI.Intracomm | None = membership.join()
    return found


def _mpi(comm: object, doing: str) -> tuple[ModuleType, MPI.Intracomm]:
    """Return the part of the library that needs MPI, and the communicator."""
    MPI = sys.modules.get("mpi4py.MPI")
    if comm is not None and (MPI is None or not isinstance(comm, MPI.Comm)):
        raise InvalidInputError(
            f"comm is {comm!r} of type {type(comm).__name__}: {doing} takes an mpi4py communicator. The ranks of a "
            "process group are fixed: make a new group of those that are to go on, and give it to Reducer.rebuild; see "
            "docs/how-to/lost-rank.md"
        )
    try:
        from sparsecomm.transport import membership, mpi  # here, so that importing sparsecomm does not start MPI
    except (ImportError, RuntimeError) as error:
        raise TransportError(f"{doing} needs MPI, and mpi4py cannot be loaded ({error})") from error
    return membership, mpi.usable(comm)
