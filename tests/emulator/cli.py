"""Runs the command line with an emulated CUDA device in the place of a real one."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from sparsecomm.backends.cuda import CudaBackend, devices
from sparsecomm.cli import main, selftest
from sparsecomm.cli.devices import DEVICES
from tests.emulator.runtime import EmulatedRuntime
from tests.emulator.tensor import CudaTensor


class Emulated:
    name = "cuda (emulated)"

    def put(self, array: np.ndarray) -> CudaTensor:
        return CudaTensor(array.copy())

    def fetch(self, tensor: Any) -> np.ndarray:
        return tensor.array.copy() if isinstance(tensor, CudaTensor) else np.array(tensor)

    def assign(self, tensor: CudaTensor, source: CudaTensor) -> None:
        np.copyto(tensor.array, source.array)

    def wait(self) -> None:
        pass

    def available_bytes(self) -> int:
        return 2**30


if __name__ == "__main__":
    runtime = EmulatedRuntime()
    devices.of = lambda index: CudaBackend(runtime)  # type: ignore[assignment]
    DEVICES["cuda"] = Emulated
    selftest.SIZES = selftest.SIZES[1:3]  # type: ignore[assignment]
    selftest._TYPICAL = 1000, 10  # type: ignore[attr-defined]
    status = main(sys.argv[1:])
    assert runtime.launches or status
    sys.exit(status)
