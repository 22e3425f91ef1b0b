"""Arrays of the deferring device, and a module with the parts of CuPy that the library uses.

If the host knows the shape of a result, the work goes to the current stream, and the result begins as poison. Other
work, and copies to the host, first wait for the current stream.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from tests.emulator.tensor import CudaTensor

if TYPE_CHECKING:
    from tests.emulator.deferred import DeferredRuntime

__all__ = ["ArrayLibrary", "DeviceArray"]

NAME = "emulated_cupy"
OF_TRUTH = {np.all, np.any, np.nonzero, np.flatnonzero}  # subnormal float32 count as zero, as in CuPy's kernels
OF_KNOWN_SHAPE = {np.concatenate, np.searchsorted, np.sort, np.where, np.sum, np.min, np.max, np.any, np.all}


class DeviceArray(NDArrayOperatorsMixin):
    """An array of the device.

    Attributes:
        raw: the present elements, as a NumPy array. Work in streams may not have run. It does not keep the memory.
        owner: keeps the memory.
    """

    __module__ = NAME  # the library imports the array's module by this name

    def __init__(self, runtime: DeferredRuntime, raw: np.ndarray, owner: object) -> None:
        self.runtime, self.raw, self.owner = runtime, raw, owner

    shape = property(lambda self: self.raw.shape)
    dtype = property(lambda self: self.raw.dtype)
    size = property(lambda self: self.raw.size)
    ndim = property(lambda self: self.raw.ndim)
    nbytes = property(lambda self: self.raw.nbytes)
    itemsize = property(lambda self: self.raw.itemsize)
    flags = property(lambda self: self.raw.flags)

    def __len__(self) -> int:
        return len(self.raw)

    # -- views --------------------------------------------------------------------------------------------------------

    def view(self, dtype: Any) -> DeviceArray:
        return DeviceArray(self.runtime, self.raw.view(dtype), self.owner)

    def reshape(self, *shape: Any) -> DeviceArray:
        return DeviceArray(self.runtime, self.raw.reshape(*shape), self.owner)

    # -- work ---------------------------------------------------------------------------------------------------------

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        if any(isinstance(value, np.ndarray) and value.ndim for value in inputs):
            raise TypeError(f"{ufunc.__name__} of an array of the device and one of the host")
        assert method in ("__call__", "reduce")
        return _call(self.runtime, getattr(ufunc, method), inputs, options, known_shape=True)

    def __array_function__(self, function: Callable[..., Any], types: Any, inputs: Any, options: Any) -> Any:
        if function is np.empty_like:
            return self.runtime.empty(options.get("shape", self.shape), self.dtype)
        return _call(self.runtime, function, inputs, options, known_shape=function in OF_KNOWN_SHAPE)

    def __getitem__(self, where: Any) -> Any:
        if not isinstance(where, (DeviceArray, np.ndarray)):
            raw = self.raw[where] if isinstance(where, (str, tuple)) else self.raw[where, ...]  # never a number
            return DeviceArray(self.runtime, raw, self.owner)
        return _call(self.runtime, _taken, (self, where), {}, known_shape=where.dtype != bool)

    def __setitem__(self, where: Any, values: Any) -> None:
        raw, where, values = self.raw, _raw(_kept(where)), _raw(_kept(values))
        self.runtime.enqueue(lambda: raw.__setitem__(where, values))

    def astype(self, dtype: Any, *, copy: bool = True) -> DeviceArray:
        if self.dtype == dtype and not copy:
            return self
        return _call(self.runtime, np.ndarray.astype, (self, dtype), {}, known_shape=True)

    def copy(self) -> DeviceArray:
        return self.astype(self.dtype)

    def sum(self) -> DeviceArray:
        return np.sum(self)

    def min(self) -> DeviceArray:
        return np.min(self)

    def max(self) -> DeviceArray:
        return np.max(self)

    def nonzero(self) -> tuple[DeviceArray, ...]:
        return np.nonzero(self)

    def any(self) -> DeviceArray:
        return np.any(self)

    def all(self) -> DeviceArray:
        return np.all(self)

    # -- to the host --------------------------------------------------------------------------------------------------

    def get(self) -> np.ndarray:
        """Wait for the current stream, and return the elements."""
        self.runtime.synchronize()
        return self.raw.copy()

    def tolist(self) -> Any:
        return self.get().tolist()

    def tobytes(self) -> bytes:
        return self.get().tobytes()

    def item(self) -> Any:
        return self.get().item()

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def __array__(self, dtype: Any = None, *, copy: bool | None = None) -> np.ndarray:
        """Convert for tests. Refuse the library, as CuPy's arrays do."""
        caller = sys._getframe(1).f_globals["__name__"]
        if caller.startswith("sparsecomm"):
            raise TypeError("an array of the device is not converted without being asked to: use get()")
        return self.get().astype(dtype or self.dtype, copy=False)

    # -- to other libraries -------------------------------------------------------------------------------------------

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"data": (self.raw.ctypes.data, False), "shape": self.shape, "typestr": self.dtype.str, "version": 3}

    def __dlpack_device__(self) -> tuple[int, int]:
        return CudaTensor(self.raw, device=self.runtime.device).__dlpack_device__()

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        return CudaTensor(self.raw, device=self.runtime.device, owner=self).__dlpack__(stream=stream)


class ArrayLibrary(ModuleType):
    """The array module of one device: NumPy's functions, which accept these arrays, and constructors."""

    def __init__(self, runtime: DeferredRuntime) -> None:
        super().__init__(NAME)
        self._runtime = runtime
        self.cuda = SimpleNamespace(
            Device=_anywhere,
            get_current_stream=lambda: SimpleNamespace(ptr=runtime.stream()),
            runtime=SimpleNamespace(CUDARuntimeError=RuntimeError),
        )

    def asarray(self, array: np.ndarray) -> DeviceArray:
        copy = self._runtime.empty(array.shape, array.dtype)
        copy[...] = array
        return copy

    def zeros(self, shape: Any, dtype: Any) -> DeviceArray:
        return self.asarray(np.zeros(shape, dtype))

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


def _anywhere(index: int) -> AbstractContextManager[None]:
    return nullcontext()


def _taken(array: np.ndarray, where: np.ndarray) -> np.ndarray:
    return array[where]


def _call(runtime: DeferredRuntime, function: Any, inputs: Any, options: Any, *, known_shape: bool) -> Any:
    """Call a NumPy function on the elements: later if the result's shape is known, otherwise now."""
    if function is np.concatenate and not all(isinstance(array, DeviceArray) for array in inputs[0]):
        raise TypeError("CuPy concatenates only its own arrays")
    raws, into, options = _raw(inputs), options.get("out"), _raw(options)

    def run() -> Any:
        with np.errstate(all="ignore"):
            return function(*(map(_flushed, raws) if function in OF_TRUTH else raws), **options)

    if into:  # in place
        runtime.enqueue(run)
        return into[0]
    if not known_shape:
        runtime.synchronize()
        result = run()
        put = runtime.library.asarray
        return tuple(map(put, result)) if isinstance(result, tuple) else put(np.asarray(result))
    with np.errstate(all="ignore"):
        like = np.asarray(function(*_raw(inputs, _stand_in), **options))
    result = runtime.empty(like.shape, like.dtype)
    raw = result.raw
    runtime.enqueue(lambda: np.copyto(raw, run()))
    return result


def _flushed(array: np.ndarray) -> np.ndarray:
    """Return an array in which subnormal float32 are zero."""
    return np.where(abs(array) < np.finfo(np.float32).tiny, 0, array) if array.dtype == np.float32 else array


def _kept(value: Any) -> Any:
    """Copy a host array, because the host may change it afterwards."""
    return value.copy() if isinstance(value, np.ndarray) else value


def _raw(value: Any, of: Callable[[DeviceArray], np.ndarray] = lambda array: array.raw) -> Any:
    if isinstance(value, DeviceArray):
        return of(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_raw(item, of) for item in value)
    if isinstance(value, dict):
        return {key: _raw(item, of) for key, item in value.items()}
    return value


def _stand_in(array: DeviceArray) -> np.ndarray:
    """Return an array of the same shape and type with elements that are valid indices."""
    return np.zeros(array.shape, array.dtype)
