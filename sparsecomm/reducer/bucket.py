"""`Bucket`: tensors that one call, a `BucketCall`, sums."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import accumulate, compress, pairwise
from typing import Any, NamedTuple

import numpy as np

from sparsecomm.algorithms import ALGORITHMS
from sparsecomm.backends import Backend, Backends, default_float_mode
from sparsecomm.backends.adamw import unit_dtype
from sparsecomm.backends.base import Addend, Segment
from sparsecomm.calls.collectives import SumCall
from sparsecomm.calls.label import Label
from sparsecomm.calls.measurement import plan_costs
from sparsecomm.calls.plan import Plan
from sparsecomm.calls.queue import CallQueue
from sparsecomm.contribution import Chunks, Contribution
from sparsecomm.primitives.communicator import gather_words
from sparsecomm.reducer.counters import Counters
from sparsecomm.reducer.options import Settings
from sparsecomm.tensors.dtypes import BFLOAT16, FLOAT16, DType
from sparsecomm.tensors.interop import CPU, Tensor, TensorSpec, library_of
from sparsecomm.tensors.sparse import Array, DenseSum, SparseVector
from sparsecomm.transport import Transport

_NARROW = FLOAT16, BFLOAT16
_MIN_OWNED = 2048  # minimum elements of an owner; for fewer elements, fewer ranks own some
_ABSENCE = 1 << 19  # round number of the exchange of absent gradients, above those of algorithms


class Addition(NamedTuple):
    """How a gradient is added to a residual: the other fields of `Addend`."""

    scale: float = 1.0
    exponents: Array | None = None
    minuend: Array | None = None


GRADIENT = Addition()


class Part(NamedTuple):
    """Elements ``begin`` to ``end`` of a tensor. The first has index ``at`` in the bucket."""

    spec: TensorSpec
    begin: int
    end: int
    at: int


class Bucket:
    """Tensors of one device and accumulator dtype, with one flat residual, and one flat velocity under momentum.

    Methods with an argument ``backend`` or ``plan`` are part of a call and use its stream. Call all other methods
    within `on_stream`.
    """

    def __init__(
        self, tensors: Sequence[TensorSpec], dense: bool, settings: Settings, backends: Backends, num_ranks: int
    ) -> None:
        self.tensors, self.settings = tuple(tensors), settings  # in the order of the flat vectors
        self.dense = dense  # the tensors are summed without a selection
        self.device, self.accumulator = tensors[0].device, tensors[0].accumulator
        self.backend = backends.of(self.device)  # for all work outside calls
        self._timeline = self.backend.timeline()
        self._offsets = [0, *accumulate(spec.size for spec in tensors)]
        self._begins = {spec.name: begin for spec, begin in zip(tensors, self._offsets, strict=False)}
        self.size = self._offsets[-1]
        self.nbytes = self.size * self.accumulator.itemsize
        self.shape = tensors[0].shape if len(tensors) == 1 else (self.size,)  # of the call's input
        with self.on_stream(None):
            self._state = [self._zeros() for _ in range(2 if settings.momentum else 1)]  # residual, velocity
            # With `Settings.owner`, the exponents of units, the same on all ranks: see `backends.adamw.unit_exponents`.
            dtype = unit_dtype(self.accumulator.accumulator)
            self.exponents = self.backend.zeros(0 if settings.owner is None else self.size, dtype)
        self.residual = self._state[0]
        self.residuals = self.views(self.residual)
        self.velocities = self.views(self._state[1]) if settings.momentum else {}
        self.exponents_of = {} if settings.owner is None else self.views(self.exponents)
        self.units_lag = False  # dense steps have changed the owners' moments, but not the units; the same on all ranks
        self.owners = min(num_ranks, max(1, self.size // _MIN_OWNED))  # the number of first ranks that own elements
        self._plan_key, self._plan_density = object(), 0.0
        self.last_plan: Plan | None = None  # of the latest call
        self._set_aside: dict[str, Array] = {}  # residuals of tensors without a gradient here, during the step's call
        self.begin()

    @default_float_mode
    def begin(self) -> None:
        """Begin a step. The calls of the previous step have ended, with or without an error."""
        if self._set_aside:
            with self.on_stream(self.last_gradient):  # their memory belongs to its stream
                while self._set_aside:  # the residual holds only what the call has added
                    name, residual = next(iter(self._set_aside.items()))
                    self.residuals[name] += residual
                    del self._set_aside[name]
        self.missing = set(self.residuals)  # names for which `take` was not called in this step
        self.outs: dict[str, Tensor] = {}  # this step's outputs for sums by name
        self.last_gradient: Tensor | None = None  # that was taken in this step
        self._present: set[str] = set()  # names for which this rank has a gradient
        self._taken: list[tuple[str, Addend]] = []  # names and what `add_taken` adds
        self._flags: list[tuple[Sequence[str], Any]] = []  # names, and what `Backend.wait_for` needs
        self.nonfinite: set[str] = set()  # names whose gradients were dropped in this step, since they were not finite

    def on_stream(self, x: Tensor | None) -> AbstractContextManager[object]:
        """Return a context for work with the bucket's memory, on the stream of ``x`` or else the current stream.

        The work runs after all earlier work with this memory, on any stream.
        """
        return self._timeline.on_stream(x)

    def side_stream(self) -> AbstractContextManager[object]:
        """Return a context, within `on_stream`, for work with memory that the latest call has made.

        The memory may be freed afterwards: later calls, which reuse it, run after this work. The host does not wait.
        """
        assert self.last_plan is not None
        return self.last_plan.backend.side_stream(wait=False)

    def __del__(self) -> None:
        with suppress(Exception):  # there may be no timeline, or at the end of the process no device
            self._timeline.wait()  # the allocator may reuse the memory on the stream that allocated it

    # -- gradients ----------------------------------------------------------------------------------------------------

    def take(self, spec: TensorSpec, gradient: Tensor | None, how: Addition = GRADIENT) -> None:
        """Take a gradient; ``None``: this rank has none, and nothing changes.

        `add_taken` adds it to the residual. On a CPU, this does so at once.
        """
        name = spec.name
        if gradient is not None:
            addend = Addend(self._begins[name], gradient, *how)
            if self.device is CPU and spec.size:
                self._add_first((name,), (addend,))
            self.join(gradient)
            if self.device is not CPU and spec.size:
                self._taken.append((name, addend))
            self._present.add(name)
        self.missing.discard(name)

    def join(self, gradient: Tensor) -> None:
        """Let later work on the stream of a gradient also wait for the streams of the gradients before it."""
        last = self.last_gradient
        if last is None or last.stream != gradient.stream:
            self._timeline.join(last, gradient)
        self.last_gradient = gradient

    def add_taken(self) -> None:
        """Add what was taken to the residual."""
        while self._taken:
            names, addends = zip(*self._taken, strict=True)
            del self._taken[: self._add_first(names, addends)]

    @default_float_mode
    def _add_first(self, names: Sequence[str], addends: Sequence[Addend]) -> int:
        """Call `Backend.add_first`, with momentum through the velocity. Return the number of gradients added."""
        s, velocity = self.settings, self._state[1] if self.settings.momentum else None
        count, flags = self.backend.add_first(addends, self.residual, velocity, s.decay, s.momentum, s.skip_nonfinite)
        if len(flags):
            self._flags.append((names, flags))
        return count

    @default_float_mode
    def sums_of_squares(self, gradients: Sequence[Tensor]) -> list[float]:
        """Return the sums of the squares of gradients' elements. The host waits once."""
        return self.backend.sums_of_squares(gradients)

    @default_float_mode
    def difference(self, spec: TensorSpec, minuend: Array, x: Tensor) -> Tensor:
        """Return minuend - x in new memory."""
        value = self.backend.accumulate(x, None)
        return self.backend.as_tensor(library_of(value).subtract(minuend, value, out=value), spec.shape)

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
        self.add_taken()
        residual = self.backend.as_tensor(self.residual, (self.size,))
        for name in self.absent():
            if name not in self._set_aside:
                self._set_aside[name] = self.residuals[name].copy()
                self.residuals[name][:] = 0
        return Contribution(plan.backend, None, residual, self.shape, self.size, plan.chunks, 1.0, self._poison)

    def _poison(self, selected: Sequence[SparseVector]) -> Tensor | None:
        """Return zeros and one NaN, which all ranks will see, if a gradient was not added because it is not finite.

        The same wait finds the numbers of selected entries.
        """
        for names, flags in self._flags:
            self.nonfinite |= {names[i] for i in self.backend.wait_for(selected, flags)}
        self._flags = []
        if not self.nonfinite:
            return None
        poison = self._zeros()
        self.views(poison)[min(self.nonfinite)][:1] = float("nan")
        return self.backend.as_tensor(poison, (self.size,))

    def nonfinite_names(self, taken: SparseVector | None) -> set[str]:
        """Return tensors whose gradients are not finite on this rank: those dropped, or the first of ``taken``."""
        if self.nonfinite or taken is None:
            return self.nonfinite
        indices = taken.indices[~np.isfinite(taken.values)]  # calls CuPy for CuPy's arrays
        return {self.tensors[bisect_right(self._offsets, int(index)) - 1].name for index in indices[:1]}

    def absent(self) -> list[str]:
        """Return the names of tensors without a gradient on this rank."""
        return [spec.name for spec in self.tensors if spec.name not in self._present]

    def write(
        self, backend: Backend, result: SparseVector, without_gradient: Collection[str], narrow: Mapping[str, DType]
    ) -> dict[str, SparseVector]:
        """Write the result to `outs`, and return the results of tensors without an output by name.

        Tensors ``without_gradient`` have no gradient on any rank, and are skipped. ``narrow``: the dtypes of other
        ranks' 16-bit outputs, to which results without an output here are rounded.
        """
        outs = {n: t for n, t in self.outs.items() if n not in without_gradient}
        backend.write(self.segments(outs), result)
        if len(outs) + len(without_gradient) == len(self.tensors):
            return {}
        left, parts = {}, [result] if len(self.tensors) == 1 else backend.split_at_indices(result, self._offsets)
        for spec, part in zip(self.tensors, parts, strict=True):
            if spec.name not in outs and spec.name not in without_gradient:
                part.shape = spec.shape
                left[spec.name] = backend.rounded(part, narrow[spec.name]) if spec.name in narrow else part
        return left

    def segments(self, tensors: Mapping[str, Tensor]) -> list[Segment]:
        """Return tensors by name in the order of their elements."""
        return [Segment(self._begins[spec.name], tensors[spec.name]) for spec in self.tensors if spec.name in tensors]

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
    def drop_large(self, times: int) -> None:
        """Set entries of the residual and the velocity to zero that overflow if multiplied by ``times``, and NaN."""
        max_ = float(np.finfo(self.residual.dtype).max) / times
        for array in self._state:
            array[~(abs(array) <= max_)] = 0

    def parts(self, rank: int) -> list[Part]:
        """Return what a rank owns: the parts of tensors in its range."""
        if rank >= self.owners:
            return []
        begin, end = self.size * rank // self.owners, self.size * (rank + 1) // self.owners
        found = []
        for spec, (first, last) in zip(self.tensors, pairwise(self._offsets), strict=True):
            if first < end and begin < last:
                low = max(begin, first)
                found.append(Part(spec, low - first, min(end, last) - first, low))
        return found

    def part(self, name: str, rank: int) -> tuple[int, int]:
        """Return the begin and the end of a rank's part of a tensor."""
        owned = {part.spec.name: (part.begin, part.end) for part in self.parts(rank)}
        return owned.get(name, (0, 0))

    def _zeros(self) -> Array:
        return self.backend.zeros(self.size, self.accumulator.accumulator)

    def views(self, flat: Array) -> dict[str, Array]:
        """Return the parts of a flat array by name."""
        bounds = zip(self.tensors, pairwise(self._offsets), strict=True)
        return {spec.name: flat[begin:end] for spec, (begin, end) in bounds}


class BucketCall(SumCall):
    """The call that sums a bucket.

    A rank without a gradient for a tensor contributes zeros and marks its messages as incomplete. All ranks see the
    mark when the algorithm returns. They then exchange which gradients are absent, and which outputs have 16-bit
    elements, in one more trip.
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
        self.finite = True  # the result, on all ranks; not computed for dense sums without ``skip_nonfinite``
        self.usable = True  # whether a finite result is usable, the same on all ranks
        self.largest = 0.0  # the largest magnitude of the result, if it was computed
        self.nonfinite_here: set[str] = set()  # names of gradients that make the result not finite, on this rank
        self.left: dict[str, SparseVector] = {}  # results of tensors without an output, by name
        self.without_gradient: frozenset[str] = frozenset()  # names for which no rank has a gradient
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
        self.comm.begin(self.label.checksum, incomplete=bool(self._absent))

    def _exchange(self) -> SparseVector:
        result = super()._exchange()
        if self.comm.incomplete:
            self._gather_absent()
        return result

    def _gather_absent(self) -> None:
        """Find the names for which no rank has a gradient, and the dtypes of 16-bit outputs. Collective."""
        count, bits = len(self.names), [name in self._absent for name in self.names]
        for dtype in _NARROW:
            bits += [self._narrow.get(name) is not dtype for name in self.names]
        words = [sum(bit << i for i, bit in enumerate(bits[start : start + 64])) for start in range(0, len(bits), 64)]
        common = [-1] * len(words)
        for theirs in gather_words(self.comm, words, _ABSENCE):
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
            with bucket.side_stream():
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
        self._count(result)
        self.left = bucket.write(backend, result, self.without_gradient, self._narrow)
        self._write_seconds = time.perf_counter() - start

    def _count(self, result: SparseVector) -> None:
        taken = self.contribution.num_taken
        self._counters.selected += self._bucket.size if taken is None else taken
        self._counters.applied += result.size if isinstance(result, DenseSum) else result.nnz

    def _mask(self, result: SparseVector) -> None:
        """With masking, clear the velocity at the entries that this rank selected and at the entries of the result."""
        bucket, backend = self._bucket, self.contribution.backend
        if self.plan.algorithm is ALGORITHMS["dense"] or not (bucket.velocities and bucket.settings.masking):
            return  # after a dense sum momentum continues
        velocity = bucket.backend.as_tensor(bucket._state[1], (bucket.size,))
        if (taken := self.contribution.taken) is not None:
            backend.clear(velocity, taken)
        backend.clear(velocity, result)
