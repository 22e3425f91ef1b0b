"""`Voting`: with an MPI that survives dead ranks (ULFM), a call counts on all surviving ranks or on none.

Open MPI 5 survives dead ranks under `mpirun --with-ft ulfm`. A rank votes for a call when it has the result, and
against a call that it leaves. A rank that stops using a transport also votes against the next call, so that ranks that
are one call ahead do not wait for its vote. No rank can be more than one call ahead.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Lock
from typing import Any
from weakref import WeakSet

from mpi4py import MPI

from sparsecomm.errors import RankFailedError, SparseCommError, TimeoutError, TransportError
from sparsecomm.signals import deferred, poll
from sparsecomm.transport import abi
from sparsecomm.transport.control import FailureDetector, format_ranks

abi.load()
from sparsecomm.transport import _mpi  # noqa: E402  # compiled for the ABI of the loaded MPI

ADVICE = (
    "To continue without them, call `comm = sparsecomm.shrink(comm)` on all ranks that live, then "
    "`Reducer.rebuild(comm)`; see docs/guides/lost-rank.md"
)
DETECTION_TIME = 1.0  # seconds to wait for MPI to name the dead rank after an error
_SURVIVES = "OMPI_MCA_mpi_ft_enable"  # set by `mpirun --with-ft ulfm`
_QUIET_TIME = 2.0  # seconds of waiting for votes without checks of signals and control messages
_POLL_INTERVAL = 0.05  # seconds between these checks


def survives() -> bool:
    """Return whether MPI survives the death of a rank, according to the environment that mpirun sets."""
    return os.environ.get(_SURVIVES, "").lower() in ("1", "true", "yes", "t", "y", "enabled")


def failed_ranks(comm: MPI.Comm, patience: float = 0.0) -> list[int]:
    """Return the ranks of ``comm`` that MPI knows to be dead, after waiting up to ``patience`` seconds for one."""
    deadline = time.monotonic() + patience
    while True:
        try:
            ranks = comm.Get_failed().Translate_ranks(None, comm.Get_group())
        except (MPI.Exception, NotImplementedError):
            return []
        failed = sorted(rank for rank in ranks if rank >= 0)
        if failed or time.monotonic() >= deadline:
            return failed
        with suppress(MPI.Exception):  # the call only lets MPI detect failures
            MPI.COMM_SELF.Iprobe()
        time.sleep(1e-3)


def wait_until(test: Callable[[], bool], timeout: float, comm: MPI.Comm | None = None) -> bool:
    """Call ``test`` until it returns true, for at most ``timeout`` seconds; return whether it did.

    If MPI survives dead ranks, raise `RankFailedError` when a rank of ``comm`` dies.
    """
    deadline, pause = time.monotonic() + timeout, 20e-6
    watched = comm if survives() else None
    while not test():
        if watched is not None and (failed := failed_ranks(watched)):
            raise RankFailedError(
                f"{format_ranks(failed)} died while rank {watched.Get_rank()} waited. {ADVICE}.", failed
            )
        if time.monotonic() > deadline:
            return False
        poll()
        time.sleep(pause)
        pause = min(1.5 * pause, 1e-3)
    return True


class Agreement:
    """The votes on the calls of a transport: one per call and rank, in the order of call numbers.

    MPI pairs the votes of all ranks in their order, so a rank also votes on call numbers that it skips.
    """

    def __init__(self, comm: MPI.Comm, spin: float) -> None:
        """Vote on the calls of ``comm``, beginning with call 1. ``spin``: seconds of busy waiting."""
        self.voted = self.approved = 0  # the latest calls on which this rank has voted, and voted yes
        self._comm, self._spin, self._lock = comm, spin, Lock()
        self._open: dict[int, tuple[MPI.Request, array[int]] | None] = {}  # votes whose decision has not been read
        self._decision = 0, False  # the latest call whose decision has been read, and the decision

    @deferred
    def vote(self, number: int, approve: bool) -> None:
        """Vote on call ``number``, and against earlier calls without a vote. A second vote on a call is ignored."""
        with self._lock:
            while self.voted < number:
                self.voted += 1
                ballot = array("i", [approve and self.voted == number])
                if ballot[0]:
                    self.approved = number
                try:
                    self._open[self.voted] = self._comm.Iagree(ballot), ballot
                except MPI.Exception:
                    self._open[self.voted] = None  # MPI cannot agree: the call does not count

    def decided(self, number: int, seconds: float) -> bool:
        """Wait up to ``seconds`` for the decision on a call that this rank has voted on; return whether it is known."""
        began = time.monotonic()
        while self._decision[0] != number and not self._test(number):
            waited = time.monotonic() - began
            if waited >= seconds:
                return False
            _mpi.wait_without_signals(waited, self._spin)
        return True

    def accepted(self, number: int) -> bool:
        """Return whether all ranks are alive and voted for the call; false until its decision has been read."""
        return self._decision == (number, True)

    def reap(self, number: int) -> bool:
        """Read the decisions on calls before ``number``; return whether all votes have been decided."""
        for old in sorted(self._open):
            if old < number:
                self._test(old)
        return not self._open

    def _test(self, number: int) -> bool:
        """Read the decision on a call; return false if there is none yet."""
        vote, approved = self._open[number], False
        if vote is not None:
            request, ballot = vote
            try:
                if not request.Test():
                    return False
                approved = bool(ballot[0])
            except MPI.Exception:
                pass  # a rank died
        del self._open[number]
        self._decision = max(self._decision, (number, approved))
        return True


_voting: WeakSet[Voting] = WeakSet()
_kept_alive: list[Agreement] = []


class Voting(FailureDetector):
    """A mixin for transports over MPI whose ranks vote on every call, so that it counts on all ranks or on none."""

    spin: float
    _comm: MPI.Intracomm
    _clean: bool
    _broken: bool

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._given_up: TransportError | None = None  # why no call can be made any more
        self._votes = Agreement(self._comm, self.spin)
        _voting.add(self)

    def conclude(self) -> None:
        votes, number = self._votes, self.number
        votes.vote(number, True)
        if not votes.decided(number, min(_QUIET_TIME, self.timeout)):
            self._wait_for_votes(votes)
        if not votes.accepted(number):
            raise self._rejected()

    @property
    def concluded(self) -> bool:
        votes, number = self._votes, self.number
        return votes.approved == number and votes.decided(number, 0.0) and votes.accepted(number)

    def _wait_for_votes(self, votes: Agreement) -> None:
        """Wait for late votes, and meanwhile handle signals and control messages."""
        began = time.monotonic()
        mismatch: SparseCommError | None = None
        while not votes.decided(self.number, _POLL_INTERVAL):
            poll()
            if mismatch is None:
                try:
                    self._receive_control(0.0)
                    self._check_leavers()
                    self._check_waiters()
                except TransportError:
                    pass  # the vote decides
                except SparseCommError as error:
                    mismatch = error
                    self._send_left(error)  # a rank that makes another call waits for messages, and does not vote
            if time.monotonic() - began >= self.timeout - _QUIET_TIME:
                break
        else:
            if mismatch is not None:
                raise mismatch
            return
        failed = failed_ranks(self._comm)
        timeout = TimeoutError(
            f"rank {self.rank} waited {self.timeout:g} s for the votes of all ranks on call {self.number}. The call "
            "does not count on this rank, and may still count on others: before you continue with a new communicator, "
            "broadcast the weights. At least one rank is stuck, or does not make this call. If it is only slow, "
            "increase SPARSECOMM_TIMEOUT (seconds)."
        )
        reason = RankFailedError(f"{timeout} {format_ranks(failed)} died.", failed) if failed else timeout
        self._give_up(reason)
        raise reason

    def _rejected(self) -> SparseCommError:
        """Return the error for a call that this rank has completed and that does not count."""
        failed, reported = failed_ranks(self._comm), None
        deadline = time.monotonic() + DETECTION_TIME
        while not failed and time.monotonic() < deadline:  # a rank may have left the call, and report why
            poll()
            try:
                self._receive_control(0.0)
                self._check_leavers()
            except RankFailedError as error:
                reported = error
            except SparseCommError as error:
                return error
            failed = failed_ranks(self._comm, 1e-3)
        self._others_informed = True
        if failed:
            return self._rank_failed(failed, f"call {self.number} counts on no rank")
        return reported or TransportError(
            f"a rank left call {self.number}, which rank {self.rank} had completed. The call counts on no rank."
        )

    def _rank_failed(self, failed: Sequence[int], consequence: str) -> RankFailedError:
        return RankFailedError(f"{format_ranks(failed)} died (rank {self.rank}, {consequence}). {ADVICE}.", failed)

    # -- calls of the failure detector --------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        reason = self._given_up
        if isinstance(reason, RankFailedError):
            raise self._rank_failed(reason.ranks, "before this call")
        if reason is not None:
            raise TransportError(f"rank {self.rank} cannot use this communicator any more: {reason}")
        super()._check_usable()

    def _prepare_call(self) -> None:
        self._votes.reap(self.number)
        super()._prepare_call()

    def abort(self, error: BaseException) -> None:
        votes, number = self._votes, self.number
        if self._in_call:
            may_count = votes.approved == number and (not votes.decided(number, 0.0) or votes.accepted(number))
            votes.vote(number, False)
            self._send_left(error)  # before the communicator is revoked
            if isinstance(error, RankFailedError):
                self._give_up(error)
            elif may_count and not isinstance(error, SparseCommError):
                self._give_up(TransportError(f"it was interrupted while the ranks voted on call {number}"))
        super().abort(error)

    def _give_up(self, reason: TransportError) -> None:
        """Refuse further calls, and end the calls of other ranks."""
        if self._given_up is None:
            self._given_up = reason
            self._votes.vote(self.number + 1, False)
            if not isinstance(reason, RankFailedError):  # MPI reports dead ranks itself
                with suppress(MPI.Exception):  # then the other ranks time out
                    self._comm.Revoke()  # ends their waits for messages

    @deferred
    def retire(self) -> None:
        """Refuse further calls, and end a call in progress with an error on all ranks. Any thread may call it."""
        failed = self.failed_ranks()
        self._give_up(
            self._rank_failed(failed, "which continues without them")
            if failed
            else TransportError("it was replaced; pass the communicator that `sparsecomm.shrink` returned to all calls")
        )

    def failed_ranks(self) -> list[int]:
        return [] if self._comm == MPI.COMM_NULL else failed_ranks(self._comm)

    @staticmethod
    def all() -> list[Voting]:
        """Return the open voting transports of this process."""
        return [transport for transport in _voting if transport._comm != MPI.COMM_NULL]

    def _close(self) -> None:
        """Free the communicator as `MpiTransport`, but only if all votes have been decided."""
        number, self._broken = self.number + 2, self._given_up is not None
        patience = 0.0 if self._broken else _QUIET_TIME
        if not MPI.Is_finalized() and not wait_until(lambda: self._votes.reap(number), patience):
            _kept_alive.append(self._votes)  # MPI may still write to its memory
            self._clean = False
        super()._close()
