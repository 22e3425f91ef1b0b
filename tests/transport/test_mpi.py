"""The MPI transport on one rank, without mpirun: accepted communicators, and loading of MPI."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from sparsecomm.errors import InvalidInputError
from sparsecomm.transport import Transport, transport_of

MPI = pytest.importorskip("mpi4py.MPI", exc_type=ImportError)
from sparsecomm.transport import mpi  # noqa: E402


def fails(content: bytes, rank: int) -> Exception:
    return AssertionError((content, rank))


IMPORT = "from sparsecomm.transport import transport_of\n"
FINALIZED = """
from mpi4py import MPI
transport = transport_of()
transport_of(MPI.COMM_SELF)
MPI.Finalize()
try:
    transport.begin(b"", None)
except ValueError as error:
    assert "closed" in str(error)
transport_of()
"""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys\ntry: transport_of(3)\nexcept ValueError: print('mpi4py' in sys.modules)", "False"),
        ("import sys; sys.modules['mpi4py'] = None; transport_of()", "TransportError: mpi4py cannot be loaded"),
        ("import mpi4py; mpi4py.rc.initialize = False; transport_of()", "MPI is not initialized"),
        (FINALIZED, "MPI is already finalized"),
        ("t = transport_of()\nprint('size', t.size)", "size 1"),  # transports are open at exit
    ],
)
def test_in_a_process_of_its_own(code: str, said: str) -> None:
    out = subprocess.run([sys.executable, "-c", IMPORT + code], capture_output=True, text=True, check=False)
    assert said in (out.stdout + out.stderr).strip().splitlines()[-1]


def test_each_communicator_has_its_own_transport() -> None:
    transport = transport_of(None)
    assert isinstance(transport, Transport)
    assert transport is transport_of() is transport_of(MPI.COMM_WORLD) is transport_of(transport)
    assert (transport.rank, transport.size) == (0, 1)
    comm = MPI.COMM_WORLD.Dup()
    new = transport_of(comm)
    assert new is transport_of(MPI.Intracomm(comm)) is not transport  # another handle of the same communicator
    copy = comm.Dup()
    assert transport_of(copy) is not new  # a duplicate does not inherit the transport
    for communicator in (comm, copy):
        communicator.Free()
    with pytest.raises(InvalidInputError, match="freed"):
        transport_of(comm)
    for call in (lambda: new.begin(b"call", fails), new.realign):
        with pytest.raises(InvalidInputError, match="closed"):
            call()
    with pytest.raises(InvalidInputError, match="COMM_NULL"):
        transport_of(MPI.COMM_NULL)


@pytest.mark.parametrize("comm", [3, "world", object(), np.zeros(2), MPI.Info, MPI.INFO_NULL])
def test_not_a_communicator(comm: object) -> None:
    with pytest.raises(InvalidInputError, match=rf"of type {type(comm).__name__}"):
        transport_of(comm)  # type: ignore[arg-type]


class TestOneRank:
    def test_tags_come_round_without_old_bytes(self, monkeypatch):
        """A call must not receive messages of an abandoned call that had the same tag."""
        monkeypatch.setattr(mpi, "_NUM_TAGS", 64)
        comm = MPI.COMM_WORLD.Dup()
        transport = transport_of(comm)
        transport.begin(b"abandoned", fails)
        transport.isend(np.zeros(3, np.uint8), 0)
        transport.abort(RuntimeError("on purpose"))
        tag = transport.tag
        for _ in range(64):
            transport.begin(b"call", fails)
            transport.end()
        assert transport.tag == tag
        assert transport.exchange(np.ones(1, np.uint8), 0, 0).tolist() == [1]
        comm.Free()
