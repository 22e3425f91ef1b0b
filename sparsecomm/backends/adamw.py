"""AdamW's state and arithmetic, for any array library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sparsecomm.tensors.arrays import Array


class Moments(NamedTuple):
    """AdamW's state of a tensor: flat arrays with one element per weight, on the device of the weights.

    Attributes:
        mean, squares: moving averages of gradients and of their squares, in the accumulator dtype.
        last: int32, number of the latest step that updated each weight; 0 where the mean is 0, too: none.
    """

    mean: Array
    squares: Array
    last: Array


def unit(xp: Any, squares: Array, eps: Any) -> Array:
    """Return the units in which AdamW exchanges gradients: sqrt(squares) + eps, rounded down to powers of two.

    Powers of two make dividing a gradient and multiplying a sum exact. ``squares`` are float32 or float64, and ``eps``
    is a normal number of that dtype.
    """
    root = xp.sqrt(squares) + eps
    word, exponent = (np.int64, 0x7FF << 52) if root.dtype.itemsize == 8 else (np.int32, 0x7F8 << 20)
    power: Array = (root.view(word) & word(exponent)).view(root.dtype)
    return power


def adamw_step(
    xp: Any,
    weight: Array,
    quotient: Array,
    mean: Array,
    squares: Array,
    first: Array,
    coefficients: Sequence[Array],
    unit_eps: Any,
    eps: Any,
) -> tuple[Array, Array, Array, Array]:
    """Return AdamW's updates, element by element, with the array library ``xp``.

    With the coefficients c0 to c5 of `sparsecomm.optimizers.adamw.coefficients`:

        g       = quotient * unit(squares)
        mean    = c0 * mean + c1 * g
        squares = c2 * squares + c3 * g^2               squares on the right are 0 if ``first``
        weight  = c5 * weight - c4 * mean / (sqrt(squares) + eps)

    All arrays have the same shape and dtype, except ``first``, a mask of the elements without an earlier update. The
    ``squares`` of these elements are used only for the unit. Returns the change of the weight, the new mean and
    squares, and the factor that converts a residual to the new units.
    """
    c0, c1, c2, c3, c4, c5 = coefficients
    old_unit = unit(xp, squares, unit_eps)
    g = quotient * old_unit
    m = c0 * mean + c1 * g
    v = c2 * xp.where(first, xp.zeros_like(squares), squares) + c3 * (g * g)
    change = (c5 * weight - c4 * (m / (xp.sqrt(v) + eps))) - weight
    return change, m, v, old_unit / unit(xp, v, unit_eps)
