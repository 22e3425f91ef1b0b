"""The types of arrays, on the host or on a device: NumPy's, which stand for CuPy's, whose methods are the same."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Array", "ArrayDType", "Bytes", "from_host", "to_host"]

Array = NDArray[Any]
Bytes = NDArray[np.uint8]  # flat; its slices are views
ArrayDType = np.dtype[np.generic]


def to_host(array: Array) -> Array:
    """Return a copy of an array in host memory, as NumPy's."""
    copied: Array = getattr(array, "get", array.copy)()  # CuPy's arrays have `get`
    return copied


def from_host(array: Array, like: Array) -> Array:
    """Return a NumPy array as an array of the library of ``like``, on the device that is current there."""
    if isinstance(like, np.ndarray):
        return array
    import cupy  # type: ignore[unreachable] # the other library is CuPy

    return cupy.asarray(array)
