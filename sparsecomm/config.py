"""Settings from the environment, read when they are used: a program may set them before its first call.

Each function raises `InvalidInputError` if its variable holds something unusable.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from sparsecomm import _environment
from sparsecomm.errors import InvalidInputError

__all__ = [
    "alone",
    "connections",
    "max_message_bytes",
    "oversubscribed",
    "ranges",
    "rank_on_this_node",
    "ranks_on_this_node",
    "simd",
    "texts",
    "threads",
    "timeout",
    "trace",
    "voting",
]

# Variables that launchers export: how many ranks share this node, and which of them this one is.
_LOCAL_SIZE = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE")
_LOCAL_RANK = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "LOCAL_RANK", "SLURM_LOCALID")
_MAX_THREADS = 8
_MAX_TIMEOUT = 1e6  # seconds, of which all clocks and calls of the system can count so many
_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds of processor time, and in how many
_SIMD = ("portable", "avx2", "avx512")
_PROFILERS = ("torch", "nvtx")
texts = _environment.texts  # the variables that calls read: another tuple if one of them has changed


def _number(name: str, default: float, min_value: float, max_value: float) -> float:
    """Return the number in the environment variable ``name``; ``default`` if it is unset or blank.

    Raises:
        InvalidInputError: it is no number, or out of range.
    """
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
    """Return ``SPARSECOMM_ALONE``: whether one rank is meant, whatever the launcher says (0 or 1, default 0).

    See `sparsecomm.transport.job`.
    """
    return _number("SPARSECOMM_ALONE", 0, 0, 1) == 1


def timeout() -> float:
    """Return ``SPARSECOMM_TIMEOUT``: seconds to wait for a peer before giving up (default 300, from 0.001 to 10^6)."""
    return _number("SPARSECOMM_TIMEOUT", 300.0, 1e-3, _MAX_TIMEOUT)


def connections() -> int:
    """Return ``SPARSECOMM_CONNECTIONS``: TCP connections to each peer of a process group (1 to 64).

    0 stands for "auto", the default: one on a local network, and up to 48 where the round trip is long. Of two ranks,
    the setting of the higher one counts.
    """
    if os.environ.get("SPARSECOMM_CONNECTIONS", "").strip() == "auto":
        return 0
    return int(_number("SPARSECOMM_CONNECTIONS", 0, 1, 64))


def max_message_bytes() -> int:
    """Return ``SPARSECOMM_MAX_MESSAGE_BYTES``: longer messages travel in pieces of this size (default 2^22, < 2^31).

    Over MPI the smallest of all ranks counts.
    """
    return int(_number("SPARSECOMM_MAX_MESSAGE_BYTES", 2.0**22, 64, 2.0**31 - 1))


def rank_on_this_node() -> int:
    """Return this rank's number among those on its node, as the launcher says; 0 if it does not say."""
    values = (os.environ.get(name, "") for name in _LOCAL_RANK)
    return next((int(text) for text in values if text.isdigit()), 0)


def threads() -> int:
    """Return ``SPARSECOMM_THREADS``: threads per rank in the CPU kernels.

    The default is the number of cores that this rank may use, at most 8. A rank that may use every core of the node
    shares them with the other ranks that its launcher put there.
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
    """Return whether the launcher put more ranks on this node than they have cores.

    These are the cores on which this process may run, or those of the launcher, if it has bound each rank to its own.
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
    """Return ``SPARSECOMM_VOTING``: whether ranks vote on every call (1), or not (0).

    Args:
        default: where it is not set: whether MPI survives the death of a rank.
    """
    return bool(_number("SPARSECOMM_VOTING", float(default), 0, 1))


def simd() -> str | None:
    """Return ``SPARSECOMM_SIMD``: the instruction set of the CPU kernels; ``None`` for the best one."""
    text = os.environ.get("SPARSECOMM_SIMD", "").strip() or None
    if text not in (None, *_SIMD):
        raise InvalidInputError(f"SPARSECOMM_SIMD={text!r}: expected one of {', '.join(_SIMD)}")
    return text


def trace() -> Path | None:
    """Return ``SPARSECOMM_TRACE``: where each rank writes what its calls do, its number before the suffix.

    In a folder that is given it is ``trace.json``.
    """
    text = os.environ.get("SPARSECOMM_TRACE", "").strip()
    return Path(text, "trace.json") if os.path.isdir(text) else Path(text) if text else None


def ranges() -> list[str]:
    """Return ``SPARSECOMM_RANGES``: the profilers that are told of the parts of calls, "torch" or "nvtx" or both."""
    text = os.environ.get("SPARSECOMM_RANGES", "")
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in _PROFILERS]:
        raise InvalidInputError(f"SPARSECOMM_RANGES={text!r}: {unknown[0]!r} is none of {', '.join(_PROFILERS)}")
    return list(dict.fromkeys(names))


def ranks_on_this_node() -> int:
    """Return the number of ranks that the launcher put on this node; 1 if it does not say."""
    for name in _LOCAL_SIZE:
        text = os.environ.get(name, "")
        if text.isdigit() and int(text) > 0:
            return int(text)
    return 1
