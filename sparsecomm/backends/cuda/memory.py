"""Message memory of a CUDA device: device memory if MPI accepts it, else pinned host memory.

MPI ignores streams. So the host waits for the stream before MPI reads memory that the stream writes, or writes memory
that the stream may still read. Host memory is kept while a stream uses it, even if a call fails.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from sparsecomm.backends.cuda.runtime import Event, Runtime, fetch
from sparsecomm.tensors.arrays import Array, Bytes
from sparsecomm.transport.base import MessageMemory

CHUNK = 1 << 22  # bytes copied at once; a chunk is sent while the next one is copied


class MemoryInUse:
    """Keeps host memory alive while streams read or write it."""

    def __init__(self) -> None:
        self._blocks: list[tuple[Event, Bytes]] = []

    def keep(self, memory: Bytes, until: Event) -> None:
        self._blocks = [(event, block) for event, block in self._blocks if not event.done()]
        self._blocks.append((until, memory))

    def __del__(self) -> None:
        # At interpreter exit, CUDA and the names of this module may be gone.
        try:
            for event, _ in self._blocks:
                event.wait()
        except Exception:
            pass


class _Chunk(NamedTuple):
    """An address range of host memory to which the device copies, until the event ``written``."""

    begin: int
    end: int
    written: Event


class StagedMemory(MessageMemory):
    """A `sparsecomm.transport.base.MessageMemory` in pinned host memory, for the messages of one call.

    Long messages are copied in chunks, and each chunk can be sent when its copy is complete. A received piece is copied
    to the device while the next one is received.
    """

    def __init__(self, runtime: Runtime, in_use: MemoryInUse) -> None:
        self._runtime, self._in_use, self._chunk = runtime, in_use, CHUNK
        self._chunks: list[_Chunk] = []  # in the order of their copies
        self._landings: dict[int, tuple[int, Array]] = {}  # by id of a message in pieces: address, copy on the device

    def empty(self, nbytes: int) -> Bytes:
        return self._runtime.pinned(nbytes)

    def put(self, array: Array, to: Bytes) -> None:
        target, source = to.ctypes.data, self._runtime.address(array)
        for begin in range(0, to.nbytes, self._chunk):
            end = min(begin + self._chunk, to.nbytes)
            written = self._copy(target + begin, source + begin, end - begin, to)
            self._chunks.append(_Chunk(target + begin, target + end, written))

    def ready(self, message: Bytes, nbytes: int) -> None:
        begin, remaining = message.ctypes.data, []
        for chunk in self._chunks:
            if chunk.begin < begin + nbytes and chunk.end > begin:
                chunk.written.wait()
            else:
                remaining.append(chunk)
        self._chunks = remaining

    def landed(self, message: Bytes, begin: int, end: int) -> None:
        address = message.ctypes.data
        if id(message) not in self._landings:
            self._landings[id(message)] = address, self._runtime.empty(len(message), np.uint8)
            weakref.finalize(message, self._landings.pop, id(message), None).atexit = False
        mirror = self._runtime.address(self._landings[id(message)][1])
        self._copy(mirror + begin, address + begin, end - begin, message)

    def move(self, part: Bytes, to: Bytes) -> None:
        to[: len(part)] = part
        self.landed(to, 0, len(part))

    def get(self, data: Bytes, dtype: DTypeLike) -> Array:
        """Return an array on the device; a message received in pieces is already there."""
        dtype = np.dtype(dtype)
        for address, mirror in self._landings.values():
            begin = data.ctypes.data - address
            if begin >= 0 and begin + data.nbytes <= len(mirror) and begin % dtype.itemsize == 0:
                return mirror[begin : begin + data.nbytes].view(dtype)
        array = self._runtime.empty(data.nbytes // dtype.itemsize, dtype)
        if data.nbytes:
            self._copy(self._runtime.address(array), data.ctypes.data, data.nbytes, data)
        return array

    def _copy(self, to: int, source: int, nbytes: int, host: Bytes) -> Event:
        """Start copying to or from ``host`` memory, and return the event after it."""
        try:
            self._runtime.copy(to, source, nbytes)
        finally:
            copied = self._runtime.record()
            self._in_use.keep(host, copied)
        return copied


class DeviceMemory(MessageMemory):
    """A `sparsecomm.transport.base.MessageMemory` on the device, for a transport that accepts it."""

    def __init__(self, runtime: Runtime, in_use: MemoryInUse) -> None:
        self._runtime, self._in_use = runtime, in_use

    def empty(self, nbytes: int) -> Array:
        """Return new memory, after waiting for work on freed arrays that used the same memory."""
        array = self._runtime.empty(nbytes, np.uint8)
        self._runtime.synchronize()
        return array

    def put_header(self, header: bytes, to: Array) -> None:
        staged = self._runtime.pinned(len(header))
        staged[:] = np.frombuffer(header, np.uint8)
        try:
            self._runtime.copy(self._runtime.address(to), staged.ctypes.data, len(header))
        finally:
            self._in_use.keep(staged, self._runtime.record())

    def put(self, array: Array, to: Array) -> None:
        if to.nbytes:
            self._runtime.copy(self._runtime.address(to), self._runtime.address(array), to.nbytes)

    def ready(self, message: Array, nbytes: int) -> None:
        self._runtime.synchronize()

    def move(self, part: Array, to: Array) -> None:
        self._runtime.copy(self._runtime.address(to), self._runtime.address(part), len(part))
        self._runtime.synchronize()  # afterwards MPI may write to `part`

    def header(self, message: Array, nbytes: int) -> bytes:
        nbytes = min(nbytes, len(message))
        return fetch(self._runtime, (self._runtime.address(message), nbytes)).tobytes() if nbytes else b""

    def get(self, data: Array, dtype: DTypeLike) -> Array:
        dtype = np.dtype(dtype)
        if self._runtime.address(data) % dtype.itemsize == 0:
            return data.view(dtype)
        array = self._runtime.empty(len(data) // dtype.itemsize, dtype)  # kernels need aligned arrays
        self._runtime.copy(self._runtime.address(array), self._runtime.address(data), len(data))
        return array
