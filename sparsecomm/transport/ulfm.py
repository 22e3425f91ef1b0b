"""What a rank does where MPI survives that others die (ULFM, `mpirun --with-ft ulfm` of Open MPI 5).

All ranks that live vote on every call, and a call counts on all of them or on none. A rank votes for a call when it has
the result, and against one that it leaves. MPI's agreement ends although ranks die, and then says so on all the others.

A rank that gives a transport up votes against the next call, too. No rank can be further than that, so nobody waits for
the vote of one that is not coming.
"""

from __future__ import annotations

import contextlib
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from weakref import WeakSet

from mpi4py import MPI

from sparsecomm.errors import RankFailedError, SparseCommError, TimeoutError, TransportError
from sparsecomm.transport import _agreement
from sparsecomm.transport.control import FailureDetector, format_ranks

__all__ = ["ADVICE", "VotingTransport", "enabled", "failed_ranks", "wait_until"]

ADVICE = (
    "Go on without: `comm = sparsecomm.shrink(comm)` on all ranks that live, then `Reducer.rebuild(comm)`; see "
    "docs/how-to/lost-rank.md"
)
_TOLD = "OMPI_MCA_mpi_ft_enable"  # of an Open MPI that mpirun has told to survive
_NEWS = 1.0  # seconds within which MPI tells a rank who has died, once it is known that somebody has
_DEAF = 2.0  # seconds for which a wait for the others' votes hears neither signals nor control messages
_POLL_INTERVAL = 0.05  # seconds between looks at them, afterwards


def enabled() -> bool:
    """Return whether MPI goes on when a rank dies, as far as it can be known: mpirun tells its ranks."""
    return os.environ.get(_TOLD, "").lower() in ("1", "true", "yes", "t", "y", "enabled")


def failed_ranks(comm: MPI.Comm, patience: float = 0.0) -> list[int]:
    """Return the ranks of ``comm`` that MPI knows to be dead.

    Args:
        patience: seconds to wait for one at least.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            ranks = comm.Get_failed().Translate_ranks(None, comm.Get_group())
        except (MPI.Exception, NotImplementedError):
            return []
        found = sorted(rank for rank in ranks if rank >= 0)
        if found or time.monotonic() >= deadline:
            return found
        with contextlib.suppress(MPI.Exception):
            MPI.COMM_SELF.Iprobe()  # lets MPI take in news
        time.sleep(1e-3)


def wait_until(test: Callable[[], bool], timeout: float, comm: MPI.Comm | None = None) -> bool:
    """Call ``test`` until it is true, for at most ``timeout`` seconds; return whether it was.

    Args:
        comm: look for dead ranks of it, where MPI survives them.

    Raises:
        RankFailedError: there are some.
    """
    deadline, pause = time.monotonic() + timeout, 20e-6
    watch = comm is not None and enabled()
    while not test():
        if watch and comm is not None and (failed := failed_ranks(comm)):
            raise RankFailedError(f"{format_ranks(failed)} died, and rank {comm.Get_rank()} waited. {ADVICE}.", failed)
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(1.5 * pause, 1e-3)
    return True


_voting: WeakSet[VotingTransport] = WeakSet()
_kept_alive: list[_agreement.Agreement] = []


class VotingTransport(FailureDetector):
    """A transport over MPI whose ranks vote on every call, if they began with `start_voting`."""

    _comm: MPI.Comm
    _votes: _agreement.Agreement | None = None
    _gone: TransportError | None = None  # why no call can be made any more
    _left = 0  # the last call that was left
    _undecided = False  # this rank had voted for it, and the others had not

    def __init__(self, node_of_rank: Sequence[int]) -> None:
        """Start without votes; see `FailureDetector`."""
        super().__init__(node_of_rank)

    @abstractmethod
    def close(self) -> None:
        """End the transport, and its queue."""

    @abstractmethod
    def _recv_all_control(self) -> None:
        """Take in the control messages that have come."""

    def start_voting(self, spin: float) -> None:
        """Vote on every call from now on: all ranks, or none.

        Args:
            spin: seconds for which a wait for votes keeps the core busy.
        """
        self._votes = _agreement.Agreement(self._comm, spin)
        _voting.add(self)

    def conclude(self) -> None:
        agreement, number = self._votes, self.number
        if agreement is None:
            return
        agreement.vote(number, True)
        if not agreement.decided(number, min(_DEAF, self.timeout)):
            self._hear_the_others(agreement)
        if not agreement.accepted(number):
            raise self._rejected()

    @property
    def concluded(self) -> bool:
        votes, number = self._votes, self.number
        if votes is None or votes.approved != number:
            return False
        return votes.decided(number, 0.0) and votes.accepted(number)

    def _hear_the_others(self, agreement: _agreement.Agreement) -> None:
        """Wait for the votes of ranks that have been silent for long."""
        began = time.monotonic()
        mismatch: SparseCommError | None = None
        while not agreement.decided(self.number, _POLL_INTERVAL):
            if mismatch is None:
                try:
                    self._recv_all_control()
                    self._check_leavers()
                    self._check_waiters()
                except TransportError:
                    pass  # the vote decides
                except SparseCommError as error:
                    mismatch = error
                    self._send_left(error)  # who makes another call waits for messages, and does not vote
            if time.monotonic() - began >= self.timeout - _DEAF:
                break
        else:
            if mismatch is not None:
                raise mismatch
            return
        failed = failed_ranks(self._comm)
        late = TimeoutError(
            f"rank {self.rank} waited {self.timeout:g} s for all ranks to say that call {self.number} went well. It "
            "has not counted here, and may yet count elsewhere: before going on with a new communicator, broadcast "
            "the weights. At least one rank is stuck, or does not make this call. If it is only slow, set "
            "SPARSECOMM_TIMEOUT to more seconds."
        )
        self._give_up(RankFailedError(f"{late} {format_ranks(failed)} died.", failed) if failed else late)
        assert self._gone is not None
        raise self._gone

    def _rejected(self) -> SparseCommError:
        """Return the error of a call that this rank has finished, and that does not count."""
        failed, told = failed_ranks(self._comm), None
        deadline = time.monotonic() + _NEWS
        while not failed and time.monotonic() < deadline:  # perhaps a rank left it, and tells why
            try:
                self._recv_all_control()
                self._check_leavers()
            except RankFailedError as error:
                told = error
            except SparseCommError as error:
                return error
            failed = failed_ranks(self._comm, 1e-3)
        self._others_know = True
        if failed:
            return self._rank_failed(failed, f"call {self.number} counts on no rank")
        return told or TransportError(
            f"a rank left call {self.number}, which rank {self.rank} had finished. It counts on no rank."
        )

    def _rank_failed(self, failed: Sequence[int], what: str) -> RankFailedError:
        """Return the error of this rank where others have died."""
        return RankFailedError(f"{format_ranks(failed)} died (rank {self.rank}, {what}). {ADVICE}.", failed)

    # -- the calls of FailureDetector ---------------------------------------------------------------------------------

    def _check_gone(self) -> None:
        """Raise if no call can be made any more.

        Raises:
            RankFailedError, TransportError: the same, for all calls from then on.
        """
        gone = self._gone
        if isinstance(gone, RankFailedError):
            raise self._rank_failed(gone.ranks, "before this call")
        if gone is not None:
            raise TransportError(f"rank {self.rank} cannot use this communicator any more: {gone}")

    def abort(self, error: BaseException) -> None:
        votes, number = self._votes, self.number
        if votes is None or not self._in_call:
            super().abort(error)
            return
        doubtful = votes.approved == number and (not votes.decided(number, 0.0) or votes.accepted(number))
        votes.vote(number, False)
        self._send_left(error)  # before the communicator is revoked
        if isinstance(error, RankFailedError):
            self._give_up(error)
        elif doubtful and not isinstance(error, SparseCommError):
            self._give_up(TransportError(f"it was interrupted while the ranks decided on call {number}"))
        super().abort(error)

    def _give_up(self, why: TransportError) -> None:
        """Make no call any more."""
        if self._gone is None:
            self._gone = why
            if self._votes is not None:
                self._votes.vote(self.number + 1, False)
                if not isinstance(why, RankFailedError):  # which the others find out
                    with contextlib.suppress(MPI.Exception):
                        self._comm.Revoke()  # ends their waits for messages

    def retire(self) -> None:
        """Give the transport up, from any thread: no call can be made any more, and a call under way fails on all.

        Nobody waits for this rank's votes from then on.
        """
        failed = self.failed_ranks()
        self._give_up(
            self._rank_failed(failed, "which goes on without")
            if failed
            else TransportError("it goes on with another one; give what `sparsecomm.shrink` returned to all calls")
        )

    def failed_ranks(self) -> list[int]:
        """Return the ranks that are known to be dead."""
        return [] if self._comm == MPI.COMM_NULL else failed_ranks(self._comm)

    @staticmethod
    def all() -> list[VotingTransport]:
        """Return all transports of this process that vote and were not closed."""
        return [transport for transport in _voting if transport._comm != MPI.COMM_NULL]

    # -- the end ------------------------------------------------------------------------------------------------------

    def _all_decided(self) -> bool:
        """Return whether every call has been decided on, so that the communicator may be freed."""
        agreement = self._votes
        if agreement is None:
            return True

        def decided() -> bool:
            agreement.reap(self.number + 2)
            return not agreement.waiting

        if wait_until(decided, 0.0 if self._gone is not None else _DEAF):
            return self._gone is None
        _kept_alive.append(agreement)  # MPI may still write to it
        return False
