"""The end of a deadlock of simulated ranks: those that wait get the error that they would get from MPI."""

from __future__ import annotations

from collections import defaultdict

from sparsecomm.errors import CollectiveMismatchError, SparseCommError, TimeoutError, TransportError
from sparsecomm.transport.simulated.rank import LaterRoundError, PendingReceive, SimulatedTransport, World

__all__ = ["Deadlock"]


class Deadlock:
    """The ranks of a world that wait, none of which can go on."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._stuck = [(t, t._waiting) for t in world.ranks if t._waiting is not None]
        self._waiters: dict[tuple[int, int], list[SimulatedTransport]] = defaultdict(list)
        for t, waiting in self._stuck:
            self._waiters[waiting.source, waiting.number].append(t)  # (rank waited for, call) -> who waits

    def resolve(self) -> None:
        """Wake the ranks for which the surest reason is found, at least one: each raises an error."""
        checks = self._check_realigning, self._check_left, self._check_mismatch, self._check_finished, self._check_cycle
        for check in checks:
            errors = [(t, waiting, error) for t, waiting in self._stuck if (error := check(t, waiting)) is not None]
            for t, waiting, error in errors:
                waiting.error = error
                t.wake()
            if errors:
                return

    def _check_realigning(self, t: SimulatedTransport, waiting: PendingReceive) -> SparseCommError | None:
        """Return an error if another rank is in `realign`, or in a later round of it."""
        if t.latest_round() <= t._round:
            return None
        if waiting.number < 0:
            return LaterRoundError()
        t._others_know = True
        return CollectiveMismatchError(
            f"a rank waits in sparsecomm.realign() for rank {t.rank}, which makes call {waiting.number}: all ranks "
            "must call sparsecomm.realign(comm)"
        )

    def _check_left(self, t: SimulatedTransport, waiting: PendingReceive) -> SparseCommError | None:
        """Return an error if a rank has left the call."""
        for number, all_left in self._world.left.items():
            for left in all_left:
                if left.apart and t.rank not in left.told and 0 < number <= waiting.number:
                    left.told.add(t.rank)
                    t._others_know = number == waiting.number
                    return CollectiveMismatchError(
                        f"rank {left.rank} left call {number}; rank {t.rank} is in call {waiting.number}. {left.reason}"
                    )
        for left in self._world.left.get(waiting.number, ()):
            if left.rank != t.rank:
                t._others_know = True
                t.seconds = max(t.seconds, left.seconds + self._world.network.between.alpha)
                kind = CollectiveMismatchError if left.mismatch else TransportError
                call = f"call {waiting.number}, which rank {t.rank} is in"
                return kind(f"rank {left.rank} left {call}. {left.reason}")
        return None

    def _check_mismatch(self, t: SimulatedTransport, waiting: PendingReceive) -> SparseCommError | None:
        """Return an error if a rank that waits for ``t`` in the same call takes it for another one."""
        for waiter in self._waiters[t.rank, waiting.number]:
            if waiter._call != t._call and t._mismatch is not None:
                return t._mismatch(waiter._call, waiter.rank)
        return None

    def _check_finished(self, t: SimulatedTransport, waiting: PendingReceive) -> SparseCommError | None:
        """Return an error if the rank waited for has finished."""
        if self._world.ranks[waiting.source]._waiting is not None:
            return None
        return _timed_out(t, waiting, f"rank {waiting.source} has finished")

    def _check_cycle(self, t: SimulatedTransport, waiting: PendingReceive) -> SparseCommError | None:
        """Return an error, since ranks wait for each other in a cycle."""
        theirs = self._world.ranks[waiting.source]._waiting
        assert theirs is not None  # or `_check_finished` has found an error
        state = f"rank {waiting.source} waits for rank {theirs.source} in call {theirs.number}"
        return _timed_out(t, waiting, state)


def _timed_out(t: SimulatedTransport, waiting: PendingReceive, state: str) -> TimeoutError:
    t.seconds += t._timeout
    return TimeoutError(
        f"rank {t.rank} waited {t._timeout:g} s for rank {waiting.source} in call {waiting.number}: {state}. "
        "All ranks must make the same calls in the same order."
    )
