"""`load` imports the compiled module for the ABI of the MPI that mpi4py has loaded; `cuda_aware` asks MPI about CUDA.

MPI libraries differ in the size and meaning of their handles, so the module that calls MPI is compiled once for each
ABI: Open MPI's, MPICH's, and the standard ABI of MPI 5.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType

from sparsecomm.errors import TransportError

_NAME = "sparsecomm.transport._mpi"  # of the module for every ABI
_YES_NO = {**dict.fromkeys(("1", "true", "yes", "on"), True), **dict.fromkeys(("0", "false", "no", "off"), False)}


@dataclass(frozen=True)
class Abi:
    """An ABI of MPI, identified by the sizes of ``MPI_Comm`` and ``MPI_Status`` in bytes."""

    mpis: str  # names of the MPI libraries with this ABI
    comm: int
    status: int


ABIS = {
    "openmpi": Abi("Open MPI", 8, 24),
    "mpich": Abi("MPICH and its derivatives", 4, 20),
    "mpiabi": Abi("the standard ABI of MPI 5", 8, 32),
}
ADVICE = (
    "Build sparsecomm for your MPI from a checkout: `MPICC=/path/to/mpicc pip install --force-reinstall --no-deps .`. "
    "Or let mpi4py load another MPI: set MPI4PY_LIBMPI to the path of its libmpi.so."
)


def built() -> dict[str, Path]:
    """Return the compiled modules, by ABI."""
    folder = Path(__file__).parent
    files = [(name, folder / f"_mpi_{name}{suffix}") for name in ABIS for suffix in reversed(EXTENSION_SUFFIXES)]
    return {name: file for name, file in files if file.exists()}


def load() -> ModuleType:
    """Import and return ``sparsecomm.transport._mpi``, compiled for the ABI of the MPI that mpi4py has loaded.

    Raises:
        TransportError: there is no such module, it cannot be loaded, or it calls another MPI library than mpi4py.
    """
    from mpi4py import MPI  # loads libmpi, which `_mpi` needs

    if _NAME in sys.modules:
        return sys.modules[_NAME]
    loaded = vendor()
    sizes = MPI._sizeof(MPI.Comm), MPI._sizeof(MPI.Status)
    name = next((name for name, abi in ABIS.items() if (abi.comm, abi.status) == sizes), None)
    if name is None:
        raise TransportError(
            f"mpi4py has loaded {loaded}, whose MPI_Comm has {sizes[0]} bytes and whose MPI_Status has {sizes[1]}: "
            f"sparsecomm knows no such ABI, only {_describe(ABIS)}. Let mpi4py load one of these."
        )
    modules = built()
    if name not in modules:
        state = f"has modules for {_describe(modules)}" if modules else "was built without any MPI"
        raise TransportError(
            f"mpi4py has loaded {loaded}, of the ABI {name}: sparsecomm {state}, and has none for this ABI. {ADVICE}"
        )
    file = str(modules[name])
    loader = ExtensionFileLoader(_NAME, file)
    try:
        module = module_from_spec(ModuleSpec(_NAME, loader, origin=file))
        loader.exec_module(module)
    except ImportError as error:
        raise TransportError(
            f"sparsecomm's module for the ABI {name} cannot be loaded beside {loaded} ({error}). {ADVICE}"
        ) from error
    if _called_by(file) != _called_by(MPI.__file__):
        raise TransportError(
            f"two MPIs of one ABI are loaded in this process ({', '.join(map(str, libraries()))}): mpi4py calls "
            f"{library()}, and sparsecomm's module would call the other one. Import mpi4py.MPI before the package that "
            "loads the other MPI, or use one MPI for all: set MPI4PY_LIBMPI to the path of its libmpi.so."
        )
    sys.modules[_NAME] = module
    return module


@cache
def vendor() -> str:
    """Return the name and version of the MPI that mpi4py has loaded."""
    from mpi4py import MPI

    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


@cache
def library() -> Path | None:
    """Return the file of the libmpi that mpi4py calls; None if unknown."""
    from mpi4py import MPI

    address = _called_by(MPI.__file__)
    return next((file for begin, end, file in _mapped() if begin <= address < end), None)


def libraries() -> list[Path]:
    """Return the files of all MPI libraries that this process has loaded; empty if unknown."""
    return sorted({file for _, _, file in _mapped() if re.match(r"libmpi(ch|_abi|_cray|_gnu\w*)?\.so", file.name)})


def cuda_aware(MPI: ModuleType | None) -> tuple[bool, str]:
    """Return whether MPI accepts pointers to GPU memory (false if unknown), and the source of the answer.

    ``MPI``: the module ``mpi4py.MPI``, or None if it cannot be loaded.
    """
    if setting := os.environ.get("SPARSECOMM_CUDA_AWARE", "").strip():
        source = "set by the user" if setting.lower() in _YES_NO else "expected 0 or 1; treated as 0"
        return _YES_NO.get(setting.lower(), False), f"SPARSECOMM_CUDA_AWARE={setting}, {source}"
    if MPI is None:
        return False, "MPI is not loaded"
    with suppress(OSError, AttributeError):
        query = ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support  # found in the libmpi of mpi4py
        return bool(query()), "MPIX_Query_cuda_support"
    kinds = MPI.COMM_WORLD.Get_info().get("mpi_memory_alloc_kinds")
    if kinds is not None:
        return "cuda" in re.split("[,:]", kinds), f"mpi_memory_alloc_kinds={kinds}"
    return False, "no probe answered: assumed not to be CUDA-aware"


def _called_by(module: str) -> int:
    """Return the address of `MPI_Comm_rank` for a module, which tells the loaded MPI libraries apart."""
    return ctypes.cast(ctypes.CDLL(module).MPI_Comm_rank, ctypes.c_void_p).value or 0


def _mapped() -> list[tuple[int, int, Path]]:
    """Return the files mapped into this process's memory, as (begin, end, file); empty without /proc."""
    with suppress(OSError):
        lines = Path("/proc/self/maps").read_text()
        matches = re.findall(r"^(\w+)-(\w+) .*?(/.*)$", lines, re.MULTILINE)
        return [(int(begin, 16), int(end, 16), Path(file)) for begin, end, file in matches]
    return []


def _describe(names: dict[str, Abi] | dict[str, Path]) -> str:
    return ", ".join(f"{name} ({ABIS[name].mpis})" for name in names)
