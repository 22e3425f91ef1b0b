"""One device's arithmetic. `of` gives that of a device."""

from __future__ import annotations

from sparsecomm.interop import Device, Tensor
from sparsecomm.ops.base import Ops
from sparsecomm.ops.cpu import CpuOps
from sparsecomm.sparse import DENSIFY, SparseVector

__all__ = ["CpuOps", "Ops", "of"]


def of(device: Device) -> Ops:
    """The arithmetic of ``device``.

    Raises:
        InvalidInputError: it cannot be used; the message says what is missing.
    """
    if device.kind == "cpu":
        return CpuOps()
    from sparsecomm.ops.cuda import devices  # here: most calls need none of it

    return devices.of(device.index)


def _densify_on_device(out: Tensor, entries: SparseVector) -> None:
    arithmetic = of(out.device)
    with arithmetic.using(out):
        arithmetic.densify(out, entries)


DENSIFY["cuda"] = _densify_on_device
