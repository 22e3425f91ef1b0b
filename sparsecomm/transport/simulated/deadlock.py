"""The end of a deadlock of simulated ranks: those that wait get the error that they would get from MPI."""

from __future__ import annotations

from collections import defaultdict

from sparsecomm.errors import SparseCommError, TimeoutError
from sparsecomm.transport.simulated.rank import PendingReceive, SimulatedTransport, World

__all__ = ["break_deadlock"]


def break_deadlock(world: World) -> None:
    """Wake the ranks for which the surest reason is found, at least one: each raises an error.

    Ranks that wait in `realign` go on waiting as long as others have a reason to raise one.
    """
    stuck = [(t, t._waiting) for t in world.ranks if t._waiting is not None]
    waiters: dict[tuple[int, int], list[SimulatedTransport]] = defaultdict(list)
    for t, waiting in stuck:
        waiters[waiting.source, waiting.number].append(t)  # (rank waited for, call) -> who waits

    def left(t: SimulatedTransport, waiting: PendingReceive) -> SparseCommError | None:
        """Return an error if a rank has left the call, or waits in `realign`."""
        try:
            t._check_leavers()
        except SparseCommError as error:
            t.seconds = max(t.seconds, t._told)
            return error
        return None

    def mismatch(t: SimulatedTransport, waiting: PendingReceive) -> SparseCommError | None:
        """Return an error if a rank that waits for ``t`` in the same call takes it for another one."""
        for waiter in waiters[t.rank, waiting.number]:
            if waiter._call != t._call and t._mismatch is not None:
                return t._mismatch(waiter._call, waiter.rank)
        return None

    def finished(t: SimulatedTransport, waiting: PendingReceive) -> SparseCommError | None:
        """Return an error if the rank waited for does not wait itself."""
        source = world.ranks[waiting.source]
        if source._waiting is not None or source._listening:
            return None
        return _timed_out(t, waiting, f"rank {waiting.source} has finished")

    def in_a_cycle(t: SimulatedTransport, waiting: PendingReceive) -> SparseCommError | None:
        """Return an error, since ranks wait for each other in a cycle."""
        theirs = world.ranks[waiting.source]._waiting
        where = "in sparsecomm.realign()" if theirs is None else f"for rank {theirs.source} in call {theirs.number}"
        return _timed_out(t, waiting, f"rank {waiting.source} waits {where}")

    for check in (left, mismatch, finished, in_a_cycle):
        errors = [(t, waiting, error) for t, waiting in stuck if (error := check(t, waiting)) is not None]
        for t, waiting, error in errors:
            waiting.error = error
            t.wake()
        if errors:
            return
    for t in world.ranks:
        if t._listening:
            t.compute(t.timeout)
            t.wake()


def _timed_out(t: SimulatedTransport, waiting: PendingReceive, state: str) -> TimeoutError:
    t.compute(t.timeout)
    return TimeoutError(
        f"rank {t.rank} waited {t.timeout:g} s for rank {waiting.source} in call {waiting.number}: {state}. "
        "All ranks must make the same calls in the same order."
    )
