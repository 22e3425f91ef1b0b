"""`LazyAdamW`: AdamW with the sparse sums of a `Reducer`, several steps at a time, by an `AdamWRule`.

All ranks hold the same weights and moments, and the step of each weight's last update. In every step

1. each rank divides its gradient by a unit and adds it to its residual. The unit is sqrt(v) + eps, with v the second
   moment of the weight, rounded down to a power of two, so the division is exact. The magnitude of an entry is then how
   far AdamW would move the weight. It decides which entries are selected, and how they are rounded to few bits;
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
moments, weights and sums, so they decide the same. `Update.bounds_after` usually proves without a pass over the moments
that nothing can overflow. Near the largest number of a dtype it cannot. `Backend.adamw_overflows` then computes the
updates without applying them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from itertools import compress
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from sparsecomm.backends import Backend, Backends, default_float_mode
from sparsecomm.backends.adamw import Moments, unit
from sparsecomm.calls.collectives import SumCall, prepare
from sparsecomm.calls.label import Label, by_name
from sparsecomm.checks import quote, to_float
from sparsecomm.errors import InvalidInputError, listed
from sparsecomm.reducer import Rebuilt, Reducer, Step
from sparsecomm.reducer.step import cause_of
from sparsecomm.signals import deferred
from sparsecomm.states.loading import as_float, reading
from sparsecomm.states.schema import is_count
from sparsecomm.tensors.arrays import Array
from sparsecomm.tensors.dtypes import DType
from sparsecomm.tensors.interop import NamedTensors, Tensor, TensorSpec, from_host, library_of, specs_of, to_host
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.transport import Transport

_log = logging.getLogger("sparsecomm")

DENSITY = 0.09  # at which a transformer trains as with dense sums: docs/reports/adamw.md
START = 0.2
OPTIONS: dict[str, Any] = {"dense_below": 0, "skip_nonfinite": True}  # required options of the reducer
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


# Bounds on second moments and on |mean| / (sqrt(second moment) + eps), and the smallest eps for which the latter holds.
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

    def bounds_after(self, bounds: Bounds, largest: float, weight: float, dtype: DType) -> Bounds | None:
        """Return bounds after the update of weights of ``dtype``, or ``None`` if something could overflow.

        ``largest`` and ``weight``: upper bounds of the magnitudes of the entries and of the weights.
        """
        square, ratio, eps = bounds
        max_ = float(np.finfo(self.spec.accumulator.accumulator).max)
        gradient = largest * (math.sqrt(square) + self.unit_eps)
        grown = self.max_kept * ratio + self.max_new  # NaN if there is no bound, as with beta2 = 0
        ratio = grown if grown > ratio or math.isnan(grown) else ratio
        moved = 1.01 * (weight + self.max_rate * ratio)
        fits = gradient < 0.5 * math.sqrt(max_) and moved < min(max_, dtype.rounds_to_infinity)
        return (1.01 * (square + self.max_square * gradient**2), ratio, eps) if fits else None


def _maxima(table: Array) -> tuple[float, float, float, float]:
    """Return the last fields of `Update`."""
    kept_mean, new_mean, kept_squares, new_squares, rate, _ = table.T.astype(np.float64)
    kept, new = kept_mean / np.sqrt(kept_squares), new_mean / np.sqrt(new_squares)
    kept, new = np.where(kept_mean == 0, 0, kept), np.where(new_mean == 0, 0, new)
    return float(new_squares.max()), float(rate.max()), float(kept.max()), float(new.max())


def bounds_of(backend: Backend, moments: Moments, eps: float) -> Bounds:
    """Return the maxima of moments as bounds."""
    ratios, shape = abs(moments.mean) / (moments.squares**0.5 + moments.mean.dtype.type(eps)), moments.mean.shape
    square, ratio = (backend.largest(backend.as_tensor(array, shape)) for array in (moments.squares, ratios))
    return square, ratio, eps


@deferred
class LazyAdamW:
    """The moments of named weights, and steps by the rule above.

    All ranks hold equal values, except for the reducer's residuals.

    Attributes:
        specs: the weights' specs by name.
        zeros: returns new moments of zeros for a name; by default, arrays on the tensor's device.
        moments: moments by name; missing before a tensor's first gradient, and after `replace` has removed them.
        steps: the number of steps of each tensor by name.
        done: the outcome of the reducer's step that was applied last.
    """

    def __init__(
        self,
        weights: NamedTensors,
        reducer: Reducer,
        check_every: int | None,
        zeros: Callable[[str], Moments] | None = None,
    ) -> None:
        """Begin without moments. ``reducer`` must have `OPTIONS`, and ``check_every`` must be checked."""
        self.specs = specs_of(weights)
        self._reducer, self._check_every = reducer, check_every
        backends = Backends()
        self._backends = {spec.device: backends.of(spec.device) for spec in self.specs.values()}
        self._timelines = {device: backend.timeline() for device, backend in self._backends.items()}
        self.zeros = zeros or self._new
        self.done: Step | None = None
        self._shared_rules: tuple[Mapping[str, AdamWRule], Label] | None = None  # of the latest step
        self.adopt({}, {})

    def adopt(self, moments: Mapping[str, Moments], steps: Mapping[str, int]) -> None:
        """Replace the moments and the step counts, and discard everything computed from the old ones.

        Residuals must be in the units of the new moments. The weights may have been replaced, too.
        """
        self.moments, self.steps = dict(moments), {name: steps.get(name, 0) for name in self.specs}
        self._units: dict[str, tuple[Array, float]] = {}  # second moments and eps of the units of residuals, by name
        self._pending: list[Update] | None = None  # the rest of an update that was interrupted
        self._planned: tuple[Mapping[str, SparseVector], list[Update]] | None = None  # sums, and their updates
        self._overflows: dict[str, Array] = {}  # indices of weights that the step would make infinite, by name
        self._bounds: dict[str, Bounds] = {}
        self._next_bounds: dict[str, Bounds] = {}  # after the update that was accepted

    def replace(self, name: str, moments: Moments | None, step: int, *, keep_residual: bool) -> None:
        """Use other moments of a tensor between steps; ``None``: begin anew at its next gradient.

        ``keep_residual``: convert the residual to the new units in the next step. Otherwise drop it.
        """
        self.steps[name] = step
        self._bounds.pop(name, None)
        if moments is None:
            self.moments.pop(name, None)
        else:
            self.moments[name] = moments
        if not keep_residual and self._units.pop(name, None) is not None:
            self._reducer.discard(name)

    @default_float_mode
    def convert_residuals(self, rules: Mapping[str, AdamWRule]) -> None:
        """Convert residuals to the units of the moments, if moments or eps were replaced since the last step."""
        for name, moments in self.moments.items():
            squares, eps = moments.squares, rules[name].eps
            old_squares, old_eps = self._units.get(name, (squares, eps))
            if old_squares is not squares or old_eps != eps:
                with self.on_stream(self.specs[name]), np.errstate(over="ignore"):
                    xp, max_, real = library_of(squares), np.finfo(squares.dtype).max, squares.dtype.type
                    residual = self._reducer.residual(name).reshape(-1)
                    residual *= xp.minimum(unit(xp, old_squares, real(old_eps)) / unit(xp, squares, real(eps)), max_)
                    xp.clip(residual, -max_, max_, out=residual)
            self._units[name] = squares, eps

    def on_stream(self, spec: TensorSpec) -> AbstractContextManager[object]:
        """Return a context for work with the moments of a tensor on the current stream."""
        return self._timelines[spec.device].on_stream(None)

    def _new(self, name: str) -> Moments:
        spec = self.specs[name]
        backend, dtype = self._backends[spec.device], spec.accumulator.accumulator
        return Moments(*(backend.zeros(spec.size, each) for each in (dtype, dtype, np.int32)))

    # -- a step -------------------------------------------------------------------------------------------------------

    def exchange(
        self,
        gradients: Mapping[str, object],
        weights: Mapping[str, object],
        replicated: Mapping[str, object],
        rules: Mapping[str, AdamWRule],
        scale: float = 1.0,
    ) -> Step:
        """Sum gradients over the ranks. Collective. After an interrupt, call it again to continue.

        Args:
            gradients: by name; ``None`` or a missing name: no gradient. Gradients pushed already are skipped.
            weights, rules: by name.
            replicated: the tensors that must be equal on all ranks, besides the moments.
            scale: a factor of the gradients.

        Returns:
            The outcome. Pass it to `update`, unless moments are still `missing`, because a rank's gradient is not
            finite or its square overflows, or because there are no moments and no rank has a gradient.
        """
        if not self._reducer.pending:  # check before this rank waits for others, which may refuse their gradients
            for name, spec in self.specs.items():
                spec.tensor(weights[name], name)
        self.open(replicated, rules)
        if missing := self.missing:
            self._begin(missing, gradients, rules, scale)
            self._reducer.end_opening()
            if self.missing:
                return Step(self._reducer.step, self._reducer.density, usable=False)
        for name in self.specs:
            if not self._reducer.pushed(name):
                self.push(name, gradients.get(name), rules[name], scale)
        return self._reducer.wait(partial(self._accept, weights, rules))

    def open(self, replicated: Mapping[str, object], rules: Mapping[str, AdamWRule]) -> None:
        """Begin a step, unless it has begun. If a check is due, compare weights and moments between the ranks."""
        reducer = self._reducer
        if not reducer.pending:
            self.convert_residuals(rules)
            reducer.check_weights(self._check_every, lambda: {**replicated, **self.replicated()})
            reducer.label = self._label(rules)

    def _label(self, rules: Mapping[str, AdamWRule]) -> Label:
        """Return the rules and the steps by name, which all ranks must share."""
        steps = self.steps
        if self._shared_rules is None or self._shared_rules[0] != rules:
            shared, numbers = {name: rules[name] for name in self.specs}, dict[AdamWRule, int]()
            pattern = [numbers.setdefault(rule, len(numbers)) for rule in shared.values()]

            def pairs() -> Iterator[tuple[str, object]]:
                for option in AdamWRule._fields:
                    yield from by_name(option, {name: getattr(rule, option) for name, rule in shared.items()})

            self._shared_rules = shared, Label((pattern, [*map(tuple, numbers)]), pairs)
        return Label([*steps.values()], lambda: by_name("steps so far", steps)) + self._shared_rules[1]

    @property
    def missing(self) -> list[str]:
        """The names of tensors without moments."""
        complete = len(self.moments) == len(self.specs)
        return [] if complete else [name for name in self.specs if name not in self.moments]

    @default_float_mode
    def _begin(
        self, names: list[str], gradients: Mapping[str, object], rules: Mapping[str, AdamWRule], scale: float
    ) -> None:
        """Make missing moments from the first gradients, if they are finite on all ranks. Collective."""
        specs = [self.specs[name] for name in names]
        sizes = np.array([float(spec.size) for spec in specs])
        largest = np.array([float(np.finfo(spec.accumulator.accumulator).max) for spec in specs])
        squares = np.zeros(len(sizes) + 1)  # the last element: whether this rank has a gradient
        for i, name in enumerate(names):
            if gradients.get(name) is not None:
                total = self._reducer.sum_of_squares(name, gradients[name]) * scale**2
                squares[i], squares[-1] = math.inf if total >= largest[i] else total, 1
        shapes = ((name, spec.shape) for name, spec in zip(names, specs, strict=True))
        label = Label.of(("call", f"first moments of AdamW for {listed(sorted(names), 3)}"), *shapes)

        def average(transport: Transport) -> SumCall:
            args = "dense", "mean", None, None, "plain", None, 1.0, label
            return prepare(squares, 1.0, transport, *args, background=True)[1]

        call, means = self._reducer.opening_call("moments", average)
        *totals, any_gradient = means.to_dense()
        if not np.isfinite(totals).all():
            bad = (name for i, name in enumerate(names) if not math.isfinite(squares[i]))
            _log_skipped(self._reducer.step, cause_of(call.transport.rank, next(bad, None)))
        if not np.isfinite(totals).all() or not (any_gradient or self.moments):
            return
        mean = np.array(totals) / np.maximum(sizes, 1)
        mean[mean == 0] = sum(totals) / max(sizes.sum(), 1)  # a tensor without a gradient so far
        if (mean >= largest).any():
            return
        moments = {}
        for spec, square in zip(specs, mean, strict=True):
            with self.on_stream(spec):
                moments[spec.name] = its = self.zeros(spec.name)
                start = START * (1 - rules[spec.name].betas[1]) * square
                its.squares[:] = max(start, float(np.finfo(its.squares.dtype).tiny))
        self.moments |= moments
        self._units |= {name: (its.squares, rules[name].eps) for name, its in moments.items()}

    def push(self, name: str, gradient: object, rule: AdamWRule, scale: float = 1.0) -> None:
        """Push ``scale`` times a gradient, divided by each weight's unit.

        Pass ``None`` if the tensor has no gradient.
        """
        factor, squares = -scale if rule.maximize else scale, self.moments[name].squares

        def add(backend: Backend, x: Tensor, residual: Tensor, decay: float, if_finite: bool) -> bool:
            return backend.add_quotient(x, squares, rule.eps, factor, residual, if_finite)

        self._reducer.push_with(name, gradient, add)

    @default_float_mode
    def update(self, weights: Mapping[str, object], rules: Mapping[str, AdamWRule], done: Step) -> None:
        """Apply the sums of a reducer's step to weights in place, only once. A step that is not usable changes none.

        After an interrupt, call it again to continue.
        """
        if done is self.done:
            return
        if not done.usable:
            for name, indices in self._overflows.items():  # drop these entries, which would overflow again
                with self.on_stream(self.specs[name]):
                    self._reducer.residual(name).reshape(-1)[indices] = 0
            self._overflows, self._next_bounds, self._planned, self.done = {}, {}, None, done
            _log_skipped(done.number, done.cause)
            return
        if self._pending is None:
            self._pending = list(self._updates(done.left, rules))
        while self._pending:
            update = self._pending[-1]
            spec = update.spec
            name, backend, moments = spec.name, self._backends[spec.device], self.moments[spec.name]
            weight = spec.tensor(weights[name], name, writable=True)
            residual = self._reducer.residual(name).reshape(-1)
            with self._timelines[spec.device].on_stream(weight):
                backend.adamw(weight, moments, residual, *update.arguments)
                self._pending.pop()
            self._bounds.pop(name, None)
        self._bounds |= self._next_bounds
        steps = {name: count + (name not in done.without_gradient) for name, count in self.steps.items()}
        self.steps, self.done, self._pending, self._planned, self._next_bounds = steps, done, None, None, {}

    def _updates(self, sums: Mapping[str, SparseVector], rules: Mapping[str, AdamWRule]) -> list[Update]:
        """Return the updates by a step's sums, which are computed once."""
        if self._planned is None or self._planned[0] is not sums:
            updates, tables = [], {}
            for name, entries in sums.items():
                spec, rule, t = self.specs[name], rules[name], self.steps[name] + 1
                key = rule, spec.accumulator.name, t
                if key not in tables:
                    table = rule.table(t, np.dtype(spec.accumulator.accumulator))
                    tables[key] = table, _maxima(table)
                table, maxima = tables[key]
                eps = step_eps(np, rule.eps, rule.betas[1], t)
                updates.append(Update(spec, entries, table, rule.eps, eps, t, *maxima))
            self._planned = sums, updates
        return self._planned[1]

    # -- overflows ----------------------------------------------------------------------------------------------------

    @default_float_mode
    def _accept(
        self,
        weights: Mapping[str, object],
        rules: Mapping[str, AdamWRule],
        sums: Mapping[str, SparseVector],
        largest: float,
    ) -> bool:
        """Return whether a step leaves all weights and moments finite: see `Reducer.wait`."""
        overflows, after = {}, {}
        for update in self._updates(sums, rules):
            spec, name, next_bounds = update.spec, update.spec.name, None
            weight, backend, moments = spec.tensor(weights[name], name), self._backends[spec.device], self.moments[name]
            with self._timelines[spec.device].on_stream(weight):
                magnitude, bounds = backend.largest(weight), self._bounds.get(name)  # programs change weights, too
                if bounds is not None and bounds[2] <= update.eps:
                    next_bounds = update.bounds_after(bounds, largest, magnitude, weight.dtype)
                if next_bounds is None:
                    bounds = bounds_of(backend, moments, update.eps)
                    next_bounds = update.bounds_after(bounds, largest, magnitude, weight.dtype)
                if next_bounds is not None:
                    after[name] = next_bounds
                elif len(indices := backend.adamw_overflows(weight, moments, *update.arguments)):
                    overflows[name] = indices
        self._overflows, self._next_bounds = overflows, after
        return not overflows

    # -- state and other ranks ----------------------------------------------------------------------------------------

    def check_complete(self) -> None:
        """Check that the moments can be saved: no update was interrupted, and all moments are finite."""
        if self._pending is not None:
            raise InvalidInputError(
                "a step of AdamW was interrupted, or failed, while it changed weights; call step() again to complete it"
            )
        for name, moments in self.moments.items():
            backend = self._backends[self.specs[name].device]
            with self.on_stream(self.specs[name]):
                for field in ("mean", "squares"):
                    array = getattr(moments, field)
                    if not backend.finite(backend.as_tensor(array, array.shape)):
                        raise InvalidInputError(
                            f"state: {field} of {name} is not finite, so the state could not be loaded again; load an "
                            "older checkpoint"
                        )

    def broadcast(self, transport: Transport, rebuilt: Rebuilt) -> None:
        """Broadcast the moments and step counts from the first rank that is not new. Collective.

        Does nothing if no rank has joined and all ranks were in the same step.
        """
        if not rebuilt.ranks_joined and not rebuilt.steps_apart:
            return
        root = next(rank for rank in range(rebuilt.size) if rank not in rebuilt.ranks_joined)
        counts = np.array([[name in self.moments, step] for name, step in self.steps.items()], np.int64)
        transport.broadcast(counts.reshape(-1).view(np.uint8), root)
        begun, steps = counts.T.tolist()
        moments = {}
        for name in compress(self.specs, begun):
            spec = self.specs[name]
            with self.on_stream(spec):
                moments[name] = its = self.moments.get(name) or self.zeros(name)
                for array in its if spec.size else ():
                    host = to_host(array)
                    transport.broadcast(host.view(np.uint8), root)
                    array[:] = from_host(host, array)
        self.adopt(moments, dict(zip(self.specs, steps, strict=True)))

    def replicated(self) -> dict[str, Array]:
        """Return all moments by name and field. They must be equal on all ranks."""
        fields = Moments._fields
        return {f"{name}.{field}": getattr(its, field) for name, its in self.moments.items() for field in fields}


def _log_skipped(step: int, cause: str) -> None:
    _log.warning("step %s: %s; no rank updates its weights", step, cause)


def read_moments(saved: Mapping[str, Any], spec: TensorSpec) -> tuple[Moments, int]:
    """Return the checked moments of a tensor, flat and in host memory, and the number of its steps.

    ``saved``: the fields of `Moments` as NumPy arrays, and "step". ``last`` may be ``None``, as in a state of dense
    AdamW: the last update of every weight is then ``step``.
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
