"""`CupyRuntime`: CUDA through CuPy, with its memory pools, streams and arrays."""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from cupy.cuda import compiler
from numpy.typing import DTypeLike, NDArray

from sparsecomm.backends.cuda import _launch
from sparsecomm.backends.cuda.modules import OPTIONS, SOURCES
from sparsecomm.backends.cuda.runtime import PER_THREAD, Launch
from sparsecomm.errors import InvalidInputError
from sparsecomm.tensors.sparse import Array

_ANY_DIRECTION = 4  # cudaMemcpyDefault
_NO_CHANGE = nullcontext()
_LARGE = 1 << 20  # bytes of an array that comes from PyTorch's allocator; CuPy's takes less of the host's time


class CupyRuntime:
    """`sparsecomm.backends.cuda.runtime.Runtime` for the GPU with number ``device``."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.multiprocessors = int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])
        # The driver's function, since `cupy.cuda.Function` converts the arguments of each launch again.
        self._launch = ctypes.cast(ctypes.CDLL("libcuda.so.1").cuLaunchKernel, ctypes.c_void_p).value or 0
        self._kernels: dict[tuple[str, str, tuple[str, ...]], Any] = {}
        self._entered = _Entered()
        self._streams: dict[int, Any] = {}  # that CuPy did not create, by handle
        self._events: dict[int, Any] = {}
        self._of_graphs: list[Array] = []  # arrays that replays write to, even if nobody else refers to them

    def kernel(self, file: str, name: str, definitions: tuple[str, ...]) -> Any:
        key = file, name, definitions
        if key not in self._kernels:  # two threads may both compile it
            with cupy.cuda.Device(self.device):
                module = cupy.cuda.function.Module()
                module.load(_binary((SOURCES / "cuda" / file).read_text(), _options(definitions)))
                self._kernels[key] = module.get_function(name)
        return self._kernels[key]

    def launcher(self, launches: Sequence[Launch]) -> Callable[[tuple[int, ...]], None]:
        kernels = [(kernel.ptr, *sizes, tuple(arguments.values())) for kernel, *sizes, arguments in launches]
        launcher = _launch.Launcher(self._launch, kernels)

        def start(addresses: tuple[int, ...]) -> None:
            cupy.cuda.runtime.setDevice(self.device)  # gives a new thread its CUDA context
            if error := launcher.start(cupy.cuda.get_current_stream().ptr, addresses):
                raise cupy.cuda.driver.CUDADriverError(error)

        return start

    def empty(self, count: int, dtype: DTypeLike) -> Array:
        nbytes, memory, torch = count * np.dtype(dtype).itemsize, None, _torch()
        if cupy.cuda.runtime.getDevice() != self.device:
            with cupy.cuda.Device(self.device):
                return self.empty(count, dtype)
        capturing = self.capturing()
        # PyTorch keeps memory for a graph that it captures itself, but not for one of CuPy.
        if torch is not None and (torch.cuda.is_current_stream_capturing() if capturing else nbytes >= _LARGE):
            memory = _TorchMemory(torch, max(nbytes, 1), self.device).pointer()
        array: Array = cupy.ndarray((count,), dtype, memory)
        if capturing and memory is None:
            self._of_graphs.append(array)
        return array

    def address(self, array: Array) -> int:
        return int(array.data.ptr)  # type: ignore[attr-defined]

    def view(self, address: int, count: int, dtype: DTypeLike, owner: object) -> Array:
        if count == 0:
            return self.empty(0, dtype)
        nbytes = count * np.dtype(dtype).itemsize
        memory = cupy.cuda.UnownedMemory(address, nbytes, owner, self.device)
        array: Array = cupy.ndarray((count,), dtype, cupy.cuda.MemoryPointer(memory, 0))
        return array

    def clear(self, array: Array) -> None:
        cupy.cuda.runtime.memsetAsync(self.address(array), 0, array.nbytes, cupy.cuda.get_current_stream().ptr)

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        memory: NDArray[np.uint8] = np.ndarray((nbytes,), np.uint8, cupy.cuda.alloc_pinned_memory(max(nbytes, 1)))
        return memory

    def copy(self, to: int, source: int, nbytes: int) -> None:
        cupy.cuda.runtime.memcpyAsync(to, source, nbytes, _ANY_DIRECTION, cupy.cuda.get_current_stream().ptr)

    def record(self) -> _Event:
        return _Event()

    def capturing(self) -> bool:
        capturing = self._entered.capturing
        return bool(cupy.cuda.get_current_stream().is_capturing()) if capturing is None else capturing

    def stream(self) -> int:
        return cupy.cuda.get_current_stream().ptr or 1

    def new_stream(self) -> Any:
        with cupy.cuda.Device(self.device):
            return cupy.cuda.Stream(non_blocking=True)

    def enter(self, stream: Any) -> Any:
        device = _NO_CHANGE if cupy.cuda.runtime.getDevice() == self.device else cupy.cuda.Device(self.device)
        device.__enter__()
        entered = None
        try:
            previous, before = cupy.cuda.get_current_stream(), self._entered.capturing
            target = self._known(stream) if isinstance(stream, int) else stream
            capturing = bool((previous if target is None else target).is_capturing())
            torch = _torch() if target is None and not capturing else None
            if torch is not None and torch.cuda.is_current_stream_capturing():
                raise InvalidInputError(
                    "PyTorch's current stream is being captured into a CUDA graph, and CuPy's is not: make calls "
                    "without a tensor of PyTorch, such as merge_topk, before or after the graph"
                )
            if target is not None and target.ptr != previous.ptr:
                target.__enter__()
                entered = target
            self._entered.capturing = capturing
        except BaseException:
            device.__exit__(None, None, None)
            raise
        return device, previous, entered, before

    def leave(self, entered: Any, follow: bool) -> None:
        device, previous, stream, self._entered.capturing = entered
        try:
            if stream is not None:
                stream.__exit__(None, None, None)
                if follow:  # results are used on the previous stream
                    previous.wait_event(stream.record(self._event_of(stream)))
        finally:
            device.__exit__(None, None, None)

    def follow(self, event: Any) -> None:
        cupy.cuda.get_current_stream().wait_event(event.event)

    def synchronize(self) -> None:
        cupy.cuda.get_current_stream().synchronize()

    def _known(self, handle: int) -> Any:
        if handle not in self._streams:
            self._streams[handle] = _stream(handle, self.device)
        return self._streams[handle]

    def _event_of(self, stream: Any) -> Any:
        """Return an event to record on a stream, the same each time: a later record of another thread does no harm."""
        if stream.ptr == PER_THREAD:
            return cupy.cuda.Event(disable_timing=True)
        if stream.ptr not in self._events:
            self._events[stream.ptr] = cupy.cuda.Event(disable_timing=True)
        return self._events[stream.ptr]


class _Entered(threading.local):
    """Whether the stream that the thread has entered is being captured; ``None`` if it has entered none."""

    capturing: bool | None = None


def _torch() -> Any:
    """Return PyTorch if the program uses it on a GPU, else ``None``."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None


class _TorchMemory:
    """Memory of PyTorch's allocator for the current stream. Under `torch.cuda.graph`, the graph keeps it."""

    def __init__(self, torch: Any, nbytes: int, device: int) -> None:
        self._free: Any = torch.cuda.caching_allocator_delete
        self._nbytes, self._device = nbytes, device
        self._address = torch.cuda.caching_allocator_alloc(nbytes, device, cupy.cuda.get_current_stream().ptr)

    def pointer(self) -> Any:
        memory = cupy.cuda.UnownedMemory(self._address, self._nbytes, self, self._device)
        return cupy.cuda.MemoryPointer(memory, 0)

    def __del__(self) -> None:
        try:  # noqa: SIM105 # `suppress` takes longer
            self._free(self._address)
        except Exception:  # at interpreter exit, PyTorch may be gone
            pass


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
    if hasattr(cupy.cuda.Stream, "from_external"):  # where it exists, ExternalStream is deprecated
        with cupy.cuda.Device(device):
            return cupy.cuda.Stream.from_external(_ForeignStream(handle))
    return cupy.cuda.ExternalStream(handle, device)


class _ForeignStream:
    """A stream that CuPy did not create, as an object of the CUDA stream protocol."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def _binary(source: str, options: tuple[str, ...]) -> bytes:
    """Return the binary of a module for the current device, compiled or from CuPy's cache folder.

    `cupy.RawModule` is not used, because it adds ``-ftz=true``, which sets subnormal floats to zero.
    """
    versions = cupy.__version__, compiler._get_nvrtc_version(), cupy.cuda.Device().compute_capability
    key = hashlib.sha256(repr((source, options, versions)).encode()).hexdigest()
    folder = Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy/kernel_cache")
    path = folder / f"sparsecomm-{key}.cubin"
    with suppress(OSError):
        return path.read_bytes()
    binary: bytes = compiler.compile_using_nvrtc(source, options)[0]
    with suppress(OSError):  # a folder that cannot be written to: compile again next time
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(binary)
        os.replace(file.name, path)  # atomically: other processes may write the same file
    return binary


def _options(definitions: tuple[str, ...]) -> tuple[str, ...]:
    """Return compiler options, with a digest of all sources, so that the cache notices changes in included files."""
    digest = hashlib.sha256()
    for path in sorted([*SOURCES.glob("*.hpp"), *SOURCES.glob("cuda/*.cu*")]):
        digest.update(path.read_bytes())
    folders = f"-I{SOURCES / 'cuda'}", f"-I{SOURCES}"
    return (*OPTIONS, *folders, f"-DSOURCES_{digest.hexdigest()[:16]}", *(f"-D{d}" for d in definitions))
