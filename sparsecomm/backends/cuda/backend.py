"""`CudaBackend`: the backend of a CUDA device, which starts the kernels in ``kernels/cuda``.

The host waits for the device only in `threshold`, `well_formed`, packing, `wait_for`, `sums_of_squares`, `adamw`, and
when it asks a `CountedVector` for its number of entries. All other work can be captured into a CUDA graph, after a
first call of the same sizes, which compiles and allocates.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from sparsecomm.backends import default_float_mode
from sparsecomm.backends.base import Backend
from sparsecomm.backends.cuda.bucket import BucketWork
from sparsecomm.backends.cuda.context import Arguments, CountedVector, Operand, ceil_div, dtype_of
from sparsecomm.backends.cuda.memory import DeviceMemory, StagedMemory
from sparsecomm.backends.cuda.modules import dense_definitions
from sparsecomm.backends.cuda.packing import Packing
from sparsecomm.backends.cuda.runtime import Event, OnStream, Runtime, read_word, refuse_capture
from sparsecomm.backends.cuda.selection import Selection
from sparsecomm.errors import InvalidInputError, pip_install
from sparsecomm.tensors.interop import Tensor
from sparsecomm.tensors.sparse import INT64_SIZE, Array, DenseSum, SparseVector
from sparsecomm.transport.base import MessageMemory


class CudaBackend(Selection, Packing, BucketWork):
    """`sparsecomm.backends.base.Backend` on one device, on the current stream."""

    def on_stream(self, x: Tensor | None) -> OnStream:
        return OnStream(self.runtime, x.stream if x else None)

    def side_stream(self, *, wait: bool = True) -> OnStream:
        refuse_capture(self.runtime, "communication with other ranks")
        if self._side is None:
            self._side = self.runtime.new_stream()
        after, end = self.runtime.record(), self.runtime.synchronize if wait else None
        return OnStream(self.runtime, self._side, lambda: self.runtime.follow(after), end)

    def timeline(self) -> CudaTimeline:
        return CudaTimeline(self.runtime)

    def memory(self, direct: bool) -> MessageMemory:
        refuse_capture(self.runtime, "communication with other ranks")
        return (DeviceMemory if direct else StagedMemory)(self.runtime, self.in_use)

    def memory_of(self, tensor: Tensor) -> Array:
        return self.runtime.view(tensor.pointer, tensor.size, tensor.dtype.view, tensor.owner)

    # -- kernels/cuda/dense.cu ----------------------------------------------------------------------------------------

    scale = default_float_mode(Backend.scale)

    def scatter_add(self, dense_tensor: Tensor, entries: SparseVector) -> None:
        self._scatter("scatter_add", dense_tensor, entries, {})

    def scatter_add_where(
        self, dense_tensor: Tensor, entries: SparseVector, others: SparseVector, present: bool
    ) -> None:
        other = Operand.of(others)
        extra: Arguments = {"others": other.indices, "other_host_count": other.host_count}
        extra |= {"other_device_count": other.device_count, "present": present}
        self._scatter("scatter_add_where", dense_tensor, entries, extra)

    def _scatter(self, kernel: str, dense: Tensor, entries: SparseVector, extra: Arguments) -> None:
        added, types = Operand.of(entries), dense_definitions(dense.dtype, int64_indices=entries.size >= INT64_SIZE)
        self._elementwise(kernel, added.max_count, types, {"dense": dense, **added.arguments(), **extra})

    def densify(self, out: Tensor, entries: SparseVector) -> None:
        if isinstance(entries, DenseSum):
            self.cast_into(entries.dense, out)
        elif out.size:
            types = dense_definitions(out.dtype, int64_indices=entries.size >= INT64_SIZE)
            arguments: Arguments = {"out": out, "n": out.size, "aligned": out.pointer % 16 == 0}
            arguments |= Operand.of(entries).arguments()
            tiles = ceil_div(out.size, self.tuning.densify_tile)
            self.start(self.prepare("dense.cu", "densify", types, tiles, self.tuning.dense_threads, arguments))

    def clear(self, dense: Tensor, entries: SparseVector) -> None:
        if isinstance(entries, DenseSum):
            super().clear(dense, entries)
        else:
            self._scatter("clear", dense, entries, {})

    def divide(self, entries: SparseVector, divisor: int) -> SparseVector:
        if isinstance(entries, DenseSum):
            operand = Operand(entries.dense, entries.dense, entries.size, entries.size, None)
        else:
            operand = Operand.of(entries)
        quotients = self.runtime.empty(operand.max_count, operand.values.dtype)
        arguments: Arguments = operand.arguments() | {"by": quotients.dtype.type(divisor), "counts": None}
        arguments["to"] = quotients
        del arguments["indices"]
        self._elementwise("divide", operand.max_count, dense_definitions(dtype_of(quotients)), arguments)
        if isinstance(entries, DenseSum):
            return self.nonzeros(quotients, entries.shape)
        if isinstance(entries, CountedVector):
            return entries.with_values(quotients)
        return SparseVector.trusted(operand.indices, quotients, entries.size, entries.shape)

    def means(self, entries: SparseVector, counts: Array) -> SparseVector:
        quotients, count = self.runtime.empty(entries.nnz, entries.values.dtype), entries.nnz
        arguments: Arguments = {"values": entries.values, "host_count": count, "device_count": None}
        arguments |= {"by": quotients.dtype.type(1), "counts": counts, "to": quotients}
        self._elementwise("divide", count, dense_definitions(dtype_of(quotients)), arguments)
        return self.with_values(entries, quotients)

    def not_zero(self, values: Array) -> Array:
        # CuPy's comparison of floats would treat subnormal ones as zero.
        mask: Array = values.view(f"u{values.itemsize}") << 1 != 0
        return mask

    def well_formed(self, entries: SparseVector, begin: int = 0, end: int | None = None) -> bool:
        end = entries.size if end is None else end
        faults, (indices, values, count) = self.zeros(1, np.uint32), (entries.indices, entries.values, entries.nnz)
        types = dense_definitions(dtype_of(values), int64_indices=entries.size >= INT64_SIZE)
        arguments: Arguments = {"indices": indices, "values": values, "count": count, "begin": begin, "end": end}
        arguments["faults"] = faults
        self._elementwise("well_formed", count, types, arguments)
        return not read_word(self.runtime, faults)

    def accumulate(self, x: Tensor, residual: Tensor | None) -> Array:
        total = self.runtime.empty(x.size, x.dtype.accumulator)
        types = dense_definitions(x.dtype, residual.dtype if residual else x.dtype)
        self._elementwise("widen", x.size, types, {"x": x, "residual": residual, "n": x.size, "sum": total})
        return total

    def add(self, total: Array, addend: Array) -> None:
        n = len(total)
        self._elementwise("add", n, dense_definitions(dtype_of(total)), {"sum": total, "addend": addend, "n": n})

    def cast_into(self, values: Array | None, out: Tensor) -> None:
        arguments: Arguments = {"values": values, "n": out.size, "dense": out}
        self._elementwise("narrow", out.size, dense_definitions(out.dtype), arguments)

    def _elementwise(self, name: str, max_count: int, types: tuple[str, ...], arguments: Arguments) -> None:
        """Start a kernel of dense.cu with about one thread per entry or element."""
        if max_count:
            threads = self.tuning.dense_threads
            self.start(self.prepare("dense.cu", name, types, self.spread(max_count, threads), threads, arguments))


class CudaTimeline:
    """A `sparsecomm.backends.base.Timeline`. ``last`` is the event after all work so far."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.last: Event | None = None

    def on_stream(self, x: Tensor | None) -> OnStream:
        return OnStream(self.runtime, x.stream if x else None, self._follow, self._advance)

    def join(self, former: Tensor | None, x: Tensor) -> None:
        with OnStream(self.runtime, x.stream, self._refuse_capture):
            pass
        if former is not None:
            with self.on_stream(former):
                pass

    def wait(self) -> None:
        if self.last is not None:
            self.last.wait()

    def _refuse_capture(self) -> None:
        refuse_capture(self.runtime, "an exchange of gradients or weights")

    def _follow(self) -> None:
        self._refuse_capture()
        if self.last is not None:
            self.runtime.follow(self.last)

    def _advance(self) -> None:
        self.last = self.runtime.record()


def of(index: int) -> CudaBackend:
    """Return a new backend of GPU number ``index``.

    Raises:
        InvalidInputError: CuPy is not installed, does not find the driver, or the driver is too old for it.
    """
    return CudaBackend(_runtime(index))


@cache  # threads may share it, because it keeps only compiled kernels
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
                f"cuda:{index}: this process sees {count} device(s); set CUDA_VISIBLE_DEVICES, or use another device"
            )
        from sparsecomm.backends.cuda.cupy_runtime import CupyRuntime

        return CupyRuntime(index)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise InvalidInputError(
            f"cuda:{index}: CuPy {cupy.__version__} cannot use it ({error}); expected a GPU, and a driver for CUDA "
            f"{cupy.cuda.runtime.runtimeGetVersion() // 1000} or newer: update it, or install the CuPy for its CUDA "
            "(cupy-cuda12x, cupy-cuda13x)"
        ) from error
