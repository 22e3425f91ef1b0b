"""Messages of a device's arrays: in its own memory where MPI takes that, else in pinned host memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike, NDArray

from sparsecomm.backends.cuda.runtime import Event, Runtime
from sparsecomm.tensors.sparse import Array

__all__ = ["DeviceMemory", "StagedMemory"]

_Bytes = NDArray[np.uint8]
_CHUNK = 1 << 22  # bytes copied at once: sent while the next ones are copied


class StagedMemory:
    """A `sparsecomm.transport.memory.MessageMemory` in pinned host memory.

    It is copied on the current stream, next to which MPI runs.

    Long messages are copied in chunks, each of which may be sent when it is there; and what comes in pieces is copied
    to the device piece by piece, while the next one is received.
    """

    def __init__(self, runtime: Runtime, *, chunk: int = _CHUNK) -> None:
        self._runtime, self._chunk = runtime, chunk
        self._written: list[tuple[int, Event]] = []  # from the device: all before this address
        self._read: list[tuple[Event, _Bytes]] = []  # to the device: held until then
        self._landing: tuple[_Bytes, Array] | None = None  # a message in pieces, and the same on the device

    def empty(self, nbytes: int) -> _Bytes:
        return self._runtime.pinned(nbytes)

    def put_header(self, header: bytes, to: _Bytes) -> None:
        to[: len(header)] = np.frombuffer(header, np.uint8)

    def put(self, array: Array, to: _Bytes) -> None:
        target, source = to.ctypes.data, self._runtime.address(array)
        for begin in range(0, to.nbytes, self._chunk):
            nbytes = min(self._chunk, to.nbytes - begin)
            self._runtime.copy(target + begin, source + begin, nbytes)
            self._written.append((target + begin + nbytes, self._runtime.record()))

    def ready(self, message: _Bytes, nbytes: int) -> None:
        begin = message.ctypes.data
        end = begin + nbytes
        due = [i for i, (upto, _) in enumerate(self._written) if begin < upto]
        for i in due:
            self._written[i][1].wait()
            if self._written[i][0] >= end:
                break
        if end == begin + len(message):
            self._written = [(upto, event) for upto, event in self._written if not begin < upto <= end]

    def landed(self, message: _Bytes, begin: int, end: int) -> None:
        if self._landing is None or self._landing[0] is not message:
            self._landing = message, self._runtime.empty(len(message), np.uint8)
        mirror = self._runtime.address(self._landing[1])
        self._runtime.copy(mirror + begin, message.ctypes.data + begin, end - begin)
        self._hold(message)

    def move(self, part: _Bytes, to: _Bytes) -> None:
        to[: len(part)] = part
        self._landing = to, self._runtime.empty(len(to), np.uint8)
        self.landed(to, 0, len(part))

    def header(self, message: _Bytes, nbytes: int) -> bytes:
        return message[:nbytes].tobytes()

    def get(self, data: _Bytes, dtype: DTypeLike) -> Array:
        """What has come in pieces is there already."""
        dtype = np.dtype(dtype)
        if self._landing is not None:
            message, mirror = self._landing
            begin = data.ctypes.data - message.ctypes.data
            if begin >= 0 and begin + data.nbytes <= message.nbytes and begin % dtype.itemsize == 0:
                return mirror[begin : begin + data.nbytes].view(dtype)
        array = self._runtime.empty(data.nbytes // dtype.itemsize, dtype)
        if data.nbytes:
            self._runtime.copy(self._runtime.address(array), data.ctypes.data, data.nbytes)
            self._hold(data)
        return array

    def _hold(self, data: _Bytes) -> None:
        self._read = [(event, held) for event, held in self._read if not event.done()]
        self._read.append((self._runtime.record(), data))


class DeviceMemory:
    """`sparsecomm.transport.memory.MessageMemory` on the device, for a transport that takes its addresses."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def empty(self, nbytes: int) -> Array:
        return self._runtime.empty(nbytes, np.uint8)

    def put_header(self, header: bytes, to: Array) -> None:
        self._staged = self._runtime.pinned(len(header))  # held until the next one: `ready` is called between
        self._staged[:] = np.frombuffer(header, np.uint8)
        self._runtime.copy(self._runtime.address(to), self._staged.ctypes.data, len(header))

    def put(self, array: Array, to: Array) -> None:
        if to.nbytes:
            self._runtime.copy(self._runtime.address(to), self._runtime.address(array), to.nbytes)

    def ready(self, message: Array, nbytes: int) -> None:
        self._runtime.record().wait()

    def landed(self, message: Array, begin: int, end: int) -> None:
        pass

    def move(self, part: Array, to: Array) -> None:
        self._runtime.copy(self._runtime.address(to), self._runtime.address(part), len(part))
        self._runtime.record().wait()  # `part` may be freed

    def header(self, message: Array, nbytes: int) -> bytes:
        staged = self._runtime.pinned(min(nbytes, len(message)))
        if len(staged):
            self._runtime.copy(staged.ctypes.data, self._runtime.address(message), len(staged))
            self._runtime.record().wait()
        return staged.tobytes()

    def get(self, data: Array, dtype: DTypeLike) -> Array:
        dtype = np.dtype(dtype)
        if self._runtime.address(data) % dtype.itemsize == 0:
            return data.view(dtype)
        array = self._runtime.empty(len(data) // dtype.itemsize, dtype)  # kernels need them at whole multiples
        self._runtime.copy(self._runtime.address(array), self._runtime.address(data), len(data))
        return array
