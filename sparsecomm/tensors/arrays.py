"""Types of arrays in host or device memory. `Array` is NumPy's array, and stands for CuPy's, with the same methods."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Array", "ArrayDType", "Bytes", "from_host", "library_of", "to_host"]

Array = NDArray[Any]
Bytes = NDArray[np.uint8]  # flat; its slices are views
ArrayDType = np.dtype[np.generic]


def library_of(array: Array) -> Any:
    """Return the library of an array: NumPy or CuPy."""
    return sys.modules[type(array).__module__.partition(".")[0]]


def to_host(array: Array) -> Array:
    """Return a NumPy copy of an array."""
    copied: Array = getattr(array, "get", array.copy)()  # CuPy's arrays have `get`
    return copied


def from_host(array: Array, like: Array) -> Array:
    """Return a NumPy array as an array of the library of ``like``, on its current device."""
    if isinstance(like, np.ndarray):
        return array
    import cupy  # type: ignore[unreachable]

    return cupy.asarray(array)
