"""`Runtime`: the part of CUDA that the launch code uses. `CupyRuntime` and the tests' emulator implement it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from sparsecomm.errors import InvalidInputError
from sparsecomm.tensors.sparse import Array

PER_THREAD = 2  # handle of the per-thread default stream, a different stream in every thread
_Work = Callable[[], object]
Scalar = np.generic  # an argument of the parameter's type
Kernel = Any  # a compiled kernel
Stream = Any  # a stream that the runtime has made


class Moved(NamedTuple):
    """An address in a block of memory, which may be elsewhere in each call."""

    block: int  # its number
    offset: int  # bytes


class Launch(NamedTuple):
    """A kernel, ready to be started. An int is an address or another u64; a bool is one byte."""

    kernel: Kernel
    blocks: int
    threads: int
    arguments: dict[str, Scalar | int | Moved]  # in the order of the kernel's parameters


class Event(Protocol):
    """A point in the work of a stream."""

    def wait(self) -> None:
        """Wait for all work before it."""

    def done(self) -> bool:
        """Return whether all work before it is done."""


class Runtime(Protocol):
    """One device, and the current stream of the calling thread. Any thread may call any method.

    Freed memory is immediately available to the stream that was current when the memory was allocated.
    """

    device: int
    multiprocessors: int

    def kernel(self, file: str, name: str, definitions: tuple[str, ...]) -> Kernel:
        """Return kernel ``name`` of ``kernels/cuda/<file>``, compiled once with ``-D`` for each definition."""

    def launcher(self, launches: Sequence[Launch]) -> Callable[[tuple[int, ...]], None]:
        """Return a function that starts grids on the current stream, one after another, for one thread at a time.

        It takes the addresses of the blocks of memory of `Moved` arguments.
        """

    def empty(self, count: int, dtype: DTypeLike) -> Array:
        """Return a new, uninitialised, flat array of the device."""

    def address(self, array: Array) -> int:
        """Return the address of an array from `empty`, or of a contiguous part of it."""

    def view(self, address: int, count: int, dtype: DTypeLike, owner: object) -> Array:
        """Return device memory that ``owner`` keeps alive as a flat array."""

    def clear(self, array: Array) -> None:
        """Fill an array with zero bytes, on the current stream."""

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """Return page-locked host memory."""

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Start copying bytes in any direction, on the current stream. Waits if host memory is not `pinned`."""

    def record(self) -> Event:
        """Return an event after the work submitted so far to the current stream."""

    def capturing(self) -> bool:
        """Return whether the current stream is being captured into a graph, when waiting is not allowed."""

    def new_stream(self) -> Stream:
        """Return a new stream, which waits for other streams only through `follow`."""

    def enter(self, stream: int | Stream | None) -> Any:
        """Make the device and a stream current; return the argument for `leave`. ``None``: keep the current stream."""

    def leave(self, entered: Any, follow: bool) -> None:
        """Restore the stream and device from before `enter`. With ``follow``, it waits for the stream that is left."""

    def follow(self, event: Event) -> None:
        """Make the current stream, not the host, wait for all work before ``event``."""

    def synchronize(self) -> None:
        """Wait until all work of the current stream is done."""

    def stream(self) -> int:
        """Return the current stream's handle in DLPack's numbers: 1 is the legacy default, 2 the per-thread default."""


class OnStream:
    """A context in which a stream is current. It can be entered repeatedly, but not nested.

    On leaving, the previous stream waits for this one, unless this one is being captured: an event of a graph orders
    nothing outside of it, and would invalidate the capture.

    ``begin`` is called after entering, and ``end`` before leaving, also after an error.
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
            self._leave()
            raise

    def __exit__(self, *error: object) -> None:
        try:
            if self._end is not None:
                self._end()
        finally:
            self._leave()

    def _leave(self) -> None:
        self._runtime.leave(self._entered, follow=not self._runtime.capturing())


def event_after(runtime: Runtime) -> Event | None:
    """Return an event after the work so far of the current stream; ``None`` if it is being captured into a graph."""
    return None if runtime.capturing() else runtime.record()


def refuse_capture(runtime: Runtime, what: str) -> None:
    """Raise an error if the current stream is being captured into a CUDA graph, which cannot contain ``what``."""
    if runtime.capturing():
        raise InvalidInputError(
            f"the current stream is being captured into a CUDA graph, which cannot contain {what}: make the call "
            "before or after the graph"
        )


def fetch(runtime: Runtime, *sources: tuple[int, int]) -> NDArray[np.uint8]:
    """Wait for the current stream, and return the concatenated bytes of ranges ``(address, nbytes)`` on the device."""
    fetched, begin = runtime.pinned(sum(nbytes for _, nbytes in sources)), 0
    try:
        for address, nbytes in sources:
            runtime.copy(fetched.ctypes.data + begin, address, nbytes)
            begin += nbytes
    finally:
        runtime.synchronize()  # also after an error, because the memory is then freed
    return fetched


def read_word(runtime: Runtime, counter: Array) -> int:
    """Wait for the current stream, and return the integer in an array of one element."""
    return int(fetch(runtime, (runtime.address(counter), counter.nbytes)).view(counter.dtype)[0])
