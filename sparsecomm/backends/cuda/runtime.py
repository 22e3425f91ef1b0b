"""`Runtime`: the part of CUDA that the launch code uses. `CupyRuntime` provides it, and so does the tests' emulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from sparsecomm.tensors.sparse import Array

__all__ = ["PER_THREAD", "Event", "Kernel", "OnStream", "Runtime", "Scalar", "Stream", "fetch", "read_word"]

PER_THREAD = 2  # the handle of the per-thread default stream, which names another stream in every thread
_Work = Callable[[], object]
Scalar = np.generic  # of a parameter's type; addresses are np.uint64


Kernel = Any  # compiled
Stream = Any  # a queue of work on the device


class Event(Protocol):
    """A point in the work of a stream."""

    def wait(self) -> None:
        """Wait for all work before it."""

    def done(self) -> bool:
        """Return whether all work before it is done."""


class Runtime(Protocol):
    """One device, and the stream that is current in this thread. All methods may be called from any thread.

    Freed memory may be reused at once by the stream that was current when it was made.
    """

    device: int
    multiprocessors: int

    def kernel(self, file: str, name: str, definitions: tuple[str, ...]) -> Kernel:
        """Return kernel ``name`` of ``kernels/cuda/<file>``, compiled once with ``-D`` for each definition."""

    def launch(self, kernel: Kernel, blocks: int, threads: int, arguments: Mapping[str, Scalar]) -> None:
        """Start a grid on the current stream, after what was started there before.

        ``arguments``: by name, in the order of the kernel's parameters; scalars of their types, addresses as uint64.
        """

    def empty(self, count: int, dtype: DTypeLike) -> Array:
        """Return a new, uninitialised, flat array of the device."""

    def address(self, array: Array) -> int:
        """Return the address of an array of `empty`, or of a contiguous part of it."""

    def view(self, address: int, count: int, dtype: DTypeLike, owner: object) -> Array:
        """Return memory of the device, which ``owner`` keeps, as a flat array."""

    def clear(self, array: Array) -> None:
        """Fill an array with zero bytes, on the current stream."""

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """Return page-locked host memory."""

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Start copying bytes, each way, on the current stream. Host memory must be `pinned`, or the call waits."""

    def record(self) -> Event:
        """Return the point that the current stream has reached."""

    def capturing(self) -> bool:
        """Return whether the current stream is being captured into a graph, where nothing runs or can be waited for."""

    def new_stream(self) -> Stream:
        """Return a new stream, which waits for no other one without `follow`."""

    def enter(self, stream: int | Stream | None) -> Any:
        """Make the device current, and a stream: a handle, or one of `new_stream`; return the argument of `leave`."""

    def leave(self, entered: Any) -> None:
        """Restore the stream and device from before `enter`. That stream then follows the one that was left."""

    def follow(self, event: Event) -> None:
        """Make the current stream wait until all work before ``event`` is done. The host does not wait."""

    def synchronize(self) -> None:
        """Wait until all work of the current stream is done."""

    def stream(self) -> int:
        """Return the current stream's handle in DLPack's numbers: 1 is the legacy default, 2 the per-thread default."""


class OnStream:
    """A context in which a stream is current. It may be entered repeatedly, but not nested.

    ``begin`` runs first on the stream; ``end`` runs last, also after an error.
    """

    def __init__(
        self, runtime: Runtime, stream: int | Stream | None, begin: _Work | None = None, end: _Work | None = None
    ) -> None:
        self._runtime, self._stream, self._begin, self._end = runtime, stream, begin, end

    def __enter__(self) -> None:
        self._entered = self._runtime.enter(self._stream)
        try:
            if self._begin is not None:
                self._begin()
        except BaseException:
            self._runtime.leave(self._entered)
            raise

    def __exit__(self, *error: object) -> None:
        try:
            if self._end is not None:
                self._end()
        finally:
            self._runtime.leave(self._entered)


def fetch(runtime: Runtime, *sources: tuple[int, int]) -> NDArray[np.uint8]:
    """Wait for the current stream, and return bytes of the device, ``(address, nbytes)`` each, one after another."""
    fetched, begin = runtime.pinned(sum(nbytes for _, nbytes in sources)), 0
    try:
        for address, nbytes in sources:
            runtime.copy(fetched.ctypes.data + begin, address, nbytes)
            begin += nbytes
    finally:
        runtime.synchronize()  # also after an error, which frees the memory
    return fetched


def read_word(runtime: Runtime, counter: Array) -> int:
    """Wait for the current stream, and return the integer that an array of one element holds."""
    return int(fetch(runtime, (runtime.address(counter), counter.nbytes)).view(counter.dtype)[0])
