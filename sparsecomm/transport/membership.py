"""Communicators of other ranks than before: without those that died (ULFM), or with new ones (dynamic processes)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from mpi4py import MPI

from sparsecomm import config
from sparsecomm.errors import RankFailedError, TimeoutError, TransportError
from sparsecomm.transport import mpi
from sparsecomm.transport.control import format_ranks
from sparsecomm.transport.ulfm import Agreement, Voting, failed_ranks, survives

__all__ = ["grow", "join", "shrink"]

T = TypeVar("T")


def shrink(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Return a communicator of the ranks that live; see `sparsecomm.shrink`."""
    if not survives():
        raise TransportError(
            f"rank {comm.Get_rank()}: this MPI ends the job when a rank dies, so there is nothing to shrink. Start "
            "with `mpirun --with-ft ulfm` of Open MPI 5, or restart from a checkpoint: see docs/how-to/lost-rank.md"
        )
    _leave(comm)
    timeout = config.timeout()
    while True:
        waited_for = "all other ranks that live to call shrink"
        smaller = cast("MPI.Intracomm", _in_time(comm.Shrink, timeout, comm, waited_for))
        if _all_live(smaller, timeout):
            return smaller
        comm = smaller  # one more died meanwhile, and all know


def grow(comm: MPI.Intracomm, count: int, command: Sequence[str]) -> MPI.Intracomm:
    """Start processes, and return the communicator of all; see `sparsecomm.grow`."""
    timeout = config.timeout()
    info = MPI.Info.Create({"wdir": os.getcwd()})

    def start() -> MPI.Intracomm:
        return comm.Spawn(command[0], list(command[1:]), count, info).Merge(high=False)

    return _checked(_in_time(start, timeout, comm, f"{count} processes to start"), timeout)


def join() -> MPI.Intracomm | None:
    """Return the communicator of those who started this process, and of this one; see `sparsecomm.join`."""
    parent = MPI.Comm.Get_parent()
    if parent == MPI.COMM_NULL:
        return None
    timeout = config.timeout()
    merged = _in_time(lambda: parent.Merge(high=True), timeout, parent, "those who started this process")
    return _checked(merged, timeout)


def _checked(comm: MPI.Intracomm, timeout: float) -> MPI.Intracomm:
    if survives() and not _all_live(comm, timeout):
        failed = failed_ranks(comm)
        raise RankFailedError(
            f"{format_ranks(failed)} of the new communicator died (rank {comm.Get_rank()}): shrink the old one again",
            failed,
        )
    return comm


def _leave(comm: MPI.Intracomm) -> None:
    """Give up the transport of ``comm``, and those that hold dead ranks. Nobody waits for this rank on them any more.

    First all of them, so that no call in flight waits for a rank that waits for another call to end.
    """
    own: object = mpi.existing(comm)
    left = [transport for transport in Voting.all() if transport is own or transport.failed_ranks()]
    for transport in left:
        transport.retire()
    for transport in left:
        transport.close()


def _all_live(comm: MPI.Intracomm, timeout: float) -> bool:
    """Return whether all ranks of ``comm`` are here and live; the same on all of them, so that all go on together."""
    agreement = Agreement(comm, 0.0)
    agreement.vote(1, True)
    if not agreement.decided(1, timeout):
        raise _late(timeout, comm, "all other ranks of the new communicator")
    return agreement.accepted(1)


def _in_time(make: Callable[[], T], timeout: float, comm: MPI.Comm, what: str) -> T:
    """Return what ``make`` does, which MPI has no form of that does not wait; leave it to itself after ``timeout``."""
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        return make()
    made: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            made.append(make())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="sparsecomm-membership", daemon=True)
    thread.start()
    thread.join(timeout)
    if errors:
        raise TransportError(f"rank {comm.Get_rank()}: MPI failed: {errors[0]}") from errors[0]
    if not made:
        raise _late(timeout, comm, what)
    return made[0]


def _late(timeout: float, comm: MPI.Comm, what: str) -> TimeoutError:
    return TimeoutError(
        f"rank {comm.Get_rank()} waited {timeout:g} s for {what}. If they are only slow, set SPARSECOMM_TIMEOUT to "
        "more seconds; otherwise restart the job from a checkpoint."
    )
