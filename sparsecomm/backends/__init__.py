"""One device's arithmetic. `of` gives that of a device."""

from __future__ import annotations

from sparsecomm.backends.base import Backend
from sparsecomm.backends.cpu import CpuBackend
from sparsecomm.tensors.interop import Device, Tensor
from sparsecomm.tensors.sparse import DENSIFY, SparseVector

__all__ = ["Backend", "CpuBackend", "of"]


def of(device: Device) -> Backend:
    """The arithmetic of ``device``.

    Raises:
        InvalidInputError: it cannot be used; the message says what is missing.
    """
    if device.kind == "cpu":
        return CpuBackend()
    from sparsecomm.backends.cuda import devices  # here: most calls need none of it

    return devices.of(device.index)


def _densify_on_device(out: Tensor, entries: SparseVector) -> None:
    backend = of(out.device)
    with backend.on_stream(out):
        backend.densify(out, entries)


DENSIFY["cuda"] = _densify_on_device
