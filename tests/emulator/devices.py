"""An emulated device in the place of all CUDA devices of the process."""

from __future__ import annotations

import pytest

from sparsecomm import backends
from sparsecomm.backends.cuda import CudaBackend, devices
from sparsecomm.backends.cuda.runtime import Runtime

__all__ = ["use"]


def use(runtime: Runtime, monkeypatch: pytest.MonkeyPatch, **sizes: int) -> None:
    """Make new backends, of threads and of call queues, work with ``runtime``; ``sizes``: as of `CudaBackend`."""
    monkeypatch.setattr(devices, "of", lambda index: CudaBackend(runtime, **sizes))
    monkeypatch.setattr(backends, "_of_thread", backends._OfThread())
