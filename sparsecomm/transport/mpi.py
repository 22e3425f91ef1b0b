"""The transport over MPI.

It works on a duplicate of the user's communicator, so that its messages never meet the user's. Data messages carry the
number of their collective call in the MPI tag; tag 0 is for control messages (`sparsecomm.transport.control`), which
ranks send when something is wrong and read only while they wait for long.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Sequence

from mpi4py import MPI

from sparsecomm import config
from sparsecomm.errors import InvalidInputError, RankFailedError, TimeoutError, TransportError
from sparsecomm.tensors.arrays import Bytes
from sparsecomm.transport import abi, job
from sparsecomm.transport.base import PeerTraffic, Request
from sparsecomm.transport.control import (
    MAX_CONTROL_BYTES,
    ControlMessage,
    FailureDetector,
    format_ranks,
    missing_ranks_error,
    unreadable_error,
)
from sparsecomm.transport.cuda_aware import cuda_aware
from sparsecomm.transport.ulfm import ADVICE, DETECTION_TIME, Voting, failed_ranks, survives, wait_until

__all__ = ["MpiTransport", "VotingTransport", "existing", "of", "usable"]

abi.load()
from sparsecomm.transport import _mpi  # noqa: E402  # of the ABI that fits

_NUM_TAGS = 2**14  # tags of data are 1 ... _NUM_TAGS; MPI promises at least 32767
_CONTROL = struct.Struct("<8sqB")  # of a control message: the transport's token, number of the call, kind
_AT_ONCE = 1000  # control messages that are read before the clock is
_FAILED = frozenset((MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED))
_OF_RANK = struct.Struct(f"<9s{job.NODE_ID_BYTES}sq")  # what a rank tells: a token, its node, its limit of bytes
_BROADCAST_BYTES = 2**30  # that MPI broadcasts at once: a count has 32 bits before MPI 4
_CLOSE_TIMEOUT = 5.0  # seconds for which a rank that frees a communicator waits for the others to do so
_PROCESS = os.getpid()  # mpi4py has started MPI in it
_SPIN = 50e-6  # seconds for which a wait keeps a core busy, where every rank has one

Request.register(_mpi.Transfer)


class MpiTransport(_mpi.Endpoint, FailureDetector):
    """A transport over MPI. `sparsecomm.transport.transport_of` makes one per communicator."""

    def __init__(self, private: MPI.Intracomm, token: bytes, limit: int, node_of_rank: Sequence[int]) -> None:
        """Take over ``private``, which `close` frees.

        Args:
            private: a communicator that nobody else uses.
            token: 8 bytes, the same on all ranks and different from other transports'. MPI may give the identity of a
                freed communicator to a new one, and a late control message with it.
            limit: bytes in a piece of a message, the same on all ranks.
            node_of_rank: for each rank, the number of its node.
        """
        private.Set_errhandler(MPI.ERRORS_RETURN)
        _mpi.Endpoint.__init__(self, MPI._addressof(private), limit, 0.0 if config.oversubscribed() else _SPIN)
        FailureDetector.__init__(self, node_of_rank)
        self._comm = private
        self.library = abi.vendor()
        self.device_memory = cuda_aware(MPI)[0]
        self.threaded = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._token = token
        self._clean = True  # no call was ever abandoned
        self._broken = False  # what is under way on the communicator ends with an error
        self._abandoned: list[int] = []  # calls of which bytes may still arrive

    @property
    def members(self) -> Sequence[int]:
        """For each rank, the number that it has in the job; ranks in their order, where that is not known."""
        numbers = MPI.Group.Translate_ranks(self._comm.group, None, MPI.COMM_WORLD.group)
        return numbers if all(0 <= number < MPI.COMM_WORLD.size for number in numbers) else range(self.size)

    # -- calls ------------------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self.closed:
            raise InvalidInputError(
                "this transport is closed: its communicator was freed, MPI was finalised, or this process is a fork"
            )

    def _start(self) -> None:
        self.tag = 1 + self.number % _NUM_TAGS
        self._listen(0.0)
        if self._abandoned:
            self._discard_abandoned()
        self.reap()
        super()._start()

    def _abandon(self, number: int) -> None:
        self._clean = False
        self._abandoned.append(number)

    def _discard_abandoned(self) -> None:
        """Receive what still arrives of abandoned calls, until their tags are about to be used again."""
        self._abandoned = [n for n in self._abandoned if self.number - n < _NUM_TAGS // 2]
        for number in self._abandoned:
            self.discard(1 + number % _NUM_TAGS)

    def _go_on_from(self, number: int) -> None:
        for passed in range(max(self.number, number - _NUM_TAGS // 2) + 1, number + 1):
            self._abandon(passed)  # other ranks have sent of it
        super()._go_on_from(number)

    # -- waiting ----------------------------------------------------------------------------------------------------

    def poll(self, peer: int, waited: float, ping: bool) -> None:
        """Read control messages and the clock, now and then during a wait; return to go on waiting, or raise.

        Args:
            peer: the rank waited for.
            waited: seconds since the wait began.
            ping: tell the peer that this rank waits for it.
        """
        self._listen(0.0)
        self._check_wait(peer, waited, ping=ping)

    def _send_control(self, to: int, kind: int, text: bytes) -> None:
        self.send_control(_CONTROL.pack(self._token, self.number, kind) + text, to)

    def _listen(self, seconds: float) -> None:
        if seconds:
            time.sleep(min(seconds, 1e-3))
        for _ in range(_AT_ONCE):
            if (received := self.recv_control(_CONTROL.size + MAX_CONTROL_BYTES)) is None:
                break
            rank, nbytes, message = received
            if nbytes != len(message) or nbytes < _CONTROL.size:
                self._refuse(rank, f"a control message of {nbytes} bytes")
                continue
            token, number, kind = _CONTROL.unpack_from(message)
            if token == self._token:
                self._add_control(ControlMessage(rank, number, kind, message[_CONTROL.size :]))
        self._drop_old_control()

    def peers(self) -> list[PeerTraffic]:
        return [PeerTraffic(rank, *self.traffic(rank)) for rank in range(self.size) if rank != self.rank]

    # -- errors -----------------------------------------------------------------------------------------------------

    def failure(self, code: int, peer: int) -> TransportError:
        """Return the error for an error code of MPI; ``peer`` is -1 where it concerns no rank in particular."""
        text = f"{MPI.Get_error_string(code)} (rank {self.rank}, call {self.number}"
        text += f", peer {peer})" if peer >= 0 else ")"
        kind = MPI.Get_error_class(code)
        failed = failed_ranks(self._comm, DETECTION_TIME if kind in _FAILED else 0.0)
        if not failed and kind == MPI.ERR_PROC_FAILED and peer >= 0:
            failed = [peer]
        if failed:
            return RankFailedError(f"{format_ranks(failed)} died. {text}. {ADVICE}.", failed)
        if kind == MPI.ERR_REVOKED:
            return TransportError(f"a rank has given this communicator up. {text}. {ADVICE}.")
        if kind in _FAILED:
            return RankFailedError(f"a rank died. {text}. {ADVICE}.")
        return TransportError(f"MPI failed: {text}")

    def oversized(self, source: int, nbytes: int) -> TransportError:
        """Return the error for a piece of so many bytes from ``source``; negative: of more than is known."""
        seen = f"{nbytes} bytes" if nbytes >= 0 else "too many bytes"
        return unreadable_error(self.rank, source, f"a message of {seen} in one piece (of at most {self.limit})")

    # -- whole messages to all ranks ----------------------------------------------------------------------------------

    def broadcast(self, data: Bytes, root: int) -> None:
        timeout = config.timeout()
        try:
            for begin in range(0, len(data), _BROADCAST_BYTES):
                request = self._comm.Ibcast([data[begin : begin + _BROADCAST_BYTES], MPI.BYTE], root)
                if not _completes(request, timeout, self._comm):
                    raise TimeoutError(
                        f"rank {self.rank} waited {timeout:g} s for a broadcast from rank {root}. If ranks are only "
                        "slow, set SPARSECOMM_TIMEOUT to more seconds."
                    )
        except MPI.Exception as error:
            raise self.failure(error.Get_error_code(), root) from error

    # -- the end ----------------------------------------------------------------------------------------------------

    def _close(self) -> None:
        """Free the private communicator, unless bytes of an abandoned call may still be on their way over it.

        MPI may give its identity to the next communicator, which these bytes would reach. Any rank may have abandoned
        a call, so all ranks exchange here whether they did; what they sent before that has arrived by then. A rank
        that does not hear from the others soon, because they do not free theirs, keeps the communicator.

        MPI completes transfers that are under way.
        """
        if self._comm != MPI.COMM_NULL:
            private, self._comm = self._comm, MPI.Intracomm(MPI.COMM_NULL)
            self.detach(self._broken)
            if not (self._broken or MPI.Is_finalized()) and _all_true(self._clean, private):
                private.Free()


class VotingTransport(Voting, MpiTransport):
    """A transport over MPI whose ranks vote on every call."""


# -- one transport per communicator -----------------------------------------------------------------------------------


class _Setup:
    """What a communicator keeps of this library, as an attribute: its transport, or what has been done to make it.

    All ranks tell each other of themselves, rank 0 also a token, whose last byte says whether ranks vote on calls, and
    meanwhile duplicate the communicator. MPI pairs what all ranks do in its order, so nothing may be begun twice: a
    setup whose wait was interrupted, or timed out, stays under way and is taken up by the next attempt. One that failed
    has failed for good.

    Attributes:
        transport: ``None`` until all ranks have taken part.
    """

    transport: MpiTransport | None = None

    def __init__(self, comm: MPI.Intracomm) -> None:
        token = os.urandom(8) + bytes([config.voting(default=survives())])
        self._mine = _OF_RANK.pack(token, job.node_id(), config.max_message_bytes())
        self._everyones = bytearray(_OF_RANK.size * comm.Get_size())
        self._private: MPI.Intracomm | None = None
        self._requests: list[MPI.Request] = []  # of the steps that have begun
        self._error: MPI.Exception | None = None  # of a step: its request is gone, and would pass for complete

    def test(self, comm: MPI.Intracomm) -> bool:
        """Go on with it; return whether there is a transport. Any thread may call it."""
        with _lock:
            if self.transport is not None:
                return True
            if self._error is not None:
                raise self._error
            try:
                done = [request.Test() for request in self._begun(comm)]  # of all: each test lets MPI go on
            except MPI.Exception as error:
                self._error = error
                raise
            if all(done):
                assert self._private is not None
                tokens, node_ids, limits = zip(*_OF_RANK.iter_unpack(self._everyones), strict=True)
                limit = max(min(limits), 1)  # the smallest of any rank, whatever a peer says
                kind = VotingTransport if tokens[0][-1] and len(limits) > 1 else MpiTransport
                self.transport = kind(self._private, tokens[0][:-1], limit, job.number_nodes(node_ids))
                _kept_alive.remove(self)
            return self.transport is not None

    def _begun(self, comm: MPI.Intracomm) -> list[MPI.Request]:
        """Begin what has not been begun; return the requests of all of it.

        The exchange comes first. Open MPI gives a duplication its tags step by step, out of those of ``comm``, whenever
        a thread lets it go on (open-mpi/ompi#2025). An exchange that begins later gets its tag between them, at another
        place on each rank, and the ranks read each other's messages for what they are not.
        """
        if not self._requests:
            self._requests.append(comm.Iallgather([self._mine, MPI.BYTE], [self._everyones, MPI.BYTE]))
        if self._private is None:
            self._private, request = comm.Idup()
            self._requests.append(request)
        return self._requests


def _all_true(value: bool, comm: MPI.Comm) -> bool:
    """Return whether ``value`` is true on every rank; false where that is not known within `_CLOSE_TIMEOUT` seconds."""
    mine, everyones = bytearray([value]), bytearray(1)
    try:
        request = comm.Iallreduce([mine, MPI.BYTE], [everyones, MPI.BYTE], MPI.BAND)
        return _completes(request, _CLOSE_TIMEOUT, comm) and everyones[0] == 1
    except (MPI.Exception, RankFailedError):
        return False


def _completes(request: MPI.Request, timeout: float, comm: MPI.Comm) -> bool:
    """Wait for a request of ``comm`` for so many seconds; return whether it is complete. See `wait_until`."""
    _kept_alive.append(request)
    if complete := wait_until(request.Test, timeout, comm):
        _kept_alive.remove(request)
    return complete


_lock = threading.RLock()  # of setups, and of `_key` while it is made; nobody waits while holding it
_kept_alive: list[_Setup | MPI.Request] = []  # MPI may still write to their memory
_key = MPI.KEYVAL_INVALID  # of the attribute that is a `_Setup`


def of(comm: MPI.Intracomm | None) -> MpiTransport:
    """Return the transport of a communicator; see `sparsecomm.transport.transport_of`."""
    if (found := existing(comm)) is not None:
        return found
    if comm is None:
        comm = MPI.COMM_WORLD
    try:
        if comm == MPI.COMM_WORLD and comm.Get_size() == 1:
            job.check_alone_with_mpi(abi.vendor(), abi.library(), abi.libraries())
        return _connect(comm)
    except MPI.Exception as error:
        failed = failed_ranks(comm, DETECTION_TIME if survives() else 0.0)  # whatever its class, which may be any
        if failed:
            raise RankFailedError(
                f"{format_ranks(failed)} died before the first call (rank {comm.Get_rank()}). {ADVICE}.", failed
            ) from error
        raise TransportError(f"rank {comm.Get_rank()}: MPI failed in the first call: {error}") from error


def existing(comm: MPI.Intracomm | None) -> MpiTransport | None:
    """Return the transport of a communicator, COMM_WORLD for ``None``; ``None`` if there is none yet.

    Raises:
        InvalidInputError: the communicator cannot be used: see `sparsecomm.transport.transport_of`.
    """
    setup: object = None
    if _key != MPI.KEYVAL_INVALID and _mpi.usable():
        try:  # noqa: SIM105  # suppress() is bytecode
            setup = (MPI.COMM_WORLD if comm is None else comm).Get_attr(_key)
        except MPI.Exception:
            pass  # it was freed
    if isinstance(setup, _Setup):
        return setup.transport
    usable(comm)
    return None


def usable(comm: MPI.Intracomm | None) -> MPI.Intracomm:
    """Return a communicator, COMM_WORLD for ``None``, if it can be used.

    Raises:
        InvalidInputError: it cannot: see `sparsecomm.transport.transport_of`.
    """
    global _key
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
    with _lock:
        if _key == MPI.KEYVAL_INVALID:
            _key = MPI.Comm.Create_keyval(copy_fn=None, delete_fn=_close_transport)
    try:
        if comm.Is_inter():
            raise InvalidInputError("comm is an intercommunicator: merge it first (`comm.Merge()`)")
        comm.Get_attr(_key)
    except MPI.Exception as error:
        raise InvalidInputError(
            f"comm cannot be used, it may have been freed through another handle: {error}"
        ) from error
    return comm


def _connect(comm: MPI.Intracomm) -> MpiTransport:
    """Make the transport of ``comm``, without trusting that the other ranks do.

    Several threads may wait for one. Those that wait for others go on beside them: which comes first may differ between
    ranks.
    """
    timeout = config.timeout()
    with _lock:
        setup: object = comm.Get_attr(_key)
        if not isinstance(setup, _Setup):
            setup = _Setup(comm)
            _kept_alive.append(setup)
            comm.Set_attr(_key, setup)
    started = setup
    if not wait_until(lambda: started.test(comm), timeout, comm):
        others = [rank for rank in range(comm.Get_size()) if rank != comm.Get_rank()]
        missing = ("" if len(others) == 1 else "at least one of ") + f"{format_ranks(others)} has"
        raise missing_ranks_error(comm.Get_rank(), timeout, "communicator", missing)
    assert setup.transport is not None
    return setup.transport


def _close_transport(comm: MPI.Comm, key: int, attribute: object) -> None:
    """Close the transport of ``comm``: MPI's callback when the user frees it."""
    if isinstance(attribute, _Setup) and attribute.transport is not None:
        attribute.transport.close()
