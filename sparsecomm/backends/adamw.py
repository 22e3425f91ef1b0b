"""AdamW's state and arithmetic, for any array library."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from sparsecomm.tensors.arrays import Array
from sparsecomm.tensors.interop import Tensor


class Moments(NamedTuple):
    """AdamW's state of some weights: flat arrays with one element per weight, on the device of the weights.

    Attributes:
        mean, squares: moving averages of gradients and of their squares, in the accumulator dtype.
        last: int32, number of the latest step that updated each weight; 0: none.
        compensation: what rounding has left out of each weight, in the accumulator dtype: the exact weight is the
            weight plus this. ``None`` on a single rank, which rounds no updates.
    """

    mean: Array
    squares: Array
    last: Array
    compensation: Array | None


class AdamWPart(NamedTuple):
    """Weights of one tensor that make a step, and the numbers of this step.

    Attributes:
        begin: the index of the first weight in the vectors of the bucket.
        weights, moments: of the part.
        table: shape ``(rows, 6)``, in host memory and the accumulator dtype: row i contains the coefficients for a
            weight last updated i steps ago. The last row is also used for all earlier updates.
        unit_eps, eps: of the units and of the step, rounded to the accumulator dtype.
        step: number of this step, at least 1.
    """

    begin: int
    weights: Tensor
    moments: Moments
    table: Array
    unit_eps: float
    eps: float
    step: int


class AdamWStep(NamedTuple):
    """A step of weights, which `Backend.store_adamw` stores. Arrays have an element for each entry of the sums.

    Attributes:
        changes: of the weights, in the accumulator dtype.
        jumps: int8: how exponents of units should change, at most by `MAX_JUMP`, and `OVERFLOWS` where the step must
            not be used.
        overflows: whether an entry overflows.
        finite: whether all sums are finite.
        results: new weights and moments, in a format that the backend chooses.
    """

    changes: Array
    jumps: Array
    overflows: bool
    finite: bool
    results: Any


MAX_JUMP = 4  # as in kernels/adamw.hpp
OVERFLOWS = 127  # in `AdamWStep.jumps`


def unit_dtype(real: Any) -> Any:
    """Return the dtype of `unit_exponents` for an accumulator dtype: uint8 for float32, uint16 for float64."""
    return np.dtype(np.uint16 if np.dtype(real).itemsize == 8 else np.uint8)


def unit_exponents(xp: Any, squares: Array, eps: Any) -> Array:
    """Return the exponents of sqrt(squares) + eps, with the bias of the format of float32 or float64.

    The power of two with this exponent is the unit in which AdamW exchanges gradients. ``eps`` is a normal number of
    the dtype of ``squares``, so exponents are at least 1.
    """
    unsigned, digits = _format_of(squares.dtype)
    exponents: Array = ((xp.sqrt(squares) + eps).view(unsigned) >> unsigned(digits)).astype(unit_dtype(squares.dtype))
    return exponents


def units(exponents: Array, real: Any) -> Array:
    """Return the powers of two with these exponents, in an accumulator dtype."""
    unsigned, digits = _format_of(real)
    powers: Array = (exponents.astype(unsigned) << unsigned(digits)).view(real)
    return powers


def _format_of(real: Any) -> tuple[Any, int]:
    """Return the unsigned dtype for the bits of an accumulator dtype, and the number of bits below the exponent."""
    return (np.uint64, 52) if np.dtype(real).itemsize == 8 else (np.uint32, 23)
