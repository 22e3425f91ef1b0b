"""What a rank does where MPI survives that others die (ULFM, `mpirun --with-ft ulfm` of Open MPI 5).

All ranks that live vote on every call, and a call counts on all of them or on none. A rank votes for a call when it has
the result, and against one that it leaves. MPI's agreement ends although ranks die, and then says so on all the others.

A rank that gives a transport up votes against the next call, too. No rank can be further than that, so nobody waits for
the vote of one that is not coming.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any
from weakref import WeakSet

from mpi4py import MPI

from sparsecomm.errors import RankFailedError, SparseCommError, TimeoutError, TransportError
from sparsecomm.transport import abi
from sparsecomm.transport.control import FailureDetector, format_ranks
from sparsecomm.transport.scheduling import check_signals

__all__ = ["ADVICE", "DETECTION_TIME", "Agreement", "Voting", "failed_ranks", "survives", "wait_until"]

abi.load()
from sparsecomm.transport import _mpi  # noqa: E402  # of the ABI that fits

ADVICE = (
    "Go on without: `comm = sparsecomm.shrink(comm)` on all ranks that live, then `Reducer.rebuild(comm)`; see "
    "docs/how-to/lost-rank.md"
)
DETECTION_TIME = 1.0  # seconds within which MPI tells a rank who has died, once it is known that somebody has
_SURVIVES = "OMPI_MCA_mpi_ft_enable"  # of an Open MPI that mpirun has told to survive
_DEAF_TIME = 2.0  # seconds for which a wait for the others' votes takes notice of neither signals nor control messages
_POLL_INTERVAL = 0.05  # seconds between looks at them, afterwards


def survives() -> bool:
    """Return whether MPI goes on when a rank dies, as far as it can be known: mpirun tells its ranks."""
    return os.environ.get(_SURVIVES, "").lower() in ("1", "true", "yes", "t", "y", "enabled")


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
        try:  # noqa: SIM105  # suppress() is bytecode
            MPI.COMM_SELF.Iprobe()
        except MPI.Exception:
            pass  # it was only to let MPI take notice of failures
        time.sleep(1e-3)


def wait_until(test: Callable[[], bool], timeout: float, comm: MPI.Comm | None = None) -> bool:
    """Call ``test`` until it is true, for at most ``timeout`` seconds; return whether it was.

    Args:
        comm: look for dead ranks of it, where MPI survives them.

    Raises:
        RankFailedError: there are some.
    """
    deadline, pause = time.monotonic() + timeout, 20e-6
    watched = comm if survives() else None
    while not test():
        if watched is not None and (failed := failed_ranks(watched)):
            raise RankFailedError(
                f"{format_ranks(failed)} died, and rank {watched.Get_rank()} waited. {ADVICE}.", failed
            )
        if time.monotonic() > deadline:
            return False
        check_signals()
        time.sleep(pause)
        pause = min(1.5 * pause, 1e-3)
    return True


class Agreement:
    """The votes on the calls of a transport: one per call and rank, in the order of the calls' numbers.

    MPI pairs the agreements of all ranks in their order. So a rank votes on every number, also where it skips one.

    Attributes:
        voted: the number of the call that this rank voted on last.
        approved: the number of the call that it voted for last.
    """

    def __init__(self, comm: MPI.Comm, spin: float) -> None:
        """Begin with call 1.

        Args:
            comm: a communicator on which nobody else agrees.
            spin: seconds for which a wait keeps the core busy.
        """
        self.voted = self.approved = 0
        self._comm, self._spin, self._lock = comm, spin, Lock()
        self._open: dict[int, tuple[MPI.Request, array[int]] | None] = {}  # votes whose decision nobody has read
        self._decision = 0, False  # the number of the call whose decision was read last, and what it was

    def vote(self, number: int, yes: bool) -> None:
        """Vote on call ``number``; against those before it that have no vote yet. Only the first vote counts."""
        with self._lock:
            while self.voted < number:
                self.voted += 1
                ballot = array("i", [yes and self.voted == number])
                if ballot[0]:
                    self.approved = number
                try:
                    self._open[self.voted] = self._comm.Iagree(ballot), ballot
                except MPI.Exception:
                    self._open[self.voted] = None  # MPI cannot: the call does not count

    def decided(self, number: int, seconds: float) -> bool:
        """Wait for the decision on a call that this rank has voted on, for so long; return whether it is known."""
        began = time.monotonic()
        while self._decision[0] != number and not self._test(number):
            waited = time.monotonic() - began
            if waited >= seconds:
                return False
            _mpi.wait_deaf(waited, self._spin)
        return True

    def accepted(self, number: int) -> bool:
        """Return whether it is known that all ranks have voted for the call, and that all lived."""
        return self._decision == (number, True)

    def reap(self, number: int) -> bool:
        """Forget the votes on calls before ``number`` whose decision has come; return whether none is left."""
        for old in sorted(self._open):
            if old < number:
                self._test(old)
        return not self._open

    def _test(self, number: int) -> bool:
        """Read the decision on a call, if it is there."""
        vote, yes = self._open[number], False
        if vote is not None:
            request, ballot = vote
            try:
                if not request.Test():
                    return False
                yes = bool(ballot[0])
            except MPI.Exception:
                pass  # a rank died
        del self._open[number]
        self._decision = max(self._decision, (number, yes))
        return True


_voting: WeakSet[Voting] = WeakSet()
_kept_alive: list[Agreement] = []


class Voting(FailureDetector):
    """What makes the ranks of a transport over MPI vote on every call: all of them, or none."""

    spin: float
    _comm: MPI.Intracomm
    _clean: bool
    _broken: bool

    def __init__(self, *arguments: Any) -> None:
        """Do as the transport, and vote from now on."""
        super().__init__(*arguments)
        self._given_up: TransportError | None = None  # why no call can be made any more
        self._votes = Agreement(self._comm, self.spin)
        _voting.add(self)

    def conclude(self) -> None:
        votes, number = self._votes, self.number
        votes.vote(number, True)
        if not votes.decided(number, min(_DEAF_TIME, self.timeout)):
            self._wait_for_votes(votes)
        if not votes.accepted(number):
            raise self._rejected()

    @property
    def concluded(self) -> bool:
        votes, number = self._votes, self.number
        return votes.approved == number and votes.decided(number, 0.0) and votes.accepted(number)

    def _wait_for_votes(self, votes: Agreement) -> None:
        """Wait for the votes of ranks that have been silent for long."""
        began = time.monotonic()
        mismatch: SparseCommError | None = None
        while not votes.decided(self.number, _POLL_INTERVAL):
            check_signals()
            if mismatch is None:
                try:
                    self._listen(0.0)
                    self._check_leavers()
                    self._check_waiters()
                except TransportError:
                    pass  # the vote decides
                except SparseCommError as error:
                    mismatch = error
                    self._send_left(error)  # who makes another call waits for messages, and does not vote
            if time.monotonic() - began >= self.timeout - _DEAF_TIME:
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
        why = RankFailedError(f"{late} {format_ranks(failed)} died.", failed) if failed else late
        self._give_up(why)
        raise why

    def _rejected(self) -> SparseCommError:
        """Return the error of a call that this rank has finished, and that does not count."""
        failed, told = failed_ranks(self._comm), None
        deadline = time.monotonic() + DETECTION_TIME
        while not failed and time.monotonic() < deadline:  # perhaps a rank left it, and tells why
            check_signals()
            try:
                self._listen(0.0)
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

    # -- calls of others ----------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        why = self._given_up
        if isinstance(why, RankFailedError):  # the same for all calls from then on
            raise self._rank_failed(why.ranks, "before this call")
        if why is not None:
            raise TransportError(f"rank {self.rank} cannot use this communicator any more: {why}")
        super()._check_usable()

    def _start(self) -> None:
        self._votes.reap(self.number)
        super()._start()

    def abort(self, error: BaseException) -> None:
        votes, number = self._votes, self.number
        if self._in_call:
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
        if self._given_up is None:
            self._given_up = why
            self._votes.vote(self.number + 1, False)
            if not isinstance(why, RankFailedError):  # which the others find out
                try:  # noqa: SIM105  # suppress() is bytecode
                    self._comm.Revoke()  # ends their waits for messages
                except MPI.Exception:
                    pass  # they time out

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
    def all() -> list[Voting]:
        """Return all transports of this process that vote and were not closed."""
        return [transport for transport in _voting if transport._comm != MPI.COMM_NULL]

    # -- the end ------------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        """Free the communicator as the transport does, if every call has been decided on."""
        number, self._broken = self.number + 2, self._given_up is not None
        patience = 0.0 if self._broken else _DEAF_TIME
        if not MPI.Is_finalized() and not wait_until(lambda: self._votes.reap(number), patience):
            _kept_alive.append(self._votes)  # MPI may still write to it
            self._clean = False
        super()._close()
