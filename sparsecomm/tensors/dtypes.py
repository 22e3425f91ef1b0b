"""The element dtypes of gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

DTypeName: TypeAlias = Literal["float16", "bfloat16", "float32", "float64"]


@dataclass(frozen=True, slots=True)
class DType:
    """An element dtype."""

    name: str
    code: int  # in C++ kernels and in messages
    itemsize: int
    view: str  # NumPy dtype in which its memory is viewed
    accumulator: np.dtype = np.dtype(np.float32)  # noqa: RUF009 # in which values are added
    rounds_to_infinity: float = math.inf  # smallest magnitude of the accumulator dtype that rounds to infinity

    def __str__(self) -> str:
        return self.name


FLOAT16 = DType("float16", 0, 2, "<f2", rounds_to_infinity=65520.0)
BFLOAT16 = DType("bfloat16", 1, 2, "<u2", rounds_to_infinity=(2 - 2**-8) * 2.0**127)  # NumPy has no bfloat16
FLOAT32 = DType("float32", 2, 4, "<f4")
FLOAT64 = DType("float64", 3, 8, "<f8", np.dtype(np.float64))
DTYPES = {d.name: d for d in (FLOAT16, BFLOAT16, FLOAT32, FLOAT64)}
