"""`Bucket`: the tensors that one call sums, with their residual and velocity. `layout` assigns tensors to buckets."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TypeAlias

import numpy as np

from sparsecomm.backends import Backend, Backends, default_float_mode
from sparsecomm.calls.measurement import plan_costs
from sparsecomm.calls.plan import Plan
from sparsecomm.calls.queue import CallQueue
from sparsecomm.contribution import Chunks, Contribution, Segment, ThresholdHint
from sparsecomm.errors import InvalidInputError
from sparsecomm.reducer.options import SIZED_SCOPES, Settings
from sparsecomm.tensors import interop
from sparsecomm.tensors.dtypes import FLOAT32, FLOAT64, DType
from sparsecomm.tensors.interop import Tensor
from sparsecomm.tensors.sparse import Array, SparseVector
from sparsecomm.transport import Transport

__all__ = ["Add", "Bucket", "NamedTensors", "TensorSpec", "layout", "on_streams", "specs_of"]

NamedTensors: TypeAlias = "Mapping[str, object] | Iterable[tuple[str, object]]"

# ``add(backend, x, residual, decay, if_finite)`` multiplies a residual by a decay, adds a value computed from x, and
# returns True. With ``if_finite`` and a value that is not finite, it changes nothing and returns False.
Add: TypeAlias = Callable[[Backend, Tensor, Tensor, float, bool], bool]


@dataclass(frozen=True)
class TensorSpec:
    """The name, shape and device of a tensor, and the dtype in which its gradients are summed."""

    name: str
    shape: tuple[int, ...]
    accumulator: DType
    device: interop.Device
    size: int = field(init=False)  # number of elements

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", math.prod(self.shape))

    @property
    def nbytes(self) -> int:
        """The size of the sum in bytes."""
        return self.size * self.accumulator.itemsize

    def tensor(self, obj: object, name: str, *, writable: bool = False) -> Tensor:
        """Import an array that must match this spec; ``name`` is its name in error messages."""
        t = interop.tensor(obj, name, writable=writable)
        if (t.shape, t.device, t.dtype.accumulator) != (self.shape, self.device, self.accumulator.accumulator):
            raise InvalidInputError(
                f"{name}: got shape {t.shape}, {t.dtype} on {t.device}; expected shape {self.shape} with sums in "
                f"{self.accumulator} on {self.device}, as at the beginning. If the model has changed, make a new object"
            )
        return t


def specs_of(tensors: NamedTensors) -> dict[str, TensorSpec]:
    """Return the specs of named tensors by name, in their order. A `TensorSpec` may take a tensor's place."""
    specs: dict[str, TensorSpec] = {}
    for name, tensor in interop.named(tensors):
        if name in specs:
            raise InvalidInputError(f"tensors: the name {name!r} appears twice; names must be unique")
        if isinstance(tensor, TensorSpec):
            specs[name] = tensor
            continue
        t = interop.tensor(tensor, name)
        specs[name] = TensorSpec(name, t.shape, FLOAT64 if t.dtype.itemsize == 8 else FLOAT32, t.device)
    if not specs:
        raise InvalidInputError("tensors: must contain at least one tensor")
    return specs


def layout(
    tensors: Sequence[TensorSpec], scope: str, dense_below: int, bucket_bytes: int = sys.maxsize
) -> list[tuple[list[int], bool]]:
    """Assign tensors to buckets.

    Tensors of fewer than ``dense_below`` elements share dense buckets. The other tensors get a bucket each with scope
    "tensor", and share one with "model"; with "bucket" and "chunk" a bucket is complete when it holds
    ``bucket_bytes``. Tensors of different devices or accumulator dtypes never share a bucket.

    Returns:
        For each bucket, positions in ``tensors`` and whether it is dense, in the order in which buckets become
        complete if gradients become ready in the order of ``tensors``. Dense buckets come last.
    """
    buckets: list[tuple[list[int], bool]] = []
    open_buckets: dict[tuple[interop.Device, DType, bool], list[int]] = {}
    nbytes: dict[tuple[interop.Device, DType, bool], int] = {}
    for i, spec in enumerate(tensors):
        dense = spec.size < dense_below
        key = spec.device, spec.accumulator, dense
        open_buckets.setdefault(key, []).append(i)
        nbytes[key] = nbytes.get(key, 0) + spec.nbytes
        full = scope == "tensor" or (scope in SIZED_SCOPES and nbytes[key] >= bucket_bytes)
        if full and not dense:
            buckets.append((open_buckets.pop(key), dense))
            del nbytes[key]
    buckets += [(positions, dense) for (_, _, dense), positions in open_buckets.items()]
    return sorted(buckets, key=lambda bucket: (bucket[1], bucket[0][-1]))


@contextmanager
def on_streams(contexts: Iterable[AbstractContextManager[object]]) -> Iterator[None]:
    """Enter several contexts of `Bucket.on_stream`, for work with the memory of several buckets."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


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
        last_plan: the plan of the latest call; ``None`` before the first call.
    """

    def __init__(self, tensors: Sequence[TensorSpec], dense: bool, settings: Settings, backends: Backends) -> None:
        self.tensors, self.dense, self._settings = tuple(tensors), dense, settings
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
        self._nonfinite: set[str] = set()  # names whose gradient was dropped because it was not finite
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
                    if not add(self.backend, gradient, residual, self._settings.decay, self._settings.skip_nonfinite):
                        self._nonfinite.add(name)
            elif self._settings.skip_nonfinite and spec.size and not self.backend.finite(gradient):
                self._nonfinite.add(name)
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
        if self._settings.decay < 1:
            residual *= self._settings.decay
        if g is None:
            backend.add_into(gradient, backend.as_tensor(residual, spec.shape))
        elif velocity is None:
            residual += g
        else:
            velocity *= self._settings.momentum
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
            options, chunk = self._settings.call_options(self.accumulator.name), self._settings.chunk
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
            decay = self._settings.decay
            return Contribution(backend, segments, residual, self.shape, self.size, chunks, decay, self._hint)
        self.add_deferred()
        for name in self.absent():
            if name not in self._set_aside:
                self._set_aside[name] = self.residuals[name].copy()
                self.residuals[name][:] = 0
        if self._nonfinite:  # contribute one NaN, which all ranks will see, instead of the residual
            poison = self._zeros()
            self._views(poison)[min(self._nonfinite)][:1] = float("nan")
            residual, chunks = self.backend.as_tensor(poison, (self.size,)), None
        return Contribution(backend, [Segment(None, residual)], residual, self.shape, self.size, chunks)

    def absent(self) -> list[str]:
        """Return the names of tensors without a gradient on this rank."""
        return [spec.name for spec in self.tensors if spec.name not in self._present]

    def mask_velocity(self, contribution: Contribution, result: SparseVector) -> None:
        """With masking, clear the velocity at the entries that this rank selected and at the entries of the result."""
        if self.velocities and self._settings.masking and not self.dense:
            velocity, backend = self.backend.as_tensor(self._state[1], (self.size,)), contribution.backend
            if (taken := contribution.taken) is not None:
                backend.clear(velocity, taken)
            backend.clear(velocity, result)

    def write(
        self, backend: Backend, result: SparseVector, without_gradient: Collection[str]
    ) -> dict[str, SparseVector]:
        """Write the result to `outs`, and return the results of tensors without an output by name.

        Tensors ``without_gradient`` have no gradient on any rank, and are skipped.
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
                left[spec.name] = part
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
