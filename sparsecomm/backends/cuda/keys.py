"""Keys of values: kernels/formats.hpp."""

from __future__ import annotations

import math

import numpy as np

from sparsecomm.tensors.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, DType

__all__ = ["min_key"]


def min_key(tau: float, dtype: DType) -> int:
    """Return the smallest key whose value is at least ``tau``; at least 1, as zeros are never selected."""
    if tau == math.inf:
        return _infinity(dtype)
    low, high = 1, _infinity(dtype)
    while low < high:  # values rise with their bits
        middle = (low + high) // 2
        if _value(middle, dtype) >= tau:
            high = middle
        else:
            low = middle + 1
    return low


def _value(bits: int, dtype: DType) -> float:
    if dtype is BFLOAT16:
        return float(np.array(bits << 16, np.uint32).view(np.float32))
    return float(np.array(bits, f"u{dtype.itemsize}").view(dtype.view))


def _infinity(dtype: DType) -> int:
    return {FLOAT16: 0x7C00, BFLOAT16: 0x7F80, FLOAT32: 0x7F800000, FLOAT64: 0x7FF0000000000000}[dtype]
