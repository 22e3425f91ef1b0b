"""The arithmetic of a device: its backend."""

from __future__ import annotations

from sparsecomm.backends.base import Backend
from sparsecomm.backends.cpu import CpuBackend
from sparsecomm.tensors.interop import Device
from sparsecomm.tensors.sparse import SparseVector

__all__ = ["Backend", "CpuBackend", "of"]


def of(device: Device) -> Backend:
    """Return the backend of ``device``.

    Raises:
        InvalidInputError: it cannot be used; the message says what is missing.
    """
    if device.kind == "cpu":
        return CpuBackend()
    from sparsecomm.backends.cuda import devices  # here: most calls need none of it

    return devices.of(device.index)


SparseVector.densifier_of = staticmethod(of)
