"""The arithmetic of a CUDA device: sequences of the kernels in ``kernels/cuda``.

Nothing here waits for the device, but `CountedVector` when its number of entries is asked for, and `threshold`,
`well_formed` and packing, whose answers the host needs. Grids come from bounds that the host knows; numbers of entries
stay in device memory. After a first call of the same sizes, which compiles and allocates, a sequence can be captured
into a CUDA graph.
"""

from __future__ import annotations

from functools import cache

from sparsecomm.backends.cuda.dense import DenseArithmetic
from sparsecomm.backends.cuda.memory import DeviceMemory, StagedMemory
from sparsecomm.backends.cuda.packing import Packing
from sparsecomm.backends.cuda.runtime import Event, OnStream, Runtime
from sparsecomm.errors import InvalidInputError, pip_install
from sparsecomm.tensors.interop import Tensor
from sparsecomm.tensors.sparse import Array
from sparsecomm.transport.base import MessageMemory

__all__ = ["CudaBackend", "CudaTimeline", "of"]


class CudaBackend(DenseArithmetic, Packing):
    """`sparsecomm.backends.base.Backend` on one device and its current stream, which is its own execution context."""

    def on_stream(self, x: Tensor | None) -> OnStream:
        return OnStream(self.runtime, x.stream if x else None)

    def side_stream(self) -> OnStream:
        after = self.runtime.record()
        return OnStream(self.runtime, self.own_stream(), lambda: self.runtime.follow(after), self.runtime.synchronize)

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


class CudaTimeline:
    """A `sparsecomm.backends.base.Timeline`: an event stands where its work ends so far."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.last: Event | None = None

    def on_stream(self, x: Tensor | None) -> OnStream:
        return OnStream(self.runtime, x.stream if x else None, self._follow, self._advance)

    def wait(self) -> None:
        if self.last is not None:
            self.last.wait()

    def _follow(self) -> None:
        if self.last is not None:
            self.runtime.follow(self.last)

    def _advance(self) -> None:
        self.last = self.runtime.record()


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
