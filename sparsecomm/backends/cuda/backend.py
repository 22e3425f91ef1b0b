"""The arithmetic of a CUDA device: sequences of the kernels in ``kernels/cuda``.

Nothing here waits for the device, but `CountedVector` when its number of entries is asked for, and `threshold`,
`well_formed` and packing, whose answers the host needs. Grids come from bounds that the host knows; numbers of entries
stay in device memory. After a first call of the same sizes, which compiles and allocates, a sequence can be captured
into a CUDA graph.
"""

from __future__ import annotations

from functools import cache

from sparsecomm.backends.cuda.context import ExecutionContext
from sparsecomm.backends.cuda.dense import DenseArithmetic
from sparsecomm.backends.cuda.memory import DeviceMemory, StagedMemory
from sparsecomm.backends.cuda.packing import Packing
from sparsecomm.backends.cuda.runtime import Event, OnStream, Runtime
from sparsecomm.errors import InvalidInputError
from sparsecomm.hints import pip_install
from sparsecomm.tensors.interop import Tensor
from sparsecomm.tensors.sparse import Array
from sparsecomm.transport.memory import MessageMemory

__all__ = ["CudaBackend", "CudaTimeline", "of"]


class CudaBackend(DenseArithmetic, Packing):
    """`sparsecomm.backends.base.Backend` on one device and its current stream, which is its own execution context."""

    def on_stream(self, x: Tensor | None) -> OnStream:
        return OnStream(self.runtime, x.stream if x else None)

    def side_stream(self) -> OnStream:
        return _Aside(self, self.runtime.record())

    def timeline(self) -> CudaTimeline:
        return CudaTimeline(self.runtime)

    def memory(self, direct: bool) -> MessageMemory:
        if self.runtime.capturing():
            raise InvalidInputError(
                "x is on a stream that is being captured into a CUDA graph; expected one on which work runs: a call "
                "that talks to other ranks cannot be replayed; call it before or after the graph"
            )
        return (DeviceMemory if direct else StagedMemory)(self.runtime, self.in_use)

    def memory_of(self, tensor: Tensor) -> Array:
        return self.runtime.view(tensor.pointer, tensor.size, tensor.dtype.view, tensor.owner)


class _Aside(OnStream):
    """On the context's own stream: from an event on, and until all of it is done."""

    def __init__(self, context: ExecutionContext, after: Event) -> None:
        super().__init__(context.runtime, None)
        self._context, self._after = context, after

    def __enter__(self) -> None:
        self._stream = self._context.own_stream()
        super().__enter__()

    def begin(self) -> None:
        self._runtime.follow(self._after)

    def end(self) -> None:
        self._runtime.synchronize()


class CudaTimeline:
    """A `sparsecomm.backends.base.Timeline`: an event stands where its work ends so far."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.last: Event | None = None

    def on_stream(self, x: Tensor | None) -> OnStream:
        return _InTurn(self, x.stream if x else None)

    def wait(self) -> None:
        if self.last is not None:
            self.last.wait()


class _InTurn(OnStream):
    """On any stream, after all that a timeline has."""

    def __init__(self, timeline: CudaTimeline, stream: int | None) -> None:
        super().__init__(timeline.runtime, stream)
        self._timeline = timeline

    def begin(self) -> None:
        if self._timeline.last is not None:
            self._runtime.follow(self._timeline.last)

    def end(self) -> None:
        self._timeline.last = self._runtime.record()


def of(index: int) -> CudaBackend:
    """Return a new backend of device number ``index``.

    Raises:
        InvalidInputError: CuPy is not installed, does not find the driver, or the driver is too old for it.
    """
    return CudaBackend(_runtime(index))


@cache  # for all threads: what it keeps, compiled kernels, does not change once it is made
def _runtime(index: int) -> Runtime:
    try:
        import cupy
    except ImportError as error:
        raise InvalidInputError(
            f"cuda:{index}: CuPy, which compiles and starts the CUDA kernels, cannot be imported ({error}): "
            f"{pip_install('cuda13x')} (or [cuda12x], to match the driver), or keep tensors in host memory: x.cpu()"
        ) from error
    try:
        count = cupy.cuda.runtime.getDeviceCount()
        if index >= count:
            raise InvalidInputError(
                f"cuda:{index}: this process sees {count} device(s); set CUDA_VISIBLE_DEVICES, or take another device"
            )
        from sparsecomm.backends.cuda.cupy_runtime import CupyRuntime

        return CupyRuntime(index)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise InvalidInputError(
            f"cuda:{index}: CuPy {cupy.__version__} cannot use it ({error}); expected a GPU, and a driver for CUDA "
            f"{cupy.cuda.runtime.runtimeGetVersion() // 1000} or newer: update it, or install the CuPy for its CUDA "
            "(cupy-cuda12x, cupy-cuda13x)"
        ) from error
