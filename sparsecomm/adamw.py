"""AdamW by sparse sums: each rank's gradients, divided by the root of the second moment, are summed by "double".

All ranks hold the same weights, moments, and for each weight the step in which it was updated last. In every step

1. each rank adds g / (sqrt(v) + eps) to its residual, so that what is selected, and rounded to few bits, is what
   matters to Adam, whatever layer it is of;
2. the first sums come back, the same on all ranks. What is not sent waits in residuals, on both sides, whose unit
   changes as v does: no gradient is lost;
3. a weight whose sum has come after ``a`` steps makes that many steps of AdamW (Loshchilov and Hutter, ICLR 2019) by
   the mean gradient g = sum / a, weight decay among them:

       m = b1^a m + (1 - b1^a) g,  v = b2^a v + (1 - b2^a) a g^2,  w = (1 - lr wd)^a w - a lr m / (sqrt(v) + eps)

   The a in v: a sum of a noisy gradients has a times the variance of one.

Nothing corrects the bias of the moments. v begins with a hundredth of the mean square of the tensor's first gradient,
and m with zeros, which is a short warm-up.

The scheme of owners that keep what they do not send is that of Tang et al. (DoubleSqueeze), ICML 2019.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from sparsecomm import transport
from sparsecomm.algorithms import Algorithm, AlgorithmName
from sparsecomm.api import sparse_allreduce
from sparsecomm.backends import Backends, default_float_mode
from sparsecomm.backends.base import Moments
from sparsecomm.calls.loading import Prepared, as_float, reading
from sparsecomm.calls.weights import check_every, check_weights
from sparsecomm.checks import number, shown
from sparsecomm.errors import InvalidInputError
from sparsecomm.hints import listed
from sparsecomm.reducer import Rebuilt, Reducer, Step
from sparsecomm.reducer.bucket import TensorSpec
from sparsecomm.reducer.layout import NamedTensors, specs_of
from sparsecomm.reducer.options import OnStep
from sparsecomm.reducer.schedule import Schedule
from sparsecomm.reducer.state import State, StateDict, is_count
from sparsecomm.tensors import interop
from sparsecomm.tensors.arrays import Array, from_host, to_host
from sparsecomm.tensors.sparse import DenseSum
from sparsecomm.transport import Comm, Transport
from sparsecomm.wire import WireName

__all__ = ["DEFAULTS", "DENSITY", "FIRST", "AdamWRule", "LazyAdamW", "SparseAdamW"]

_log = logging.getLogger("sparsecomm")

# Of the exchange, with which a transformer trains as with dense gradients: docs/reports/adamw.md.
DEFAULTS: dict[str, Any] = {
    "algorithm": "double",
    "wire": "packed_int2",
    "op": "mean",
    "scope": "bucket",
    "reorder": False,
    "dense_below": 0,
}
DENSITY = 0.09
FIRST = 0.01  # part of the mean square of a first gradient with which second moments begin
_MAX_WAIT = 1 << 14  # steps: who waited longer makes so many


@dataclass(frozen=True)
class AdamWRule:
    """The settings of AdamW, as `torch.optim.AdamW` names them."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float

    @classmethod
    def of(cls, lr: object, betas: object, eps: object, weight_decay: object) -> AdamWRule:
        """Return checked settings.

        Raises:
            InvalidInputError: one of them cannot be used.
        """
        pair = tuple(betas) if isinstance(betas, (tuple, list)) else ()
        powers = [number(beta) for beta in pair]
        rate, tiny, decay = number(lr), number(eps), number(weight_decay)
        for name, value, fine, expected in (
            ("lr", lr, 0 <= rate < math.inf, "a number that is at least 0"),
            ("betas", betas, len(powers) == 2 and all(0 <= beta < 1 for beta in powers), "two numbers in [0, 1)"),
            ("eps", eps, 0 < tiny < math.inf, "a number above 0"),
            ("weight_decay", weight_decay, 0 <= decay < math.inf, "a number that is at least 0"),
        ):
            if not fine:
                raise InvalidInputError(f"{name}={shown(value)}: expected {expected}")
        if rate * decay >= 1:
            raise InvalidInputError(
                f"lr={rate!r} times weight_decay={decay!r} is {rate * decay:g}; expected less than 1"
            )
        return cls(rate, (powers[0], powers[1]), tiny, decay)

    def table(self, steps: int, dtype: np.dtype[Any]) -> Array:
        """Return the rows that `Backend.adamw` takes, for weights that waited up to so many steps."""
        size = 1 << min(steps, _MAX_WAIT).bit_length()
        waited, powers = _waited(size), _powers(size, self.betas)
        rows = np.empty((size, 6), dtype)
        rows[:, :4] = powers
        rows[:, 4] = self.lr * waited
        rows[:, 5] = np.expm1(waited * math.log1p(-self.lr * self.weight_decay))
        return rows[: min(steps, _MAX_WAIT) + 1]


@lru_cache(8)
def _waited(size: int) -> Array:
    return np.maximum(np.arange(size, dtype=np.float64), 1)


@lru_cache(8)
def _powers(size: int, betas: tuple[float, float]) -> Array:
    """Return what moments keep, and what a mean gradient adds to them, by steps."""
    waited = _waited(size)
    first, second = (np.float64(beta) ** waited for beta in betas)
    return np.stack([first, (1 - first) / waited, second, (1 - second) / waited], axis=1)


class LazyAdamW:
    """Moments by name, and steps by the sums of a reducer's calls: what the optimizers for all frameworks share.

    All of it is the same on all ranks, but for the reducer's residuals.

    Attributes:
        specs: of the weights, by name.
        comm: the ranks.
        zeros: makes moments for a tensor.
        moments: by name; none before the first gradients.
        step: how many steps have been made.
        done: the outcome of the reducer's step that was used last.
    """

    def __init__(
        self, weights: NamedTensors, reducer: Reducer, comm: Comm, zeros: Callable[[TensorSpec], Moments] | None = None
    ) -> None:
        """Begin without moments.

        Args:
            weights: by name, as the reducer has them.
            reducer: of their gradients.
            comm: its ranks.
            zeros: makes moments for a tensor; ``None``: as arrays of its device.
        """
        self.specs = specs_of(weights)
        self.comm, self._reducer = comm, reducer
        self._backends = Backends()
        self._timelines = {spec.device: self._backends.of(spec.device).timeline() for spec in self.specs.values()}
        self.zeros = zeros or self._new
        self.moments: dict[str, Moments] = {}
        self.step = 0
        self.done: Step | None = None
        self._work: list[Any] | None = None  # of an update that has not ended

    def on_stream(self, spec: TensorSpec) -> AbstractContextManager[object]:
        """Return a context for work with the moments of a tensor on the current stream."""
        return self._timelines[spec.device].on_stream(None)

    def _new(self, spec: TensorSpec) -> Moments:
        backend, dtype = self._backends.of(spec.device), spec.accumulator.accumulator
        return Moments(
            backend.zeros(spec.size, dtype), backend.zeros(spec.size, dtype), backend.zeros(spec.size, np.int32)
        )

    @default_float_mode
    def begin(self, gradients: Mapping[str, object], scale: float = 1.0) -> bool:
        """Make moments by the first gradients, if there are none yet. Collective, then.

        Args:
            gradients: by name; ``None``, or none of a name: zeros.
            scale: what they are to be multiplied by.

        Returns:
            Whether there are moments now. Not if a gradient of a rank is not finite, or all are zeros.
        """
        if self.moments:
            return True
        self._reducer.connect()  # on all ranks, also where there is no gradient
        names, sizes = list(self.specs), np.array([float(spec.size) for spec in self.specs.values()])
        squares = np.zeros(len(names))
        for i, name in enumerate(names):
            if gradients.get(name) is not None:
                squares[i] = self._reducer.sum_of_squares(name, gradients[name]) * scale**2
        options: dict[str, Any] = {"algorithm": "dense", "wire": "plain", "op": "mean", "label": "first second moments"}
        total = sparse_allreduce(squares, 1.0, comm=self.comm, **options).to_dense()
        if not np.isfinite(total).all() or not total.any():
            return False
        mean = total / np.maximum(sizes, 1)
        mean[mean == 0] = total.sum() / sizes.sum()  # a tensor without a gradient, yet
        largest = [np.finfo(spec.accumulator.accumulator).max for spec in self.specs.values()]
        if (mean >= largest).any():
            return False
        made = {}
        for spec, square in zip(self.specs.values(), mean, strict=True):
            with self.on_stream(spec):
                made[spec.name] = moments = self.zeros(spec)
                moments.squares[:] = max(FIRST * square, float(np.finfo(moments.squares.dtype).tiny))
        self.moments = made
        return True

    def push(self, name: str, gradient: object, rule: AdamWRule, scale: float = 1.0) -> None:
        """Push a gradient, times ``scale``, over the root of its second moment; ``None``: zeros."""
        self._reducer.push_quotient(name, gradient, self.moments[name].squares, rule.eps, scale)

    def update(self, weights: Mapping[str, object], rules: Mapping[str, AdamWRule], done: Step) -> None:
        """Make a step with the sums that have come, once. It is the same on all ranks. Interrupted, it may go on.

        Args:
            weights: by name, changed in place.
            rules: by name.
            done: the outcome of the reducer's step. One that is not usable changes nothing.
        """
        if done is self.done:
            return
        if not done.usable:
            self.done = done
            _log.warning("a gradient of some rank is not finite, so no rank makes a step of AdamW, %s", done.number)
            return
        if self._work is None:
            step, work, tables = self.step + 1, [], {}
            for name, entries in done.left.items():
                rule, spec = rules[name], self.specs[name]
                key = rule, spec.accumulator.name
                if key not in tables:
                    tables[key] = rule.table(step, np.dtype(spec.accumulator.accumulator))
                _ = entries.indices if isinstance(entries, DenseSum) else None  # which finds them
                residual = self._reducer.residual(name).reshape(-1)
                weight = spec.tensor(weights[name], name, writable=True)
                work.append((spec, weight, residual, entries, tables[key], rule.eps, step))
            self._work = work
        while self._work:
            spec, weight, *rest = self._work[-1]
            backend, moments = self._backends.of(spec.device), self.moments[spec.name]
            with self._timelines[spec.device].on_stream(weight):
                backend.adamw(weight, moments, *rest)
                self._work.pop()
        self.step, self.done, self._work = self.step + 1, done, None

    def check_whole(self) -> None:
        """Check that no update was left half-way.

        Raises:
            InvalidInputError: one was.
        """
        if self._work is not None:
            raise InvalidInputError(
                "a step of AdamW was interrupted, or failed, while it changed weights; call step() again, which goes on"
            )

    def label(self, rules: Mapping[str, AdamWRule]) -> str:
        """Return what ranks must have in common in the next step, besides the reducer's own settings."""
        return f"AdamW {self.step} {sorted(set(map(repr, rules.values())))}"

    def adopt(self, moments: Mapping[str, Moments], step: int) -> None:
        """Go on with moments that were loaded."""
        self.moments, self.step, self._work = dict(moments), step, None

    def spread(self, ranks: Transport, rebuilt: Rebuilt) -> None:
        """Give all ranks the moments of one that has stayed, if others joined or were apart. Collective."""
        if not rebuilt.ranks_joined and not rebuilt.steps_apart:
            return
        root = next(rank for rank in range(rebuilt.size) if rank not in rebuilt.ranks_joined)
        told = np.array([self.step, bool(self.moments)], np.int64)
        ranks.broadcast(told.view(np.uint8), root)
        step, begun = told.tolist()
        moments = {}
        for name, spec in self.specs.items() if begun else ():
            with self.on_stream(spec):
                moments[name] = its = self.moments.get(name) or self.zeros(spec)
                for array in its if spec.size else ():
                    host = to_host(array)
                    ranks.broadcast(host.view(np.uint8), root)
                    array[:] = from_host(host, array)
        self.adopt(moments, step)

    def replicated(self) -> dict[str, Array]:
        """Return all moments by name, with the field's: what must be the same on all ranks, as weights."""
        return {
            f"{name}.{field}": array
            for name, moments in self.moments.items()
            for field, array in moments._asdict().items()
        }


class SparseAdamW:
    """AdamW for training with slow links: 1/40 of the bytes of dense sums, and losses as with these.

        optimizer = sc.SparseAdamW(weights, lr=1e-3)        # names and arrays, alike on all ranks; changed in place
        for ...:
            gradients = ...                                 # by name, of this rank's samples
            optimizer.step(gradients)

    Each step is collective. Weights, moments, and for each weight the step that updated it last, are the same on all
    ranks, bit for bit; what was not sent waits in residuals, of which each rank has its own. In a step some 9 % of the
    weights are updated, each by as many steps of AdamW as it waited. Take the learning rate that is best with dense
    gradients, or up to 1.5 times that: docs/reports/adamw.md has what was measured.

    For PyTorch see `sparsecomm.torch.SparseAdamW`, and for JAX `sparsecomm.jax.sparse_adamw`.

    Args:
        weights: names and arrays, or pairs of them: of NumPy, CuPy, or anything else with ``__dlpack__`` that can be
            written.
        lr, betas, eps, weight_decay: as in `torch.optim.AdamW`; ``weight_decay`` may also be numbers by name, of which
            others have none. They are attributes, which may be set between steps, on all ranks alike.
        density: of what is sent, both ways: a float in (0, 1], or a function of the step's number. With 0.09 a weight
            is updated in one of 11 steps, on average.
        comm, algorithm, wire: as in `sparse_allreduce`. float64 needs ``wire="packed"``.
        bucket_bytes: as in `Reducer`.
        check_weights_every: `check_weights` of weights and moments before every step whose number it divides; 0: before
            the first one only; ``None``: never.
        on_step: as in `Reducer`.

    Raises:
        InvalidInputError: an argument cannot be used.
    """

    def __init__(
        self,
        weights: NamedTensors,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | Mapping[str, float] = 0.01,
        density: Schedule = DENSITY,
        comm: Comm = None,
        algorithm: AlgorithmName | Algorithm = "double",
        wire: WireName = "packed_int2",
        bucket_bytes: int | None = None,
        check_weights_every: int | None = 0,
        on_step: OnStep | None = None,
    ) -> None:
        self._check_every = check_every(check_weights_every)
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.weights = dict(interop.named(weights, "weights"))
        self._rules()
        options = {**DEFAULTS, "algorithm": algorithm, "wire": wire, "bucket_bytes": bucket_bytes, "on_step": on_step}
        self._comm = comm
        self._reducer = Reducer(self.weights, density, comm=comm, skip_nonfinite=True, **options)
        self._adamw = LazyAdamW(self.weights, self._reducer, comm)
        for name, weight in self.weights.items():
            self._adamw.specs[name].tensor(weight, name, writable=True)
        self._checked: int | None = None  # the step in which weights were compared last

    @property
    def reducer(self) -> Reducer:
        """The reducer, with its counters, buckets and residuals."""
        return self._reducer

    def step(self, gradients: Mapping[str, object]) -> Step:
        """Exchange gradients, and update the weights. Collective. Where it was interrupted, call it again: it goes on.

        Args:
            gradients: by name; of names that are not there, or ``None``, they are zeros. They are not written.

        Returns:
            The outcome; if a gradient of some rank was not finite, nothing was updated on any.

        Raises:
            WeightMismatchError: weights or moments are not alike on all ranks.
            SparseCommError: as `sparse_allreduce`. Gradients wait in residuals then, and the next step may be made.
        """
        if not isinstance(gradients, Mapping):
            raise InvalidInputError(f"gradients: got {type(gradients).__name__}; expected gradients by name")
        if unknown := [name for name in gradients if name not in self.weights]:
            raise InvalidInputError(
                f"gradients: {listed(unknown)} are no names of the {len(self.weights)} weights, {listed(self.weights)}"
            )
        adamw, rules = self._adamw, self._rules()
        for name, gradient in gradients.items():  # before anything is sent
            if gradient is not None:
                adamw.specs[name].tensor(gradient, name)
        last = self._reducer.last
        if last is not None and last is not adamw.done:  # an interrupt came between
            adamw.update(self.weights, rules, last)
            return last
        if not self._reducer.pending:
            self._check_weights()
            self._reducer.label = adamw.label(rules)
            if not adamw.begin(gradients):
                return Step(self._reducer.step, self._reducer.density, usable=False)
        for name in self.weights:
            if not self._reducer.parts(name):
                adamw.push(name, gradients.get(name), rules[name])
        done = self._reducer.wait()
        adamw.update(self.weights, rules, done)
        return done

    def _rules(self) -> dict[str, AdamWRule]:
        """Return the settings of each weight."""
        decay = self.weight_decay
        if not isinstance(decay, Mapping):
            return dict.fromkeys(self.weights, AdamWRule.of(self.lr, self.betas, self.eps, decay))
        if unknown := [name for name in decay if name not in self.weights]:
            raise InvalidInputError(
                f"weight_decay: {listed(unknown)} are no names of the weights, {listed(self.weights)}"
            )
        return {name: AdamWRule.of(self.lr, self.betas, self.eps, decay.get(name, 0.0)) for name in self.weights}

    def _check_weights(self) -> None:
        """Compare weights and moments with other ranks, if that is due."""
        step, every = self._reducer.step, self._check_every
        if every is None or (self._checked is not None and not (every and step % every == 0 and self._checked != step)):
            return
        check_weights({**self.weights, **self._adamw.replicated()}, comm=self._comm)
        self._checked = step

    # -- other ranks, and state ---------------------------------------------------------------------------------------

    def rebuild(self, comm: Comm, *, joining: bool = False) -> Rebuilt:
        """Go on with the ranks of another communicator: see `Reducer.rebuild`. Collective over them.

        Ranks that join take moments from those that stay; the weights are yours to broadcast.
        """
        rebuilt = self._reducer.rebuild(comm, joining=joining)
        self._comm = self._adamw.comm = comm
        self._checked = None
        self._adamw.spread(transport.of(comm), rebuilt)
        return rebuilt

    def state_dict(self) -> StateDict:
        """Return what this rank needs to go on, but for the weights, which are yours to save: as `Reducer.state_dict`.

        `reshard` makes states for another number of ranks.
        """
        adamw = self._adamw
        adamw.check_whole()
        moments = {}
        for name, its in adamw.moments.items():
            spec = adamw.specs[name]
            with adamw.on_stream(spec):
                moments[name] = {field: to_host(array).reshape(spec.shape) for field, array in its._asdict().items()}
        return {**self._reducer.state_dict(), "adamw_step": adamw.step, "moments": moments}

    def load_state_dict(self, state: State) -> None:
        """Go on from what `state_dict` returned, or `reshard` made. Collective: all ranks load, or none does.

        Raises:
            InvalidInputError: it does not fit, or another rank's does not. Nothing has changed on any rank.
            SparseCommError: as `Reducer.load_state_dict`.
        """
        adamw = self._adamw

        def prepare(undo: object) -> Prepared:
            kept = self._reducer.prepare_state(state)
            step, saved = _read(state)
            made, moments = {}, {}
            for name, spec in adamw.specs.items() if saved else ():
                if name not in saved:
                    raise InvalidInputError(f"state: moments lack {name!r}; expected those of these weights")
                made[name] = its = _read_moments(saved[name], spec, step)
                with adamw.on_stream(spec):
                    pairs = zip(its, adamw.zeros(spec), strict=True)
                    moments[name] = Moments(*(from_host(theirs, like) for theirs, like in pairs))

            def commit() -> None:
                kept.commit()
                adamw.adopt(moments, step)
                self._checked = None

            compared = {name: list(its) for name, its in made.items()}
            return Prepared({**kept.common, "adamw_step": step, "moments": compared}, commit)

        self._reducer.load_with(prepare, ["adamw_step", "moments"])

    def report(self) -> str:
        """Return a small table, of this rank: see `Reducer.report`."""
        return self._reducer.report()

    def __repr__(self) -> str:
        return f"SparseAdamW(lr={self.lr!r}, {len(self.weights)} weights, step {self._adamw.step}; {self._reducer!r})"


def _read(state: State) -> tuple[int, Mapping[str, Any]]:
    """Return the number of steps of a state, and its moments by name."""
    with reading("moments", "moments by name, and the number of steps"):
        step, moments = state["adamw_step"], state["moments"]
        if not is_count(step) or not isinstance(moments, Mapping):
            raise InvalidInputError(f"state: adamw_step is {shown(step)}; expected a number of steps")
        return step, moments


def _read_moments(saved: Any, spec: TensorSpec, step: int) -> Moments:
    """Return the moments of a tensor, in host memory."""
    name = spec.name
    with reading(f"moments of {name}", "mean, squares and last"):
        mean, squares = (
            as_float(saved[field], f"{field} of {name}", spec.shape, spec.accumulator) for field in ("mean", "squares")
        )
        last = np.array(saved["last"])
        if (
            last.dtype.kind != "i"
            or last.shape != spec.shape
            or (last.size and not 0 <= last.min() <= last.max() <= step)
        ):
            raise InvalidInputError(
                f"state: last of {name}: expected whole numbers from 0 to {step}, shape {spec.shape}"
            )
        if not np.isfinite(mean).all() or not np.isfinite(squares).all() or not (squares > 0).all():
            raise InvalidInputError(f"state: moments of {name}: expected finite numbers, and squares above 0")
        return Moments(mean, squares, last.astype(np.int32).reshape(-1))
