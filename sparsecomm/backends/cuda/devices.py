"""The CUDA devices."""

from __future__ import annotations

from functools import cache

from sparsecomm.backends.cuda.backend import CudaBackend
from sparsecomm.backends.cuda.runtime import Runtime
from sparsecomm.errors import InvalidInputError
from sparsecomm.hints import pip_install

__all__ = ["of"]


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
