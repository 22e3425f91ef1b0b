"""CUDA by CuPy: its compiler cache, memory pools, streams and arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import cupy
import cupyx
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

    def bind(self, kernel: Any, blocks: int, threads: int, arguments: Mapping[str, Scalar]) -> Callable[[], object]:
        return partial(kernel, (blocks,), (threads,), tuple(arguments.values()))

    def empty(self, count: int, dtype: DTypeLike) -> Array:
        with cupy.cuda.Device(self.device):
            made: Array = cupy.empty(count, dtype)
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
        made: NDArray[np.uint8] = cupyx.empty_pinned(nbytes, np.uint8)
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

    @contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        with cupy.cuda.Device(self.device):
            users = cupy.cuda.get_current_stream()
            ours = _stream(stream, self.device) if isinstance(stream, int) else stream
            if ours is None or ours.ptr == users.ptr:
                yield
                return
            try:
                with ours:
                    yield
            finally:
                users.wait_event(ours.record())  # results are CuPy arrays: whoever uses them there comes after us

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
