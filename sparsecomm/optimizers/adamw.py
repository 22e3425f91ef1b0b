"""The rule of `SparseAdamW`: AdamW whose gradients arrive as sparse sums, several steps at a time.

All ranks hold the same weights and moments, and know for each weight the step of its last update. In every step

1. each rank adds its gradient, divided by a unit, to its residual. The unit is sqrt(v) + eps, with v the second moment
   of the weight, rounded down to a power of two: so the division is exact. Entries are selected, and rounded to few
   bits, by how far AdamW would move them;
2. the exchange returns the same sparse sums to all ranks. What is not sent stays in residuals;
3. a weight whose sum arrives after a steps makes these a steps of AdamW (Loshchilov and Hutter, ICLR 2019) at once.
   With G the mean over the ranks of the sum of their a gradients, and t the tensor's step:

       m = b1^a m + (1 - b1^a) G / a,  v = b2^a v + (1 - b2^a) G^2 / a
       w = (1 - lr wd)^a w - a lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

   A sum of a noisy gradients has a times the variance of one, hence G^2 / a and not (G / a)^2.

With a = 1 for all weights, as at density 1.0, this is AdamW. Before a weight's first update its v only serves as the
unit: it starts at `START` (1 - b2) times the mean square of the tensor's first gradient, and the first update drops it.

A tensor for which no rank has a gradient makes no step: neither its weights nor its t change.

**Overflows.** A step that would make a weight or a moment infinite is no step, on any rank. A rank drops the gradient
of a tensor if the square of an entry overflows, like a gradient with a NaN. Sums that overflow are found after the
exchange: all ranks hold the same moments and weights and get the same sums, so they come to the same verdict. This
costs no pass over memory: bounds on moments and weights tell that nothing can overflow. Only where numbers are close to
the largest of their type, the updates are computed before they are made.

This module is compiled, so that no signal handler runs between two of its statements.

The exchange, in which owners keep what they do not send, is that of Tang et al. (DoubleSqueeze), ICML 2019.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from sparsecomm.backends import Backend, Backends, default_float_mode
from sparsecomm.backends.adamw import Moments
from sparsecomm.calls.call import SumCall
from sparsecomm.calls.sparse import prepare
from sparsecomm.checks import quote, to_float
from sparsecomm.errors import InvalidInputError
from sparsecomm.reducer import Rebuilt, Reducer, Step
from sparsecomm.reducer.bucket import TensorSpec
from sparsecomm.reducer.layout import NamedTensors, specs_of
from sparsecomm.states.loading import as_float, reading
from sparsecomm.states.schema import is_count
from sparsecomm.tensors.arrays import Array, from_host, to_host
from sparsecomm.tensors.dtypes import DType
from sparsecomm.tensors.interop import Tensor
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.transport import Comm, Transport

__all__ = ["DENSITY", "EXCHANGE", "START", "AdamWRule", "LazyAdamW", "coefficients", "read_moments", "step_eps"]

_log = logging.getLogger("sparsecomm")

# Options of the reducer, and the density at which a transformer trains as with dense sums: docs/reports/adamw.md.
EXCHANGE: dict[str, Any] = {"reorder": False, "dense_below": 0}
DENSITY = 0.09
START = 0.2
_MAX_WAIT = 1 << 14  # a weight that waited longer makes this many steps


def coefficients(
    xp: Any, waited: Any, t: Any, lr: Any, betas: tuple[Any, Any], weight_decay: Any
) -> tuple[Any, Any, Any, Any, Any, Any]:
    """Return the six coefficients of `sparsecomm.backends.adamw.adamw_step`.

    Args:
        xp: the library of arrays: numpy or jax.numpy.
        waited: the steps since the last update, at least 1: an array.
        t: the tensor's step, at least 1. It corrects the bias of the moments.
        lr, betas, weight_decay: as in `torch.optim.AdamW`; they may be arrays.
    """
    (kept_mean, new_mean), (kept_squares, new_squares) = (_power(xp, 1 - beta, waited) for beta in betas)
    correction = xp.sqrt(_power(xp, 1 - betas[1], t)[1]) / _power(xp, 1 - betas[0], t)[1]
    decay, _ = _power(xp, lr * weight_decay, waited)
    return kept_mean, new_mean / waited, kept_squares, new_squares / waited, lr * waited * correction, decay


def step_eps(xp: Any, eps: Any, beta2: Any, t: Any) -> Any:
    """Return eps in step ``t`` for the root of a second moment whose bias is not corrected."""
    return eps * xp.sqrt(_power(xp, 1 - beta2, t)[1])


def _power(xp: Any, less: Any, exponent: Any) -> tuple[Any, Any]:
    """Return (1 - less)^exponent, and what it is below 1."""
    if xp is np:  # in float64, as `torch.optim.AdamW` does
        kept = np.power(1 - less, exponent)
        return kept, 1 - kept
    log = xp.log1p(-less)
    return xp.exp(exponent * log), -xp.expm1(exponent * log)


@dataclass(frozen=True)
class AdamWRule:
    """The settings of AdamW, as `torch.optim.AdamW` names them."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    maximize: bool = False

    @classmethod
    def of(cls, lr: object, betas: object, eps: object, weight_decay: object, maximize: object = False) -> AdamWRule:
        """Return checked settings.

        Raises:
            InvalidInputError: a setting cannot be used.
        """
        pair = tuple(betas) if isinstance(betas, (tuple, list)) else ()
        powers = [to_float(beta) for beta in pair]
        rate, tiny, decay = to_float(lr), to_float(eps), to_float(weight_decay)
        two = len(powers) == 2 and all(0 <= beta < 1 for beta in powers)
        for name, value, fine, expected in (
            ("lr", lr, 0 <= rate < math.inf, "must be a number that is at least 0"),
            ("betas", betas, two, "must be two numbers in [0, 1)"),
            ("eps", eps, 0 < tiny < math.inf, "must be a number above 0"),
            ("weight_decay", weight_decay, 0 <= decay < math.inf, "must be a number that is at least 0"),
            ("maximize", maximize, isinstance(maximize, bool), "must be True or False"),
        ):
            if not fine:
                raise InvalidInputError(f"{name}={quote(value)}: {expected}")
        if rate * decay >= 1:
            raise InvalidInputError(f"lr={rate!r} times weight_decay={decay!r} is {rate * decay:g}: must be below 1")
        return cls(rate, (powers[0], powers[1]), tiny, decay, bool(maximize))

    def table(self, t: int, dtype: np.dtype[Any]) -> Array:
        """Return `coefficients` in step ``t``, a row for each wait from 0 (as if 1) to ``t`` steps."""
        size = min(t, _MAX_WAIT) + 1
        waited = np.maximum(np.arange(size, dtype=np.float64), 1)
        made = coefficients(np, waited, float(t), self.lr, self.betas, self.weight_decay)
        return np.stack(made, axis=1).astype(dtype)


# Bounds on second moments, |mean| / (sqrt(second moment) + eps), and magnitudes of weights.
_Bounds: TypeAlias = tuple[float, float, float]


class _Reach(NamedTuple):
    """How far the rows of a table can move moments and weights.

    Attributes:
        square: of g^2 that is added to a second moment.
        rate: of |mean| / (sqrt(second moment) + eps) by which a weight moves.
        kept, new: that quotient is at most kept * (its value before) + new.
    """

    square: float
    rate: float
    kept: float
    new: float

    @classmethod
    def of(cls, table: Array) -> _Reach:
        kept_mean, new_mean, kept_squares, new_squares, rate, _ = table.T.astype(np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            kept, new = kept_mean / np.sqrt(kept_squares), new_mean / np.sqrt(new_squares)
        kept, new = np.where(kept_mean == 0, 0, kept), np.where(new_mean == 0, 0, new)
        return cls(*(float(each.max()) for each in (new_squares, rate, kept, new)))


class _Update(NamedTuple):
    """What the sums of a step make of a tensor. The fields in the middle are arguments of `Backend.adamw`."""

    spec: TensorSpec
    entries: SparseVector
    table: Array
    unit_eps: float
    eps: float
    step: int
    reach: _Reach

    def bounds_after(self, bounds: _Bounds, largest: float, dtype: DType) -> _Bounds | None:
        """Return bounds that hold after the update; ``None``: it is not sure that nothing overflows.

        Args:
            bounds: before it.
            largest: the largest magnitude in the entries, or more.
            dtype: of the weights.
        """
        (square, ratio, weight), reach = bounds, self.reach
        max_ = float(np.finfo(self.spec.accumulator.accumulator).max)
        gradient = largest * (math.sqrt(square) + self.unit_eps)
        ratio = max(ratio, reach.kept * ratio + reach.new)
        weight = 1.01 * (weight + reach.rate * ratio)
        if gradient < 0.5 * math.sqrt(max_) and weight < min(max_, dtype.rounds_to_infinity):
            return 1.01 * (square + reach.square * gradient**2), ratio, weight
        return None


def _bounds(backend: Backend, weight: Tensor, moments: Moments, eps: float, ratio: float | None) -> _Bounds:
    """Return bounds as they are now: the maxima. ``ratio``: a bound on the quotients, where it is known."""
    shape = (weight.size,)
    if ratio is None or not math.isfinite(ratio):
        ratios = abs(moments.mean) / (moments.squares**0.5 + moments.mean.dtype.type(eps))
        ratio = backend.largest(backend.as_tensor(ratios, shape))
    return backend.largest(backend.as_tensor(moments.squares, shape)), ratio, backend.largest(weight)


class LazyAdamW:
    """The moments of named weights, and the steps that the sums of a reducer make: shared by all frameworks.

    Everything is the same on all ranks, except the reducer's residuals.

    Attributes:
        specs: the weights' specs by name.
        comm: the ranks.
        zeros: makes the moments of a tensor.
        moments: by name; empty before the first gradients.
        steps: by name, the number of steps that the tensor has made.
        done: the outcome of the reducer's step that was applied last.
    """

    def __init__(
        self, weights: NamedTensors, reducer: Reducer, comm: Comm, zeros: Callable[[TensorSpec], Moments] | None = None
    ) -> None:
        """Begin without moments.

        Args:
            weights: by name, as in the reducer.
            reducer: of the gradients.
            comm: its ranks.
            zeros: makes the moments of a tensor; ``None``: arrays on its device.
        """
        self.specs = specs_of(weights)
        self.comm, self._reducer = comm, reducer
        self._backends = Backends()
        self._timelines = {spec.device: self._backends.of(spec.device).timeline() for spec in self.specs.values()}
        self.zeros = zeros or self._new
        self.moments: dict[str, Moments] = {}
        self.steps = dict.fromkeys(self.specs, 0)
        self.done: Step | None = None
        self._pending: list[_Update] | None = None  # the rest of an update that was interrupted
        self._planned: tuple[Mapping[str, SparseVector], list[_Update]] | None = None  # for the sums of `accept`
        self._overflows: dict[str, Array] = {}  # indices of weights for which the step was not accepted, by name
        self._bounds: dict[str, _Bounds] = {}
        self._next_bounds: dict[str, _Bounds] = {}  # after the update that was accepted

    def on_stream(self, spec: TensorSpec) -> AbstractContextManager[object]:
        """Return a context for work with the moments of a tensor on the current stream."""
        return self._timelines[spec.device].on_stream(None)

    def _new(self, spec: TensorSpec) -> Moments:
        backend, dtype = self._backends.of(spec.device), spec.accumulator.accumulator
        return Moments(
            backend.zeros(spec.size, dtype), backend.zeros(spec.size, dtype), backend.zeros(spec.size, np.int32)
        )

    @default_float_mode
    def begin(self, gradients: Mapping[str, object], rules: Mapping[str, AdamWRule], scale: float = 1.0) -> bool:
        """Make the moments from the first gradients, if there are none yet. Collective in that case.

        Args:
            gradients: by name; ``None`` or a missing name: no gradient.
            rules: by name.
            scale: a factor of the gradients.

        Returns:
            Whether there are moments now. There are none if a rank's gradient is not finite, or no rank has any.
        """
        if self.moments:
            return True
        self._reducer.connect()  # on all ranks, also where there is no gradient
        names, sizes = list(self.specs), np.array([float(spec.size) for spec in self.specs.values()])
        squares = np.zeros(len(names) + 1)  # and whether there is a gradient
        for i, name in enumerate(names):
            if gradients.get(name) is not None:
                total = self._reducer.sum_of_squares(name, gradients[name]) * scale**2
                if total >= float(np.finfo(self.specs[name].accumulator.accumulator).max):  # as in later steps
                    total = math.inf
                squares[i], squares[-1] = total, 1
        *totals, some = self._reducer.opening_call("moments", partial(_mean_of, squares))[1].to_dense()
        if not np.isfinite(totals).all() or not some:
            return False
        mean = np.array(totals) / np.maximum(sizes, 1)
        mean[mean == 0] = sum(totals) / max(sizes.sum(), 1)  # a tensor without a gradient so far
        largest = [np.finfo(spec.accumulator.accumulator).max for spec in self.specs.values()]
        if (mean >= largest).any():
            return False
        made = {}
        for spec, square in zip(self.specs.values(), mean, strict=True):
            with self.on_stream(spec):
                made[spec.name] = moments = self.zeros(spec)
                start = START * (1 - rules[spec.name].betas[1]) * square
                moments.squares[:] = max(start, float(np.finfo(moments.squares.dtype).tiny))
        self.moments, self._bounds = made, {}
        return True

    def push(self, name: str, gradient: object, rule: AdamWRule, scale: float = 1.0) -> None:
        """Push ``scale`` times a gradient, divided by the units of its weights; ``None``: this rank has none."""
        sign = -scale if rule.maximize else scale
        self._reducer.push_quotient(name, gradient, self.moments[name].squares, rule.eps, sign)

    def update(self, weights: Mapping[str, object], rules: Mapping[str, AdamWRule], done: Step) -> None:
        """Apply the sums of a reducer's step, once. After an interrupt, call it again: it goes on.

        Args:
            weights: by name, changed in place.
            rules: by name.
            done: the outcome of the reducer's step. If it is not usable, nothing changes.
        """
        if done is self.done:
            return
        if not done.usable:
            self._drop_overflows()
            self.done = done
            _log.warning(
                "step %s: a gradient of some rank is not finite, or the step would make weights or moments infinite; "
                "no rank updates its weights",
                done.number,
            )
            return
        if self._pending is None:
            self._pending = self._updates(done.left, rules)
        while self._pending:
            update = self._pending[-1]
            spec = update.spec
            name, backend, moments = spec.name, self._backends.of(spec.device), self.moments[spec.name]
            weight = spec.tensor(weights[name], name, writable=True)
            residual = self._reducer.residual(name).reshape(-1)
            with self._timelines[spec.device].on_stream(weight):
                backend.adamw(weight, moments, residual, *update[1:-1])
                self._pending.pop()
            self._bounds.pop(name, None)
        made = {name: steps + (name not in done.without_gradient) for name, steps in self.steps.items()}
        self.steps, self.done, self._pending, self._planned = made, done, None, None
        self._bounds |= self._next_bounds
        self._next_bounds = {}

    def _updates(self, sums: Mapping[str, SparseVector], rules: Mapping[str, AdamWRule]) -> list[_Update]:
        """Return the updates that sums make."""
        if self._planned is not None and self._planned[0] is sums:
            return list(self._planned[1])
        updates, tables = [], {}
        for name, entries in sums.items():
            rule, spec, t = rules[name], self.specs[name], self.steps[name] + 1
            key = rule, spec.accumulator.name, t
            if key not in tables:
                table = rule.table(t, np.dtype(spec.accumulator.accumulator))
                tables[key] = table, _Reach.of(table)
            table, reach = tables[key]
            eps = step_eps(np, rule.eps, rule.betas[1], t)
            updates.append(_Update(spec, entries, table, rule.eps, eps, t, reach))
        self._planned = sums, updates
        return list(updates)

    # -- overflows ----------------------------------------------------------------------------------------------------

    def accept(
        self,
        weights: Mapping[str, object],
        rules: Mapping[str, AdamWRule],
        sums: Mapping[str, SparseVector],
        largest: float,
    ) -> bool:
        """Return whether the step that sums make leaves all weights and moments finite: see `Reducer.wait`.

        Args:
            weights, rules: as of `update`.
            sums: by name.
            largest: the largest magnitude in sums.
        """
        overflows, after = {}, {}
        for update in self._updates(sums, rules):
            spec, name = update.spec, update.spec.name
            weight = spec.tensor(weights[name], name)
            bounds = self._bounds.get(name)
            found = None if bounds is None else update.bounds_after(bounds, largest, weight.dtype)
            if found is None:
                backend, moments = self._backends.of(spec.device), self.moments[name]
                with self._timelines[spec.device].on_stream(weight):
                    ratio = None if bounds is None else bounds[1]
                    self._bounds[name] = bounds = _bounds(backend, weight, moments, update.eps, ratio)
                    found = update.bounds_after(bounds, largest, weight.dtype)
                    if found is None and len(indices := backend.adamw_overflows(weight, moments, *update[1:-1])):
                        overflows[name] = indices
            if found is not None:
                after[name] = found
        self._overflows, self._next_bounds = overflows, after
        return not overflows

    def _drop_overflows(self) -> None:
        """Drop what waits in this rank's residuals for weights that could not be updated."""
        for name, indices in self._overflows.items():
            with self.on_stream(self.specs[name]):
                self._reducer.residual(name).reshape(-1)[indices] = 0
        self._overflows, self._next_bounds, self._planned = {}, {}, None

    def check_whole(self) -> None:
        """Check that the moments can be saved: no update has stopped half-way, and all are finite.

        Raises:
            InvalidInputError: one has, or a moment is not finite.
        """
        if self._pending is not None:
            raise InvalidInputError(
                "a step of AdamW was interrupted, or failed, while it changed weights; call step() again, which goes on"
            )
        for name, moments in self.moments.items():
            backend = self._backends.of(self.specs[name].device)
            with self.on_stream(self.specs[name]):
                for field in ("mean", "squares"):
                    array = getattr(moments, field)
                    if not backend.finite(backend.as_tensor(array, array.shape)):
                        raise InvalidInputError(
                            f"state: {field} of {name} is not finite, so the state could not be loaded again; load an "
                            "older checkpoint"
                        )

    def label(self, rules: Mapping[str, AdamWRule]) -> str:
        """Return what ranks must have in common in the next step, besides the reducer's own settings."""
        return f"AdamW {sorted(set(self.steps.values()))} {sorted(set(map(repr, rules.values())))}"

    def adopt(self, moments: Mapping[str, Moments], steps: Mapping[str, int]) -> None:
        """Go on with moments that were loaded, and the number of steps of each tensor."""
        self.steps, self.moments, self._pending = {name: steps.get(name, 0) for name in self.specs}, dict(moments), None
        self._planned, self._overflows, self._bounds, self._next_bounds = None, {}, {}, {}

    def spread(self, transport: Transport, rebuilt: Rebuilt) -> None:
        """Give all ranks the moments of a rank that stayed, if others joined or were a step apart. Collective."""
        if not rebuilt.ranks_joined and not rebuilt.steps_apart:
            return
        root = next(rank for rank in range(rebuilt.size) if rank not in rebuilt.ranks_joined)
        counts = np.array([bool(self.moments), *self.steps.values()], np.int64)
        transport.broadcast(counts.view(np.uint8), root)
        begun, *steps = counts.tolist()
        moments = {}
        for name, spec in self.specs.items() if begun else ():
            with self.on_stream(spec):
                moments[name] = its = self.moments.get(name) or self.zeros(spec)
                for array in its if spec.size else ():
                    host = to_host(array)
                    transport.broadcast(host.view(np.uint8), root)
                    array[:] = from_host(host, array)
        self.adopt(moments, dict(zip(self.specs, steps, strict=True)))

    def replicated(self) -> dict[str, Array]:
        """Return all moments by name and field: like weights, they must be the same on all ranks."""
        return {
            f"{name}.{field}": array
            for name, moments in self.moments.items()
            for field, array in moments._asdict().items()
        }


def _mean_of(squares: Array, transport: Transport) -> SumCall:
    """Return the call that takes the mean of the ranks' mean squares."""
    args = "dense", "mean", None, None, "plain", None, 1.0, "first second moments"
    return prepare(squares, 1.0, transport, *args, background=True)[1]


def read_moments(saved: Mapping[str, Any], spec: TensorSpec) -> tuple[Moments, int]:
    """Return checked moments of a tensor, flat and in host memory, and the number of its steps.

    Args:
        saved: the fields of `Moments` as NumPy arrays of the tensor's shape, and "step". ``last`` may be ``None``, as
            in a state of dense AdamW: all weights have made all steps.
        spec: of the tensor.

    Raises:
        InvalidInputError: they do not fit.
    """
    name = spec.name
    with reading(f"moments of {name}", "mean, squares, last and step"):
        step, last = saved["step"], saved["last"]
        if not is_count(step):
            raise InvalidInputError(f"state: step of {name} is {quote(step)}; expected a number of steps")
        last = np.full(spec.shape, step, np.int32) if last is None else np.asarray(last)
        if last.dtype.kind != "i" or last.shape != spec.shape:
            raise InvalidInputError(f"state: last of {name}: expected whole numbers of shape {spec.shape}")
        if missing := [field for field in ("mean", "squares") if saved[field] is None]:
            raise InvalidInputError(f"state: {missing[0]} of {name} is missing")
        mean, squares = (
            as_float(saved[field], f"{field} of {name}", spec.shape, spec.accumulator) for field in ("mean", "squares")
        )
        for field, array, low, high in (
            ("last", last, 0, step),
            ("squares", squares, 0, np.finfo(squares.dtype).max),
            ("mean", mean, np.finfo(mean.dtype).min, np.finfo(mean.dtype).max),
        ):
            if array.size and not low <= array.min() <= array.max() <= high:
                raise InvalidInputError(f"state: {field} of {name}: expected finite numbers from {low:g} to {high:g}")
        return Moments(mean, squares, last.astype(np.int32).reshape(-1)), step
