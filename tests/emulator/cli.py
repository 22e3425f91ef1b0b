"""Runs the command line with an emulated CUDA device."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from sparsecomm.cli import main, selftest
from sparsecomm.tools.devices import DEVICES
from tests.emulator.arrays import DeviceArray
from tests.emulator.deferred import DeferredRuntime
from tests.emulator.devices import use

runtime = DeferredRuntime()


class Emulated:
    name = "cuda (emulated)"

    def put(self, array: np.ndarray) -> DeviceArray:
        return runtime.library.asarray(array)

    def fetch(self, tensor: Any) -> np.ndarray:
        return np.array(tensor)

    def wait(self) -> None:
        runtime.synchronize()


if __name__ == "__main__":
    use(runtime, pytest.MonkeyPatch())
    DEVICES["cuda"] = Emulated
    selftest.SIZES = selftest.SIZES[1:3]  # type: ignore[assignment]
    status = main(sys.argv[1:])
    assert runtime.launches or status
    sys.exit(status)
