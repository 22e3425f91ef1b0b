"""Fixtures of several folders."""

from __future__ import annotations

import pytest

from sparsecomm.ops.cuda import CudaOps, devices
from tests.emulator.runtime import EmulatedRuntime


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> EmulatedRuntime:
    """An emulated CUDA device, on which `tests.emulator.tensor.CudaTensor` are."""
    runtime = EmulatedRuntime()
    found = CudaOps(runtime, short=50, spare=100)
    monkeypatch.setattr(devices, "of", lambda index: found)
    return runtime
