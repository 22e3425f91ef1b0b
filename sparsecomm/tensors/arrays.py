"""Types of arrays in host or device memory. `Array` also stands for CuPy's arrays, which have NumPy's methods."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Bytes = NDArray[np.uint8]  # flat; its slices are views
ArrayDType = np.dtype[np.generic]


class TensorLike(Protocol):
    """An array or tensor of NumPy, PyTorch, JAX, CuPy or any other library with ``__dlpack__``."""

    def __dlpack__(self) -> Any:
        """Return the array as a DLPack capsule."""
