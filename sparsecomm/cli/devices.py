"""The memory that holds the vectors that are summed: the host's, or a CUDA device's."""

from __future__ import annotations

import argparse

import numpy as np

from sparsecomm import config
from sparsecomm.errors import InvalidInputError, pip_install
from sparsecomm.tensors.arrays import Array

__all__ = ["DEVICES", "DeviceMemory", "add_argument", "check"]


class DeviceMemory:
    """A device's memory, here the host's: how arrays get there and back."""

    name = "cpu"

    def put(self, array: Array) -> Array:
        """Return a copy of ``array`` in this memory."""
        return np.array(array)

    def fetch(self, tensor: Array) -> Array:
        """Return the tensor's values in host memory; they may be the tensor's own."""
        return np.asarray(tensor)

    def assign(self, tensor: Array, source: Array) -> None:
        """Copy ``source`` into ``tensor``; both are in this memory."""
        np.copyto(tensor, source)

    def wait(self) -> None:
        """Wait until the device has done everything that was started on it."""

    def available_bytes(self) -> int | None:
        """Return the bytes that this rank may take there; None where `sweep.check_memory` looks at it."""
        return None


class _Cuda(DeviceMemory):
    """The memory of this rank's device. The ranks of one node take its devices in turn."""

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
            raise InvalidInputError("this process sees no GPU; CUDA_VISIBLE_DEVICES?")
        from sparsecomm.backends import cuda

        index = config.rank_on_this_node() % devices_here
        cuda.of(index)
        self._cupy, self._devices = cupy, devices_here
        cupy.cuda.Device(index).use()
        self.name = f"cuda ({cupy.cuda.runtime.getDeviceProperties(index)['name'].decode()}; CuPy {cupy.__version__})"

    def put(self, array: Array) -> Array:
        copied: Array = self._cupy.asarray(array)
        return copied

    def fetch(self, tensor: Array) -> Array:
        values: Array = self._cupy.asnumpy(tensor)
        return values

    def assign(self, tensor: Array, source: Array) -> None:
        self._cupy.copyto(tensor, source)

    def wait(self) -> None:
        self._cupy.cuda.get_current_stream().synchronize()

    def available_bytes(self) -> int | None:
        free = int(self._cupy.cuda.runtime.memGetInfo()[0])
        return free // -(-config.ranks_on_this_node() // self._devices)


DEVICES: dict[str, type[DeviceMemory]] = {"cpu": DeviceMemory, "cuda": _Cuda}


def add_argument(parser: argparse._ActionsContainer) -> None:
    """Declare ``--device``."""
    parser.add_argument("--device", default="cpu", choices=DEVICES, help="where the vectors are (%(default)s)")


def check(device: str, dtype: str) -> None:
    """Refuse a device that is unusable here, or has no such type.

    Raises:
        InvalidInputError: why.
    """
    if device == "cuda" and dtype == "bfloat16":
        raise InvalidInputError("--dtype bfloat16: expected another type with --device cuda; CuPy has no bfloat16")
    try:
        DEVICES[device]()
    except InvalidInputError as error:
        raise InvalidInputError(f"--device {device}: {error}") from error
