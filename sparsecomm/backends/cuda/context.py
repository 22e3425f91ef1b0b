"""`ExecutionContext`, which launches kernels and keeps their scratch memory; and the vectors that kernels use."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from sparsecomm.backends.base import Backend
from sparsecomm.backends.cuda.memory import MemoryInUse
from sparsecomm.backends.cuda.modules import TUNING, Tuning, structure_definitions, structures
from sparsecomm.backends.cuda.runtime import (
    PER_THREAD,
    Event,
    Kernel,
    Launch,
    Moved,
    OnStream,
    Runtime,
    Scalar,
    Stream,
    event_after,
    read_word,
    refuse_capture,
)
from sparsecomm.tensors.arrays import ArrayDType
from sparsecomm.tensors.dtypes import FLOAT32, FLOAT64, DType
from sparsecomm.tensors.interop import Device, Tensor
from sparsecomm.tensors.sparse import Array, SparseVector, index_dtype

# A kernel's argument. Arrays and tensors are passed as addresses, `None` as a null pointer, an int as u64.
Argument = Array | Tensor | Scalar | int | None
Arguments = dict[str, Argument]
_COUNTER_BYTES = 256  # of the counter of a `CountedVector`, so that values and indices are aligned
_MAX_PLANS = 256  # of a stream


class Workspace:
    """Memory of one stream that is kept between calls: the state that kernels share, which is zero between calls.

    ``plans`` start the launches of calls that differ only in the addresses of their arguments.
    """

    def __init__(self, runtime: Runtime, tuning: Tuning) -> None:
        self._runtime = runtime
        self.plans: dict[Hashable, Callable[[tuple[int, ...]], None]] = {}
        self._structures = structures(tuning)
        self._rooms: dict[str, Array] = {}
        self._outgrown: list[Array] = []  # kept, because a captured graph may still use them

    def state(self, name: str, more_bytes: int = 0) -> int:
        """Return the address of one of the `structures`, followed by ``more_bytes``."""
        nbytes = self._structures[name].itemsize + more_bytes
        array = self._rooms.get(name)
        if array is None or len(array) < nbytes:
            # During a capture, `clear` only adds to the graph: this memory is not zero for calls outside of the graph.
            array = self._grown(f"{name} of graphs" if self._runtime.capturing() else name, nbytes)
            self._runtime.clear(array)
        return self._runtime.address(array)

    def look_back(self, tiles: int) -> int:
        """Return the address of a look-back's state."""
        return self.state("LOOK_BACK", 8 * tiles)

    def room(self, nbytes: int) -> Array:
        """Return uninitialised memory for a call. The workspace keeps it only if the call is captured into a graph."""
        return self._grown("room", nbytes) if self._runtime.capturing() else self._runtime.empty(nbytes, np.uint8)

    def _grown(self, name: str, nbytes: int) -> Array:
        array = self._rooms.get(name)
        if array is None or len(array) < nbytes:
            if array is not None:
                self._outgrown.append(array)
            nbytes = max(nbytes, 2 * len(array) if array is not None else 0)
            self._rooms[name] = array = self._runtime.empty(nbytes, np.uint8)
        return array


class _ThreadWorkspaces(threading.local):
    def __init__(self) -> None:
        self.workspaces: dict[int, Workspace] = {}


class ExecutionContext(Backend):
    """The kernels of one backend, their sizes (``tuning``), and scratch memory per stream.

    ``in_use`` keeps the host memory that streams still use.
    """

    def __init__(self, runtime: Runtime, tuning: Tuning = TUNING, **sizes: int) -> None:
        """``sizes`` override those of ``tuning``."""
        self.runtime, self.tuning = runtime, replace(tuning, **sizes)
        self.in_use = MemoryInUse()
        self._definitions = self.tuning.definitions + structure_definitions(self.tuning)
        self._workspaces, self._per_thread = dict[int, Workspace](), _ThreadWorkspaces()  # by the handle of the stream
        self._kernels: dict[tuple[str, str, tuple[str, ...]], Kernel] = {}
        self._side: Stream | None = None

    def workspace(self) -> Workspace:
        """Return the scratch memory of the current stream."""
        stream = self.runtime.stream()
        # PER_THREAD is a different stream in every thread. Thread ids would not distinguish these, because they are
        # reused while work may still run.
        workspaces = self._per_thread.workspaces if stream == PER_THREAD else self._workspaces
        if stream not in workspaces:
            workspaces[stream] = Workspace(self.runtime, self.tuning)
        return workspaces[stream]

    def room(self, count: int, size: int, value: ArrayDType) -> tuple[Array, Array]:
        """Return uninitialised arrays for the indices and values of ``count`` entries of ``size`` elements."""
        return self.runtime.empty(count, index_dtype(size)), self.runtime.empty(count, value)

    def zeros(self, count: int, dtype: DTypeLike) -> Array:
        array = self.runtime.empty(count, dtype)
        self.runtime.clear(array)
        return array

    def as_tensor(self, array: Array, shape: tuple[int, ...], dtype: DType | None = None) -> Tensor:
        address, device = self.runtime.address(array), Device("cuda", self.runtime.device)
        return Tensor(address, len(array), shape, dtype or dtype_of(array), device, False, array)

    def prepare(
        self, file: str, name: str, types: tuple[str, ...], blocks: int, threads: int, arguments: Arguments
    ) -> Launch:
        """Return a launch of a kernel compiled for ``types``. ``arguments`` are in the order of its parameters."""
        key = file, name, types
        if (kernel := self._kernels.get(key)) is None:
            kernel = self._kernels[key] = self.runtime.kernel(file, name, types + self._definitions)
        return Launch(kernel, blocks, threads, {name: self._scalar(value) for name, value in arguments.items()})

    def start(self, *launches: Launch, writes: Sequence[CountedVector] = ()) -> None:
        """Start kernels that write vectors, on the current stream.

        `prepare` has done the steps that can fail: compiling and allocating.
        """
        self.runtime.launcher(launches)(())
        if writes:
            written = event_after(self.runtime)
            for vector in writes:
                vector.written = written

    def start_plan(
        self,
        key: Hashable,
        memory: Sequence[Tensor | Array | None],
        launches: Callable[[], Sequence[Launch]],
        writes: Sequence[CountedVector],
    ) -> None:
        """Start ``launches``, which depend only on ``key`` and on the addresses of ``memory``.

        They are prepared once for each stream. Later calls only replace the addresses.
        """
        plans = self.workspace().plans
        if self.runtime.capturing():  # the state of the kernels may belong to the graph
            self.start(*launches(), writes=writes)
            return
        addresses = tuple(map(self._address, memory))
        if (plan := plans.get(key)) is None:
            if len(plans) >= _MAX_PLANS:
                plans.clear()
            blocks = list(zip(addresses, (0 if block is None else block.nbytes for block in memory), strict=True))
            plan = plans[key] = self.runtime.launcher([_moved(launch, blocks) for launch in launches()])
        plan(addresses)
        written = self.runtime.record()
        for vector in writes:
            vector.written = written

    def spread(self, count: int, threads: int) -> int:
        """Return the number of blocks for about one thread per element, but at most 16 per multiprocessor."""
        return min(ceil_div(count, threads), 16 * self.runtime.multiprocessors)

    def counted(self, count: int, value: ArrayDType, size: int, shape: tuple[int, ...]) -> CountedVector:
        """Return room for ``count`` entries of ``size`` elements; a kernel writes their number."""
        length = _COUNTER_BYTES * ceil_div(count * value.itemsize, _COUNTER_BYTES)
        nbytes = _COUNTER_BYTES + length + count * index_dtype(size).itemsize
        return CountedVector(self.runtime, self.runtime.empty(nbytes, np.uint8), count, value, size, shape)

    def _scalar(self, argument: Argument) -> Scalar | int:
        return argument if isinstance(argument, (int, np.generic)) else self._address(argument)

    def _address(self, memory: Tensor | Array | None) -> int:
        if isinstance(memory, Tensor):
            return memory.pointer
        return 0 if memory is None else self.runtime.address(memory)


class CountedVector(SparseVector):
    """A `SparseVector` whose number of entries is in device memory.

    The first access to ``nnz``, ``indices`` or ``values`` waits for the number, on any thread, device and stream.

    Attributes:
        memory: bytes of the counter, the values and the indices.
        room: arrays for indices and values, which may be longer than the number of entries.
        counter: array of one uint64, the number of entries.
        host_count: the same number, once the host knows it; else None.
        written: the event after the kernels that write the vector; ``None`` if each replay of a graph starts them.
    """

    __slots__ = ("_capacity", "_room", "_runtime", "_value", "host_count", "memory", "written")

    def __init__(
        self, runtime: Runtime, memory: Array, capacity: int, value: ArrayDType, size: int, shape: tuple[int, ...]
    ) -> None:
        """Use `ExecutionContext.counted`."""
        self._runtime, self.memory, self._capacity, self._value = runtime, memory, capacity, value
        self._room: tuple[Array, Array] | None = None
        self.host_count: int | None = None
        self.written: Event | None = None
        self.size, self.shape = size, shape

    @property
    def counter(self) -> Array:
        return self.memory[:8].view(np.uint64)

    @property
    def room(self) -> tuple[Array, Array]:
        if self._room is None:  # on first use, because making arrays would delay kernels
            index, value = index_dtype(self.size), self._value
            begin = len(self.memory) - self._capacity * index.itemsize
            values = self.memory[_COUNTER_BYTES:][: self._capacity * value.itemsize]
            self._room = self.memory[begin:].view(index), values.view(value)
        return self._room

    @property
    def nnz(self) -> int:
        if self.host_count is not None:
            return self.host_count
        with OnStream(self._runtime, None):
            refuse_capture(self._runtime, "a wait of the host for nnz")
            if self.written is None:  # the next replay may change it
                return read_word(self._runtime, self.counter)
            self.written.wait()
            self.host_count = read_word(self._runtime, self.counter)
            return self.host_count

    @property
    def indices(self) -> Array:  # type: ignore[override]
        return self.room[0][: self.nnz]

    @property
    def values(self) -> Array:  # type: ignore[override]
        return self.room[1][: self.nnz]

    @property
    def _like(self) -> Array:
        return self.room[1]

    def with_values(self, values: Array) -> CountedVector:
        """Return a vector with the same indices, and ``values`` that earlier work of the current stream writes."""
        other = CountedVector(self._runtime, self.memory, self._capacity, self._value, self.size, self.shape)
        other._room = self.room[0], values
        other.host_count, other.written = self.host_count, event_after(self._runtime)
        return other


class Operand(NamedTuple):
    """A sparse vector as arguments of a kernel. ``device_count``, if not None, overrides ``host_count``."""

    indices: Array
    values: Array
    max_count: int
    host_count: int
    device_count: Array | None

    @classmethod
    def of(cls, entries: SparseVector) -> Operand:
        if isinstance(entries, CountedVector) and entries.host_count is None:
            indices, values = entries.room
            return cls(indices, values, len(indices), 0, entries.counter)
        return cls(entries.indices, entries.values, entries.nnz, entries.nnz, None)

    def arguments(self, prefix: str = "") -> Arguments:
        names = "indices", "values", "host_count", "device_count"
        values = self.indices, self.values, self.host_count, self.device_count
        return {prefix + name: argument for name, argument in zip(names, values, strict=True)}


def _moved(launch: Launch, blocks: Sequence[tuple[int, int]]) -> Launch:
    """Replace addresses in ``blocks`` (address, length) by `Moved`. Other ints are smaller than any address."""
    arguments = launch.arguments.copy()
    for name, argument in arguments.items():
        for number, (address, nbytes) in enumerate(blocks):
            if isinstance(argument, int) and address <= argument < address + nbytes:
                arguments[name] = Moved(number, argument - address)
    return launch._replace(arguments=arguments)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def dtype_of(array: Array) -> DType:
    return FLOAT64 if array.dtype.itemsize == 8 else FLOAT32
