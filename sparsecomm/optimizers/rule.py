"""The rule of `SparseAdamW`: AdamW whose gradients arrive as sparse sums, several steps at a time.

All ranks hold the same weights and moments, and the step of each weight's last update. In every step

1. each rank divides its gradient by a unit and adds it to its residual. The unit is sqrt(v) + eps, with v the second
   moment of the weight, rounded down to a power of two, so the division is exact. So entries are selected, and rounded
   to few bits, by how far AdamW would move the weight;
2. the exchange returns the same sparse sums to all ranks. The residuals keep the rest. Owners keep the sums that they
   do not send, as in Tang et al. (DoubleSqueeze), ICML 2019;
3. a weight that receives a sum for the first time in n steps makes n steps of AdamW (Loshchilov and Hutter, ICLR 2019)
   at once. With G the mean over the ranks of the sum of their n gradients, and t the tensor's step:

       m = b1^n m + (1 - b1^n) G / n,  v = b2^n v + (1 - b2^n) G^2 / n
       w = (1 - lr wd)^n w - n lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

   A sum of n noisy gradients has n times the variance of one, hence G^2 / n and not (G / n)^2.

With n = 1 for all weights, as at density 1.0, this is AdamW. Before a weight's first update, v only serves the unit: it
starts at `START` (1 - b2) times the mean square of the tensor's first gradient, and the first update drops it. A tensor
for which no rank has a gradient makes no step: neither its weights nor its t change.

**Overflows.** A step that would make a weight or a moment infinite is skipped on all ranks. All ranks hold the same
moments, weights and sums, so they decide the same. `Update.bounds_after` usually proves without a pass over memory
that nothing can overflow. Near the largest number of a dtype it cannot, and updates are computed before they are made.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from sparsecomm.backends import Backend
from sparsecomm.backends.adamw import Moments
from sparsecomm.checks import quote, to_float
from sparsecomm.errors import InvalidInputError
from sparsecomm.tensors.arrays import Array
from sparsecomm.tensors.dtypes import DType
from sparsecomm.tensors.interop import Tensor, TensorSpec
from sparsecomm.tensors.sparse import SparseVector

__all__ = ["DENSITY", "START", "AdamWRule", "Bounds", "Update", "bounds_of", "coefficients", "step_eps", "updates_of"]

DENSITY = 0.09  # at which a transformer trains as with dense sums: docs/reports/adamw.md
START = 0.2
_MAX_WAIT = 1 << 14  # maximum number of steps that a weight makes at once


def coefficients(
    xp: Any, waited: Any, t: Any, lr: Any, betas: tuple[Any, Any], weight_decay: Any
) -> tuple[Any, Any, Any, Any, Any, Any]:
    """Return the six coefficients of `sparsecomm.backends.adamw.adamw_step`.

    Args:
        xp: the array library: numpy or jax.numpy.
        waited: an array: the steps since the last update, at least 1.
        t: the tensor's step, at least 1, for the bias correction of the moments.
        lr, betas, weight_decay: as in `torch.optim.AdamW`, numbers or arrays.
    """
    (kept_mean, new_mean), (kept_squares, new_squares) = (_power(xp, 1 - beta, waited) for beta in betas)
    correction = xp.sqrt(_power(xp, 1 - betas[1], t)[1]) / _power(xp, 1 - betas[0], t)[1]
    decay, _ = _power(xp, lr * weight_decay, waited)
    return kept_mean, new_mean / waited, kept_squares, new_squares / waited, lr * waited * correction, decay


def step_eps(xp: Any, eps: Any, beta2: Any, t: Any) -> Any:
    """Return eps in step ``t`` for the root of a second moment without bias correction."""
    return eps * xp.sqrt(_power(xp, 1 - beta2, t)[1])


def _power(xp: Any, x: Any, exponent: Any) -> tuple[Any, Any]:
    """Return (1 - x)^exponent, and 1 minus that."""
    if xp is np:  # in float64, as `torch.optim.AdamW` does
        power = np.power(1 - x, exponent)
        return power, 1 - power
    log = xp.log1p(-x)
    return xp.exp(exponent * log), -xp.expm1(exponent * log)


class AdamWRule(NamedTuple):
    """The settings of AdamW, with the names of `torch.optim.AdamW`."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    maximize: bool = False

    @classmethod
    def of(cls, lr: object, betas: object, eps: object, weight_decay: object, maximize: object = False) -> AdamWRule:
        """Return checked settings."""
        powers = [to_float(beta) for beta in betas] if isinstance(betas, (tuple, list)) else []
        rate, tiny, decay = to_float(lr), to_float(eps), to_float(weight_decay)
        two = len(powers) == 2 and all(0 <= beta < 1 for beta in powers)
        for name, value, valid, expected in (
            ("lr", lr, 0 <= rate < math.inf, "must be a number that is at least 0"),
            ("betas", betas, two, "must be two numbers in [0, 1)"),
            ("eps", eps, 0 < tiny < math.inf, "must be a number above 0"),
            ("weight_decay", weight_decay, 0 <= decay < math.inf, "must be a number that is at least 0"),
            ("maximize", maximize, isinstance(maximize, bool), "must be True or False"),
        ):
            if not valid:
                raise InvalidInputError(f"{name}={quote(value)}: {expected}")
        if rate * decay >= 1:
            raise InvalidInputError(f"lr={rate!r} times weight_decay={decay!r} is {rate * decay:g}: must be below 1")
        return cls(rate, (powers[0], powers[1]), tiny, decay, bool(maximize))

    def table(self, t: int, dtype: np.dtype[Any]) -> Array:
        """Return `coefficients` in step ``t``, with a row for each wait from 0 (treated as 1) to ``t`` steps."""
        size = min(t, _MAX_WAIT) + 1
        waited = np.maximum(np.arange(size, dtype=np.float64), 1)
        rows = coefficients(np, waited, float(t), self.lr, self.betas, self.weight_decay)
        return np.stack(rows, axis=1).astype(dtype)


# Bounds on second moments, on |mean| / (sqrt(second moment) + eps), and on magnitudes of weights.
Bounds: TypeAlias = tuple[float, float, float]


class Update(NamedTuple):
    """The update of a tensor by the sums of a step. ``entries`` to ``step`` are arguments of `Backend.adamw`.

    The last fields bound, over all rows of the table, the changes by a gradient g. With the ratio
    |mean| / (sqrt(second moment) + eps), a second moment grows by at most ``max_square`` * g^2, a weight moves by at
    most ``max_rate`` * ratio, and the new ratio is at most ``max_kept`` * ratio + ``max_new``.
    """

    spec: TensorSpec
    entries: SparseVector
    table: Array
    unit_eps: float
    eps: float
    step: int
    max_square: float
    max_rate: float
    max_kept: float
    max_new: float

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The last arguments of `Backend.adamw` and `Backend.adamw_overflows`."""
        return self[1:6]

    def bounds_after(self, bounds: Bounds, largest: float, dtype: DType) -> Bounds | None:
        """Return bounds after the update of weights of ``dtype``, or ``None`` if something could overflow.

        ``largest``: an upper bound of the magnitudes in the entries.
        """
        square, ratio, weight = bounds
        max_ = float(np.finfo(self.spec.accumulator.accumulator).max)
        gradient = largest * (math.sqrt(square) + self.unit_eps)
        ratio = max(ratio, self.max_kept * ratio + self.max_new)
        weight = 1.01 * (weight + self.max_rate * ratio)
        if gradient < 0.5 * math.sqrt(max_) and weight < min(max_, dtype.rounds_to_infinity):
            return 1.01 * (square + self.max_square * gradient**2), ratio, weight
        return None


def updates_of(
    sums: dict[TensorSpec, SparseVector], rules: dict[str, AdamWRule], steps: dict[str, int]
) -> list[Update]:
    """Return the updates by the sums of tensors. ``steps``: the number of steps that each tensor has made."""
    updates, tables = [], {}
    for spec, entries in sums.items():
        rule, t = rules[spec.name], steps[spec.name] + 1
        key = rule, spec.accumulator.name, t
        if key not in tables:
            table = rule.table(t, np.dtype(spec.accumulator.accumulator))
            tables[key] = table, _maxima(table)
        table, maxima = tables[key]
        eps = step_eps(np, rule.eps, rule.betas[1], t)
        updates.append(Update(spec, entries, table, rule.eps, eps, t, *maxima))
    return updates


def _maxima(table: Array) -> tuple[float, float, float, float]:
    """Return the last fields of `Update`."""
    kept_mean, new_mean, kept_squares, new_squares, rate, _ = table.T.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        kept, new = kept_mean / np.sqrt(kept_squares), new_mean / np.sqrt(new_squares)
    kept, new = np.where(kept_mean == 0, 0, kept), np.where(new_mean == 0, 0, new)
    return float(new_squares.max()), float(rate.max()), float(kept.max()), float(new.max())


def bounds_of(backend: Backend, weight: Tensor, moments: Moments, eps: float, ratio: float | None) -> Bounds:
    """Return the maxima of weights and moments as bounds. ``ratio``: a known bound on the ratios, or ``None``."""
    shape = (weight.size,)
    if ratio is None or not math.isfinite(ratio):
        ratios = abs(moments.mean) / (moments.squares**0.5 + moments.mean.dtype.type(eps))
        ratio = backend.largest(backend.as_tensor(ratios, shape))
    return backend.largest(backend.as_tensor(moments.squares, shape)), ratio, backend.largest(weight)
