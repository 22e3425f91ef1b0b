"""A bucket: the tensors that one call sums, with their residual and velocity."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np

from sparsecomm.backends import Backend, Backends, default_float_mode
from sparsecomm.calls.measurement import plan_costs
from sparsecomm.calls.plan import Plan
from sparsecomm.calls.queue import CallQueue
from sparsecomm.contribution import Chunks, Contribution, Segment, ThresholdHint
from sparsecomm.errors import InvalidInputError
from sparsecomm.reducer.options import Settings
from sparsecomm.tensors import interop
from sparsecomm.tensors.dtypes import DType
from sparsecomm.tensors.interop import Tensor
from sparsecomm.tensors.sparse import Array, SparseVector
from sparsecomm.transport import Transport

__all__ = ["Add", "Bucket", "Streams", "TensorSpec"]

# ``add(backend, x, residual, decay, if_finite)`` multiplies a residual by a decay, and adds a value computed from x.
# With ``if_finite`` it does so only if all values are finite. It returns whether it has added them.
Add: TypeAlias = Callable[[Backend, Tensor, Tensor, float, bool], bool]


@dataclass(frozen=True)
class TensorSpec:
    """The name, shape and device of a tensor, and the dtype in which its gradients are summed.

    Attributes:
        size: number of elements.
    """

    name: str
    shape: tuple[int, ...]
    accumulator: DType
    device: interop.Device
    size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", math.prod(self.shape))

    @property
    def nbytes(self) -> int:
        """Bytes of the sum."""
        return self.size * self.accumulator.itemsize

    def tensor(self, obj: object, name: str, *, writable: bool = False) -> Tensor:
        """Import an array that must match this spec: a gradient, an output or the tensor itself.

        Args:
            obj: the array.
            name: its name in error messages.
            writable: require that it can be written.

        Raises:
            InvalidInputError: it does not match, or cannot be written.
        """
        t = interop.tensor(obj, name, writable=writable)
        if (t.shape, t.device, t.dtype.accumulator) != (self.shape, self.device, self.accumulator.accumulator):
            raise InvalidInputError(
                f"{name}: got shape {t.shape}, {t.dtype} on {t.device}; expected shape {self.shape} with sums in "
                f"{self.accumulator} on {self.device}, as at the beginning. If the model has changed, make a new object"
            )
        return t


class Bucket:
    """Tensors of one device and accumulator dtype, with one flat residual, and one flat velocity under momentum.

    Methods with an argument ``backend`` or ``plan`` are part of a call and use its stream. Call all other methods
    within `on_stream`.

    Attributes:
        tensors: specs, in the order of the flat vectors.
        dense: the tensors are summed without a selection.
        backend: the reducer's backend of the device, for all work outside calls.
        size, nbytes: elements of all tensors, and bytes of their sums.
        shape: of the call's input: the tensor's shape if there is one tensor, otherwise flat.
        residuals, velocities: flat views by name. ``velocities`` is empty without momentum.
        missing: names that were not taken in this step.
        present: names for which this rank has a gradient in this step.
        outs: outputs for this step's sums, by name.
        last: the gradient that was added last.
        nonfinite: names whose gradient of this step was dropped because it was not finite.
        latest: the plan of the latest call; ``None`` before the first call.
    """

    def __init__(self, tensors: Sequence[TensorSpec], dense: bool, settings: Settings, backends: Backends) -> None:
        """Allocate residual and velocity, filled with zeros, by a backend of ``backends``."""
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
        self.latest: Plan | None = None
        self._set_aside: dict[str, Array] = {}  # residuals of tensors without a gradient here, during the step's call
        self.begin()

    @default_float_mode
    def begin(self) -> None:
        """Begin a step. The calls of the previous step have ended, with or without an error."""
        if self._set_aside:
            with self.on_stream(None):
                self._put_back()
        self.missing = set(self.residuals)
        self.outs: dict[str, Tensor] = {}
        self.last: Tensor | None = None
        self.present: set[str] = set()
        self.nonfinite: set[str] = set()
        self._deferred: dict[str, Tensor] = {}  # gradients that the call adds

    def on_stream(self, x: Tensor | None) -> AbstractContextManager[object]:
        """Return a context for work with the bucket's memory on the stream of ``x``; ``None``: on the current stream.

        The work runs after all earlier work with this memory, on any stream.
        """
        return self._timeline.on_stream(x)

    def __del__(self) -> None:
        with suppress(Exception):  # there may be no timeline, or at the end of the process no device
            self._timeline.wait()  # the allocator may reuse the memory on the stream that allocated it

    # -- gradients ----------------------------------------------------------------------------------------------------

    @default_float_mode
    def take(self, spec: TensorSpec, gradient: Tensor | None, *, add: Add | None = None, scale: float = 1.0) -> None:
        """Add a tensor's gradient to the residual. Where possible, the call adds it instead.

        Args:
            spec: of the tensor.
            gradient: ``None``: this rank has no gradient. Residual and velocity then stay as they are.
            add: adds a value computed from the gradient, without momentum and clipping.
            scale: a factor of the gradient.
        """
        name = spec.name
        if gradient is not None:
            if add is not None:
                if spec.size:
                    residual = self.backend.as_tensor(self.residuals[name], spec.shape)
                    if not add(self.backend, gradient, residual, self._settings.decay, self._settings.skip_nonfinite):
                        self.nonfinite.add(name)
            elif self._settings.skip_nonfinite and spec.size and not self.backend.finite(gradient):
                self.nonfinite.add(name)
            elif scale == 1.0 and self._may_defer:
                self._deferred[name] = gradient
            elif spec.size:
                self._add(spec, gradient, scale)
            self.present.add(name)
            self.last = gradient
        self.missing.discard(name)

    @default_float_mode
    def sum_of_squares(self, gradient: Tensor) -> float:
        """Return the sum of the squares of a gradient's elements."""
        g = self.backend.accumulate(gradient, None).astype("f8")  # squares may exceed float32
        return float((g * g).sum())

    def _add(self, spec: TensorSpec, gradient: Tensor, scale: float = 1.0) -> None:
        """Add a gradient to its residual, with momentum by way of its velocity."""
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

    def planned(self, queue: CallQueue, density: float) -> bool:
        """Return whether the queue has a plan for calls of this bucket at ``density``."""
        return self._plan_density == density and queue.plans.find(self._plan_key) is not None

    def plan(self, transport: Transport, queue: CallQueue, density: float) -> Plan:
        """Return the plan for calls of this bucket at ``density``, which the queue stores."""
        plan = queue.plans.find(self._plan_key) if self._plan_density == density else None
        if plan is None:
            k, chunks = min(self.size, max(1, round(density * self.size))), None
            options, chunk = self._settings.call_options(self.accumulator.name), self._settings.chunk
            if self.dense or density == 1.0:
                options = options.whole()
            elif chunk is not None:
                chunks = Chunks(max(1, round(density * chunk)), chunk, tuple(self._offsets))
                k = chunks.total(self.size)
            backend = queue.backends.of(self.device)
            costs = plan_costs(transport, options)
            plan = Plan(transport, backend, self.accumulator, self.shape, self.size, k, options, costs, chunks)
            queue.plans.keep(self._plan_key, plan)
            self._plan_density = density
        self.latest = plan
        return plan

    @default_float_mode
    def contribution(self, plan: Plan) -> Contribution:
        """Return this rank's contribution to the step's call, with zeros for tensors without a gradient.

        The residuals of these tensors are set aside until the next step begins: the call neither sends them nor adds
        to them.
        """
        backend, chunks = plan.backend, plan.chunks
        residual = self.backend.as_tensor(self._residual, (self.size,))
        if len(self._deferred) == len(self.tensors):
            segments = [
                Segment(
                    self._deferred[spec.name], self.backend.as_tensor(self.residuals[spec.name], spec.shape), offset
                )
                for spec, offset in zip(self.tensors, self._offsets[:-1], strict=True)
            ]
            return Contribution(
                backend, segments, residual, self.shape, self.size, chunks, self._settings.decay, self._hint
            )
        self.add_deferred()
        for name in self.absent():
            if name not in self._set_aside:
                self._set_aside[name] = self.residuals[name].copy()
                self.residuals[name][:] = 0
        if self.nonfinite:  # contribute one NaN, which all ranks will see, and nothing of the residual
            poison = self._zeros()
            self._views(poison)[min(self.nonfinite)][:1] = float("nan")
            residual, chunks = self.backend.as_tensor(poison, (self.size,)), None
        return Contribution(backend, [Segment(None, residual)], residual, self.shape, self.size, chunks)

    def absent(self) -> list[str]:
        """Return the names of tensors for which this rank has no gradient, in their order."""
        return [spec.name for spec in self.tensors if spec.name not in self.present]

    def mask_velocity(self, contribution: Contribution, result: SparseVector) -> None:
        """Clear the velocity where this rank has selected entries and where the result has some, if masking is on."""
        if self.velocities and self._settings.masking and not self.dense:
            velocity, backend = self.backend.as_tensor(self._state[1], (self.size,)), contribution.backend
            if (taken := contribution.taken) is not None:
                backend.clear(velocity, taken)
            backend.clear(velocity, result)

    def write(
        self, backend: Backend, result: SparseVector, without_gradient: Collection[str]
    ) -> dict[str, SparseVector]:
        """Write the result to `outs`, and return the parts of tensors without an output by name.

        Tensors in ``without_gradient``, for which no rank has a gradient, are left out.
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
        """Add the gradients that were left to the call."""
        for spec in self.tensors:
            if spec.name in self._deferred:
                self._add(spec, self._deferred[spec.name])
                del self._deferred[spec.name]

    # -- the state ----------------------------------------------------------------------------------------------------

    @default_float_mode
    def discard(self, name: str) -> None:
        """Set the residual and the velocity of a tensor to zero."""
        for views in (self.residuals, self.velocities):
            if name in views:
                views[name][:] = 0

    @default_float_mode
    def scale(self, factor: float) -> None:
        """Multiply the residual and the velocity by ``factor``."""
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
        max_ = float(np.finfo(self._residual.dtype).max) / (4 * world_size)  # wires round up by at most a factor of 2
        for array in self._state:
            array[~(abs(array) <= max_)] = 0

    def _put_back(self) -> None:
        """Add to the residuals what was set aside. Entries that are there came from the call."""
        while self._set_aside:
            name, residual = next(iter(self._set_aside.items()))
            self.residuals[name] += residual
            del self._set_aside[name]

    def _zeros(self) -> Array:
        return self.backend.zeros(self.size, self.accumulator.accumulator)

    def _views(self, flat: Array) -> dict[str, Array]:
        bounds = zip(self.tensors, pairwise(self._offsets), strict=True)
        return {spec.name: flat[begin:end] for spec, (begin, end) in bounds}


class Streams:
    """Contexts that are entered together, for work with the memory of several buckets."""

    def __init__(self, contexts: Iterable[AbstractContextManager[object]]) -> None:
        self._contexts = list(contexts)
        self._entered: list[AbstractContextManager[object]] = []

    def __enter__(self) -> None:
        for context in self._contexts:
            try:
                context.__enter__()
            except BaseException:
                self.__exit__(None, None, None)
                raise
            self._entered.append(context)

    def __exit__(self, *error: Any) -> None:
        while self._entered:
            self._entered.pop().__exit__(*error)
