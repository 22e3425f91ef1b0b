"""`LazyAdamW`: AdamW with the sparse sums of a `Reducer`. The optimizers for arrays and for PyTorch both use it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

from sparsecomm.backends import Backend, Backends, default_float_mode
from sparsecomm.backends.adamw import Moments
from sparsecomm.calls.collectives import SumCall, prepare
from sparsecomm.checks import quote
from sparsecomm.errors import InvalidInputError
from sparsecomm.optimizers.rule import START, AdamWRule, Bounds, Update, bounds_of, updates_of
from sparsecomm.reducer import Rebuilt, Reducer, Step
from sparsecomm.signals import deferred
from sparsecomm.states.loading import as_float, reading
from sparsecomm.states.schema import is_count
from sparsecomm.tensors.arrays import Array
from sparsecomm.tensors.interop import NamedTensors, Tensor, TensorSpec, from_host, specs_of, to_host
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.transport import Transport

__all__ = ["OPTIONS", "LazyAdamW", "read_moments"]

_log = logging.getLogger("sparsecomm")

OPTIONS: dict[str, Any] = {"dense_below": 0, "skip_nonfinite": True}  # required options of the reducer


@deferred
class LazyAdamW:
    """The moments of named weights, and steps by the rule of `sparsecomm.optimizers.rule`.

    All ranks hold equal values, except for the reducer's residuals.

    Attributes:
        specs: the weights' specs by name.
        zeros: returns new moments of zeros for a tensor.
        moments: moments by name; empty before the first gradients.
        steps: the number of steps of each tensor by name.
        done: the outcome of the reducer's step that was applied last.
    """

    def __init__(
        self,
        weights: NamedTensors,
        reducer: Reducer,
        check_every: int | None,
        zeros: Callable[[TensorSpec], Moments] | None = None,
    ) -> None:
        """Begin without moments.

        Args:
            weights: weights by name, as in the reducer.
            reducer: sums the gradients, with `OPTIONS`.
            check_every: the checked option ``check_weights_every``.
            zeros: as in the attributes; ``None`` makes arrays on the tensor's device.
        """
        self.specs = specs_of(weights)
        self._reducer, self._check_every = reducer, check_every
        self._backends = Backends()
        self._timelines = {spec.device: self._backends.of(spec.device).timeline() for spec in self.specs.values()}
        self.zeros = zeros or self._new
        self.done: Step | None = None
        self.adopt({}, {})

    def adopt(self, moments: Mapping[str, Moments], steps: Mapping[str, int]) -> None:
        """Replace the moments and the step counts, and discard everything computed from the old ones.

        The weights may have been replaced, too.
        """
        self.moments, self.steps = dict(moments), {name: steps.get(name, 0) for name in self.specs}
        self._pending: list[Update] | None = None  # the rest of an update that was interrupted
        self._planned: tuple[Mapping[str, SparseVector], list[Update]] | None = None  # sums, and their updates
        self._overflows: dict[str, Array] = {}  # indices of weights that the step would make infinite, by name
        self._bounds: dict[str, Bounds] = {}
        self._next_bounds: dict[str, Bounds] = {}  # after the update that was accepted

    def on_stream(self, spec: TensorSpec) -> AbstractContextManager[object]:
        """Return a context for work with the moments of a tensor on the current stream."""
        return self._timelines[spec.device].on_stream(None)

    def _new(self, spec: TensorSpec) -> Moments:
        backend, dtype = self._backends.of(spec.device), spec.accumulator.accumulator
        return Moments(
            backend.zeros(spec.size, dtype), backend.zeros(spec.size, dtype), backend.zeros(spec.size, np.int32)
        )

    # -- a step -------------------------------------------------------------------------------------------------------

    def exchange(
        self,
        gradients: Mapping[str, object],
        weights: Mapping[str, object],
        replicated: Mapping[str, object],
        rules: Mapping[str, AdamWRule],
        scale: float = 1.0,
    ) -> Step | None:
        """Sum gradients over the ranks. Collective. After an interrupt, call it again to continue.

        Args:
            gradients: by name; ``None`` or a missing name: no gradient. Gradients pushed already are skipped.
            weights, rules: by name.
            replicated: the tensors that must be equal on all ranks, besides the moments.
            scale: a factor of the gradients.

        Returns:
            The outcome; pass it to `update`. ``None`` if the first moments cannot be computed yet, because no rank has
            a gradient, or a rank's gradient is not finite or its square overflows.
        """
        self.open(replicated, rules)
        if not self.moments:
            self._begin(gradients, rules, scale)
            self._reducer.end_opening()
            if not self.moments:
                return None
        for name in self.specs:
            if not self._reducer.pushed(name):
                self.push(name, gradients.get(name), rules[name], scale)
        return self._reducer.wait(partial(self._accept, weights, rules))

    def open(self, replicated: Mapping[str, object], rules: Mapping[str, AdamWRule]) -> None:
        """Begin a step, unless it has begun. If a check is due, compare weights and moments between the ranks."""
        reducer = self._reducer
        if not reducer.pending:
            reducer.check_weights(self._check_every, lambda: {**replicated, **self.replicated()})
            reducer.label = f"AdamW {sorted(set(self.steps.values()))} {sorted(map(tuple, set(rules.values())))}"

    @default_float_mode
    def _begin(self, gradients: Mapping[str, object], rules: Mapping[str, AdamWRule], scale: float) -> None:
        """Make the moments from the first gradients, if they are finite on all ranks. Collective."""
        sizes = np.array([float(spec.size) for spec in self.specs.values()])
        largest = np.array([float(np.finfo(spec.accumulator.accumulator).max) for spec in self.specs.values()])
        squares = np.zeros(len(sizes) + 1)  # the last element: whether this rank has a gradient
        for i, name in enumerate(self.specs):
            if gradients.get(name) is not None:
                total = self._reducer.sum_of_squares(name, gradients[name]) * scale**2
                squares[i], squares[-1] = math.inf if total >= largest[i] else total, 1
        *totals, any_gradient = self._reducer.opening_call("moments", partial(_mean_of, squares))[1].to_dense()
        if not np.isfinite(totals).all() or not any_gradient:
            return
        mean = np.array(totals) / np.maximum(sizes, 1)
        mean[mean == 0] = sum(totals) / max(sizes.sum(), 1)  # a tensor without a gradient so far
        if (mean >= largest).any():
            return
        moments = {}
        for spec, square in zip(self.specs.values(), mean, strict=True):
            with self.on_stream(spec):
                moments[spec.name] = its = self.zeros(spec)
                start = START * (1 - rules[spec.name].betas[1]) * square
                its.squares[:] = max(start, float(np.finfo(its.squares.dtype).tiny))
        self.moments, self._bounds = moments, {}

    def push(self, name: str, gradient: object, rule: AdamWRule, scale: float = 1.0) -> None:
        """Push ``scale`` times a gradient, divided by each weight's unit: see `sparsecomm.optimizers.rule`.

        Pass ``None`` if the tensor has no gradient.
        """
        factor, squares = -scale if rule.maximize else scale, self.moments[name].squares

        def add(backend: Backend, x: Tensor, residual: Tensor, decay: float, if_finite: bool) -> bool:
            return backend.add_quotient(x, squares, rule.eps, factor, residual, if_finite)

        self._reducer.push_with(name, gradient, add)

    def update(self, weights: Mapping[str, object], rules: Mapping[str, AdamWRule], done: Step) -> None:
        """Apply the sums of a reducer's step to weights in place. A step that is not usable changes no weights.

        Each step is applied only once.

        After an interrupt, call it again to continue.
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
            self._pending = list(self._updates(done.left, rules))
        while self._pending:
            update = self._pending[-1]
            spec = update.spec
            name, backend, moments = spec.name, self._backends.of(spec.device), self.moments[spec.name]
            weight = spec.tensor(weights[name], name, writable=True)
            residual = self._reducer.residual(name).reshape(-1)
            with self._timelines[spec.device].on_stream(weight):
                backend.adamw(weight, moments, residual, *update.arguments)
                self._pending.pop()
            self._bounds.pop(name, None)
        steps = {name: count + (name not in done.without_gradient) for name, count in self.steps.items()}
        self.steps, self.done, self._pending, self._planned = steps, done, None, None
        self._bounds |= self._next_bounds
        self._next_bounds = {}

    def _updates(self, sums: Mapping[str, SparseVector], rules: Mapping[str, AdamWRule]) -> list[Update]:
        if self._planned is None or self._planned[0] is not sums:
            by_spec = {self.specs[name]: entries for name, entries in sums.items()}
            self._planned = sums, updates_of(by_spec, dict(rules), self.steps)
        return self._planned[1]

    # -- overflows ----------------------------------------------------------------------------------------------------

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
            spec, name = update.spec, update.spec.name
            weight = spec.tensor(weights[name], name)
            bounds = self._bounds.get(name)
            next_bounds = None if bounds is None else update.bounds_after(bounds, largest, weight.dtype)
            if next_bounds is None:
                backend, moments = self._backends.of(spec.device), self.moments[name]
                with self._timelines[spec.device].on_stream(weight):
                    ratio = None if bounds is None else bounds[1]
                    self._bounds[name] = bounds = bounds_of(backend, weight, moments, update.eps, ratio)
                    next_bounds = update.bounds_after(bounds, largest, weight.dtype)
                    if next_bounds is None and len(
                        indices := backend.adamw_overflows(weight, moments, *update.arguments)
                    ):
                        overflows[name] = indices
            if next_bounds is not None:
                after[name] = next_bounds
        self._overflows, self._next_bounds = overflows, after
        return not overflows

    def _drop_overflows(self) -> None:
        """Set this rank's residuals to zero at the weights that would have overflowed."""
        for name, indices in self._overflows.items():
            with self.on_stream(self.specs[name]):
                self._reducer.residual(name).reshape(-1)[indices] = 0
        self._overflows, self._next_bounds, self._planned = {}, {}, None

    # -- state and other ranks ----------------------------------------------------------------------------------------

    def check_complete(self) -> None:
        """Check that the moments can be saved: no update was interrupted, and all moments are finite."""
        if self._pending is not None:
            raise InvalidInputError(
                "a step of AdamW was interrupted, or failed, while it changed weights; call step() again to complete it"
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

    def spread(self, transport: Transport, rebuilt: Rebuilt) -> None:
        """Broadcast the moments and step counts from the first rank that is not new. Collective.

        Does nothing if no rank has joined and all ranks were in the same step.
        """
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
        """Return all moments by name and field. They must be equal on all ranks."""
        fields = ((name, *item) for name, moments in self.moments.items() for item in moments._asdict().items())
        return {f"{name}.{field}": array for name, field, array in fields}


def _mean_of(squares: Array, transport: Transport) -> SumCall:
    """Return the call that averages ``squares`` over the ranks."""
    args = "dense", "mean", None, None, "plain", None, 1.0, "first second moments"
    return prepare(squares, 1.0, transport, *args, background=True)[1]


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
