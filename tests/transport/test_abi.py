"""The choice of the compiled module for MPI, and the error if none fits."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from sparsecomm.transport import abi

HEAD = "from pathlib import Path; from sparsecomm import transport; from sparsecomm.transport import abi\n"


def python(code: str) -> str:
    ran = subprocess.run([sys.executable, "-c", HEAD + code], capture_output=True, text=True)
    return (ran.stdout + ran.stderr).strip()


def test_the_module_fits_what_mpi4py_has_loaded() -> None:
    module = abi.load()
    from mpi4py import MPI

    from sparsecomm.transport import _mpi

    assert module is _mpi
    (name,) = [name for name, file in abi.built().items() if file == Path(str(module.__file__))]
    assert (abi.ABIS[name].comm, abi.ABIS[name].status) == (MPI._sizeof(MPI.Comm), MPI._sizeof(MPI.Status))
    assert name == ("openmpi" if MPI.get_vendor()[0] == "Open MPI" else name)
    assert re.search(r" \d", _mpi.built_with)
    library = abi.library()
    assert library is not None
    assert library in abi.libraries()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (
            "abi.built = lambda: {'mpiabi': Path('x')}",
            r"of the ABI \w+: sparsecomm has modules for mpiabi \(the standard.*none for this.*MPICC=.*MPI4PY_LIBMPI",
        ),
        ("abi.built = lambda: {}", r"sparsecomm was built without any MPI, and has none for this ABI\. .*MPICC="),
        (
            "abi.ABIS = {'openmpi': abi.Abi('An old MPI', 8, 20)}",
            r"whose MPI_Comm has \d bytes and .* \d\d: sparsecomm knows no such ABI, only openmpi \(An",
        ),
        (
            "abi.built = lambda: dict.fromkeys(abi.ABIS, Path(abi.__file__))",
            r"sparsecomm's module for the ABI \w+ cannot be loaded beside .* \(",
        ),
        (
            "abi._called_by = lambda module: hash(str(module))",
            r"two MPIs of one ABI are loaded in this process \(.*libmpi.*\): mpi4py calls ",
        ),
    ],
    ids=["none for this ABI", "none at all", "unknown ABI", "broken module", "two MPIs"],
)
def test_an_mpi_that_no_module_fits(change: str, error: str) -> None:
    *_, said = python(f"{change}\ntransport.transport_of(None)").splitlines()
    assert re.match(f"sparsecomm.errors.TransportError: .*{error}", said), said


def test_mpi4py_without_an_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """The advice comes first, then mpi4py's list of searched places."""
    monkeypatch.setenv("MPI4PY_LIBMPI", "/no/such/libmpi.so")
    _, _, said = python("transport.transport_of(None)").rpartition("TransportError: ")
    assert said.startswith(
        "mpi4py cannot be loaded (cannot load MPI library). Install an MPI with `pip install mpi4py op"
    )
    assert "/no/such/libmpi.so" in said.splitlines()[1]
