"""The types of arrays, on the host or on a device: NumPy's, which stand for CuPy's, whose methods are the same."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Array", "ArrayDType", "Bytes"]

Array = NDArray[Any]
Bytes = NDArray[np.uint8]  # flat; its slices are views
ArrayDType = np.dtype[np.generic]
