"""Types of arrays in host or device memory. `Array` is NumPy's array, and stands for CuPy's, with the same methods."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Bytes = NDArray[np.uint8]  # flat; its slices are views
ArrayDType = np.dtype[np.generic]
