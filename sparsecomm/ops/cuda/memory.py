"""Messages of a device's arrays: in its own memory where MPI takes that, else in pinned host memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike, NDArray

from sparsecomm.ops.cuda.runtime import Event, Runtime
from sparsecomm.sparse import Array

__all__ = ["DeviceMemory", "StagedMemory"]


class StagedMemory:
    """`sparsecomm.memory.Memory` in pinned host memory: copied on the current stream, next to which MPI runs."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._under_way: list[tuple[Event, NDArray[np.uint8]]] = []  # being copied to the device

    def empty(self, nbytes: int) -> NDArray[np.uint8]:
        return self._runtime.pinned(nbytes)

    def put_header(self, header: bytes, to: NDArray[np.uint8]) -> None:
        to[: len(header)] = np.frombuffer(header, np.uint8)

    def put(self, array: Array, to: NDArray[np.uint8]) -> None:
        if to.nbytes:
            self._runtime.copy(to.ctypes.data, self._runtime.address(array), to.nbytes)

    def settle(self) -> None:
        self._runtime.record().wait()
        self._under_way.clear()  # these were begun before

    def header(self, message: NDArray[np.uint8], nbytes: int) -> bytes:
        return message[:nbytes].tobytes()

    def get(self, data: NDArray[np.uint8], dtype: DTypeLike) -> Array:
        array = self._runtime.empty(data.nbytes // np.dtype(dtype).itemsize, dtype)
        if data.nbytes:
            self._runtime.copy(self._runtime.address(array), data.ctypes.data, data.nbytes)
            self._under_way = [(event, held) for event, held in self._under_way if not event.done()]
            self._under_way.append((self._runtime.record(), data))
        return array


class DeviceMemory:
    """`sparsecomm.memory.Memory` on the device, for a transport that takes its addresses."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def empty(self, nbytes: int) -> Array:
        return self._runtime.empty(nbytes, np.uint8)

    def put_header(self, header: bytes, to: Array) -> None:
        staged = self._runtime.pinned(len(header))
        staged[:] = np.frombuffer(header, np.uint8)
        self._runtime.copy(self._runtime.address(to), staged.ctypes.data, len(header))
        self._held = staged  # until `settle`

    def put(self, array: Array, to: Array) -> None:
        if to.nbytes:
            self._runtime.copy(self._runtime.address(to), self._runtime.address(array), to.nbytes)

    def settle(self) -> None:
        self._runtime.record().wait()

    def header(self, message: Array, nbytes: int) -> bytes:
        staged = self._runtime.pinned(min(nbytes, len(message)))
        if len(staged):
            self._runtime.copy(staged.ctypes.data, self._runtime.address(message), len(staged))
            self._runtime.record().wait()
        return staged.tobytes()

    def get(self, data: Array, dtype: DTypeLike) -> Array:
        return data.view(dtype)
