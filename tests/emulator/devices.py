"""Replaces all CUDA devices of the process with an emulated one."""

from __future__ import annotations

import sys

import pytest

from sparsecomm import backends
from sparsecomm.backends import cuda
from sparsecomm.backends.cuda import CudaBackend
from tests.emulator.deferred import DeferredRuntime

__all__ = ["use"]


def use(runtime: DeferredRuntime, monkeypatch: pytest.MonkeyPatch, **sizes: int) -> None:
    """Make new backends use ``runtime``; ``sizes``: options of `CudaBackend`.

    The library takes the runtime's arrays for CuPy's.
    """
    monkeypatch.setattr(cuda, "of", lambda index: CudaBackend(runtime, **sizes))
    monkeypatch.setattr(backends, "_thread_backends", backends._ThreadBackends())
    monkeypatch.setitem(sys.modules, "cupy", runtime.library)
