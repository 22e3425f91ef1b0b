"""One device's arithmetic. `of` gives that of a device."""

from __future__ import annotations

from sparsecomm.errors import InvalidInputError
from sparsecomm.interop import Device
from sparsecomm.ops.base import Ops
from sparsecomm.ops.cpu import CpuOps

__all__ = ["CpuOps", "Ops", "of"]


def of(device: Device) -> Ops:
    """The arithmetic of ``device``.

    Raises:
        InvalidInputError: this build has none for it.
    """
    if device.kind == "cpu":
        return CpuOps()
    raise InvalidInputError(
        f"x is on {device}; expected host memory: this version selects and merges on the CPU only; pass x.cpu()"
    )
