"""Sources of the C++ (`cpu`) and CUDA (`cuda`) kernels, which know neither Python nor MPI.

The C++ ones are compiled into `sparsecomm.backends._cpu` when the library is built. The CUDA ones are compiled for the
machine's GPU when they are first used, so they travel with the library.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["path"]


def path(*parts: str) -> Path:
    """Where a source file or folder lies, such as ``path("cuda", "select.cuh")``."""
    return Path(__file__).parent.joinpath(*parts)
