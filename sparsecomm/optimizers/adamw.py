"""`LazyAdamW`: AdamW with the sparse sums of a `Reducer`, several steps at a time, by an `AdamWRule`.

Each index has one owner, which alone keeps AdamW's state there: both moments and the step of the last update. All ranks
have the weights, and for each weight a unit, a power of two near sqrt(v) + eps, with v the second moment. Weights and
units are the same on all ranks. With nodes, a rank has the units and the residual of its slice only, and the gradient
below is the sum of its node. In every step

1. each rank divides its gradient by the units and adds it to its residual. A power of two makes this exact. The
   magnitude of an entry is then how far AdamW would move the weight. It decides which entries are sent, and how they
   are rounded to few bits;
2. owners receive these entries and select the largest sums. Their residuals keep the rest, as in Tang et al.
   (DoubleSqueeze), ICML 2019;
3. a weight that receives a sum for the first time in n steps makes n steps of AdamW (Loshchilov and Hutter, ICLR 2019)
   at once. With G the mean over the ranks of the sum of their n gradients, and t the tensor's step:

       m = b1^n m + (1 - b1^n) G / n,  v = b2^n v + (1 - b2^n) G^2 / n
       w = (1 - lr wd)^n w - n lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

   A sum of n noisy gradients has n times the variance of one, hence G^2 / n and not (G / n)^2;
4. the owner sends the change of each weight, rounded to few bits, to all ranks, which add it. The owner keeps what
   rounding has lost, the compensation, and adds it to the weight in the next step there. So 16-bit weights train as
   if a float32 copy were kept. The message also says how exponents of units change, to follow sqrt(v) + eps.

In a step of density 1.0, owners receive whole sums and send new weights: this is AdamW. A single rank changes its
weights without rounding. Units begin at sqrt(v) + eps, with v = `FIRST_SQUARE` (1 - b2) times the mean square of the
tensor's first gradient. A tensor for which no rank has a gradient makes no step: neither its weights nor its t change.

**Overflows.** If a step would make a weight or a moment infinite, its owner says so instead of sending updates, and all
ranks skip the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple
from functools import partial
from typing import Any

import numpy as np

from sparsecomm.backends import Backend, default_float_mode
from sparsecomm.backends.adamw import OVERFLOWS, AdamWPart, AdamWStep, Moments, unit_dtype, unit_exponents
from sparsecomm.backends.adamw import units as to_units
from sparsecomm.calls.collectives import SumCall, prepare
from sparsecomm.calls.label import Label, by_name
from sparsecomm.errors import InvalidInputError, listed, log
from sparsecomm.optimizers.options import RULE, AdamWRule
from sparsecomm.optimizers.state import SavedMoments
from sparsecomm.reducer import Rebuilt, Reducer, Step
from sparsecomm.reducer.bucket import Addition, Bucket, Contents, Part
from sparsecomm.reducer.owned import FINE, NOT_FINITE, OVERFLOW, Outcome, SparseStep
from sparsecomm.reducer.step import cause_of
from sparsecomm.signals import deferred
from sparsecomm.tensors.arrays import Array
from sparsecomm.tensors.interop import NamedTensors, Tensor, from_host, library_of, specs_of, to_host
from sparsecomm.tensors.sparse import DenseSum, SparseVector
from sparsecomm.transport import Comm, Transport, transport_of

FIRST_SQUARE = 0.2


@deferred
class LazyAdamW:
    """This rank's moments of named weights, and steps by the rule above.

    Attributes:
        reducer: sums the gradients.
        specs: the weights' specs by name.
        moments: the moments of this rank's part of each tensor by name: see `part`. Missing before a tensor's first
            gradient.
        new_moments: returns moments of zeros for this rank's part of a tensor, with or without a compensation; by
            default, arrays on its device.
        steps: the number of steps of each tensor by name.
        done: the outcome of the reducer's step that was applied last.
    """

    def __init__(
        self,
        weights: NamedTensors,
        reducer: Reducer,
        check_every: int | None,
        new_moments: Callable[[str, bool], Moments] | None = None,
    ) -> None:
        """Begin without moments. ``reducer`` is that of `AdamWSettings`, which also checks ``check_every``."""
        self.specs = specs_of(weights)
        self.reducer, self._check_every = reducer, check_every
        self.new_moments = new_moments or self._new
        self.done: Step | None = None
        self._shared_rules: tuple[Mapping[str, AdamWRule], Label] | None = None  # of the latest step
        self._weights: Mapping[str, Tensor] = {}  # weights and rules of the open step
        self._rules: Mapping[str, AdamWRule] = {}
        self._tables: dict[tuple[int, np.dtype[Any], int], tuple[Array, float]] = {}  # of the open step
        reducer.own(self)
        self.adopt({}, {})

    def adopt(self, moments: Mapping[str, Moments], steps: Mapping[str, int]) -> None:
        """Replace the moments and the step counts, and discard everything computed from the old ones."""
        self.moments, self.steps = dict(moments), {name: steps.get(name, 0) for name in self.specs}
        self.parts = {name: self.part(name) for name in moments}
        self._own_steps: dict[Bucket, tuple[Sequence[Part], AdamWStep]] = {}  # this rank's parts of the open step
        self._outcomes: dict[Bucket, Outcome] = {}  # of the open step
        self._pending: list[Callable[[], None]] | None = None  # the rest of an update that was interrupted

    def replace(self, name: str, moments: Moments | None, step: int) -> None:
        """Use other moments of a tensor between steps; ``None``: zeros, as at its first gradient."""
        self.moments[name] = moments or self.new_moments(name, self.reducer.transport.size > 1)
        self.steps[name], self.parts[name] = step, self.part(name)

    def part(self, name: str) -> tuple[int, int]:
        """Return where this rank's part of a tensor begins and ends."""
        return self.reducer.bucket(name).part(name, self.reducer.transport.rank)

    def on_stream(self, name: str) -> AbstractContextManager[object]:
        """Return a context for work with the moments of a tensor, on the current stream."""
        return self.reducer.bucket(name).on_stream(None)

    def _new(self, name: str, compensated: bool) -> Moments:
        spec, (begin, end) = self.specs[name], self.part(name)
        backend, real = self.reducer.bucket(name).backend, spec.accumulator.accumulator
        mean, squares, last = (backend.zeros(end - begin, dtype) for dtype in (real, real, np.int32))
        return Moments(mean, squares, last, backend.zeros(end - begin, real) if compensated else None)

    # -- a step -------------------------------------------------------------------------------------------------------

    def exchange(
        self,
        gradients: Mapping[str, object],
        weights: Mapping[str, object],
        replicated: Mapping[str, object],
        rules: Mapping[str, AdamWRule],
        scale: float = 1.0,
    ) -> Step:
        """Exchange gradients and updates. Collective. After an interrupt, call it again to continue.

        Args:
            gradients: by name; ``None`` or a missing name: no gradient. Gradients pushed already are skipped.
            weights, rules: by name. Do not change them until `update` returns. Equal rules should be one object, whose
                coefficients are then computed once.
            replicated: the tensors that must be equal on all ranks, besides the units.
            scale: a factor of the gradients.

        Returns:
            The outcome. Pass it to `update`, unless moments are still `missing`, because a rank's gradient is not
            finite or its square overflows, or because there are no moments and no rank has a gradient.
        """
        self.open(weights, replicated, rules)
        if missing := self.missing:
            self._begin(missing, gradients, rules, scale)
            self.reducer.forget_preliminary_calls()
            if self.missing:
                return Step(self.reducer.step, self.reducer.density, usable=False)
        for name in self.specs:
            if not self.reducer.pushed(name):
                self.push(name, gradients.get(name), rules[name], scale)
        return self.reducer.wait()

    def open(
        self, weights: Mapping[str, object], replicated: Mapping[str, object], rules: Mapping[str, AdamWRule]
    ) -> None:
        """Begin a step, unless it has begun. If a check is due, compare weights and units between the ranks."""
        reducer = self.reducer
        if not reducer.pending:
            tensors = self._tensors_of(weights)  # before this rank waits for others, which may refuse gradients
            reducer.check_weights(self._check_every, lambda: {**replicated, **self._replicated_units()})
            if reducer.density < 1:
                self._refresh_units(rules)
            reducer.label = self._label(rules)
            self._weights, self._rules, self._tables, self._own_steps, self._outcomes = tensors, rules, {}, {}, {}

    def _replicated_units(self) -> dict[str, Array]:
        """Return the units that are equal on all ranks: not those of slices."""
        names = (name for name in self.moments if self.reducer.bucket(name).nodes is None)
        return {f"{name}.unit": self.reducer.exponents(name) for name in names}

    def _tensors_of(self, weights: Mapping[str, object], writable: bool = False) -> dict[str, Tensor]:
        return {name: spec.tensor(weights[name], name, writable=writable) for name, spec in self.specs.items()}

    def _label(self, rules: Mapping[str, AdamWRule]) -> Label:
        """Return the rules and the steps by name, which all ranks must share."""
        steps = self.steps
        if self._shared_rules is None or self._shared_rules[0] != rules:
            shared, numbers = {name: rules[name] for name in self.specs}, dict[AdamWRule, int]()
            pattern = [numbers.setdefault(rule, len(numbers)) for rule in shared.values()]

            def pairs() -> Iterator[tuple[str, object]]:
                for option in RULE:
                    yield from by_name(option, {name: getattr(rule, option) for name, rule in shared.items()})

            self._shared_rules = shared, Label((pattern, [astuple(rule) for rule in numbers]), pairs)
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
        """Make missing moments, and units from the first gradients, if they are finite on all ranks. Collective."""
        specs = [self.specs[name] for name in names]
        sizes = np.array([float(spec.size) for spec in specs])
        largest = np.array([float(np.finfo(spec.accumulator.accumulator).max) for spec in specs])
        squares = np.zeros(len(sizes) + 1)  # the last element: whether this rank has a gradient
        present = {name: gradients[name] for name in names if gradients.get(name) is not None}
        for name, total in self.reducer.sums_of_squares(present).items():
            i, scaled = names.index(name), total * scale**2
            squares[i], squares[-1] = math.inf if scaled >= largest[i] else scaled, 1
        shapes = ((name, spec.shape) for name, spec in zip(names, specs, strict=True))
        label = Label.of(("call", f"first moments of AdamW for {listed(sorted(names), 3)}"), *shapes)
        call, means = self.reducer.preliminary_call("moments", partial(_dense_sum, squares, "mean", label))
        *totals, any_gradient = means.to_dense()
        if not np.isfinite(totals).all():
            bad = (name for i, name in enumerate(names) if not math.isfinite(squares[i]))
            _log_skipped(self.reducer.step, cause_of(call.transport.rank, next(bad, None)))
        if not np.isfinite(totals).all() or not (any_gradient or self.moments):
            return
        mean = np.array(totals) / np.maximum(sizes, 1)
        mean[mean == 0] = sum(totals) / max(sizes.sum(), 1)  # a tensor without a gradient so far
        if (mean >= largest).any():
            return
        moments = {}
        for spec, square in zip(specs, mean, strict=True):
            name, rule, real = spec.name, rules[spec.name], np.dtype(spec.accumulator.accumulator)
            start = np.array([FIRST_SQUARE * (1 - rule.betas[1]) * square], real)
            with self.on_stream(name):
                moments[name] = self.new_moments(name, self.reducer.transport.size > 1)
                self.reducer.exponents(name)[:] = int(unit_exponents(np, start, real.type(rule.eps))[0])
                self.reducer.bucket(name).begun.add(name)
        self.moments |= moments
        self.parts |= {name: self.part(name) for name in names}

    def push(self, name: str, gradient: object, rule: AdamWRule, scale: float = 1.0) -> None:
        """Push ``scale`` times a gradient. Pass ``None`` if the tensor has no gradient."""
        self.reducer.push_with(name, gradient, Addition(-scale if rule.maximize else scale))

    # -- the owner's step: see `sparsecomm.reducer.owned.Owner` -------------------------------------------------------

    def sparse_step(self, backend: Backend, bucket: Bucket, parts: Sequence[Part], sums: SparseVector) -> SparseStep:
        alone = self.reducer.transport.size == 1
        margin = 4 if bucket.owners > 1 else 0  # rounding changes an update by less
        step = backend.adamw(self._parts(parts, self._weights), bucket.exponents, sums, margin, keep_changes=alone)
        changes, jumps = step.changes, step.jumps
        if step.overflows:
            changes, jumps = (jumps == OVERFLOWS).astype(changes.dtype), 0 * jumps
        else:  # keep only what `store_adamw` needs
            self._own_steps[bucket] = parts, step._replace(changes=changes[:0], jumps=jumps[:0])
        return SparseStep(changes, jumps, _verdict(step))

    def dense_step(
        self, backend: Backend, bucket: Bucket, parts: Sequence[Part], sums: Array, without: Collection[str]
    ) -> int:
        begin = parts[0].at
        for spec, first, last, at in parts:
            if spec.name in without:
                weight = self._weights[spec.name].part(first, last)
                sums[at - begin : at - begin + last - first] = backend.values_of(weight, slice(None))
        parts = [part for part in parts if part.spec.name not in without]
        step = backend.adamw_dense(self._parts(parts, self._weights), bucket.exponents, sums, begin)
        self._own_steps[bucket] = parts, step
        return _verdict(step)

    def decided(self, bucket: Bucket, outcome: Outcome) -> None:
        self._outcomes[bucket] = outcome

    def _parts(self, parts: Sequence[Part], weights: Mapping[str, Tensor]) -> list[AdamWPart]:
        """Return parts with their moments, and with the coefficients of their next step."""
        stepped = []
        for spec, begin, end, at in parts:
            name, rule, real = spec.name, self._rules[spec.name], np.dtype(spec.accumulator.accumulator)
            key = id(rule), real, self.steps[name] + 1
            if key not in self._tables:
                self._tables[key] = rule.table(key[2], real)
            table, eps = self._tables[key]
            weight = weights[name].part(begin, end)
            stepped.append(AdamWPart(at, weight, self.moments[name], table, rule.eps, eps, key[2]))
        return stepped

    # -- the update ---------------------------------------------------------------------------------------------------

    @default_float_mode
    def update(self, weights: Mapping[str, object], done: Step) -> None:
        """Apply the updates of a reducer's step to weights in place, only once. A step that is not usable changes none.

        After an interrupt, call it again to continue.
        """
        if done is self.done:
            return
        if not done.usable:
            for bucket, outcome in self._outcomes.items():  # drop these entries, which would overflow again
                if outcome.verdict == OVERFLOW:
                    own = outcome.own
                    with bucket.on_stream(None), bucket.side_stream():
                        overflowed = np.isnan(own.dense) if isinstance(own, DenseSum) else own.indices
                        bucket.residual[overflowed] = 0  # with CuPy's arrays, NumPy calls CuPy
            self._own_steps, self._outcomes, self.done = {}, {}, done
            _log_skipped(done.number, done.cause)
            return
        if self._pending is None:
            self._pending = list(self._actions(weights, done))[::-1]
        while self._pending:
            self._pending[-1]()
            self._pending.pop()
        steps = {name: count + (name not in done.without_gradient) for name, count in self.steps.items()}
        self.steps, self.done, self._pending, self._own_steps, self._outcomes = steps, done, None, {}, {}
        self._weights = {}
        self.reducer.release_memory()

    def _actions(self, weights: Mapping[str, object], done: Step) -> Iterator[Callable[[], None]]:
        """Return what changes weights, moments and units. Each action either succeeds, or changes nothing."""
        alone, tensors = self.reducer.transport.size == 1, self._tensors_of(weights, writable=True)
        for bucket, outcome in self._outcomes.items():
            if not alone:
                yield partial(self._add, bucket, tensors, outcome.result, done.without_gradient)
            if bucket in self._own_steps:
                yield partial(self._keep, bucket, tensors, alone)
            yield partial(self._change_units, bucket, outcome)

    def _add(
        self, bucket: Bucket, weights: Mapping[str, Tensor], updates: SparseVector, without: Collection[str]
    ) -> None:
        """Add the updates of a bucket to its weights, or set them to new values."""
        segments = bucket.segments({name: t for name, t in weights.items() if name not in without})
        with bucket.on_stream(segments[0].tensor if segments else None):
            apply = bucket.backend.write if isinstance(updates, DenseSum) else bucket.backend.add_entries
            apply(segments, updates)

    def _keep(self, bucket: Bucket, weights: Mapping[str, Tensor], write: bool) -> None:
        """Store the new moments of this rank's parts, and with ``write`` the new weights and units."""
        owned, step = self._own_steps[bucket]
        parts = self._parts(owned, weights)
        units = bucket.exponents if write and not isinstance(self._outcomes[bucket].result, DenseSum) else None
        with bucket.on_stream(next((part.weights for part in parts), None)):
            bucket.backend.store_adamw(parts, units, step, write)

    def _change_units(self, bucket: Bucket, outcome: Outcome) -> None:
        """Change the units of some weights, and convert their residuals. After a dense step, units lag."""
        bucket.units_lag = bucket.units_lag or isinstance(outcome.result, DenseSum)
        with bucket.on_stream(None), bucket.side_stream():
            residual = bucket.backend.as_tensor(bucket.residual, (bucket.length,))
            if not isinstance(outcome.result, DenseSum):
                bucket.backend.change_units(residual, bucket.exponents, outcome.changes)

    def _refresh_units(self, rules: Mapping[str, AdamWRule]) -> None:
        """Compute units that lag from the owners' second moments, where these are above zero. Collective."""
        for i, bucket in enumerate(self.reducer.buckets):
            if not bucket.units_lag:
                continue
            with bucket.on_stream(None):
                own = bucket.backend.zeros(bucket.size, np.float32)
                for spec, begin, end, at in bucket.parts(self.reducer.transport.rank):
                    squares, old = self.moments[spec.name].squares, bucket.exponents[at : at + end - begin]
                    xp, eps = library_of(squares), squares.dtype.type(rules[spec.name].eps)
                    first = bucket.first + at
                    own[first : first + end - begin] = xp.where(squares > 0, unit_exponents(xp, squares, eps), old)
            label = Label.of(("call", f"units of bucket {i} after dense steps of AdamW"))
            sums: Any = self.reducer.preliminary_call(f"units {i}", partial(_dense_sum, own, "sum", label))[1]
            with bucket.on_stream(None):
                new, count = sums.dense[bucket.first : bucket.last], bucket.last - bucket.first
                _use_units(bucket.residual[:count], bucket.exponents[:count], new.astype(bucket.exponents.dtype))
            bucket.units_lag = False

    # -- state and other ranks ----------------------------------------------------------------------------------------

    def check_complete(self) -> None:
        """Check that the moments can be saved: no update was interrupted, and all moments are finite."""
        if self.unfinished is not None:
            raise InvalidInputError(
                "a step of AdamW was interrupted, or failed, before it changed all weights; call step() again to "
                "complete it"
            )
        for name, moments in self.moments.items():
            backend = self.reducer.bucket(name).backend
            with self.on_stream(name):
                for field in ("mean", "squares"):
                    array = getattr(moments, field)
                    if not backend.finite(backend.as_tensor(array, array.shape)):
                        raise InvalidInputError(
                            f"state: {field} of {name} is not finite, so the state could not be loaded again; load an "
                            "older checkpoint"
                        )

    @property
    def unfinished(self) -> Step | None:
        """The outcome of the reducer's last step, if an interrupt prevented its update."""
        last = self.reducer.last
        return None if last is self.done or not self._outcomes else last

    def load(self, saved: Mapping[str, SavedMoments]) -> None:
        """Use the moments of a state."""
        moments = {}
        for name, (arrays, _, _) in saved.items():
            with self.on_stream(name):
                lost = arrays.compensation is not None and bool(arrays.compensation.any())
                moments[name] = filled(self.new_moments(name, lost or self.reducer.transport.size > 1), arrays)
        self.adopt(moments, {name: saved_moments.step for name, saved_moments in saved.items()})

    @default_float_mode
    def rebuild(self, comm: Comm, rebuild_reducer: Callable[[], Rebuilt]) -> Rebuilt:
        """Rebuild the reducer, and divide the moments among the ranks of a new communicator. Collective over them.

        All ranks take step counts, and whether units lag, from the first rank that is not new. First moments of lost
        ranks become zeros, and second moments 2 * unit^2. If units lag behind dense steps, these second moments become
        the mean of the tensor's other second moments.
        """
        reducer = self.reducer
        units = {name: reducer.bucket(name).contents(name) for name in self.moments}
        rebuilt, transport = rebuild_reducer(), transport_of(comm)
        rank = transport.rank
        if rank in rebuilt.ranks_joined:
            units = {}
            self.adopt({}, {})
        root = next(stayed for stayed in range(transport.size) if stayed not in rebuilt.ranks_joined)
        begun = [(name in self.moments, step, reducer.bucket(name).units_lag) for name, step in self.steps.items()]
        shared = np.array(begun, np.int64)
        _broadcast(shared, root, transport)
        moments, steps, lost, estimate = {}, {}, 0, "the squares of units, mostly within a factor of 2"
        for name, (has_moments, step, lag) in zip(self.specs, shared.tolist(), strict=True):
            bucket, exponents, steps[name] = reducer.bucket(name), reducer.exponents(name), step
            bucket.units_lag = bool(lag)
            with self.on_stream(name):
                if not has_moments:  # other ranks may have moments from a step that failed
                    bucket.discard(name)
                    bucket.begun.discard(name)
                    exponents[:] = 0
                    continue
                host = self._gather_units(name, units.get(name), root, transport)
                own_units = host[slice(*bucket.part_in_slice(name))]
                _use_units(bucket.residuals[name], exponents, from_host(own_units, exponents))
                bucket.begun.add(name)
                (mean, squares, last, compensation), known = self.gather(name, transport)
                np.minimum(last, step, out=last)  # the root may be a step behind
                own = slice(*self.part(name))
                if (missing := ~known[own]).any():
                    lost += int(missing.sum())
                    powers = to_units(host[own][missing], mean.dtype)
                    squares[own][missing], last[own][missing] = 2 * np.square(powers), step
                    if lag and known.any():
                        squares[own][missing], estimate = squares[known].mean(), "the mean of the tensor's others"
                new = self.new_moments(name, transport.size > 1 or bool(compensation.any()))
                moments[name] = filled(new, [array[own] for array in (mean, squares, last, compensation)])
        self.adopt(moments, steps)
        if lost:
            log.warning(
                "rank %s: %s moments were on lost ranks; first moments begin with zeros, and second moments with %s. "
                "Load a checkpoint for exact ones",
                rank,
                f"{lost:,}",
                estimate,
            )
        return rebuilt

    def _gather_units(self, name: str, own: Contents | None, root: int, transport: Transport) -> Array:
        """Return the exponents of a tensor's units from the ranks that have them, in host memory. Collective.

        ``own``: this rank's contents, if any. ``root``'s units come first. Units that no rank has become the median.
        """
        spec = self.specs[name]
        units = np.zeros(spec.size, unit_dtype(spec.accumulator.accumulator))
        part, exponents = ((0, 0), None) if own is None or own.exponents is None else (own.part, own.exponents)
        known = _gather_parts([units], part, [exponents], transport, root)
        if not known.all() and known.any():
            units[~known] = int(np.median(units[known]))
        return units

    def gather(self, name: str, transport: Transport) -> tuple[Any, Array]:
        """Return the `Moments` of a tensor from all ranks, in host memory, and where they are known. Collective.

        Call it between calls. Unknown moments are zeros.
        """
        spec = self.specs[name]
        real = np.dtype(spec.accumulator.accumulator)
        moments: Any = Moments(*(np.zeros(spec.size, dtype) for dtype in (real, real, np.dtype(np.int32), real)))
        own = self.moments.get(name, (None,) * len(moments))
        return moments, _gather_parts(moments, self.parts.get(name, (0, 0)), own, transport)


def filled(moments: Moments, host: Iterable[Array | None]) -> Moments:
    """Copy arrays in host memory into moments that have them, and return these moments."""
    for array, values in zip(moments, host, strict=True):
        if array is not None and values is not None:
            array[:] = from_host(values, array)
    return moments


def _verdict(step: AdamWStep) -> int:
    return FINE if not step.overflows else OVERFLOW if step.finite else NOT_FINITE


def _use_units(residual: Array, exponents: Array, new: Array) -> None:
    """Replace the exponents of units, and convert a residual. New exponents of zero do not count."""
    with np.errstate(all="ignore"):
        xp, dtype, max_ = library_of(residual), residual.dtype, np.finfo(residual.dtype).max
        ratio = to_units(exponents, dtype) / to_units(new, dtype)
        residual[:] = xp.where(residual != 0, xp.clip(residual * ratio, -max_, max_), residual)
        exponents[:] = new


def _broadcast(array: Array, root: int, transport: Transport) -> None:
    """Copy a contiguous array in host memory from one rank to all. Collective; call it between calls."""
    if array.size:
        transport.broadcast(array.reshape(-1).view(np.uint8), root)


def _gather_parts(
    arrays: Sequence[Array], part: tuple[int, int], own: Sequence[Array | None], transport: Transport, root: int = 0
) -> Array:
    """Fill arrays in host memory with the parts of all ranks, ``root``'s first. Return where parts are. Collective.

    ``own``: the contents of this rank's ``part``; ``None``: zeros. Parts that earlier ranks have sent are skipped.
    """
    known = np.zeros(len(arrays[0]), bool)
    for rank in ((root + i) % transport.size for i in range(transport.size)):
        bounds = np.array(part, np.int64)
        _broadcast(bounds, rank, transport)
        where = slice(*bounds.tolist())
        if known[where].all():
            continue
        for array, values in zip(arrays, own, strict=True):
            if rank == transport.rank and values is not None:
                array[where] = to_host(values)
            _broadcast(array[where], rank, transport)
        known[where] = True
    return known


def _dense_sum(x: Array, op: str, label: Label, transport: Transport) -> SumCall:
    """Return the call of an exact dense sum."""
    options = {"algorithm": "dense", "op": op, "wire": "plain", "label": label}
    return prepare(x, 1.0, transport, None, None, options, background=True)[1]


def _log_skipped(step: int, cause: str) -> None:
    log.warning("step %s: %s; no rank updates its weights", step, cause)
