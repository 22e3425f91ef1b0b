"""The arithmetic of a device: its backend."""

from __future__ import annotations

import threading

from sparsecomm.backends import _cpu
from sparsecomm.backends.base import Backend, Timeline
from sparsecomm.tensors.interop import Device
from sparsecomm.tensors.sparse import SparseVector

__all__ = ["AT_ONCE", "Backend", "Backends", "CpuBackend", "Timeline", "default_float_mode", "of"]


AT_ONCE = _cpu.AT_ONCE
CpuBackend = _cpu.CpuBackend
default_float_mode = _cpu.default_float_mode


class Backends:
    """The backends of one owner, such as a call queue, who uses them from one thread at a time.

    There is one for each CUDA device, made when it is first asked for. Nobody else has its memory or its stream.
    """

    def __init__(self) -> None:
        self._cuda: dict[int, Backend] = {}

    def of(self, device: Device) -> Backend:
        """Return the owner's backend of ``device``.

        Raises:
            InvalidInputError: it cannot be used; the message says what is missing.
        """
        if device.kind == "cpu":
            return CpuBackend()  # which has nothing of its own
        if device.index not in self._cuda:
            from sparsecomm.backends import cuda  # here: most calls need none of it

            self._cuda.setdefault(device.index, cuda.of(device.index))
        return self._cuda[device.index]


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.backends = Backends()


_of_thread = _OfThread()


def of(device: Device) -> Backend:
    """Return the calling thread's own backend of ``device``: for work that belongs to no call.

    Raises:
        InvalidInputError: it cannot be used; the message says what is missing.
    """
    return _of_thread.backends.of(device)


SparseVector.densifier_of = staticmethod(of)
