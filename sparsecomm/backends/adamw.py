"""AdamW's state and arithmetic, for any array library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sparsecomm.tensors.arrays import Array


class Moments(NamedTuple):
    """AdamW's state of some weights: flat arrays with one element per weight, on the device of the weights.

    Attributes:
        mean, squares: moving averages of gradients and of their squares, in the accumulator dtype.
        last: int32, number of the latest step that updated each weight; 0: none.
        compensation: what rounding has kept from each weight, in the accumulator dtype: the exact weight is the weight
            plus this. ``None`` on a single rank, which rounds no updates.
    """

    mean: Array
    squares: Array
    last: Array
    compensation: Array | None


class AdamWResult(NamedTuple):
    """New values of weights, one element for each entry of an update.

    Attributes:
        weights, mean, squares: in the accumulator dtype.
        changes: of the weights, or ``None``.
        jumps: int8: how exponents of units should change, at most by `MAX_JUMP`, and `OVERFLOWS` where the step must
            not be used.
        overflows: the number of entries that overflow.
    """

    weights: Array
    mean: Array
    squares: Array
    changes: Array | None
    jumps: Array
    overflows: int


MAX_JUMP = 4
OVERFLOWS = 127  # in `AdamWResult.jumps`


def unit_dtype(real: Any) -> Any:
    """Return the dtype of `unit_exponents` for an accumulator dtype: uint8 for float32, uint16 for float64."""
    return np.dtype(np.uint16 if np.dtype(real).itemsize == 8 else np.uint8)


def unit_exponents(xp: Any, squares: Array, eps: Any) -> Array:
    """Return the exponents of sqrt(squares) + eps, with the bias of the format of float32 or float64.

    The power of two with this exponent is the unit in which AdamW exchanges gradients. ``eps`` is a normal number of
    the dtype of ``squares``, so exponents are at least 1.
    """
    return exponents_of(xp.sqrt(squares) + eps)


def exponents_of(x: Array) -> Array:
    """Return the exponents of positive numbers."""
    word, digits = _format_of(x.dtype)
    exponents: Array = (x.view(word) >> word(digits)).astype(unit_dtype(x.dtype))
    return exponents


def units(exponents: Array, real: Any) -> Array:
    """Return the powers of two with these exponents, in an accumulator dtype."""
    word, digits = _format_of(real)
    powers: Array = (exponents.astype(word) << word(digits)).view(real)
    return powers


def _format_of(real: Any) -> tuple[Any, int]:
    """Return the word of an accumulator dtype, and the number of its digits below the exponent."""
    return (np.uint64, 52) if np.dtype(real).itemsize == 8 else (np.uint32, 23)


def adamw_step(
    xp: Any, weight: Array, gradient: Array, mean: Array, squares: Array, coefficients: Sequence[Array], eps: Any
) -> tuple[Array, Array, Array]:
    """Return AdamW's weights, means and squares, element by element, with the array library ``xp``.

    With the coefficients c0 to c5 of `sparsecomm.optimizers.adamw.coefficients`:

        mean    = c0 * mean + c1 * gradient
        squares = c2 * squares + c3 * gradient^2
        weight  = c5 * weight - c4 * mean / (sqrt(squares) + eps)

    All arrays have the same shape and dtype.
    """
    c0, c1, c2, c3, c4, c5 = coefficients
    m = c0 * mean + c1 * gradient
    v = c2 * squares + c3 * (gradient * gradient)
    return c5 * weight - c4 * (m / (xp.sqrt(v) + eps)), m, v
