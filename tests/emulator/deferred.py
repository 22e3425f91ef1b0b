"""A CUDA device on which work runs late: on streams, in any order that events allow, chosen by a seed."""

from __future__ import annotations

import ctypes
import gc
import math
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from greenlet import getcurrent, greenlet

from sparsecomm.backends.cuda.runtime import OnStream
from tests.emulator.arrays import NAME, ArrayLibrary, DeviceArray
from tests.emulator.memory import Block, Lease, pinned
from tests.emulator.runtime import POISON, EmulatedRuntime, EmulatorError
from tests.emulator.streams import PER_THREAD, Event, Stream, Streams
from tests.emulator.tensor import CudaTensor

__all__ = ["DeferredRuntime"]

_current_device: WeakKeyDictionary[greenlet, DeferredRuntime] = WeakKeyDictionary()  # by thread; any device if missing


class DeferredRuntime(EmulatedRuntime):
    """`sparsecomm.backends.cuda.runtime.Runtime` whose work does not run before the host waits for it.

    Freed device memory is reused at once by the next array of the stream that was current at its allocation. The first
    work on an array fills it with poison; pinned memory is poisoned at once.

    Each thread has its own current stream, and a simulated rank counts as a thread. As with CuPy, work goes to the
    current stream of the thread's current device, which may be another device; `enter` makes this device current.

    Attributes:
        operations: number of operations enqueued, without those that poison memory.
    """

    def __init__(self, *, seed: int = 0, device: int = 0, **settings: Any) -> None:
        super().__init__(seed=seed, **settings)
        self.device, self.operations = device, 0
        self.streams = Streams(seed)
        self.library = sys.modules[NAME] = ArrayLibrary(self)
        self._current: WeakKeyDictionary[greenlet, Stream] = WeakKeyDictionary()
        self._per_thread: WeakKeyDictionary[greenlet, Stream] = WeakKeyDictionary()
        self._of_graphs: list[Lease] = []  # replays write to these even after their arrays are gone
        self._last: deque[Block] = deque(maxlen=64)  # `check` looks at their canaries

    # -- streams ------------------------------------------------------------------------------------------------------

    @property
    def current(self) -> Stream:
        return _current_device.get(getcurrent(), self).own_stream

    @property
    def own_stream(self) -> Stream:
        """The thread's current stream on this device, even while another device is current."""
        return self._current.get(getcurrent(), self.streams.legacy)

    def enqueue(self, work: Callable[[], object] | None, *after: Event) -> None:
        self.operations += 1
        self.current.streams.give(self.current, work, after)

    def stream(self) -> int:
        return self.current.handle

    def new_stream(self) -> Stream:
        return self.streams.new()

    def on_stream(self, stream: int | Stream | None) -> OnStream:
        return OnStream(self, stream)

    def enter(self, stream: int | Stream | None) -> tuple[DeferredRuntime | None, Stream]:
        sys.modules[NAME] = self.library
        device = _current_device.get(getcurrent())
        _current_device[getcurrent()] = self
        return device, self.make_current(self.current if stream is None else stream)

    def leave(self, entered: tuple[DeferredRuntime | None, Stream], follow: bool) -> None:
        device, before = entered
        left = self.make_current(before)
        if follow and left is not before:
            self.enqueue(None, Event(left))
        del _current_device[getcurrent()]
        if device is not None:
            _current_device[getcurrent()] = device

    def make_current(self, stream: int | Stream) -> Stream:
        """Make a stream current on this device, and return the one before it."""
        before = self.own_stream
        self._current[getcurrent()] = self._of(stream)
        return before

    def follow(self, event: Event) -> None:
        self.enqueue(None, event)

    def record(self) -> Event:
        return Event(self.current)

    def synchronize(self) -> None:
        self.record().wait()

    def capturing(self) -> bool:
        return self.current.graph is not None

    @contextmanager
    def capture(self, stream: Stream) -> Iterator[list[Callable[[], object]]]:
        """Capture the work of a stream into a graph for `replay`."""
        graph = stream.graph = []
        try:
            yield graph
        finally:
            stream.graph = None

    def replay(self, graph: list[Callable[[], object]], stream: Stream) -> None:
        for work in graph:
            self.streams.give(stream, work)

    def _of(self, stream: int | Stream) -> Stream:
        if isinstance(stream, Stream):
            return stream
        if stream != PER_THREAD:
            return self.streams.of(stream)
        thread = getcurrent()
        if thread not in self._per_thread:
            self._per_thread[thread] = self.streams.new(PER_THREAD, blocking=True)
        return self._per_thread[thread]

    @contextmanager
    def counted(self) -> Iterator[list[int]]:
        """Yield a list that receives the numbers of operations and waits, without those of garbage collection."""
        gc.collect()
        gc.disable()
        before, counts = (self.operations, self.streams.waits), list[int]()
        try:
            yield counts
        finally:
            gc.enable()
            counts += [self.operations - before[0], self.streams.waits - before[1]]

    # -- memory -------------------------------------------------------------------------------------------------------

    def empty(self, shape: Any, dtype: Any) -> DeviceArray:
        shape, dtype = (shape if isinstance(shape, tuple) else (shape,)), np.dtype(dtype)
        lease = Lease(self.own_stream.pool, math.prod(shape) * dtype.itemsize)
        block, nbytes, number = lease.block, lease.nbytes, lease.number
        self.streams.give(self.own_stream, lambda: block.poison(nbytes, number))
        self._last.append(block)
        if self.own_stream.graph is not None:
            self._of_graphs.append(lease)
        return DeviceArray(self, lease.memory.view(dtype).reshape(shape), lease)

    def pinned(self, nbytes: int) -> np.ndarray:
        return pinned(self.streams.pinned, nbytes)

    def address(self, array: DeviceArray | np.ndarray) -> int:
        if isinstance(array, DeviceArray):
            return array.raw.ctypes.data
        self.streams.hold(array)
        return array.ctypes.data

    def view(self, address: int, count: int, dtype: Any, owner: object) -> DeviceArray:
        if count == 0:
            return self.empty(0, dtype)
        nbytes = count * np.dtype(dtype).itemsize
        raw = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype)
        return DeviceArray(self, raw, owner)

    def put(self, array: np.ndarray) -> CudaTensor:
        """Return a host array as a tensor of the device, whose elements the current stream writes later.

        No work on the array may be in flight.
        """
        elements = array.copy()
        array.reshape(-1).view(np.uint8).fill(POISON)
        self.enqueue(lambda: np.copyto(array, elements))
        return CudaTensor(array, device=self.device)

    # -- work ---------------------------------------------------------------------------------------------------------

    def start(self, run: Callable[[], None]) -> None:
        if self.current is not self.own_stream:
            raise EmulatorError("a kernel is started while another device is current")
        self.enqueue(run)

    def clear(self, array: DeviceArray) -> None:
        raw = array.raw.view(np.uint8)
        self.enqueue(lambda: raw.fill(0))

    def copy(self, to: int, source: int, nbytes: int) -> None:
        self.enqueue(lambda: ctypes.memmove(to, source, nbytes))

    def check(self) -> None:
        for block in self._last:
            block.check()
