"""The transport over MPI.

It works on a duplicate of the user's communicator, so that its messages never meet the user's. Data messages carry
the number of their collective call in the MPI tag; tag 0 is for control messages (`sparsecomm.transport.control`),
which ranks send when something is wrong and read only while they wait for long.
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from mpi4py import MPI

from sparsecomm import config
from sparsecomm.errors import InvalidInputError, RankFailedError, TimeoutError, TransportError
from sparsecomm.transport import _mpi_abi
from sparsecomm.transport import nodes as node_ids
from sparsecomm.transport.base import Mismatch, Request, TrafficCounters
from sparsecomm.transport.control import WAITING, ControlMessage, FailureDetector, named, not_all_came
from sparsecomm.transport.cuda_aware import cuda_aware

__all__ = ["MpiTransport", "of"]


def _check_family() -> None:
    """Refuse an MPI whose handles have another form: calling it would crash, not fail."""
    name, version = MPI.get_vendor()
    standard = MPI.Get_abi_version()[0] > 0 and "mpiabi" in str(MPI.__file__)
    loaded = "mpiabi" if standard else "openmpi" if name == "Open MPI" else "mpich"
    if loaded != _mpi_abi.abi:
        raise TransportError(
            f"sparsecomm was built for {_mpi_abi.built_for}, but mpi4py has loaded {name} "
            f"{'.'.join(map(str, version))}. {_ADVICE}"
        )


_ADVICE = (
    "Build sparsecomm for the MPI that you run, from a checkout: `MPICC=/path/to/mpicc pip install --force-reinstall "
    "--no-deps .`; or have mpi4py load the other MPI: set MPI4PY_MPIABI to openmpi or mpich."
)

_check_family()
try:
    from sparsecomm.transport import _mpi  # after mpi4py.MPI, which has loaded libmpi: this module has no path to it
except ImportError as error:
    raise TransportError(
        f"sparsecomm's MPI module, built for {_mpi_abi.built_for}, cannot be loaded ({error}). {_ADVICE}"
    ) from error

_TAGS = 2**14  # data tags are 1 ... _TAGS; MPI promises at least 32767
_HEADER = struct.Struct("<8sqB")  # of a control message: the transport's token, number of the call, kind
_FAILED = frozenset((MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED))
_PARTING = 5.0  # seconds for which a rank that frees a communicator waits for the others to do so
_PROCESS = os.getpid()  # mpi4py has started MPI in it
_SPIN = 50e-6  # seconds for which a wait keeps a core busy, where every rank has one

Request.register(_mpi.Transfer)


class MpiTransport(_mpi.Endpoint, FailureDetector):
    """Bytes between the ranks of a communicator. Made by `sparsecomm.transport.of`, once per communicator."""

    def __init__(self, private: MPI.Intracomm, token: bytes, nodes: Sequence[int] = ()) -> None:
        """``private``: a communicator that nobody else uses; `close` frees it.

        ``nodes``: the number of the machine of each rank; without it, they are all on one.

        ``token``: 8 bytes, the same on all ranks and different from other transports'. MPI may give the identity of
        a freed communicator to a new one, and a late control message with it.
        """
        private.Set_errhandler(MPI.ERRORS_RETURN)
        crowded = config.ranks_on_this_node() > (os.cpu_count() or 1)
        _mpi.Endpoint.__init__(
            self,
            MPI._addressof(private),
            limit=config.max_message_bytes(),
            spin=0.0 if crowded else _SPIN,
            counters=TrafficCounters(),
        )
        FailureDetector.__init__(self, nodes or [0] * self.size)
        self._comm: MPI.Comm = private
        self.library = _library()
        self.device_memory = cuda_aware(MPI)[0]
        self.threaded = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._token = token
        self._clean = True  # no call was ever abandoned
        self._abandoned: list[int] = []  # calls of which bytes may still arrive

    # -- calls ------------------------------------------------------------------------------------------------------

    def begin(self, call: bytes, mismatch: Mismatch) -> int:
        if self._comm == MPI.COMM_NULL or MPI.Is_finalized():
            raise InvalidInputError("this transport is closed: its communicator was freed, or MPI was finalised")
        left = self._inside
        number = self._start(call, mismatch)
        if left:
            self._abandon(number - 1)
        self.tag = 1 + number % _TAGS
        with contextlib.suppress(TransportError):  # a wait will report it
            self._recv_all_control()  # lets MPI take in what has come since it was called last, and may miss that
            self._recv_all_control()
        if self._abandoned:
            self._clear()
        self.reap()
        self._check_leavers()
        return number

    def abort(self, error: BaseException) -> None:
        if self._inside:
            self._abandon(self._number)
            super().abort(error)
            self.reap()

    def _abandon(self, number: int) -> None:
        self._clean = False
        self._abandoned.append(number)

    def _clear(self) -> None:
        """Receive what still arrives of abandoned calls, until their tags are about to be used again."""
        self._abandoned = [n for n in self._abandoned if self._number - n < _TAGS // 2]
        for number in self._abandoned:
            self.discard(1 + number % _TAGS)

    # -- waiting ----------------------------------------------------------------------------------------------------

    def poll(self, peer: int, waited: float, ping: bool) -> None:
        """Called now and then while this rank waits for ``peer``: raise, or return to go on waiting."""
        self._recv_all_control()
        self._check_leavers()
        self._check_waiters()
        if waited >= self.timeout:
            raise self._timed_out(peer)
        if ping and peer != self.rank:
            self._send_control(peer, WAITING, self._call)

    def _send_control(self, to: int, kind: int, text: bytes) -> None:
        self.send_control(_HEADER.pack(self._token, self._number, kind) + text, to)

    def _recv_all_control(self) -> None:
        while (heard := self.recv_control()) is not None:
            rank, message = heard
            token, number, kind = _HEADER.unpack_from(message)
            if token == self._token:
                self._learn(ControlMessage(rank, number, kind, message[_HEADER.size :]))
        for number in self._forget():
            self._abandon(number)  # its bytes may be on the way

    # -- errors -----------------------------------------------------------------------------------------------------

    def failure(self, code: int, peer: int) -> TransportError:
        """The error for an error code of MPI; ``peer`` is -1 where it concerns no rank in particular."""
        text = f"{MPI.Get_error_string(code)} (rank {self.rank}, call {self._number}"
        text += f", peer {peer})" if peer >= 0 else ")"
        if MPI.Get_error_class(code) not in _FAILED:
            return TransportError(f"MPI failed: {text}")
        dead = self._dead() or ([peer] if peer >= 0 else [])
        return RankFailedError(
            f"{named(dead)} died. {text}. The communicator cannot be used any more: restart the job, or shrink it "
            "(MPI's `Comm.Shrink`, under `mpirun --with-ft ulfm`)."
        )

    def _dead(self) -> list[int]:
        try:
            failed = self._comm.Get_failed()
            ranks = failed.Translate_ranks(None, self._comm.Get_group())
            return sorted(rank for rank in ranks if rank >= 0)
        except (MPI.Exception, NotImplementedError):
            return []

    # -- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free the private communicator, unless bytes of an abandoned call may still be on their way over it.

        MPI may give its identity to the next communicator, which these bytes would reach. Any rank may have abandoned
        a call, so all of them say here whether they did; what they sent before that has arrived by then. A rank that
        does not hear from the others soon, because they do not free theirs, keeps the communicator.

        Transfers under way stay MPI's to complete.
        """
        if self._comm == MPI.COMM_NULL:
            return
        if self.queue is not None:
            self.queue.finish()
        private, self._comm = self._comm, MPI.COMM_NULL
        self.leave()
        if not MPI.Is_finalized() and _all_say(self._clean, private):
            private.Free()


# -- one transport per communicator -----------------------------------------------------------------------------------


class _Joining:
    """A duplicate being made; a token that its rank 0 chooses; which machine every rank is on.

    MPI writes to all three until all ranks have joined.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.token = bytearray(os.urandom(8))
        self._mark, self._marks = node_ids.mark(), bytearray(node_ids.MARK * comm.Get_size())
        self.private, self._request = comm.Idup()
        self._steps = [
            lambda: self.private.Ibcast([self.token, MPI.BYTE], root=0),
            lambda: self.private.Iallgather([self._mark, MPI.BYTE], [self._marks, MPI.BYTE]),
        ]

    def test(self) -> bool:
        """Go on; true when it is done."""
        while self._request.Test():
            if not self._steps:
                return True
            self._request = self._steps.pop(0)()
        return False

    def nodes(self) -> list[int]:
        """The number of each rank's machine, counted as they appear."""
        length = node_ids.MARK
        return node_ids.numbered([bytes(self._marks[i : i + length]) for i in range(0, len(self._marks), length)])


@cache
def _library() -> str:
    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


def _all_say(yes: bool, comm: MPI.Comm) -> bool:
    """Whether every rank says yes; no, where that is not known within `_PARTING` seconds."""
    mine, everyones = bytearray([yes]), bytearray(1)
    with contextlib.suppress(MPI.Exception):  # a rank may be dead
        request = comm.Iallreduce([mine, MPI.BYTE], [everyones, MPI.BYTE], MPI.BAND)
        _kept_alive.append(request)
        if _comes_true(request.Test, _PARTING):
            _kept_alive.remove(request)
            return everyones[0] == 1
    return False


def _comes_true(test: Callable[[], bool], seconds: float) -> bool:
    """Whether ``test()`` is true within so many seconds."""
    deadline, nap = time.monotonic() + seconds, 20e-6
    while not test():
        if time.monotonic() > deadline:
            return False
        time.sleep(nap)
        nap = min(1.5 * nap, 1e-3)
    return True


_lock = threading.RLock()
_kept_alive: list[_Joining | MPI.Request] = []  # MPI may still write to their memory
_key = MPI.KEYVAL_INVALID


def of(comm: MPI.Intracomm | None) -> MpiTransport:
    """The transport of a communicator; see `sparsecomm.transport.of`."""
    if comm is not None and not isinstance(comm, MPI.Comm):
        raise InvalidInputError(
            f"comm is {comm!r} of type {type(comm).__name__}: expected an mpi4py communicator, or None for COMM_WORLD"
        )
    if os.getpid() != _PROCESS:
        raise InvalidInputError(
            f"process {os.getpid()} is a fork of one that had started MPI, which does not survive that: make the call "
            f"in process {_PROCESS}, or start processes by spawning"
        )
    if not MPI.Is_initialized():
        raise InvalidInputError(
            "MPI is not initialised. Leave `mpi4py.rc.initialize` true, or call `MPI.Init_thread()` before sparsecomm."
        )
    if MPI.Is_finalized():
        raise InvalidInputError("MPI is finalised already: call sparsecomm before `MPI.Finalize()`")
    if comm is None:
        comm = MPI.COMM_WORLD
    if comm == MPI.COMM_NULL:
        raise InvalidInputError(
            "comm is COMM_NULL: it was freed, or this rank is not in it. Ranks outside a communicator must not call."
        )
    try:
        if comm.Is_inter():
            raise InvalidInputError("comm is an intercommunicator: merge it first (`comm.Merge()`)")
        found = comm.Get_attr(_keyval())
        return found if isinstance(found, MpiTransport) else _join(comm)
    except MPI.Exception as error:
        raise InvalidInputError(
            f"comm cannot be used, it may have been freed through another handle: {error}"
        ) from error


def _keyval() -> int:
    global _key
    if _key == MPI.KEYVAL_INVALID:
        _key = MPI.Comm.Create_keyval(copy_fn=None, delete_fn=_forget)
    return _key


def _join(comm: MPI.Intracomm) -> MpiTransport:
    """Duplicate ``comm``, without trusting that the other ranks do.

    A duplicate that timed out stays under way and is taken up by the next attempt: MPI pairs the attempts of all
    ranks in their order, and a second one would pair with nothing.
    """
    timeout = config.timeout()
    with _lock:
        state: Any = comm.Get_attr(_keyval())
        if isinstance(state, MpiTransport):
            return state
        if state is None:
            state = _Joining(comm)
            _kept_alive.append(state)
            comm.Set_attr(_keyval(), state)
        if not _comes_true(state.test, timeout):
            raise _not_joined(comm, timeout)
        transport = MpiTransport(state.private, bytes(state.token), state.nodes())
        _kept_alive.remove(state)
        comm.Set_attr(_keyval(), transport)
        return transport


def _not_joined(comm: MPI.Intracomm, timeout: float) -> TimeoutError:
    others = [rank for rank in range(comm.Get_size()) if rank != comm.Get_rank()]
    missing = f"{named(others)} has" if len(others) == 1 else f"at least one of {named(others)} has"
    return not_all_came(comm.Get_rank(), timeout, "communicator", missing)


def _forget(comm: MPI.Comm, key: int, state: object) -> None:
    """MPI's callback when the user frees ``comm``, and when `_join` replaces what is stored."""
    if isinstance(state, MpiTransport):
        state.close()
