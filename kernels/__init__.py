"""Sources of the C++ (`cpu`) and CUDA (`cuda`) kernels, which know neither Python nor MPI.

The C++ kernels are compiled into `sparsecomm.backends._cpu` when the library is built. The CUDA kernels are compiled
when they are first used, so packages contain their sources.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["path"]


def path(*parts: str) -> Path:
    """Return the path of a source file or folder, such as ``path("cuda", "select.cuh")``."""
    return Path(__file__).parent.joinpath(*parts)
