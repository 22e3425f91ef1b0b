"""The sizes of ``kernels/cuda/tuning.cuh``, for the launch code: read from there, so that they are written once."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import sparsecomm._kernels

__all__ = ["SOURCES", "sizes"]

SOURCES = Path(sparsecomm._kernels.__path__[0])


@cache
def sizes() -> dict[str, int]:
    """Constants of tuning.cuh by name."""
    text = (SOURCES / "cuda" / "tuning.cuh").read_text()
    return {name: int(value) for name, value in re.findall(r"constexpr unsigned (\w+) = (\d+);", text)}
