"""Fixtures of several folders."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sparsecomm.backends.cuda import CudaBackend, devices
from tests.emulator.runtime import EmulatedRuntime


@pytest.fixture(autouse=True, scope="module")
def _nobody_writes_to_constants() -> Iterator[None]:
    """Python has one object for each text of one byte: what writes to it changes it everywhere."""
    yield
    assert all(chr(i).encode("latin-1")[0] == i for i in range(256)), "a bytes object was written to"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> EmulatedRuntime:
    """An emulated CUDA device, on which `tests.emulator.tensor.CudaTensor` are."""
    runtime = EmulatedRuntime()
    found = CudaBackend(runtime, radix_max_size=50, spare_candidates=100)
    monkeypatch.setattr(devices, "of", lambda index: found)
    return runtime
