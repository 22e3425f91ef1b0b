"""The arithmetic of devices: one `Backend` per device and owner, such as a call queue or a thread."""

from __future__ import annotations

import threading

from sparsecomm.backends import _cpu
from sparsecomm.backends.base import Backend, Timeline
from sparsecomm.tensors.interop import Device, Tensor
from sparsecomm.tensors.sparse import SparseVector

__all__ = ["AT_ONCE", "Backend", "Backends", "CpuBackend", "Timeline", "default_float_mode", "float_mode_only", "of"]

AT_ONCE, CpuBackend = _cpu.AT_ONCE, _cpu.CpuBackend
default_float_mode, float_mode_only = _cpu.default_float_mode, _cpu.float_mode_only


class Backends:
    """The backends of one owner, such as a call queue, with their memory and streams. Serves one thread at a time."""

    def __init__(self) -> None:
        self._scratch = _cpu.Scratch()
        self._cuda: dict[int, Backend] = {}

    def of(self, device: Device) -> Backend:
        """Return the owner's backend of ``device``. Raises `InvalidInputError` if the device cannot be used."""
        if device.kind == "cpu":
            return CpuBackend(scratch=self._scratch)  # a new one, because environment variables may have changed
        if device.index not in self._cuda:
            from sparsecomm.backends import cuda  # most programs do not need it

            self._cuda.setdefault(device.index, cuda.of(device.index))
        return self._cuda[device.index]

    def release(self, keep: int) -> None:
        """Give unused scratch memory of the host back to the system, except for ``keep`` bytes."""
        self._scratch.release(keep)


class _ThreadBackends(threading.local):
    def __init__(self) -> None:
        self.backends = Backends()


_thread_backends = _ThreadBackends()


def of(device: Device) -> Backend:
    """Return the calling thread's backend of ``device``, for work outside of calls. See `Backends.of`."""
    return _thread_backends.backends.of(device)


def _densify(out: Tensor, entries: SparseVector) -> None:
    backend = of(out.device)
    with backend.on_stream(out):
        backend.densify(out, entries)


SparseVector.densify = staticmethod(_densify)
