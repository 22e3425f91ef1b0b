"""Run the slow network, and find leftovers."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from bench.slow_network import network
from tests.processes import LIMIT

ROOT = Path(__file__).parents[2]
PROGRAM = [sys.executable, "-m", "bench.slow_network"]


@functools.cache
def why_not() -> str:
    if os.geteuid() != 0:  # other users may hold namespaces, which some machines limit
        return "needs root, for the relay's device and to empty what TCP remembers"
    try:
        network.entry(2)
    except network.CannotError as error:
        return str(error)
    mpi = shutil.which("mpirun") and subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout
    return "" if mpi and "(Open MPI) 5" in mpi else "needs Open MPI 5"


needs_network = pytest.mark.skipif(bool(why_not()), reason=f"no slow network here: {why_not()}")
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")


def call(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *args],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        stdin=subprocess.DEVNULL,
    )


def traces(mark: str) -> list[str]:
    """Return the processes with this text in their command."""
    lines = []
    for process in filter(str.isdigit, os.listdir("/proc")):  # `Path.glob` ends early at one that it may not see
        with contextlib.suppress(OSError):
            if mark in (
                line := Path("/proc", process, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            ):
                lines.append(line)
    return lines


def folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("slow_network.*"))


def links() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()}
