"""Settings from the environment, read when they are used, so that a program may set them before its first call."""

from __future__ import annotations

import math
import os
from functools import lru_cache

from sparsecomm.errors import InvalidInputError

__all__ = ["max_message_bytes", "rank_on_this_node", "ranks_on_this_node", "simd", "threads", "timeout"]

# Counts that launchers export: how many ranks share this machine.
_LOCAL_SIZE = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE")
_LOCAL_RANK = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "LOCAL_RANK", "SLURM_LOCALID")
_MAX_THREADS = 8
_SIMD = ("portable", "avx2", "avx512")


def _number(name: str, default: float, least: float, most: float = math.inf) -> float:
    text = os.environ.get(name)
    if text is None or not text.strip():
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise InvalidInputError(f"{name}={text!r}: expected a number from {least:g} to {most:g}")
    return value


def timeout() -> float:
    """``SPARSECOMM_TIMEOUT``: seconds to wait for a peer before giving up (default 300, at least 0.001)."""
    return _number("SPARSECOMM_TIMEOUT", 300.0, 1e-3)


def max_message_bytes() -> int:
    """``SPARSECOMM_MAX_MESSAGE_BYTES``: longer messages travel in pieces of this size (default 2^22, below 2^31)."""
    return int(_number("SPARSECOMM_MAX_MESSAGE_BYTES", 2.0**22, 64, 2.0**31 - 1))


def rank_on_this_node() -> int:
    """This rank's number among those on this machine, as the launcher says; 0 if it says nothing."""
    said = (os.environ.get(name, "") for name in _LOCAL_RANK)
    return next((int(text) for text in said if text.isdigit()), 0)


def threads() -> int:
    """``SPARSECOMM_THREADS``: threads per rank in the CPU kernels.

    The default is the number of cores that this rank may use, at most 8. A rank that may use every core of the
    machine shares them with the other ranks that its launcher put there.
    """
    return int(_number("SPARSECOMM_THREADS", 0, 0, 1024)) or _share_of_cores()


@lru_cache(maxsize=1)  # asking the system takes longer than a small selection
def _share_of_cores() -> int:
    every = os.cpu_count() or 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else every
    if cores == every:
        cores //= ranks_on_this_node()
    return max(1, min(cores, _MAX_THREADS))


def simd() -> str | None:
    """``SPARSECOMM_SIMD``: the instruction set of the CPU kernels, if the best one is not wanted."""
    text = os.environ.get("SPARSECOMM_SIMD", "").strip() or None
    if text not in (None, *_SIMD):
        raise InvalidInputError(f"SPARSECOMM_SIMD={text!r}: expected one of {', '.join(_SIMD)}")
    return text


def ranks_on_this_node() -> int:
    """How many ranks the launcher says it put on this machine; 1 if it does not say."""
    for name in _LOCAL_SIZE:
        text = os.environ.get(name, "")
        if text.isdigit() and int(text) > 0:
            return int(text)
    return 1
