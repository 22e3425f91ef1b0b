"""`OpenStep`: one step of a reducer. `Step`: its outcome. `Bucket`: tensors that one call, a `BucketCall`, sums."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, compress, pairwise
from typing import TypeAlias

import numpy as np

from sparsecomm.algorithms import ALGORITHMS
from sparsecomm.backends import Backend, Backends, default_float_mode
from sparsecomm.calls.collectives import SumCall
from sparsecomm.calls.label import Label
from sparsecomm.calls.measurement import plan_costs
from sparsecomm.calls.plan import Plan
from sparsecomm.calls.queue import CallQueue, Handle, Task
from sparsecomm.contribution import Chunks, Contribution, Segment, ThresholdHint
from sparsecomm.errors import listed
from sparsecomm.primitives.communicator import gather_words
from sparsecomm.reducer.counters import Counters
from sparsecomm.reducer.options import Settings
from sparsecomm.states.weights import FirstStep, checksum
from sparsecomm.tensors.dtypes import BFLOAT16, FLOAT16, DType
from sparsecomm.tensors.interop import CPU, Tensor, TensorSpec, to_host
from sparsecomm.tensors.sparse import Array, DenseSum, SparseVector
from sparsecomm.transport import Transport

__all__ = ["Accept", "Add", "Bucket", "BucketCall", "OpenStep", "Step", "cause_of", "error_of"]

# ``add(backend, x, residual, decay, if_finite)`` multiplies a residual by a decay, adds a value computed from x, and
# returns True. With ``if_finite`` and a value that is not finite, it changes nothing and returns False.
Add: TypeAlias = Callable[[Backend, Tensor, Tensor, float, bool], bool]

# Returns whether a step is usable, given `Step.left` and the largest magnitude in all sums.
Accept: TypeAlias = Callable[[Mapping[str, SparseVector], float], bool]

_NARROW = FLOAT16, BFLOAT16
_ABSENCE = 1 << 19  # round number of the exchange of absent gradients, above those of algorithms


@dataclass(frozen=True)
class Step:
    """The outcome of a step.

    Attributes:
        number, density: the number of the step, from 0, and its density.
        usable: if False, apply nothing: a gradient was not finite on some rank (with ``skip_nonfinite``), or the step
            would make a sum, a parameter or the optimizer's state infinite.
        left: sums that had no ``out``, by name. This rank had no gradient for these tensors, but another rank had one.
            If another rank's ``out`` has 16-bit elements, the sum is rounded to its dtype, so that ``to_dense()``
            returns the numbers of that ``out``.
        without_gradient: names of tensors for which no rank had a gradient, the same on all ranks. Do not change
            their parameters or the optimizer's state.
        nonfinite: whether a sparse sum contains NaN or infinity (without ``skip_nonfinite``), the same on all ranks.
            Such entries of residuals and velocities were set to zero.
        cause: why the step is ``nonfinite`` or not ``usable``. The rank whose gradient is not finite names the tensor.
    """

    number: int
    density: float
    usable: bool = True
    left: Mapping[str, SparseVector] = field(default_factory=dict)
    without_gradient: frozenset[str] = frozenset()
    nonfinite: bool = False
    cause: str = ""


def cause_of(rank: int, name: str | None) -> str:
    """Return `Step.cause` if ``name`` is the first tensor whose gradient is not finite on this rank, or ``None``."""
    where = "a gradient of another rank" if name is None else f"the gradient of {name} on this rank"
    return f"rank {rank}: {where} is not finite{', or a sum overflows' if name is None else ''}"


class Bucket:
    """Tensors of one device and accumulator dtype, with one flat residual, and one flat velocity under momentum.

    Methods with an argument ``backend`` or ``plan`` are part of a call and use its stream. Call all other methods
    within `on_stream`.

    Attributes:
        tensors: specs, in the order of the flat vectors.
        dense: the tensors are summed without a selection.
        backend: the reducer's backend of the device, for all work outside calls.
        shape: shape of the call's input: the tensor's shape if there is one tensor, otherwise flat.
        residuals, velocities: flat views by name. ``velocities`` is empty without momentum.
        missing: names of tensors for which `take` was not called in this step.
        outs: this step's outputs for sums by name.
        last_gradient: the gradient that was taken last in this step.
        nonfinite: names of tensors whose gradients were dropped in this step because they were not finite.
        last_plan: the plan of the latest call; ``None`` before the first call.
    """

    def __init__(self, tensors: Sequence[TensorSpec], dense: bool, settings: Settings, backends: Backends) -> None:
        self.tensors, self.dense, self.settings = tuple(tensors), dense, settings
        self.device, self.accumulator = tensors[0].device, tensors[0].accumulator
        self.backend = backends.of(self.device)
        self._timeline = self.backend.timeline()
        self._offsets = [0, *accumulate(spec.size for spec in tensors)]
        self.size = self._offsets[-1]
        self.nbytes = self.size * self.accumulator.itemsize
        self.shape = tensors[0].shape if len(tensors) == 1 else (self.size,)
        with self.on_stream(None):
            self._state = [self._zeros() for _ in range(2 if settings.momentum else 1)]  # residual, velocity
        self._residual = self._state[0]
        self.residuals = self._views(self._residual)
        self.velocities = self._views(self._state[1]) if settings.momentum else {}
        self._hint = ThresholdHint()
        # Whether a call may add gradients and select in one pass.
        self._may_defer = not (settings.skip_nonfinite or settings.momentum) and (
            len(tensors) == 1 or self.device.kind == "cpu"
        )
        self._plan_key, self._plan_density = object(), 0.0
        self.last_plan: Plan | None = None
        self._set_aside: dict[str, Array] = {}  # residuals of tensors without a gradient here, during the step's call
        self.begin()

    @default_float_mode
    def begin(self) -> None:
        """Begin a step. The calls of the previous step have ended, with or without an error."""
        if self._set_aside:
            with self.on_stream(None):
                while self._set_aside:  # the residual holds only what the call has added
                    name, residual = next(iter(self._set_aside.items()))
                    self.residuals[name] += residual
                    del self._set_aside[name]
        self.missing = set(self.residuals)
        self.outs: dict[str, Tensor] = {}
        self.last_gradient: Tensor | None = None
        self._present: set[str] = set()  # names for which this rank has a gradient
        self.nonfinite: set[str] = set()
        self._deferred: dict[str, Tensor] = {}  # gradients that the call adds

    def on_stream(self, x: Tensor | None) -> AbstractContextManager[object]:
        """Return a context for work with the bucket's memory, on the stream of ``x`` or else the current stream.

        The work runs after all earlier work with this memory, on any stream.
        """
        return self._timeline.on_stream(x)

    def __del__(self) -> None:
        with suppress(Exception):  # there may be no timeline, or at the end of the process no device
            self._timeline.wait()  # the allocator may reuse the memory on the stream that allocated it

    # -- gradients ----------------------------------------------------------------------------------------------------

    @default_float_mode
    def take(self, spec: TensorSpec, gradient: Tensor | None, *, add: Add | None = None, scale: float = 1.0) -> None:
        """Add ``scale`` times a gradient to the residual. Where possible, the call adds it instead.

        Args:
            spec: the tensor's spec.
            gradient: ``None``: this rank has no gradient. The residual and the velocity do not change.
            add: adds a value computed from the gradient instead. Not with momentum or clipping.
        """
        name = spec.name
        if gradient is not None:
            if add is not None:
                if spec.size:
                    residual = self.backend.as_tensor(self.residuals[name], spec.shape)
                    if not add(self.backend, gradient, residual, self.settings.decay, self.settings.skip_nonfinite):
                        self.nonfinite.add(name)
            elif self.settings.skip_nonfinite and spec.size and not self.backend.finite(gradient):
                self.nonfinite.add(name)
            elif scale == 1.0 and self._may_defer:
                self._deferred[name] = gradient
            elif spec.size:
                self._add(spec, gradient, scale)
            self._present.add(name)
            self.last_gradient = gradient
        self.missing.discard(name)

    @default_float_mode
    def sum_of_squares(self, gradient: Tensor) -> float:
        """Return the sum of the squares of a gradient's elements."""
        g = self.backend.accumulate(gradient, None).astype("f8")  # squares may exceed float32
        return float((g * g).sum())

    def _add(self, spec: TensorSpec, gradient: Tensor, scale: float = 1.0) -> None:
        """Add a gradient to its residual, with momentum through its velocity."""
        name, backend = spec.name, self.backend
        residual, velocity = self.residuals[name], self.velocities.get(name)
        g = None
        if velocity is not None or scale != 1.0:
            g = backend.accumulate(gradient, None)
            if scale != 1.0:
                g *= scale
        if self.settings.decay < 1:
            residual *= self.settings.decay
        if g is None:
            backend.add_into(gradient, backend.as_tensor(residual, spec.shape))
        elif velocity is None:
            residual += g
        else:
            velocity *= self.settings.momentum
            velocity += g
            residual += velocity

    # -- the call -----------------------------------------------------------------------------------------------------

    def planned(self, queue: CallQueue, density: float) -> Plan | None:
        """Return the queue's plan for calls of this bucket at ``density``, or ``None``."""
        return queue.plans.find(self._plan_key) if self._plan_density == density else None

    def plan(self, transport: Transport, queue: CallQueue, density: float) -> Plan:
        """Return the plan for calls of this bucket at ``density``. If there is none, make and store it."""
        plan = self.planned(queue, density)
        if plan is None:
            k, chunks = min(self.size, max(1, round(density * self.size))), None
            options, chunk = self.settings.call_options(self.accumulator.name), self.settings.chunk
            if self.dense or density == 1.0:
                options = options.for_dense_sum()
            elif chunk is not None:
                chunks = Chunks(max(1, round(density * chunk)), chunk, tuple(self._offsets))
                k = chunks.total(self.size)
            backend = queue.backends.of(self.device)
            costs = plan_costs(transport, options)
            plan = Plan(transport, backend, self.accumulator, self.shape, self.size, k, options, costs, chunks)
            queue.plans.keep(self._plan_key, plan)
            self._plan_density = density
        self.last_plan = plan
        return plan

    @default_float_mode
    def contribution(self, plan: Plan) -> Contribution:
        """Return this rank's contribution to the step's call, with zeros for tensors without a gradient.

        The residuals of these tensors are set aside until the next step begins, so the call does not send them.
        """
        backend, chunks = plan.backend, plan.chunks
        residual = self.backend.as_tensor(self._residual, (self.size,))
        if len(self._deferred) == len(self.tensors):
            segments = []
            for spec, offset in zip(self.tensors, self._offsets[:-1], strict=True):
                part = self.backend.as_tensor(self.residuals[spec.name], spec.shape)
                segments.append(Segment(self._deferred[spec.name], part, offset))
            decay = self.settings.decay
            return Contribution(backend, segments, residual, self.shape, self.size, chunks, decay, self._hint)
        self.add_deferred()
        for name in self.absent():
            if name not in self._set_aside:
                self._set_aside[name] = self.residuals[name].copy()
                self.residuals[name][:] = 0
        if self.nonfinite:  # contribute one NaN, which all ranks will see, instead of the residual
            poison = self._zeros()
            self._views(poison)[min(self.nonfinite)][:1] = float("nan")
            residual, chunks = self.backend.as_tensor(poison, (self.size,)), None
        return Contribution(backend, [Segment(None, residual)], residual, self.shape, self.size, chunks)

    def nonfinite_names(self, taken: SparseVector | None) -> set[str]:
        """Return tensors whose gradients are not finite on this rank: those dropped, or the first of ``taken``."""
        if self.nonfinite or taken is None:
            return self.nonfinite
        indices = taken.indices[~np.isfinite(taken.values)]  # calls CuPy for CuPy's arrays
        return {self.tensors[bisect_right(self._offsets, int(index)) - 1].name for index in indices[:1]}

    def absent(self) -> list[str]:
        """Return the names of tensors without a gradient on this rank."""
        return [spec.name for spec in self.tensors if spec.name not in self._present]

    def mask_velocity(self, contribution: Contribution, result: SparseVector) -> None:
        """With masking, clear the velocity at the entries that this rank selected and at the entries of the result."""
        if self.velocities and self.settings.masking and not self.dense:
            velocity, backend = self.backend.as_tensor(self._state[1], (self.size,)), contribution.backend
            if (taken := contribution.taken) is not None:
                backend.clear(velocity, taken)
            backend.clear(velocity, result)

    def write(
        self, backend: Backend, result: SparseVector, without_gradient: Collection[str], narrow: Mapping[str, DType]
    ) -> dict[str, SparseVector]:
        """Write the result to `outs`, and return the results of tensors without an output by name.

        Tensors ``without_gradient`` have no gradient on any rank, and are skipped. ``narrow``: the dtypes of other
        ranks' 16-bit outputs, to which results without an output here are rounded.
        """
        left = {}
        parts = [result] if len(self.tensors) == 1 else backend.split_at_indices(result, self._offsets)
        for spec, part in zip(self.tensors, parts, strict=True):
            if spec.name in without_gradient:
                continue
            if spec.name in self.outs:
                backend.densify(self.outs[spec.name], part)
            else:
                part.shape = spec.shape
                left[spec.name] = backend.rounded(part, narrow[spec.name]) if spec.name in narrow else part
        return left

    @default_float_mode
    def add_deferred(self) -> None:
        """Add the gradients that the call would have added."""
        for spec in self.tensors:
            if spec.name in self._deferred:
                self._add(spec, self._deferred[spec.name])
                del self._deferred[spec.name]

    # -- the state ----------------------------------------------------------------------------------------------------

    @default_float_mode
    def discard(self, name: str) -> None:
        for views in (self.residuals, self.velocities):
            if name in views:
                views[name][:] = 0

    @default_float_mode
    def scale(self, factor: float) -> None:
        for array in self._state:
            array *= factor

    @default_float_mode
    def drop_nonfinite(self) -> None:
        """Set NaN and infinities in the residual and the velocity to zero."""
        for array in self._state:
            array[~np.isfinite(array)] = 0  # calls CuPy for CuPy's arrays

    @default_float_mode
    def drop_overflows(self, world_size: int) -> None:
        """Set entries to zero that have overflowed, or are so large that the next sum could overflow."""
        max_ = float(np.finfo(self._residual.dtype).max) / (4 * world_size)  # rounding may double values
        for array in self._state:
            array[~(abs(array) <= max_)] = 0

    def _zeros(self) -> Array:
        return self.backend.zeros(self.size, self.accumulator.accumulator)

    def _views(self, flat: Array) -> dict[str, Array]:
        bounds = zip(self.tensors, pairwise(self._offsets), strict=True)
        return {spec.name: flat[begin:end] for spec, (begin, end) in bounds}


class BucketCall(SumCall):
    """The call that sums a bucket.

    A rank without a gradient for a tensor contributes zeros and marks its messages as incomplete. All ranks see the
    mark when the algorithm returns. They then exchange which gradients are absent, and which outputs have 16-bit
    elements, in one more trip.

    Attributes:
        names: names of the bucket's tensors.
        largest: the largest magnitude of the result, if it was computed.
        finite: whether the result is finite, the same on all ranks. Not computed, and True, for dense sums without
            ``skip_nonfinite``.
        nonfinite_here: names of tensors whose gradients are known not to be finite on this rank, if the result is not.
        left: results of tensors without an output, by name.
        without_gradient: names for which no rank has a gradient.
    """

    def __init__(
        self, bucket: Bucket, transport: Transport, queue: CallQueue, density: float, label: Label, counters: Counters
    ) -> None:
        plan, within = bucket.plan(transport, queue, density), None
        with bucket.on_stream(bucket.last_gradient):
            contribution = bucket.contribution(plan)
            if bucket.device is not CPU:
                within = plan.backend.side_stream()  # after all work that the call must wait for
        skip = bucket.settings.skip_nonfinite
        super().__init__(plan, contribution, label, within=within, commits=not skip, submitted=True)
        self.finite, self.largest = True, 0.0
        self.nonfinite_here: set[str] = set()
        self.left: dict[str, SparseVector] = {}
        self.without_gradient: frozenset[str] = frozenset()
        self._absent = frozenset(bucket.absent())
        self._narrow = {name: out.dtype for name, out in bucket.outs.items() if out.dtype in _NARROW}  # later, of all
        self.names = [spec.name for spec in bucket.tensors]
        self._bucket, self._counters, self._skip = bucket, counters, skip
        self._write_seconds = 0.0
        self._result: SparseVector | None = None  # until the call is settled

    def run(self) -> SparseVector:
        counters, moved, size = self._counters, self.transport.counters, self.transport.size
        before = moved.bytes_sent, moved.bytes_received, moved.messages_sent
        start = time.perf_counter()
        result = super().run()
        counters.exchange += time.perf_counter() - start - self._write_seconds
        counters.write += self._write_seconds
        counters.bytes_sent += moved.bytes_sent - before[0]
        counters.bytes_received += moved.bytes_received - before[1]
        counters.messages_sent += moved.messages_sent - before[2]
        counters.bytes_dense += 2 * (size - 1) * self._bucket.nbytes // size
        counters.calls += 1
        counters.elements += self._bucket.size
        return result

    def _begin(self) -> None:
        self.plan.comm.begin(self.label.checksum, incomplete=bool(self._absent))

    def _exchange(self) -> SparseVector:
        result = super()._exchange()
        if self.plan.comm.incomplete:
            self._gather_absent()
        return result

    def _gather_absent(self) -> None:
        """Find the names for which no rank has a gradient, and the dtypes of 16-bit outputs. Collective."""
        count, bits = len(self.names), [name in self._absent for name in self.names]
        for dtype in _NARROW:
            bits += [self._narrow.get(name) is not dtype for name in self.names]
        words = [sum(bit << i for i, bit in enumerate(bits[start : start + 64])) for start in range(0, len(bits), 64)]
        common = [-1] * len(words)
        for theirs in gather_words(self.plan.comm, words, _ABSENCE):
            common = [a & b for a, b in zip(common, theirs, strict=True)]
        on_all = [common[i // 64] >> i % 64 & 1 for i in range(len(bits))]
        self.without_gradient = frozenset(compress(self.names, on_all))
        for i, dtype in enumerate(_NARROW, 1):
            self._narrow |= {name: dtype for j, name in enumerate(self.names, i * count) if not on_all[j]}

    def settle(self, *, usable: bool) -> None:
        """With ``skip_nonfinite``, update the residual. ``usable``: the result is applied, on all ranks."""
        result, bucket, start = self._result, self._bucket, time.perf_counter()
        if result is None:
            return
        with bucket.on_stream(bucket.last_gradient):
            self.contribution.backend = bucket.backend  # another call may use the queue's backend now
            with bucket.backend.side_stream():
                super().settle(usable=usable)
                if usable:
                    self._mask(result)
                self._result = None
        self._counters.exchange += time.perf_counter() - start

    def _finish(self, result: SparseVector) -> None:
        super()._finish(result)
        start, bucket, backend = time.perf_counter(), self._bucket, self.contribution.backend
        if self._skip or self.plan.algorithm is not ALGORITHMS["dense"]:
            values = result.dense if isinstance(result, DenseSum) else result.values
            self.largest = backend.largest(backend.as_tensor(values, values.shape))
            self.finite = math.isfinite(self.largest)
            if not self.finite:
                self.nonfinite_here = self._bucket.nonfinite_names(self.contribution.taken)
        if self._skip:
            self._result = result
        else:
            self._mask(result)
        taken = self.contribution.num_taken
        self._counters.selected += bucket.size if taken is None else taken
        self._counters.applied += result.size if isinstance(result, DenseSum) else result.nnz
        self.left = bucket.write(backend, result, self.without_gradient, self._narrow)
        self._write_seconds = time.perf_counter() - start

    def _mask(self, result: SparseVector) -> None:
        if self.plan.algorithm is not ALGORITHMS["dense"]:  # after a dense sum momentum continues
            self._bucket.mask_velocity(self.contribution, result)


class OpenStep:
    """A step that has not ended, and the outcome of the previous step.

    A reducer begins the next step with a new object. All methods may be called again after an interrupt.

    Attributes:
        number: the number of the step.
        before: the outcome of the previous step; ``None`` if it failed or there was none.
        unsummed_before: names of tensors that the previous step did not sum.
        connected: whether `connect` was called; it must be before the first push.
        opening: calls before the first gradient, by name: see `Reducer.opening_call`.
        shows: checksums of gradients by name, in a first step; ``None`` later.
        buffers: checksums of the model's buffers by name, in a first step; see `FirstStep`.
        density, label: density of the step, and `Reducer.label`; set before the first push.
        pushed: gradients by name; ``None`` for an absent gradient.
        unsummed: after `settle`, names of tensors that this step did not sum.
    """

    density: float
    label: Label

    def __init__(
        self,
        specs: Mapping[str, TensorSpec],
        settings: Settings,
        counters: Counters,
        number: int,
        before: Step | None,
        unsummed_before: tuple[str, ...],
    ) -> None:
        """Begin a step. It adds its time and traffic to ``counters``."""
        self.number, self.before, self.unsummed_before = number, before, unsummed_before
        self._specs, self._settings, self._counters = specs, settings, counters
        self._clips = settings.clip is not None
        self.pushed: dict[str, Tensor | None] = {}
        self.unsummed: tuple[str, ...] = ()
        self.opening: dict[str, tuple[Handle, Task]] = {}
        self.shows: dict[str, int] | None = None
        self.buffers: dict[str, int] = {}
        self._first_step: tuple[Handle, FirstStep] | None = None
        self.connected = False
        self._buckets: Sequence[Bucket] = ()
        self._calls: list[tuple[Handle, BucketCall]] = []

    def connect(
        self,
        transport: Transport,
        queue: CallQueue,
        buckets: Sequence[Bucket],
        by_name: Mapping[str, Bucket],
        common: Label,
    ) -> None:
        """Use these buckets. ``common`` is in the label of each call; see `sparsecomm.reducer.connection.Buckets`."""
        self._transport, self._queue, self._common = transport, queue, common
        self._buckets, self._by_name, self.connected = buckets, by_name, True
        for bucket in buckets:
            bucket.begin()

    # -- gradients ----------------------------------------------------------------------------------------------------

    def take(self, spec: TensorSpec, t: Tensor | None, out: Tensor | None = None, *, add: Add | None = None) -> None:
        """Take a gradient, and the output for its sum: see `Bucket.take`. With clipping, `_add_clipped` adds it."""
        name, bucket, start = spec.name, self._by_name[spec.name], time.perf_counter()
        with bucket.on_stream(t):
            if self.shows is not None and t is not None and 0 < bucket.backend.largest(t) < math.inf:
                self.shows[name] = checksum(to_host(bucket.backend.memory_of(t)).view(np.uint8))
            if not self._clips:
                bucket.take(spec, t, add=add)
            self.pushed[name] = t
            if out is not None:
                bucket.outs[name] = out
        self._counters.accumulate += time.perf_counter() - start

    def take_rest(self) -> None:
        """Record that this rank has no gradient for tensors that were not pushed."""
        for name, spec in self._specs.items():
            if name not in self.pushed:
                self.take(spec, None)

    def _add_clipped(self) -> None:
        """Clip and add all gradients of this step. After an interrupt, add the rest."""
        s, by_name, squares, start = self._settings, self._by_name, 0.0, time.perf_counter()
        for name, t in self.pushed.items():
            if t is not None and t.size:
                with by_name[name].on_stream(t):
                    squares += by_name[name].sum_of_squares(t)
        assert s.clip is not None
        P, norm, factor = self._transport.size, math.sqrt(squares), 1.0
        max_norm = s.clip * (1 / math.sqrt(P) if s.options.op == "sum" else math.sqrt(P))
        if max_norm < norm < math.inf:
            factor = max_norm / norm
        for name, t in self.pushed.items():
            if name in by_name[name].missing:
                with by_name[name].on_stream(t):
                    by_name[name].take(self._specs[name], t, scale=factor)
        self._counters.accumulate += time.perf_counter() - start

    # -- calls --------------------------------------------------------------------------------------------------------

    def start_ready(self) -> None:
        """Start the calls of complete buckets, in the order of the buckets."""
        buckets = self._buckets
        if self._clips and len(self.pushed) == len(self._specs) and len(self._calls) < len(buckets):
            self._add_clipped()
        while len(self._calls) < len(buckets) and not buckets[len(self._calls)].missing:
            position = len(self._calls)
            bucket = buckets[position]
            pairs = partial(_contents, position, bucket.tensors, self.number, self.label, self._common)
            label = Label((position, self.number, self.label.checksum, self._common.checksum), pairs)
            call = BucketCall(bucket, self._transport, self._queue, self.density, label, self._counters)
            self._calls.append((self._queue.submit(call), call))
        if self.shows is not None and self._first_step is None and len(self._calls) == len(buckets):
            comparison = FirstStep(self._transport, self.shows, self.buffers)
            self._first_step = self._queue.submit(comparison), comparison

    def warn(self) -> None:
        """Warn of gradients and buffers, if this was a first step: see `FirstStep`."""
        if self._first_step is not None and error_of(self._first_step[0]) is None:
            self._first_step[1].warn()

    def settle(self, accept: Accept | None = None) -> tuple[BaseException | None, Step]:
        """Wait for the step's calls, with ``accept`` as in `Reducer.wait`.

        Returns:
            The exception to raise or ``None``, and the outcome, which is valid if `unsummed` is empty.
        """
        ended = [(error_of(handle), call) for handle, call in self._calls]
        failed_first = sorted(ended, key=lambda item: item[1].succeeded)  # a call may succeed and raise, too
        error = next((error for error, _ in failed_first if error is not None), None)
        summed = {name for _, call in self._calls if call.succeeded for name in call.names}
        names = tuple(name for name, spec in self._specs.items() if spec.size)
        self.unsummed = tuple(name for name in names if name not in summed)
        finite, skips = all(call.finite for _, call in self._calls), self._settings.skip_nonfinite
        usable = finite or not skips
        if self.unsummed and skips:  # no call has committed yet, so the whole step fails
            self.unsummed = names
        left = {name: part for _, call in self._calls for name, part in call.left.items()}
        if usable and skips and accept is not None and not self.unsummed:
            usable = accept(left, max((call.largest for _, call in self._calls), default=0.0))
        for _, call in self._calls:
            call.settle(usable=usable and not self.unsummed)
        for bucket in self._buckets:
            with bucket.on_stream(None):
                if not usable and not self.unsummed:
                    bucket.drop_overflows(self._transport.size)
                if not finite and not skips:
                    bucket.drop_nonfinite()
        without = frozenset(name for _, call in self._calls for name in call.without_gradient)
        cause = ""
        if not finite:
            here = {name for _, call in self._calls for name in call.nonfinite_here}
            cause = cause_of(self._transport.rank, next((name for name in self._specs if name in here), None))
        elif not usable:
            cause = f"rank {self._transport.rank}: it would make a parameter or the optimizer's state infinite"
        return error, Step(self.number, self.density, usable, left, without, not finite and not skips, cause)

    def abandon(self) -> None:
        """End the step, and add the gradients of calls that were not made to the residuals."""
        self.take_rest()
        if self._clips:
            self._add_clipped()
        self.settle()
        for bucket in self._buckets[len(self._calls) :]:
            with bucket.backend.on_stream(bucket.last_gradient):
                bucket.add_deferred()


def _contents(
    position: int, tensors: Sequence[TensorSpec], number: int, label: Label, common: Label
) -> list[tuple[str, object]]:
    """Return what the ranks must share in the call of a bucket."""
    call, *settings = common.pairs()
    names = listed([spec.name for spec in tensors])
    return [call, ("step", number), *label.pairs(), *settings, ("bucket", f"{position} ({names})")]


def error_of(handle: Handle) -> BaseException | None:
    """Wait for a call, and return its error, or ``None``. An interrupt of the wait is raised."""
    try:
        handle.wait()
    except BaseException as error:
        if error is not handle.error:
            raise
        return error
    return None
