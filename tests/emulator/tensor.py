"""NumPy arrays that claim to be on a CUDA device; the emulated device works in host memory, too."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from tests.emulator.streams import hold_while_busy

_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype, _get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]

CUDA, MANAGED = 2, 13
_DEVICE_TYPE, _DEVICE_ID, _CODE = 8, 12, 20  # offsets in DLTensor
_BFLOAT = 4


class CudaTensor:
    """Exports ``array`` by DLPack as memory of a CUDA device."""

    def __init__(self, array: np.ndarray, *, device: int = 0, kind: int = CUDA, owner: object = None) -> None:
        """``owner``: keeps the memory, if the array does not."""
        self.array, self._device, self._owner = array, (kind, device), owner
        self.streams: list[int | None] = []  # that importers asked for

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        self.streams.append(stream)
        brain = self.array.dtype.name == "bfloat16"
        capsule = np.asarray(_Loan(self.array.view(np.uint16) if brain else self.array, self._owner)).__dlpack__()
        address = _get_pointer(capsule, b"dltensor")
        for offset, value in zip((_DEVICE_TYPE, _DEVICE_ID), self._device, strict=True):
            ctypes.c_int32.from_address(address + offset).value = value
        if brain:
            ctypes.c_uint8.from_address(address + _CODE).value = _BFLOAT
        return capsule


class _Loan:
    """Exported memory. When it is released, work on it may not have run, so busy devices keep it."""

    def __init__(self, array: np.ndarray, owner: object) -> None:
        self._array, self._owner = array, owner

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self._array.__array_interface__

    def __del__(self) -> None:
        hold_while_busy(self._array)
