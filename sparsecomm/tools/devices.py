"""The memory of the vectors that commands sum: host memory or memory of a CUDA device."""

from __future__ import annotations

import argparse

import numpy as np

from sparsecomm import config
from sparsecomm.errors import InvalidInputError, pip_install
from sparsecomm.tensors.arrays import Array


class DeviceMemory:
    """Host memory, and the base class for the memory of devices."""

    name = "cpu"

    def put(self, array: Array) -> Array:
        """Return a copy of ``array`` in this memory."""
        return np.array(array)

    def fetch(self, tensor: Array) -> Array:
        """Return the tensor's values in host memory, possibly without a copy."""
        return np.asarray(tensor)

    def wait(self) -> None:
        """Wait for all work of the device."""


class _Cuda(DeviceMemory):
    """Memory of this rank's CUDA device. The ranks of a node are distributed over its devices."""

    def __init__(self) -> None:
        try:
            import cupy
        except ImportError as error:
            raise InvalidInputError(
                f"CuPy cannot be imported ({error}): {pip_install('cuda13x')}, or [cuda12x], to match the driver"
            ) from error
        try:
            devices_here = int(cupy.cuda.runtime.getDeviceCount())
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise InvalidInputError(
                f"this machine has no GPU, or no driver for it that CuPy {cupy.__version__} can use ({error}); "
                "`sparsecomm info` shows the driver"
            ) from error
        if not devices_here:
            raise InvalidInputError("this process sees no GPU: check CUDA_VISIBLE_DEVICES")
        from sparsecomm.backends import cuda

        index = config.rank_on_this_node() % devices_here
        cuda.of(index)
        self._cupy = cupy
        cupy.cuda.Device(index).use()
        self.name = f"cuda ({cupy.cuda.runtime.getDeviceProperties(index)['name'].decode()}; CuPy {cupy.__version__})"

    def put(self, array: Array) -> Array:
        tensor: Array = self._cupy.asarray(array)
        return tensor

    def fetch(self, tensor: Array) -> Array:
        values: Array = self._cupy.asnumpy(tensor)
        return values

    def wait(self) -> None:
        self._cupy.cuda.get_current_stream().synchronize()


DEVICES: dict[str, type[DeviceMemory]] = {"cpu": DeviceMemory, "cuda": _Cuda}


def add_argument(parser: argparse._ActionsContainer) -> None:
    """Add ``--device``."""
    parser.add_argument("--device", default="cpu", choices=DEVICES, help="where the vectors are (%(default)s)")


def check(device: str, dtype: str) -> None:
    """Raise `InvalidInputError` unless a device is usable and supports a dtype."""
    if device == "cuda" and dtype == "bfloat16":
        raise InvalidInputError("--dtype bfloat16: expected another type with --device cuda; CuPy has no bfloat16")
    try:
        DEVICES[device]()
    except InvalidInputError as error:
        raise InvalidInputError(f"--device {device}: {error}") from error
