"""A probe for CUDA-aware MPI, which accepts pointers to CUDA device memory."""

from __future__ import annotations

import ctypes
import os
import re
from types import ModuleType

__all__ = ["cuda_aware"]

_YES_NO = {**dict.fromkeys(("1", "true", "yes", "on"), True), **dict.fromkeys(("0", "false", "no", "off"), False)}


def cuda_aware(MPI: ModuleType | None) -> tuple[bool, str]:
    """Return whether MPI accepts pointers to GPU memory, and which probe answered. In doubt, the answer is no.

    Args:
        MPI: the module ``mpi4py.MPI``, or None if it cannot be loaded.
    """
    word = os.environ.get("SPARSECOMM_CUDA_AWARE", "").strip()
    if word:
        source = "set by the user" if word.lower() in _YES_NO else "expected 0 or 1; treated as 0"
        return _YES_NO.get(word.lower(), False), f"SPARSECOMM_CUDA_AWARE={word}, {source}"
    if MPI is None:
        return False, "MPI is not loaded"
    try:
        query = ctypes.CDLL(MPI.__file__).MPIX_Query_cuda_support  # a symbol of the libmpi that the module has loaded
    except (OSError, AttributeError):
        pass
    else:
        return bool(query()), "MPIX_Query_cuda_support"
    kinds = MPI.COMM_WORLD.Get_info().get("mpi_memory_alloc_kinds")
    if kinds is not None:
        return "cuda" in re.split("[,:]", kinds), f"mpi_memory_alloc_kinds={kinds}"
    return False, "no probe answered: assumed not to be CUDA-aware"
