"""`MpiTransport`: the transport over MPI, on a duplicate of the user's communicator.

The MPI tag of a data message contains the number of its call. Tag 0 is for control messages.
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
from sparsecomm.signals import deferred
from sparsecomm.tensors.arrays import Bytes
from sparsecomm.transport import abi, job
from sparsecomm.transport.base import PeerTraffic, Request
from sparsecomm.transport.control import (
    FIRST_PING,
    MAX_CONTROL_BYTES,
    ControlMessage,
    FailureDetector,
    format_ranks,
    missing_ranks_error,
    unreadable_error,
)
from sparsecomm.transport.ulfm import ADVICE, DETECTION_TIME, Voting, failed_ranks, survives, wait_until

abi.load()
from sparsecomm.transport import _mpi  # noqa: E402  # compiled for the ABI of the loaded MPI

_NUM_TAGS = 2**14  # data messages use tags 1 to _NUM_TAGS; MPI guarantees at least 32767
_CONTROL = struct.Struct("<8sqB")  # header of a control message: token of the transport, call number, kind
_MAX_CONTROL_MESSAGE = _CONTROL.size + MAX_CONTROL_BYTES
_MAX_CONTROL_READS = 1000  # control messages read before the next check of the clock
_DEATH_CLASSES = frozenset((MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED))
_SETUP_RECORD = struct.Struct(f"<9s{job.NODE_ID_BYTES}sq")  # each rank's token and voting flag, node id, piece limit
_BROADCAST_BYTES = 2**30  # per broadcast: before MPI 4, a count has 32 bits
_CLOSE_TIMEOUT = 5.0  # seconds to wait for the other ranks before freeing a communicator
_PROCESS = os.getpid()  # the process in which mpi4py initialized MPI
_SPIN = 50e-6  # seconds of busy waiting if every rank has its own core

Request.register(_mpi.Transfer)


class MpiTransport(_mpi.Endpoint, FailureDetector):
    """A transport over MPI. `sparsecomm.transport.transport_of` makes one per communicator."""

    def __init__(self, private: MPI.Intracomm, token: bytes, limit: int, node_of_rank: Sequence[int]) -> None:
        """Take over ``private``, a communicator that nobody else uses. `close` frees it.

        Args:
            token: 8 bytes, equal on all ranks and different for each transport. MPI may reuse the context id of a freed
                communicator; the token tells late control messages of that communicator apart.
            limit: maximum bytes in one piece of a message, the same on all ranks.
        """
        private.Set_errhandler(MPI.ERRORS_RETURN)
        _mpi.Endpoint.__init__(self, MPI._addressof(private), limit, 0.0 if config.oversubscribed() else _SPIN)
        FailureDetector.__init__(self, node_of_rank)
        self._comm = private
        self.library = abi.vendor()
        self.device_memory = abi.cuda_aware(MPI)[0]
        self.threaded = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._token = token
        self._clean = True  # false after an aborted call
        self._broken = False  # a rank has died or revoked the communicator: messages in flight end with an error
        self._abandoned: list[int] = []  # calls whose data may still arrive

    @property
    def members(self) -> Sequence[int]:
        numbers = MPI.Group.Translate_ranks(self._comm.group, None, MPI.COMM_WORLD.group)
        return numbers if all(0 <= number < MPI.COMM_WORLD.size for number in numbers) else range(self.size)

    # -- calls --------------------------------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self.closed:
            raise InvalidInputError(
                "this transport is closed: its communicator was freed, MPI was finalized, or this process is a fork"
            )

    def _prepare_call(self) -> None:
        self.tag = 1 + self.number % _NUM_TAGS
        self._receive_control(0.0)
        # Discard the data of abandoned calls. Forget calls whose tags will soon be used again.
        self._abandoned = [n for n in self._abandoned if self.number - n < _NUM_TAGS // 2]
        for number in self._abandoned:
            self.discard(1 + number % _NUM_TAGS)
        self.reap()
        super()._prepare_call()

    def _abandon(self, number: int) -> None:
        self._clean = False
        self._abandoned.append(number)

    def _continue_after(self, number: int) -> None:
        for skipped in range(max(self.number, number - _NUM_TAGS // 2) + 1, number + 1):
            self._abandon(skipped)  # other ranks have sent data of this call
        super()._continue_after(number)

    # -- waiting ------------------------------------------------------------------------------------------------------

    def poll(self, peer: int, waited: float, next_ping: float) -> float:
        """Call `_check_wait`. `_mpi.Endpoint` calls it during a wait; ``next_ping`` is 0 in the first call."""
        self._receive_control(0.0)
        return self._check_wait(peer, waited, next_ping or FIRST_PING)

    def _send_control(self, to: int, kind: int, text: bytes) -> None:
        self.send_control(_CONTROL.pack(self._token, self.number, kind) + text, to)

    def _receive_control(self, seconds: float) -> None:
        if seconds:
            time.sleep(min(seconds, 1e-3))
        for _ in range(_MAX_CONTROL_READS):
            if (received := self.recv_control(_MAX_CONTROL_MESSAGE)) is None:
                break
            rank, nbytes, message = received
            if nbytes != len(message) or nbytes < _CONTROL.size:
                self._add_unreadable(rank, f"a control message of {nbytes} bytes")
                continue
            token, number, kind = _CONTROL.unpack_from(message)
            if token == self._token:
                self._add_control(ControlMessage(rank, number, kind, message[_CONTROL.size :]))
        if self._control:
            self._drop_old_control()

    def peers(self) -> list[PeerTraffic]:
        return [PeerTraffic(rank, *self.traffic(rank)) for rank in range(self.size) if rank != self.rank]

    # -- errors -------------------------------------------------------------------------------------------------------

    def failure(self, code: int, peer: int) -> TransportError:
        """Return the error for an MPI error code; ``peer`` is -1 if it concerns no particular rank."""
        text = f"{MPI.Get_error_string(code)} (rank {self.rank}, call {self.number}"
        text += f", peer {peer})" if peer >= 0 else ")"
        kind = MPI.Get_error_class(code)
        failed = failed_ranks(self._comm, DETECTION_TIME if kind in _DEATH_CLASSES else 0.0)
        if not failed and kind == MPI.ERR_PROC_FAILED and peer >= 0:
            failed = [peer]
        if failed:
            return RankFailedError(f"{format_ranks(failed)} died. {text}. {ADVICE}.", failed)
        if kind == MPI.ERR_REVOKED:
            return TransportError(f"a rank has revoked this communicator. {text}. {ADVICE}.")
        if kind in _DEATH_CLASSES:
            return RankFailedError(f"a rank died. {text}. {ADVICE}.")
        return TransportError(f"MPI failed: {text}")

    def oversized(self, source: int, nbytes: int) -> TransportError:
        """Return the error for a piece of ``nbytes`` from ``source``; negative: its size is unknown."""
        size = f"{nbytes} bytes" if nbytes >= 0 else "too many bytes"
        return unreadable_error(self.rank, source, f"a message of {size} in one piece (of at most {self.limit})")

    @deferred
    def broadcast(self, data: Bytes, root: int) -> None:
        timeout = config.timeout()
        try:
            for begin in range(0, len(data), _BROADCAST_BYTES):
                request = self._comm.Ibcast([data[begin : begin + _BROADCAST_BYTES], MPI.BYTE], root)
                if not _completes(request, timeout, self._comm):
                    raise TimeoutError(
                        f"rank {self.rank} waited {timeout:g} s for a broadcast from rank {root}. If ranks are only "
                        "slow, increase SPARSECOMM_TIMEOUT (seconds)."
                    )
        except MPI.Exception as error:
            raise self.failure(error.Get_error_code(), root) from error

    def _close(self) -> None:
        """Free the private communicator, unless data of an aborted call may still be in flight on it.

        MPI may reuse its context id for the next communicator, which would then receive this data. Therefore all ranks
        first exchange whether they aborted a call. A rank without an answer in time does not free the communicator.
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
    """The attribute that this library sets on a communicator: its transport, or the state of making it.

    The ranks all-gather a record and duplicate the communicator. MPI pairs collective operations in the order in which
    each rank starts them, so a rank must not start them twice. If the wait was interrupted or timed out, the next call
    continues the same setup. A failed setup cannot be repeated.
    """

    transport: MpiTransport | None = None  # until all ranks have taken part

    def __init__(self, comm: MPI.Intracomm) -> None:
        token = os.urandom(8) + bytes([config.voting(default=survives())])  # all ranks use rank 0's
        self._own_record = _SETUP_RECORD.pack(token, job.node_id(), config.max_message_bytes())
        self._records = bytearray(_SETUP_RECORD.size * comm.Get_size())
        self._private: MPI.Intracomm | None = None
        self._requests: list[MPI.Request] = []  # of the operations started so far
        self._error: MPI.Exception | None = None  # raised again: a failed request tests as complete afterwards

    def test(self, comm: MPI.Intracomm) -> bool:
        """Let MPI progress; return whether the transport exists. Any thread may call it."""
        with _lock:
            if self.transport is not None:
                return True
            if self._error is not None:
                raise self._error
            try:
                # Start the all-gather first. A duplication takes tags of `comm` whenever a thread lets MPI progress
                # (open-mpi/ompi#2025), so an all-gather after it could have different tags on different ranks.
                if not self._requests:
                    self._requests.append(comm.Iallgather([self._own_record, MPI.BYTE], [self._records, MPI.BYTE]))
                if self._private is None:
                    self._private, request = comm.Idup()
                    self._requests.append(request)
                done = [request.Test() for request in self._requests]  # test all: each test lets MPI progress
            except MPI.Exception as error:
                self._error = error
                raise
            if all(done):
                assert self._private is not None
                tokens, node_ids, limits = zip(*_SETUP_RECORD.iter_unpack(self._records), strict=True)
                limit = max(min(limits), 1)  # the smallest limit of all ranks; at least 1, even if a peer sends less
                cls = VotingTransport if tokens[0][-1] and len(limits) > 1 else MpiTransport
                self.transport = cls(self._private, tokens[0][:-1], limit, job.number_nodes(node_ids))
                _kept_alive.remove(self)
            return self.transport is not None


def _all_true(value: bool, comm: MPI.Comm) -> bool:
    """Return whether ``value`` is true on every rank; false if this is not known within `_CLOSE_TIMEOUT`."""
    own, result = bytearray([value]), bytearray(1)
    try:
        request = comm.Iallreduce([own, MPI.BYTE], [result, MPI.BYTE], MPI.BAND)
        return _completes(request, _CLOSE_TIMEOUT, comm) and result[0] == 1
    except (MPI.Exception, RankFailedError):
        return False


def _completes(request: MPI.Request, timeout: float, comm: MPI.Comm) -> bool:
    """Return whether a request of ``comm`` is complete within ``timeout`` seconds. See `wait_until`."""
    _kept_alive.append(request)
    if complete := wait_until(request.Test, timeout, comm):
        _kept_alive.remove(request)
    return complete


_lock = threading.RLock()  # protects setups, and the creation of `_key`; never held during a wait
_kept_alive: list[_Setup | MPI.Request] = []  # MPI may still write to their memory
_key = MPI.KEYVAL_INVALID  # of the communicator attribute that is a `_Setup`


def of(comm: MPI.Intracomm | None) -> MpiTransport:
    """Return the transport of a communicator; see `sparsecomm.transport.transport_of`."""
    if (transport := existing(comm)) is not None:
        return transport
    if comm is None:
        comm = MPI.COMM_WORLD
    try:
        if comm == MPI.COMM_WORLD and comm.Get_size() == 1:
            job.check_alone_with_mpi(abi.vendor(), abi.library(), abi.libraries())
        return _connect(comm)
    except MPI.Exception as error:
        failed = failed_ranks(comm, DETECTION_TIME if survives() else 0.0)  # the error may be of any class
        if failed:
            raise RankFailedError(
                f"{format_ranks(failed)} died before the first call (rank {comm.Get_rank()}). {ADVICE}.", failed
            ) from error
        raise TransportError(f"rank {comm.Get_rank()}: MPI failed in the first call: {error}") from error


def existing(comm: MPI.Intracomm | None) -> MpiTransport | None:
    """Return the transport of a communicator (``None``: COMM_WORLD), or ``None`` if it has none yet. See `usable`."""
    setup: object = None
    if _key != MPI.KEYVAL_INVALID and _mpi.usable():
        try:
            setup = (MPI.COMM_WORLD if comm is None else comm).Get_attr(_key)
        except MPI.Exception:
            setup = None  # it was freed
    if isinstance(setup, _Setup):
        return setup.transport
    usable(comm)
    return None


def usable(comm: MPI.Intracomm | None) -> MPI.Intracomm:
    """Return ``comm`` (``None``: COMM_WORLD), or raise `InvalidInputError` if it cannot be used."""
    global _key
    if os.getpid() != _PROCESS:
        raise InvalidInputError(
            f"process {os.getpid()} is a fork of process {_PROCESS}, in which MPI was started; MPI does not support "
            f"this. Make the call in process {_PROCESS}, or start processes with the 'spawn' method"
        )
    if not MPI.Is_initialized():
        raise InvalidInputError(
            "MPI is not initialized. Leave `mpi4py.rc.initialize` true, or call `MPI.Init_thread()` before sparsecomm."
        )
    if MPI.Is_finalized():
        raise InvalidInputError("MPI is already finalized: call sparsecomm before `MPI.Finalize()`")
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
            f"comm cannot be used; it may have been freed through another handle: {error}"
        ) from error
    return comm


def _connect(comm: MPI.Intracomm) -> MpiTransport:
    """Make the transport of ``comm``, or raise if not all ranks do.

    No lock is held during the wait, so threads may connect several communicators in a different order on each rank.
    """
    timeout = config.timeout()
    with _lock:
        attribute: object = comm.Get_attr(_key)
        if isinstance(attribute, _Setup):
            setup = attribute
        else:
            setup = _Setup(comm)
            _kept_alive.append(setup)
            comm.Set_attr(_key, setup)
    if not wait_until(lambda: setup.test(comm), timeout, comm):
        others = [rank for rank in range(comm.Get_size()) if rank != comm.Get_rank()]
        missing = ("" if len(others) == 1 else "at least one of ") + f"{format_ranks(others)} has"
        raise missing_ranks_error(comm.Get_rank(), timeout, "communicator", missing)
    assert setup.transport is not None
    return setup.transport


def _close_transport(comm: MPI.Comm, key: int, attribute: object) -> None:
    """Close the transport of ``comm``: MPI's callback when the user frees it."""
    if isinstance(attribute, _Setup) and attribute.transport is not None:
        attribute.transport.close()
