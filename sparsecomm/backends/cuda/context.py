"""Sequences of kernels: how they are prepared and started, and the memory that they work in."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from sparsecomm.backends.base import Done
from sparsecomm.backends.cuda.memory import MemoryInUse
from sparsecomm.backends.cuda.runtime import PER_THREAD, Event, Kernel, Runtime, Scalar, Stream
from sparsecomm.backends.cuda.tuning import TUNING, Tuning
from sparsecomm.backends.cuda.workspace import Workspace, structure_definitions
from sparsecomm.interrupts import run_all
from sparsecomm.tensors.arrays import ArrayDType
from sparsecomm.tensors.dtypes import FLOAT32, FLOAT64, DType
from sparsecomm.tensors.interop import Device, Tensor
from sparsecomm.tensors.sparse import Array, index_dtype

__all__ = ["Argument", "ExecutionContext", "Launch", "aligned", "ceil_div", "dtype_of"]

# Of a kernel: an array or a tensor stands for its address, `None` for a null pointer, an int for u64.
Argument = Array | Tensor | Scalar | int | None


class Launch(NamedTuple):
    """A kernel, ready to be started."""

    kernel: Kernel
    blocks: int
    threads: int
    arguments: dict[str, Scalar]


class ExecutionContext:
    """The context of calls on a device, besides their arguments: CUDA, sizes, scratch memory, a stream of their own.

    It belongs to one owner, and serves one thread at a time. Scratch memory is per stream, since what a stream was
    given may still run.

    Attributes:
        runtime: CUDA.
        tuning: the sizes.
        in_use: the host memory that streams still work with.
    """

    def __init__(self, runtime: Runtime, tuning: Tuning = TUNING) -> None:
        self.runtime, self.tuning = runtime, tuning
        self.in_use = MemoryInUse()
        self._definitions = tuning.definitions + structure_definitions(tuning)
        self._workspaces: dict[tuple[int, int], Workspace] = {}
        self._side: Stream | None = None

    @contextmanager
    def side_stream(self, after: Event) -> Iterator[None]:
        """Make a stream current that is this context's own, from ``after`` on. On leaving wait for it."""
        if self._side is None:
            self._side = self.runtime.new_stream()
        with self.runtime.on_stream(self._side):
            self.runtime.follow(after)
            try:
                yield
            finally:
                self.runtime.synchronize()

    def workspace(self) -> Workspace:
        """Return the scratch memory of the current stream."""
        handle = self.runtime.stream()
        stream = handle, threading.get_ident() if handle == PER_THREAD else 0
        if stream not in self._workspaces:
            self._workspaces[stream] = Workspace(self.runtime, self.tuning)
        return self._workspaces[stream]

    def entries(self, count: int, size: int, value: ArrayDType) -> tuple[Array, Array]:
        """Return new arrays for the indices and values of ``count`` entries of ``size`` elements, not initialised."""
        return self.runtime.empty(count, index_dtype(size)), self.runtime.empty(count, value)

    def tensor(self, array: Array, shape: tuple[int, ...] | None = None) -> Tensor:
        """Return a flat array of float32 or float64 as a tensor. It shares memory."""
        address, device = self.runtime.address(array), Device("cuda", self.runtime.device)
        return Tensor(address, len(array), shape or array.shape, dtype_of(array), device, False, array)

    def kernel(self, file: str, name: str, definitions: tuple[str, ...]) -> Kernel:
        """Return a kernel of ``kernels/cuda/<file>``, compiled for these types and the tuning's sizes."""
        return self.runtime.kernel(file, name, definitions + self._definitions)

    def prepare(self, kernel: Kernel, blocks: int, threads: int, **arguments: Argument) -> Launch:
        """Return a launch. ``arguments`` have the names, and the order, of the kernel's parameters."""
        return Launch(kernel, blocks, threads, {name: self._scalar(value) for name, value in arguments.items()})

    def start(self, *launches: Launch, done: Done = None, result: object = None) -> None:
        """Start kernels on the current stream, all or, if a signal comes before, none.

        What can fail, compiling and allocating, was done to prepare them. ``result`` is appended to ``done``.
        """
        bind = self.runtime.bind
        run_all([bind(it.kernel, it.blocks, it.threads, it.arguments) for it in launches], done, result)

    def zeros(self, count: int, dtype: Any) -> Array:
        """Return a new flat array of zeros."""
        made = self.runtime.empty(count, dtype)
        self.runtime.clear(made)
        return made

    def _scalar(self, argument: Argument) -> Scalar:
        if isinstance(argument, np.generic):
            scalar: Scalar = argument
        elif isinstance(argument, bool):
            scalar = np.bool_(argument)
        elif isinstance(argument, int):
            scalar = np.uint64(argument)
        elif isinstance(argument, Tensor):
            scalar = np.uint64(argument.pointer)
        else:
            scalar = np.uint64(0 if argument is None else self.runtime.address(argument))
        return scalar


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def aligned(*tensors: Tensor | None) -> bool:
    """Return whether all are at multiples of 16 bytes."""
    return all(tensor is None or tensor.pointer % 16 == 0 for tensor in tensors)


def dtype_of(array: Array) -> DType:
    """Return the type of an array of float32 or float64."""
    return FLOAT64 if array.dtype.itemsize == 8 else FLOAT32
