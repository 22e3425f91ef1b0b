"""The MPI transport between ranks: the conformance cases, and cases specific to MPI. Every rank runs this file."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from sparsecomm.errors import InvalidInputError, TimeoutError, TransportError
from sparsecomm.transport import mpi, transport_of
from tests.mpi.ranks import MPI, RANK, SECONDS, WORLD, P, barrier, several
from tests.transport import conformance
from tests.transport.conformance import CASES, call, ring

NEXT, PREVIOUS = (RANK + 1) % P, (RANK - 1) % P


class MpiRanks(conformance.Ranks):
    """The ranks of the world, for the conformance cases. Frees communicators after the case."""

    rank, size = RANK, P

    def __init__(self) -> None:
        self.made: list[MPI.Intracomm] = []

    def comm(self) -> MPI.Intracomm:
        self.made.append(WORLD.Dup())
        return self.made[-1]

    def half(self) -> MPI.Intracomm:
        self.made.append(WORLD.Split(RANK % 2, RANK))
        return self.made[-1]

    def barrier(self) -> None:
        barrier()


@pytest.mark.parametrize("case", CASES)
def test_what_every_transport_promises(case: str) -> None:
    ranks = MpiRanks()
    CASES[case](ranks)
    barrier()
    for comm in ranks.made:
        comm.Free()


@several
@pytest.mark.parametrize("raw", [b"", b"abc", b"control" + bytes([0, 200]), b"control" + bytes(5000), b"data"])
def test_what_is_no_message_ends_the_call_and_names_its_sender(comm, monkeypatch, timeout, raw):
    timeout(SECONDS)
    monkeypatch.setenv("SPARSECOMM_MAX_MESSAGE_BYTES", "64")
    transport = transport_of(comm)
    tag = 0
    if raw.startswith(b"control"):
        raw = mpi._CONTROL.pack(transport._token, 1, 200) + raw[7:]
    elif raw == b"data":
        tag, raw = 2, bytes(65)  # belongs to call 1
    if RANK == 1:
        _sent_raw.extend(transport._comm.Isend([raw, MPI.BYTE], to, tag) for to in range(P) if to != RANK)
    barrier()
    with pytest.raises(TransportError, match=r"from rank 1 a (control )?message") as caught, call(transport):
        transport.receive(NEXT if RANK == 1 else 1)
    transport.abort(caught.value)  # on ranks whose call did not begin
    barrier()


_sent_raw = []  # some messages are never received


class Interrupted(MPI.Intracomm):
    """A communicator that pauses after each operation begins, for a different time on each rank."""

    def Idup(self, *arguments):  # noqa: N802
        return self._pause(super().Idup(*arguments))

    def Iallgather(self, *arguments):  # noqa: N802
        return self._pause(super().Iallgather(*arguments))

    def _pause(self, begun):
        time.sleep(0.02 * (RANK % 3))
        return begun


@pytest.mark.skipif(MPI.Query_thread() < MPI.THREAD_MULTIPLE, reason="no thread may call MPI")
def test_the_first_call_while_another_thread_is_busy_with_mpi(timeout):
    """Any thread that calls MPI may progress pending operations, at a different time on each rank."""
    timeout(SECONDS)
    done = threading.Event()

    def busy():
        while not done.wait(1e-4):
            MPI.COMM_SELF.Iprobe()

    with ThreadPoolExecutor(1) as threads:
        threads.submit(busy)
        try:
            for _ in range(3):
                comm = WORLD.Dup()
                transport = transport_of(Interrupted(comm))
                ring(transport)
                assert list(transport.node_of_rank) == list(transport_of(WORLD).node_of_rank)
                comm.Free()
        finally:
            done.set()


class Failing:
    """A request that fails and is then freed: MPI considers it complete."""

    failed = False

    def Test(self):  # noqa: N802
        if not self.failed:
            self.failed = True
            raise MPI.Exception(MPI.ERR_INTERN)
        return True


class Fails(MPI.Intracomm):
    """A communicator whose exchange fails, with nothing left under way."""

    def Idup(self, *arguments):  # noqa: N802
        private, request = super().Idup(*arguments)
        request.Wait()
        return private, request

    def Iallgather(self, *arguments):  # noqa: N802
        super().Iallgather(*arguments).Wait()
        return Failing()


def test_a_first_call_that_failed_stays_so(comm):
    for _ in range(3):
        with pytest.raises(TransportError, match="MPI failed in the first call"):
            transport_of(Fails(comm))


@several
def test_an_intercommunicator():
    half = WORLD.Split(RANK % 2, RANK)
    inter = half.Create_intercomm(0, WORLD, 1 - RANK % 2)
    with pytest.raises(InvalidInputError, match="Merge"):
        transport_of(inter)
    inter.Free()
    half.Free()


@several
def test_a_broadcast_that_does_not_come_times_out(comm, timeout):
    transport, data = transport_of(comm), np.full(2**20, RANK, np.uint8)
    if RANK == 0:
        timeout(0.2)
        with pytest.raises(TimeoutError, match=r"rank 0 waited 0\.2 s for a broadcast from rank 1"):
            transport.broadcast(data, 1)
    barrier()
    if RANK > 0:  # now rank 0's call can end, too
        transport.broadcast(data, 1)
    barrier()
