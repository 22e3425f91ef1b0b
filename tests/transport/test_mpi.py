"""The MPI transport on one rank, without mpirun: which communicators are taken, and how MPI is loaded."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from sparsecomm.errors import InvalidInputError, TimeoutError
from sparsecomm.transport import Transport, transport_of

MPI = pytest.importorskip("mpi4py.MPI", exc_type=ImportError)


def fails(theirs: bytes, rank: int) -> Exception:
    return AssertionError((theirs, rank))


def python(code: str) -> str:
    """The last line that a fresh interpreter prints, or of its error."""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return (out.stdout + out.stderr).strip().splitlines()[-1]


class TestOf:
    def test_none_is_comm_world_and_cached(self):
        transport = transport_of(None)
        assert isinstance(transport, Transport)
        assert transport is transport_of() is transport_of(MPI.COMM_WORLD) is transport_of(transport)
        assert (transport.rank, transport.size) == (0, 1)

    def test_each_communicator_has_its_own(self):
        comm = MPI.COMM_WORLD.Dup()
        assert transport_of(comm) is transport_of(comm)
        assert transport_of(comm) is not transport_of(None)
        comm.Free()

    def test_the_cache_follows_the_communicator_not_the_handle(self):
        comm = MPI.COMM_WORLD.Dup()
        assert transport_of(MPI.Intracomm(comm)) is transport_of(comm)
        copy = comm.Dup()
        assert transport_of(copy) is not transport_of(comm)  # a duplicate does not inherit it
        copy.Free()
        comm.Free()

    @pytest.mark.parametrize("comm", [3, "world", object(), np.zeros(2), MPI.Info, MPI.INFO_NULL])
    def test_not_a_communicator(self, comm):
        with pytest.raises(InvalidInputError, match=rf"of type {type(comm).__name__}"):
            transport_of(comm)

    def test_not_a_communicator_does_not_start_mpi(self):
        assert (
            python(
                "import sys\n"
                "from sparsecomm.transport import transport_of\n"
                "try: transport_of(3)\n"
                "except ValueError: print('mpi4py' in sys.modules)"
            )
            == "False"
        )

    def test_import_does_not_need_mpi(self):
        said = python(
            "import sys; sys.modules['mpi4py'] = None\n"
            "from sparsecomm.transport import transport_of\ntransport_of(None)"
        )
        assert "TransportError: mpi4py cannot be loaded" in said

    def test_null(self):
        with pytest.raises(InvalidInputError, match="COMM_NULL"):
            transport_of(MPI.COMM_NULL)

    def test_freed(self):
        comm = MPI.COMM_WORLD.Dup()
        transport = transport_of(comm)
        comm.Free()
        with pytest.raises(InvalidInputError, match="freed"):
            transport_of(comm)
        with pytest.raises(InvalidInputError, match="closed"):
            transport.begin(b"call", fails)

    def test_not_initialised(self):
        said = python(
            "import mpi4py; mpi4py.rc.initialize = False\n"
            "from sparsecomm.transport import transport_of\ntransport_of(None)"
        )
        assert "MPI is not initialized" in said
        assert "MPI.Init_thread()" in said

    def test_finalized(self):
        said = python(
            "from mpi4py import MPI\n"
            "from sparsecomm.transport import transport_of\n"
            "t = transport_of(None); transport_of(MPI.COMM_SELF)\n"
            "MPI.Finalize()\n"
            "try: t.begin(b'', None)\n"
            "except ValueError as error: print(error)\n"
            "transport_of(None)"
        )
        assert "MPI is already finalized" in said

    def test_normal_exit_with_open_transports(self):
        assert python("from sparsecomm.transport import transport_of\nt = transport_of(None)\nprint(t.size)") == "1"


class TestOneRank:
    @pytest.mark.parametrize("expected", [0, 50, 10**6, 10**7])
    @pytest.mark.parametrize("size", [0, 1, 100, 2**16 - 1, 2**16, 2**16 + 1, 10**6])
    def test_a_message_to_oneself(self, size, expected):
        """It may be longer or shorter than expected."""
        transport = transport_of(None)
        data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
        number = transport.begin(b"call", fails)
        got = transport.exchange(data, 0, 0, expected=expected)
        transport.end()
        assert np.array_equal(got, data)
        assert got.dtype == np.uint8
        assert not np.shares_memory(got, data)
        assert transport.begin(b"call", fails) == number + 1
        transport.end()

    def test_nothing_comes(self, monkeypatch):
        monkeypatch.setenv("SPARSECOMM_TIMEOUT", "0.02")
        transport = transport_of(None)
        number = transport.begin(b"call", fails)
        with pytest.raises(TimeoutError, match=rf"rank 0 waited 0.02 s for rank 0 in call {number}") as caught:
            transport.receive(0)
        transport.abort(caught.value)
        assert transport.reap() == 0  # nobody takes what comes later
        transport.begin(b"next", fails)
        assert transport.exchange(np.ones(1, np.uint8), 0, 0).tolist() == [1]
        transport.end()

    def test_bytes_must_be_contiguous(self):
        transport = transport_of(None)
        transport.begin(b"call", fails)
        with pytest.raises((BufferError, ValueError)):
            transport.isend(np.zeros(10, np.uint8)[::2], 0)
        transport.end()

    def test_tags_come_round_without_old_bytes(self):
        """A message of an abandoned call must not be taken for one of the call that has its tag next."""
        comm = MPI.COMM_WORLD.Dup()
        transport = transport_of(comm)
        transport.begin(b"abandoned", fails)
        transport.isend(np.zeros(3, np.uint8), 0)
        transport.abort(RuntimeError("on purpose"))
        tag = transport.tag
        for _ in range(2**14):
            transport.begin(b"call", fails)
            transport.end()
        assert transport.tag == tag
        assert transport.exchange(np.ones(1, np.uint8), 0, 0).tolist() == [1]
        comm.Free()
