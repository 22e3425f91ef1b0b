"""CUDA by CuPy: its compiler cache, memory pools, streams and arrays.

What is called here for every launch, copy and allocation is compiled in CuPy, so that no signal handler runs within it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import cupy
import numpy as np
from numpy.typing import DTypeLike, NDArray

from sparsecomm.backends.cuda.modules import OPTIONS, SOURCES
from sparsecomm.backends.cuda.runtime import PER_THREAD, Scalar
from sparsecomm.tensors.sparse import Array

__all__ = ["CupyRuntime"]

_ANY_DIRECTION = 4  # cudaMemcpyDefault


class CupyRuntime:
    """`sparsecomm.backends.cuda.runtime.Runtime` for the GPU with number ``device``."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.multiprocessors = int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])
        self._kernels: dict[tuple[str, str, tuple[str, ...]], Any] = {}

    def kernel(self, file: str, name: str, definitions: tuple[str, ...]) -> Any:
        key = file, name, definitions
        if key not in self._kernels:  # two threads may come here at once: then they make the same twice
            with cupy.cuda.Device(self.device):
                module = cupy.RawModule(code=(SOURCES / "cuda" / file).read_text(), options=_options(definitions))
                self._kernels[key] = module.get_function(name).kernel
        return self._kernels[key]

    def launch(self, kernel: Any, blocks: int, threads: int, arguments: Mapping[str, Scalar]) -> None:
        kernel((blocks,), (threads,), tuple(arguments.values()))

    def empty(self, count: int, dtype: DTypeLike) -> Array:
        with cupy.cuda.Device(self.device):
            made: Array = cupy.ndarray((count,), dtype)
            return made

    def address(self, array: Array) -> int:
        return int(array.data.ptr)  # type: ignore[attr-defined]

    def view(self, address: int, count: int, dtype: DTypeLike, owner: object) -> Array:
        if count == 0:
            return self.empty(0, dtype)
        nbytes = count * np.dtype(dtype).itemsize
        memory = cupy.cuda.UnownedMemory(address, nbytes, owner, self.device)
        made: Array = cupy.ndarray((count,), dtype, cupy.cuda.MemoryPointer(memory, 0))
        return made

    def clear(self, array: Array) -> None:
        cupy.cuda.runtime.memsetAsync(self.address(array), 0, array.nbytes, cupy.cuda.get_current_stream().ptr)

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        made: NDArray[np.uint8] = np.ndarray((nbytes,), np.uint8, cupy.cuda.alloc_pinned_memory(max(nbytes, 1)))
        return made

    def copy(self, to: int, source: int, nbytes: int) -> None:
        cupy.cuda.runtime.memcpyAsync(to, source, nbytes, _ANY_DIRECTION, cupy.cuda.get_current_stream().ptr)

    def record(self) -> _Event:
        return _Event()

    def capturing(self) -> bool:
        return bool(cupy.cuda.get_current_stream().is_capturing())

    def stream(self) -> int:
        return cupy.cuda.get_current_stream().ptr or 1

    def new_stream(self) -> Any:
        with cupy.cuda.Device(self.device):
            return cupy.cuda.Stream(non_blocking=True)

    def enter(self, stream: Any) -> Any:
        device, ours = cupy.cuda.Device(self.device), None
        device.__enter__()
        try:
            users = cupy.cuda.get_current_stream()
            wanted = _stream(stream, self.device) if isinstance(stream, int) else stream
            if wanted is not None and wanted.ptr != users.ptr:
                wanted.__enter__()
                ours = wanted
        except BaseException:
            device.__exit__(None, None, None)
            raise
        return device, users, ours

    def leave(self, entered: Any) -> None:
        device, users, ours = entered
        try:
            if ours is not None:
                ours.__exit__(None, None, None)
                users.wait_event(ours.record())  # results are CuPy arrays: whoever uses them there comes after us
        finally:
            device.__exit__(None, None, None)

    def follow(self, event: Any) -> None:
        cupy.cuda.get_current_stream().wait_event(event.event)

    def synchronize(self) -> None:
        cupy.cuda.get_current_stream().synchronize()


class _Event:
    def __init__(self) -> None:
        self.event = cupy.cuda.get_current_stream().record(cupy.cuda.Event(disable_timing=True))

    def wait(self) -> None:
        self.event.synchronize()

    def done(self) -> bool:
        return bool(self.event.done)


def _stream(handle: int, device: int) -> Any:
    if handle == 1:
        return cupy.cuda.Stream.null
    if handle == PER_THREAD:
        return cupy.cuda.Stream.ptds
    return cupy.cuda.ExternalStream(handle, device)


def _options(definitions: tuple[str, ...]) -> tuple[str, ...]:
    """Return options, with a digest of all sources: CuPy's cache on disk knows a module by its own text and options."""
    digest = hashlib.sha256()
    for path in sorted([*SOURCES.glob("*.hpp"), *SOURCES.glob("cuda/*.cu*")]):
        digest.update(path.read_bytes())
    folders = f"-I{SOURCES / 'cuda'}", f"-I{SOURCES}"
    return (*OPTIONS, *folders, f"-DSOURCES_{digest.hexdigest()[:16]}", *(f"-D{d}" for d in definitions))
