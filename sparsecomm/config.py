"""Settings from environment variables. Each function reads its variable when it is called.

A function raises `InvalidInputError` if its variable is invalid. `READ_BY_PLANS` are the variables that the plans of
calls depend on.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from sparsecomm.errors import InvalidInputError

# Variables of launchers: the number of ranks on this node, and which of them this rank is.
_LOCAL_SIZE = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE")
_LOCAL_RANK = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "LOCAL_RANK", "SLURM_LOCALID")
_MAX_THREADS = 8
_MAX_TIMEOUT = 1e6  # seconds; all clocks and system calls can represent it
_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds of processor time per period
_SIMD = ("portable", "avx2", "avx512")
_PROFILERS = ("torch", "nvtx")
TIMEOUT = b"SPARSECOMM_TIMEOUT"
READ_BY_PLANS = TIMEOUT, b"SPARSECOMM_THREADS", b"SPARSECOMM_SIMD", b"SPARSECOMM_PROFILE", b"XDG_CACHE_HOME"
# The dict inside `os.environ` saves a microsecond per call. getenv() is unsafe while another thread sets a variable.
variable = os.environ._data.get  # type: ignore[attr-defined]


def _number(name: str, default: float, min_value: float, max_value: float) -> float:
    """Return the number in the environment variable ``name``, or ``default`` if it is unset or blank."""
    text = os.environ.get(name)
    if text is None or not text.strip():
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not min_value <= value <= max_value:
        raise InvalidInputError(f"{name}={text!r}: expected a number from {min_value:g} to {max_value:g}")
    return value


def alone() -> bool:
    """Return ``SPARSECOMM_ALONE``: whether this process is the only rank, whatever the launcher says (default 0)."""
    return _number("SPARSECOMM_ALONE", 0, 0, 1) == 1


def timeout(default: float = 300.0) -> float:
    """Return ``SPARSECOMM_TIMEOUT``: seconds to wait for another rank (from 0.001 to 10^6).

    ``default``: 300, or the timeout of a process group.
    """
    return _number("SPARSECOMM_TIMEOUT", min(max(default, 1e-3), _MAX_TIMEOUT), 1e-3, _MAX_TIMEOUT)


def connections() -> int:
    """Return ``SPARSECOMM_CONNECTIONS``: number of TCP connections to each peer of a process group (1 to 64).

    0 means "auto", the default: one on a local network, and up to 48 for long round trips.
    """
    if os.environ.get("SPARSECOMM_CONNECTIONS", "").strip() == "auto":
        return 0
    return int(_number("SPARSECOMM_CONNECTIONS", 0, 1, 64))


def max_message_bytes() -> int:
    """Return ``SPARSECOMM_MAX_MESSAGE_BYTES``: longer messages are sent in pieces (default 2^22, below 2^31)."""
    return int(_number("SPARSECOMM_MAX_MESSAGE_BYTES", 2.0**22, 64, 2.0**31 - 1))


def rank_on_this_node() -> int:
    """Return this rank's number on its node, as the launcher sets it; 0 if it does not."""
    return _launcher_number(_LOCAL_RANK, 0)


def ranks_on_this_node() -> int:
    """Return the number of ranks on this node, as the launcher sets it; 1 if it does not."""
    return max(1, _launcher_number(_LOCAL_SIZE, 1))


def _launcher_number(names: tuple[str, ...], default: int) -> int:
    values = (os.environ.get(name, "") for name in names)
    return next((int(text) for text in values if text.isdigit()), default)


def threads() -> int:
    """Return ``SPARSECOMM_THREADS``: threads per rank in the CPU kernels.

    Defaults to the number of cores that this rank may use, at most 8. A rank that may use every core shares them with
    the other ranks of its node.
    """
    return int(_number("SPARSECOMM_THREADS", 0, 0, 1024)) or _share_of_cores()


@lru_cache(maxsize=1)  # asking the system takes longer than a small selection
def _share_of_cores() -> int:
    installed = os.cpu_count() or 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else installed
    if cores == installed:
        cores //= ranks_on_this_node()
    return max(1, min(cores, _MAX_THREADS))


def oversubscribed() -> bool:
    """Return whether this node has more ranks than cores for them.

    If the launcher has bound this rank to some of its cores, the ranks share all cores of the launcher.
    """
    cores: float = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        own = launcher = os.sched_getaffinity(0)
        with suppress(OSError):
            launcher = os.sched_getaffinity(os.getppid())
        cores = len(launcher if own < launcher else own)
    with suppress(OSError, ValueError):  # there is no quota
        microseconds, period = map(int, _QUOTA.read_text().split())
        cores = min(cores, microseconds / period)
    return ranks_on_this_node() > cores


def voting(default: bool) -> bool:
    """Return ``SPARSECOMM_VOTING``: whether ranks vote on every call (0 or 1)."""
    return bool(_number("SPARSECOMM_VOTING", float(default), 0, 1))


def simd() -> str | None:
    """Return ``SPARSECOMM_SIMD``: the instruction set of the CPU kernels, or None for the best one."""
    text = os.environ.get("SPARSECOMM_SIMD", "").strip() or None
    if text not in (None, *_SIMD):
        raise InvalidInputError(f"SPARSECOMM_SIMD={text!r}: expected one of {', '.join(_SIMD)}")
    return text


def trace() -> Path | None:
    """Return ``SPARSECOMM_TRACE``: a trace file, or a folder for ``trace.json``. The rank's number is added later."""
    text = os.environ.get("SPARSECOMM_TRACE", "").strip()
    return Path(text, "trace.json") if os.path.isdir(text) else Path(text) if text else None


def ranges() -> list[str]:
    """Return ``SPARSECOMM_RANGES``: the profilers that show the phases of calls: "torch", "nvtx" or both."""
    text = os.environ.get("SPARSECOMM_RANGES", "")
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in _PROFILERS]:
        raise InvalidInputError(f"SPARSECOMM_RANGES={text!r}: {unknown[0]!r} is none of {', '.join(_PROFILERS)}")
    return list(dict.fromkeys(names))
