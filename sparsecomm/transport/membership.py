"""`shrink` to the surviving ranks (ULFM), `grow` by new processes, and `join` the ranks that started this process."""

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

T = TypeVar("T")


def shrink(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Return a communicator of the surviving ranks; see `sparsecomm.shrink`."""
    if not survives():
        raise TransportError(
            f"rank {comm.Get_rank()}: this MPI ends the job when a rank dies, so there is nothing to shrink. Start "
            "with `mpirun --with-ft ulfm` of Open MPI 5, or restart from a checkpoint: see docs/guides/lost-rank.md"
        )
    _close_transports(comm)
    timeout = config.timeout()
    while True:
        smaller = cast("MPI.Intracomm", _in_time(comm.Shrink, timeout, comm, "all surviving ranks to call shrink"))
        if _all_live(smaller, timeout):
            return smaller
        comm = smaller  # another rank has died meanwhile: all ranks try again


def grow(comm: MPI.Intracomm, count: int, command: Sequence[str]) -> MPI.Intracomm:
    """Start processes and return a communicator of the old and the new ranks; see `sparsecomm.grow`."""
    timeout = config.timeout()
    info = MPI.Info.Create({"wdir": os.getcwd()})

    def start() -> MPI.Intracomm:
        return comm.Spawn(command[0], list(command[1:]), count, info).Merge(high=False)

    return _checked(_in_time(start, timeout, comm, f"{count} processes to start"), timeout)


def join() -> MPI.Intracomm | None:
    """Return a communicator of this process and the ranks that started it; see `sparsecomm.join`."""
    parent = MPI.Comm.Get_parent()
    if parent == MPI.COMM_NULL:
        return None
    timeout = config.timeout()
    merged = _in_time(lambda: parent.Merge(high=True), timeout, parent, "the ranks that started this process")
    return _checked(merged, timeout)


def _checked(comm: MPI.Intracomm, timeout: float) -> MPI.Intracomm:
    if survives() and not _all_live(comm, timeout):
        failed = failed_ranks(comm)
        raise RankFailedError(
            f"{format_ranks(failed)} of the new communicator died (rank {comm.Get_rank()}): shrink the old one again",
            failed,
        )
    return comm


def _close_transports(comm: MPI.Intracomm) -> None:
    """Close the transport of ``comm``, and all transports with dead ranks.

    Closing waits for calls in progress. Therefore retire all transports first, which ends their calls on all ranks.
    """
    current: object = mpi.existing(comm)
    closing = [transport for transport in Voting.all() if transport is current or transport.failed_ranks()]
    for transport in closing:
        transport.retire()
    for transport in closing:
        transport.close()


def _all_live(comm: MPI.Intracomm, timeout: float) -> bool:
    """Return whether all ranks of ``comm`` are alive. Collective: all ranks get the same answer."""
    agreement = Agreement(comm, 0.0)
    agreement.vote(1, True)
    if not agreement.decided(1, timeout):
        raise _late(timeout, comm, "all other ranks of the new communicator")
    return agreement.accepted(1)


def _in_time(operation: Callable[[], T], timeout: float, comm: MPI.Comm, waited_for: str) -> T:
    """Return the result of a blocking MPI operation; after ``timeout``, raise and leave it running in a thread."""
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        return operation()
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(operation())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="sparsecomm-membership", daemon=True)
    thread.start()
    thread.join(timeout)
    if errors:
        raise TransportError(f"rank {comm.Get_rank()}: MPI failed: {errors[0]}") from errors[0]
    if not results:
        raise _late(timeout, comm, waited_for)
    return results[0]


def _late(timeout: float, comm: MPI.Comm, waited_for: str) -> TimeoutError:
    return TimeoutError(
        f"rank {comm.Get_rank()} waited {timeout:g} s for {waited_for}. If they are only slow, increase "
        "SPARSECOMM_TIMEOUT (seconds); otherwise restart the job from a checkpoint."
    )
