"""The options of `SparseAdamW` in all front ends: `AdamWRule` has those of AdamW, `AdamWSettings` all others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypedDict

import numpy as np

from sparsecomm.calls.nodes import NodesOption
from sparsecomm.checks import quote, to_float
from sparsecomm.errors import InvalidInputError
from sparsecomm.options import check_options
from sparsecomm.reducer.options import OnStep, Schedule
from sparsecomm.states.weights import check_every
from sparsecomm.tensors.arrays import Array
from sparsecomm.wire import WireName

DENSITY = 0.09  # at which a transformer trains as with dense sums: docs/reports/adamw.md
_MAX_WAIT = 1 << 14  # maximum number of steps that a weight makes at once


@dataclass(frozen=True, kw_only=True)
class AdamWRule:
    """The settings of AdamW for one tensor. Names and defaults are those of `torch.optim.AdamW`.

    Attributes:
        maximize: follow the gradient instead of its negative.

    Raises:
        InvalidInputError: a setting is out of range.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    maximize: bool = False

    def __post_init__(self) -> None:
        betas = [to_float(beta) for beta in self.betas] if isinstance(self.betas, (tuple, list)) else []
        lr, eps, decay = to_float(self.lr), to_float(self.eps), to_float(self.weight_decay)
        for name, valid, expected in (
            ("lr", 0 <= lr < math.inf, "must be a number that is at least 0"),
            ("betas", len(betas) == 2 and all(0 <= beta < 1 for beta in betas), "must be two numbers in [0, 1)"),
            ("eps", 0 < eps < math.inf, "must be a number above 0"),
            ("weight_decay", 0 <= decay < math.inf, "must be a number that is at least 0"),
            ("maximize", isinstance(self.maximize, bool), "must be True or False"),
        ):
            if not valid:
                raise InvalidInputError(f"{name}={quote(getattr(self, name))}: {expected}")
        if lr * decay >= 1:
            raise InvalidInputError(f"lr={lr!r} times weight_decay={decay!r} is {lr * decay:g}: must be below 1")
        for name, value in {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": decay}.items():
            object.__setattr__(self, name, value)

    def table(self, t: int, dtype: np.dtype[Any]) -> tuple[Array, float]:
        """Return `coefficients` in step ``t``, with a row for each wait from 0 (treated as 1) to ``t`` steps, and eps.

        This eps is for the root of a second moment without bias correction.
        """
        size = min(t, _MAX_WAIT) + 1
        waited = np.maximum(np.arange(size, dtype=np.float64), 1)
        rows = coefficients(waited, float(t), self.lr, self.betas, self.weight_decay)
        return np.stack(rows, axis=1).astype(dtype), self.eps * np.sqrt(_power(1 - self.betas[1], t)[1])


RULE = tuple(field.name for field in fields(AdamWRule))


def coefficients(
    waited: Array, t: float, lr: float, betas: tuple[float, float], weight_decay: float
) -> tuple[Array, Array, Array, Array, Array, Array]:
    """Return the six coefficients c0 to c5 of AdamW's steps, element by element, in this form:

        mean    = c0 * mean + c1 * gradient
        squares = c2 * squares + c3 * gradient^2
        weight  = c5 * weight - c4 * mean / (sqrt(squares) + eps)

    Args:
        waited: the steps since the last update, at least 1.
        t: the tensor's step, at least 1, for the bias correction of the moments.
        lr, betas, weight_decay: as in `torch.optim.AdamW`.
    """
    (kept_mean, new_mean), (kept_squares, new_squares) = (_power(1 - beta, waited) for beta in betas)
    correction = np.sqrt(_power(1 - betas[1], t)[1]) / _power(1 - betas[0], t)[1]
    decay, _ = _power(lr * weight_decay, waited)
    return kept_mean, new_mean / waited, kept_squares, new_squares / waited, lr * waited * correction, decay


def _power(x: float, exponent: Any) -> tuple[Any, Any]:
    """Return (1 - x)^exponent, and 1 minus that, in float64, as `torch.optim.AdamW` does."""
    power = np.power(1 - x, exponent)
    return power, 1 - power


@dataclass(frozen=True, kw_only=True)
class AdamWSettings:
    """The options of `SparseAdamW` besides those of `AdamWRule`.

    Attributes:
        density: the share of the entries that is sent and received: a float in (0, 1], or a function of the step
            number. With 0.09 a weight is updated in one of 11 steps on average.
        dense_steps, wire, bucket_bytes, nodes, on_step: as in `Reducer`.
        check_weights_every: call `check_weights` for weights and units before each step whose number is a multiple of
            this; 0: before the first step only; ``None``: never.
    """

    density: Schedule = DENSITY
    dense_steps: int | None = None
    wire: WireName = "auto"
    bucket_bytes: int | None = None
    nodes: NodesOption = "auto"
    on_step: OnStep | None = None
    check_weights_every: int | None = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "check_weights_every", check_every(self.check_weights_every))

    @property
    def reducer_options(self) -> dict[str, Any]:
        """Options of the `Reducer` of gradients."""
        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "check_weights_every"}
        return {**own, "dense_below": 0, "skip_nonfinite": True}


# declared above: AdamWOptions of AdamWRule, AdamWSettings without lr, betas, eps, weight_decay
class AdamWOptions(TypedDict, total=False):
    maximize: bool
    density: Schedule
    dense_steps: int | None
    wire: WireName
    bucket_bytes: int | None
    nodes: NodesOption
    on_step: OnStep | None
    check_weights_every: int | None


def settings_of(function: Callable[..., object], options: Mapping[str, Any]) -> tuple[AdamWSettings, dict[str, Any]]:
    """Return the settings in the options of ``function``, which the user called, and the options of its `AdamWRule`."""
    check_options(function, options)
    settings = AdamWSettings(**{name: value for name, value in options.items() if name not in RULE})
    return settings, {
        name: options.get(name, field.default)
        for field in fields(AdamWRule)
        if (name := field.name) in AdamWOptions.__annotations__
    }
