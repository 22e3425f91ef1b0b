"""Print what is installed and what it runs on, as one block to paste into a bug report.

The command changes nothing, works if MPI does not, and exits with status 0. Under mpirun rank 0 prints.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import re
import sys
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType

import numpy as np

import sparsecomm
from sparsecomm import SparseCommError
from sparsecomm.calls.arguments import rank_of
from sparsecomm.tools.machine import kernels, processor, version_of
from sparsecomm.transport import abi
from sparsecomm.transport.job import launches

HELP = "versions, CPU, MPI and CUDA, to paste into a bug report"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare no arguments."""


def run(arguments: argparse.Namespace) -> int:
    """Print the facts, one a line; return 0."""
    # Print each line at once, and MPI last: MPI may kill the process.
    for label, text in _facts():
        if rank_of(None) in (None, 0):
            print(f"{label:<15} {text}", flush=True)
    return 0


def _facts() -> Iterator[tuple[str, str]]:
    yield "sparsecomm", f"{sparsecomm.__version__}, in {Path(sparsecomm.__file__).parent}"
    yield "Python", f"{platform.python_version()} ({platform.python_implementation()}), {sys.executable}"
    yield "NumPy", np.__version__
    yield "mpi4py", version_of("mpi4py") or "not installed"
    yield "platform", platform.platform()
    yield "CPU", processor()
    yield "kernels", kernels()
    settings = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("SPARSECOMM_")]
    yield "settings", " ".join(settings) or "none (no SPARSECOMM_* in the environment)"
    frameworks = [f"{name} {version}" for name in ("torch", "jax") if (version := version_of(name))]
    yield "frameworks", ", ".join(frameworks) or "none (of torch, jax)"
    # The name says for which CUDA it is, as in cupy-cuda12x; two installations at once break CuPy.
    cupy = {f"{d.name} {d.version}" for d in distributions() if d.name and re.fullmatch("cupy(-cuda.*)?", d.name)}
    yield "CuPy", ", ".join(sorted(cupy)) or "not installed"
    yield "CUDA driver", _cuda_driver()
    yield "launcher", "; ".join(f"{launch.launcher}: {launch.variables}" for launch in launches()) or "none"
    built = [f"{abi.ABIS[name].mpis} (ABI {name})" for name in abi.built()]
    yield "built for", ", ".join(built) or f"no MPI, only process groups of torch.distributed. {abi.ADVICE}"
    yield from _mpi_facts()


def _mpi_facts() -> Iterator[tuple[str, str]]:
    loaded: ModuleType | None = None
    try:
        from mpi4py import MPI
    except Exception as error:  # report any error
        yield "MPI", f"cannot be loaded: {type(error).__name__}: {_line(error)}"
    else:
        loaded = MPI
        yield "MPI", f"{abi.vendor()}, {MPI.COMM_WORLD.Get_size()} rank(s)"
        yield "MPI library", _line(MPI.Get_library_version())
        yield "MPI file", f"{abi.library() or 'unknown'}"
        if others := [str(file) for file in abi.libraries() if file != abi.library()]:
            yield "another MPI", f"{', '.join(others)}: in this process, and not used by mpi4py"
        levels = {getattr(MPI, f"THREAD_{level}"): level for level in ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")}
        level = levels[MPI.Query_thread()]
        where = "in a background thread" if level == "MULTIPLE" else "in wait(), which needs no THREAD_MULTIPLE"
        yield "MPI threads", f"{level}; isparse_allreduce runs {where}"
        yield "MPI transport", _transport()
    answer, probe = abi.cuda_aware(loaded)
    yield "CUDA-aware MPI", f"{'yes' if answer else 'no'} ({probe})"
    yield "GPU messages", "from device memory" if answer else "through pinned host memory, since MPI is not CUDA-aware"


def _transport() -> str:
    try:
        from sparsecomm.transport import mpi  # loads _mpi, or refuses the MPI
    except (SparseCommError, ImportError) as error:
        return f"cannot be loaded: {_line(error)}"
    module = abi.load()
    file = Path(str(module.__file__)).name
    return f"loads {mpi.MpiTransport.__name__} ({file}, compiled with the headers of {module.built_with})"


def _cuda_driver() -> str:
    """Describe the driver, without a CUDA toolkit."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "none (no libcuda.so.1)"
    number, count = ctypes.c_int(), ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(number))
    text = f"for CUDA {number.value // 1000}.{number.value % 1000 // 10}"
    if code := driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return f"{text}, no GPU can be used (CUDA error {code})"
    names = []
    for device in range(count.value):
        name = ctypes.create_string_buffer(100)
        driver.cuDeviceGetName(name, len(name), device)
        names.append(name.value.decode(errors="replace"))
    return f"{text}, {count.value} GPU(s): {', '.join(names)}"


def _line(text: object) -> str:
    """Return the text on one line, without the zero byte at the end of Open MPI's version."""
    return " ".join(str(text).rstrip("\0").split())
