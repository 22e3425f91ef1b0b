"""`Bucket`: tensors that one call, a `BucketCall`, sums, and their residuals."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from sparsecomm.backends import Backend, Backends, default_float_mode
from sparsecomm.backends.adamw import unit_dtype, units
from sparsecomm.backends.base import Addend, Flags, Segment
from sparsecomm.calls.measurement import plan_costs
from sparsecomm.calls.nodes import Nodes
from sparsecomm.calls.plan import Plan
from sparsecomm.calls.queue import CallQueue
from sparsecomm.contribution import Chunks, Contribution
from sparsecomm.reducer.options import ReducerSettings
from sparsecomm.tensors.dtypes import DType
from sparsecomm.tensors.interop import CPU, Tensor, TensorSpec, from_host, library_of
from sparsecomm.tensors.sparse import Array, SparseVector
from sparsecomm.transport import Transport

_MIN_OWNED = 2048  # minimum elements of an owner; for fewer elements, fewer ranks own some


class Addition(NamedTuple):
    """How a gradient is added to a residual: see `Addend`."""

    scale: float = 1.0
    minuend: Array | None = None


GRADIENT = Addition()


class Part(NamedTuple):
    """Elements ``begin`` to ``end`` of a tensor. The first has index ``at`` in the slice."""

    spec: TensorSpec
    begin: int
    end: int
    at: int


class Contents(NamedTuple):
    """What a rank has of a tensor, in flat arrays.

    Attributes:
        part: the begin and the end of the elements in ``state`` and ``exponents``.
        state: the residual, and the velocity if there is one.
        exponents: of the units of these elements; ``None``: units have not begun.
        unsummed: the whole tensor in each array of `Bucket.unsummed`; may be empty.
    """

    part: tuple[int, int]
    state: Sequence[Array]
    exponents: Array | None
    unsummed: Sequence[Array]


class Bucket:
    """Tensors of one device and accumulator dtype, with one flat residual, and one flat velocity under momentum.

    With `Nodes`, elements are divided into slices of equal length, the last one padded with zeros. This rank has the
    residual, the velocity and the exponents of its slice. Without `Nodes`, its slice is the whole bucket.

    Methods with an argument ``backend`` or ``plan`` are part of a call and use its stream. Call all other methods
    within `on_stream`.
    """

    def __init__(
        self,
        tensors: Sequence[TensorSpec],
        dense: bool,
        settings: ReducerSettings,
        backends: Backends,
        num_ranks: int,
        nodes: Nodes | None = None,
        *,
        has_units: bool = False,
    ) -> None:
        """Make a bucket with residuals of zeros. ``has_units``: residuals are divided by units."""
        self.tensors, self.settings = tuple(tensors), settings  # in the order of the flat vectors
        self.dense = dense  # the tensors are summed without a selection
        self.device, self.accumulator = tensors[0].device, tensors[0].accumulator
        self.backend = backends.of(self.device)  # for all work outside calls
        self._timeline = self.backend.timeline()
        self._offsets = [0, *accumulate(spec.size for spec in tensors)]
        self._bounds = {spec.name: bounds for spec, bounds in zip(tensors, pairwise(self._offsets), strict=True)}
        self.size = self._offsets[-1]
        self.nbytes = self.size * self.accumulator.itemsize
        self.shape = tensors[0].shape if len(tensors) == 1 else (self.size,)  # of the result
        self.nodes = nodes if nodes is not None and self.size >= nodes.per_node**2 else None  # so no slice is empty
        self.num_slices, position = (1, 0) if self.nodes is None else (self.nodes.per_node, self.nodes.position)
        self.length = -(-self.size // self.num_slices)  # of a slice
        self.slice_shape = self.shape if self.nodes is None else (self.length,)  # of the call's input
        self.first = position * self.length  # this rank's slice has elements `first` to `last` - 1
        self.last = min(self.first + self.length, self.size)
        with self.on_stream(None):
            self.state = [self._zeros() for _ in range(2 if settings.momentum else 1)]  # residual, velocity
            # The exponents of units, the same on all ranks: see `backends.adamw.unit_exponents`.
            dtype = unit_dtype(self.accumulator.accumulator)
            self.exponents = self.backend.zeros(self.length if has_units else 0, dtype)
        # Like `state`, but of all slices, and not divided by units. The next call adds it to the residual and the
        # velocity, with `nodes` after summing it over the node.
        self.unsummed: list[Array] = []
        self._gradients: Array | None = None  # with `nodes`, this step's gradients, of all slices
        self.residual = self.state[0]
        self.residuals = self.views(self.residual)
        self.exponents_of = self.views(self.exponents) if has_units else {}
        self.begun: set[str] = set()  # tensors whose units have begun, the same on all ranks
        self.units_lag = False  # dense steps have changed the owners' moments, but not the units; the same on all ranks
        # The number of first ranks, or with `nodes` of first nodes, that own elements.
        self.owners = min(num_ranks // self.num_slices, max(1, self.length // _MIN_OWNED))
        self._plan_key, self._plan_density = object(), 0.0
        self.last_plan: Plan | None = None  # of the latest call
        self._set_aside: dict[str, Array] = {}  # residuals of tensors without a gradient here, during the step's call
        self._pushed: list[tuple[str, Addend]] = []  # names and what `add_pushed` adds
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
        if self._pushed or self._gradients is not None:  # memory ran out when the call failed
            with self.on_stream(self.last_gradient):
                self.keep_unsummed(self.backend)
        self.missing = set(self.residuals)  # names for which `push` was not called in this step
        self.outs: dict[str, Tensor] = {}  # this step's outputs for sums by name
        self.last_gradient: Tensor | None = None  # that was pushed in this step
        self._present: set[str] = set()  # names for which this rank has a gradient
        self._flags: list[tuple[Sequence[str], Flags]] = []  # names, and what `Backend.wait_for` needs
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

    def push(self, spec: TensorSpec, gradient: Tensor | None, how: Addition = GRADIENT) -> None:
        """Accept a gradient; ``None``: this rank has none, and nothing changes.

        `add_pushed` adds it to the residual. On a CPU without `nodes`, this does so at once.
        """
        name = spec.name
        if gradient is not None:
            begin, exponents = self._bounds[name][0], self.exponents_of.get(name)
            addend = Addend(begin, gradient, how.scale, exponents, how.minuend)
            at_once = self.device is CPU and self.nodes is None
            if at_once and spec.size:
                self._add_first((name,), (addend,))
            self.join(gradient)
            if not at_once and spec.size:
                self._pushed.append((name, addend))
            self._present.add(name)
        self.missing.discard(name)

    def join(self, gradient: Tensor) -> None:
        """Let later work on the stream of a gradient also wait for the streams of the gradients before it."""
        last = self.last_gradient
        if last is None or last.stream != gradient.stream:
            self._timeline.join(last, gradient)
        self.last_gradient = gradient

    def add_pushed(self) -> None:
        """Add what was pushed to the residual, or with `nodes` to `unsummed`."""
        if self.nodes is not None:
            self.keep_unsummed(self.backend)
        while self._pushed:
            names, addends = zip(*self._pushed, strict=True)
            del self._pushed[: self._add_first(names, addends)]

    @default_float_mode
    def _add_first(self, names: Sequence[str], addends: Sequence[Addend]) -> int:
        """Call `Backend.add_first`, with momentum through the velocity. Return the number of gradients added."""
        s, velocity = self.settings, self.state[1] if self.settings.momentum else None
        count, flags = self.backend.add_first(addends, self.residual, velocity, s.decay, s.momentum, s.skip_nonfinite)
        if len(flags):
            self._flags.append((names, flags))
        return count

    @default_float_mode
    def gradients(self, backend: Backend) -> Array:
        """Return this step's gradients, not divided by units, in a flat array of all slices. Only with `nodes`."""
        if self._gradients is None:
            names, addends = [name for name, _ in self._pushed], [addend for _, addend in self._pushed]
            dtype, skip = self.accumulator.accumulator, self.settings.skip_nonfinite
            self._gradients, groups = backend.flat(self.num_slices * self.length, dtype, addends, skip)
            self._flags += [([names[i] for i in positions], flags) for positions, flags in groups if len(flags)]
            self._pushed = []
        return self._gradients

    @default_float_mode
    def keep_unsummed(self, backend: Backend) -> None:
        """Add this step's gradients to `unsummed`, because their call has failed or was not made."""
        if self._pushed or self._gradients is not None:
            gradients = self.gradients(backend)
            for array in self.begin_unsummed(backend):
                array += gradients
            self._gradients = None

    def begin_unsummed(self, backend: Backend) -> list[Array]:
        """Return `unsummed`, after making zeros if there is none."""
        size, dtype = self.num_slices * self.length, self.accumulator.accumulator
        self.unsummed = self.unsummed or [backend.zeros(size, dtype) for _ in self.state]
        return self.unsummed

    def forget_gradients(self) -> None:
        """Forget gradients that the node has summed, when their call has succeeded."""
        self._gradients, self.unsummed = None, []

    @default_float_mode
    def sums_of_squares(self, gradients: Sequence[Tensor]) -> list[float]:
        """Return the sums of the squares of gradients' elements. The host waits once."""
        return self.backend.sums_of_squares(gradients)

    @default_float_mode
    def difference(self, spec: TensorSpec, minuend: Array, x: Tensor) -> Tensor:
        """Return minuend - x in new memory."""
        value = self.backend.accumulate(x, None)
        return self.backend.as_tensor(library_of(value).subtract(minuend, value, out=value), spec.shape)

    def add_sums(
        self,
        backend: Backend,
        names: Collection[str],
        sums: Array,
        residual: Array,
        velocity: Array | None = None,
        decay: float = 1.0,
        momentum: float = 0.0,
    ) -> None:
        """Add sums of this rank's slice, not divided by units yet, to a residual, as `Backend.add_first` does."""
        complete, exponents, addends = len(names) == len(self.tensors), self.exponents, list[Addend]()
        for begin, end in [(0, self.last - self.first)] if complete else map(self.bounds_in_slice, names):
            if begin < end:
                part = backend.as_tensor(sums[begin:end], (end - begin,))
                addends.append(Addend(begin, part, exponents=exponents[begin:end] if len(exponents) else None))
        while addends:
            del addends[: backend.add_first(addends, residual, velocity, decay, momentum, False)[0]]

    # -- the call -----------------------------------------------------------------------------------------------------

    def planned(self, queue: CallQueue, density: float) -> Plan | None:
        """Return the queue's plan for calls of this bucket at ``density``, or ``None``."""
        plan = queue.plans.find(self._plan_key) if self._plan_density == density else None
        return plan if isinstance(plan, Plan) else None

    def plan(self, transport: Transport, queue: CallQueue, density: float) -> Plan:
        """Return the plan for calls of this bucket at ``density``. If there is none, make and store it."""
        plan = self.planned(queue, density)
        if plan is None:
            k, chunks = min(self.length, max(1, round(density * self.length))), None
            settings, chunk = self.settings.for_sums(self.accumulator.name), self.settings.chunk_length
            if self.dense or density == 1.0:
                settings = settings.for_dense_sum()
            elif chunk is not None:
                k, chunks = self._chunks(max(1, round(density * chunk)), chunk)
            plan = Plan(
                transport,
                queue.backends.of(self.device),
                settings,
                dtype=self.accumulator,
                shape=self.slice_shape,
                size=self.length,
                k=k,
                costs=plan_costs(transport, settings),
                chunks=chunks,
                per_node=self.num_slices,
            )
            queue.plans.keep(self._plan_key, plan)
            self._plan_density = density
        self.last_plan = plan
        return plan

    def _chunks(self, k: int, length: int) -> tuple[int, Chunks]:
        """Return the chunks of this rank's slice, and the largest number of entries selected from any slice."""
        by_slice = []
        for first in range(0, self.size, self.length):
            last = min(first + self.length, self.size)
            offsets = sorted({min(max(offset, first), last) - first for offset in self._offsets})
            by_slice.append(Chunks(k, length, tuple(offsets)))
        return max(chunks.total(self.length) for chunks in by_slice), by_slice[self.first // self.length]

    @default_float_mode
    def contribution(self, plan: Plan) -> Contribution:
        """Return this rank's contribution to the step's call, with zeros for tensors without a gradient.

        With `nodes`, the call itself adds the node's gradients to the residual.
        """
        if self.nodes is None:
            self.add_pushed()
            while self.unsummed:
                self.add_sums(self.backend, self._bounds, self.unsummed[-1], self.state[len(self.unsummed) - 1])
                self.unsummed.pop()
            self.set_aside(self.absent())
        elif any(addend.minuend is not None for _, addend in self._pushed):  # the program may change these tensors soon
            self.gradients(self.backend)
        residual = self.backend.as_tensor(self.residual, (self.length,))
        return Contribution(plan.backend, None, residual, self.slice_shape, self.length, plan.chunks, 1.0, self._poison)

    @default_float_mode
    def set_aside(self, names: Iterable[str]) -> None:
        """Set the residuals of some tensors aside until the next step begins, so that the call does not send them."""
        for name in names:
            if name not in self._set_aside:
                self._set_aside[name] = self.residuals[name].copy()
                self.residuals[name][:] = 0

    @default_float_mode
    def restore(self, state: Sequence[Array]) -> None:
        """Restore copies of `state`, made before anything was set aside."""
        for array, before in zip(self.state, state, strict=True):
            array[:] = before
        self._set_aside.clear()

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
        index, _ = self.bounds_in_slice(min(self.nonfinite))
        poison[min(index, self.last - self.first - 1)] = float("nan")
        return self.backend.as_tensor(poison, (self.length,))

    def nonfinite_names(self, taken: SparseVector | None) -> set[str]:
        """Return tensors whose gradients are not finite on this rank: those dropped, or the first of ``taken``.

        With `nodes`, ``taken`` is from sums of several ranks, so it is ignored.
        """
        if self.nonfinite or taken is None or self.nodes is not None:
            return self.nonfinite
        indices = taken.indices[~np.isfinite(taken.values)]  # calls CuPy for CuPy's arrays
        return {self.tensors[bisect_right(self._offsets, self.first + int(i)) - 1].name for i in indices[:1]}

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
        without_out, parts = {}, [result] if len(self.tensors) == 1 else backend.split_at_indices(result, self._offsets)
        for spec, part in zip(self.tensors, parts, strict=True):
            if spec.name not in outs and spec.name not in without_gradient:
                part.shape = spec.shape
                without_out[spec.name] = backend.rounded(part, narrow[spec.name]) if spec.name in narrow else part
        return without_out

    def segments(self, tensors: Mapping[str, Tensor]) -> list[Segment]:
        """Return tensors by name in the order of their elements."""
        bounds = self._bounds.items()
        return [Segment(begin, tensors[name]) for name, (begin, _) in bounds if name in tensors]

    # -- the state ----------------------------------------------------------------------------------------------------

    def use_exponents(self, name: str, exponents: Array, first: int = 0) -> None:
        """Set the units of a tensor from its element ``first`` on. Exponents outside this rank's slice are ignored."""
        self.begun.add(name)
        begin, end = self.part_in_slice(name)
        low = max(begin, first)
        high = max(low, min(end, first + len(exponents)))
        own = self.exponents_of[name][low - begin : high - begin]
        own[:] = from_host(exponents[low - first : high - first], own)

    def part_in_slice(self, name: str) -> tuple[int, int]:
        """Return the begin and the end of the part of a tensor that is in this rank's slice."""
        begin, end = self._bounds[name]
        return min(max(self.first, begin), end) - begin, min(max(self.last, begin), end) - begin

    def contents(self, name: str) -> Contents:
        """Return what this rank has of a tensor, in views."""
        state, unsummed = ([self.view(array, name) for array in arrays] for arrays in (self.state, self.unsummed))
        exponents = self.exponents_of[name] if name in self.begun else None
        return Contents(self.part_in_slice(name), state, exponents, unsummed)

    def fill(self, name: str, contents: Contents) -> None:
        """Copy the contents of a tensor from another bucket. Here the tensor must have zeros.

        Residuals of another part are added to `unsummed`. Exponents that ``contents`` lacks stay zero.
        """
        part, state, exponents, unsummed = contents
        own_part = self.part_in_slice(name)
        if exponents is not None and name in self.exponents_of:
            self.use_exponents(name, exponents, part[0])
        for i, array in enumerate(self.state):
            source, additions = from_host(state[i], array), [(0, values) for values in unsummed[i : i + 1]]
            if part == own_part:
                self.view(array, name)[:] = source
            elif len(source):
                if exponents is not None and len(exponents):
                    source = source * units(from_host(exponents, array), array.dtype)
                additions.append((part[0], source))
            for begin, values in additions:
                target = self.view(self.begin_unsummed(self.backend)[i], name)
                target[begin : begin + len(values)] += from_host(values, array)

    @default_float_mode
    def discard(self, name: str) -> None:
        for array in (*self.state, *self.unsummed):
            self.view(array, name)[:] = 0

    @default_float_mode
    def scale(self, factor: float) -> None:
        for array in (*self.state, *self.unsummed):
            array *= factor

    @default_float_mode
    def drop_large(self, times: int) -> None:
        """Set entries of the residual and the velocity to zero that overflow if multiplied by ``times``, and NaN."""
        max_ = float(np.finfo(self.residual.dtype).max) / times
        for array in self.state:
            array[~(abs(array) <= max_)] = 0

    def parts(self, rank: int) -> list[Part]:
        """Return what a rank owns: the parts of tensors in its range."""
        node, position = (rank, 0) if self.nodes is None else self.nodes.place(rank)
        if node >= self.owners:
            return []
        first = position * self.length
        begin = first + self.length * node // self.owners
        end = min(first + self.length * (node + 1) // self.owners, self.size)
        parts = []
        for spec, (low, high) in zip(self.tensors, pairwise(self._offsets), strict=True):
            if low < end and begin < high:
                at = max(begin, low)
                parts.append(Part(spec, at - low, min(end, high) - low, at - first))
        return parts

    def part(self, name: str, rank: int) -> tuple[int, int]:
        """Return the begin and the end of a rank's part of a tensor."""
        owned = {part.spec.name: (part.begin, part.end) for part in self.parts(rank)}
        return owned.get(name, (0, 0))

    def _zeros(self) -> Array:
        return self.backend.zeros(self.length, self.accumulator.accumulator)

    def bounds_in_slice(self, name: str) -> tuple[int, int]:
        """Return where a tensor begins and ends in this rank's slice. The two are equal if it has no elements there."""
        begin, end = (min(max(bound, self.first), self.last) - self.first for bound in self._bounds[name])
        return begin, end

    def view(self, flat: Array, name: str) -> Array:
        """Return a tensor's part of a flat array, which has this rank's slice or all elements."""
        begin, end = self._bounds[name] if len(flat) >= self.size else self.bounds_in_slice(name)
        return flat[begin:end]

    def views(self, flat: Array) -> dict[str, Array]:
        return {name: self.view(flat, name) for name in self._bounds}
