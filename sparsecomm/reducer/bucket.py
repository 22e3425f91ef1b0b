"""A bucket: the tensors that one call sends, and what this rank keeps of them from step to step."""

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


# Lets a residual decay, and adds what it makes of a gradient; if the last argument says so, only if all of it is
# finite. Returns whether it has.
Add: TypeAlias = Callable[[Backend, Tensor, float, bool], bool]


@dataclass(frozen=True)
class TensorSpec:
    """The name of a tensor, and the shape, device and accumulator that its gradients must fit.

    Attributes:
        accumulator: the type in which they are summed.
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
        """Return a gradient of this tensor, or where its sum goes, or the tensor itself.

        Args:
            obj: what the program has given.
            name: what messages call it.
            writable: it is to be written.

        Raises:
            InvalidInputError: it does not fit, or cannot be written.
        """
        t = interop.tensor(obj, name, writable=writable)
        if (t.shape, t.device, t.dtype.accumulator) != (self.shape, self.device, self.accumulator.accumulator):
            raise InvalidInputError(
                f"{name}: got shape {t.shape}, {t.dtype} on {t.device}; expected shape {self.shape} with sums in "
                f"{self.accumulator} on {self.device}, as in the beginning; make a new object if the model has changed"
            )
        return t


class Bucket:
    """Tensors of one device and accumulator dtype, with one flat residual, and the velocity if there is momentum.

    Methods that take a ``backend`` are part of the bucket's call and work on that backend's stream. All others are
    called within `on_stream`.

    Attributes:
        tensors: in the order in which they lie in the flat vectors.
        dense: whether they are summed whole.
        device, accumulator: of all tensors; the latter is the type of the residual.
        backend: that of their device, for all but calls; its owner is the reducer.
        size, nbytes: elements of all tensors, and bytes of their sums.
        shape: of what is sent: that of a tensor alone; else it is flat.
        residuals, velocities: by name: flat views. Without momentum there are no velocities.
        missing: names whose whole gradient has not come in this step, nor the word that there is none.
        present: names for which this rank has a gradient in this step, or a part of one.
        outs: where this step's sums go, by name.
        last: the gradient that was added last.
        nonfinite: names whose gradient of this step was not finite, and was dropped.
        latest: the plan of its latest call; ``None``: there was none.
    """

    def __init__(self, tensors: Sequence[TensorSpec], dense: bool, settings: Settings, backends: Backends) -> None:
        """Make a bucket, whose residual and velocity are zeros. ``backends``: for all but calls."""
        correction = settings.correction
        self.tensors, self.dense, self._settings, self._correction = tuple(tensors), dense, settings, correction
        self.device, self.accumulator = tensors[0].device, tensors[0].accumulator
        self.backend = backends.of(self.device)
        self._timeline = self.backend.timeline()
        self._offsets = [0, *accumulate(spec.size for spec in tensors)]
        self.size = self._offsets[-1]
        self.nbytes = self.size * self.accumulator.itemsize
        self.shape = tensors[0].shape if len(tensors) == 1 else (self.size,)
        with self.on_stream(None):
            self._residual = self._zeros(self.size)
            self._velocity = self._zeros(self.size) if correction.momentum else None
        self.residuals = self._views(self._residual)
        self.velocities = {} if self._velocity is None else self._views(self._velocity)
        self._hint = ThresholdHint()
        # Whether the call can add whole gradients and select in one pass.
        self._may_defer = not (settings.skip_nonfinite or correction.momentum) and (
            len(tensors) == 1 or self.device.kind == "cpu"
        )
        self._key, self._planned = object(), 0.0  # by which the plan of its calls is kept, and for which density
        self.latest: Plan | None = None
        self._set_aside: dict[str, Array] = {}  # residuals of tensors without a gradient here, during the step's call
        self.begin()

    @default_float_mode
    def begin(self) -> None:
        """Begin a new step. The calls of the step before are over, whatever has become of them."""
        if self._set_aside:
            with self.on_stream(None):
                self._put_back()
        self.missing = set(self.residuals)
        self.outs: dict[str, Tensor] = {}
        self.last: Tensor | None = None
        self.present: set[str] = set()
        self.nonfinite: set[str] = set()
        self._added: set[str] = set()  # names whose residual has decayed, and holds a gradient of this step
        self._deferred: dict[str, Tensor] = {}  # gradients that the call adds

    def on_stream(self, x: Tensor | None) -> AbstractContextManager[object]:
        """Return a context on the stream of ``x`` (``None``: the current one), for work with the bucket's memory.

        It comes after the work that was started there before, on whichever stream: gradients may be from several.
        """
        return self._timeline.on_stream(x)

    def __del__(self) -> None:
        with suppress(Exception):  # there may be no timeline, or at the end of the process no device any more
            self._timeline.wait()  # the memory goes to those who use the stream on which it was made

    # -- gradients in -------------------------------------------------------------------------------------------------

    @default_float_mode
    def take(
        self,
        spec: TensorSpec,
        gradient: Tensor | None,
        *,
        add: Add | None = None,
        scale: float = 1.0,
        last: bool = True,
    ) -> None:
        """Take a tensor's gradient, or a part of it; ``None``: this rank has none.

        Residual and velocity of a tensor without a gradient stay as they are, and neither decays.

        Args:
            spec: of the tensor.
            gradient: times ``scale`` it is added to the residual, by way of the velocity if there is one. Where the
                call can add it and select in one pass, it is left to that.
            add: adds at once what is made of the gradient, by no way of a velocity.
            last: it is the whole, or the last part.
        """
        if gradient is not None:
            if add is not None:
                if spec.size:
                    self._add_made(spec, add)
            elif self._settings.skip_nonfinite and spec.size and not self.backend.finite(gradient):
                self.nonfinite.add(spec.name)
            elif last and scale == 1.0 and self._may_defer and spec.name not in self._added:
                self._deferred[spec.name] = gradient
            elif spec.size:
                self._add(spec, gradient, scale)
            self.present.add(spec.name)
            self.last = gradient
        if last:
            self.missing.discard(spec.name)

    @default_float_mode
    def sum_of_squares(self, gradient: Tensor) -> float:
        """Return the sum of the squares of a gradient's elements."""
        g = self.backend.accumulate(gradient, None).astype("f8")  # squares may exceed float32
        return float((g * g).sum())

    def _add(self, spec: TensorSpec, gradient: Tensor, scale: float = 1.0) -> None:
        """Add a gradient to its residual."""
        name, backend = spec.name, self.backend
        residual, velocity = self.residuals[name], self.velocities.get(name)
        g, first = None, name not in self._added
        if velocity is not None or scale != 1.0:
            g = backend.accumulate(gradient, None)
            if scale != 1.0:
                g *= scale
        if first and self._correction.decay < 1:  # once in a step
            residual *= self._correction.decay
        self._added.add(name)
        if velocity is not None:
            assert g is not None
            g = self._correction.update(velocity, g, first)
        if g is not None:
            residual += g
        else:
            backend.add_into(gradient, backend.as_tensor(residual, spec.shape))

    def _add_made(self, spec: TensorSpec, add: Add) -> None:
        """Add what is made of a gradient to its residual; if it is not finite, and such steps are skipped, drop it."""
        residual = self.backend.as_tensor(self.residuals[spec.name], spec.shape)
        decay = 1.0 if spec.name in self._added else self._correction.decay
        if add(self.backend, residual, decay, self._settings.skip_nonfinite):
            self._added.add(spec.name)
        else:
            self.nonfinite.add(spec.name)

    # -- the call -----------------------------------------------------------------------------------------------------

    def planned(self, queue: CallQueue, density: float) -> bool:
        """Return whether the queue keeps the plan of calls in steps of that density."""
        return self._planned == density and queue.plans.find(self._key) is not None

    def plan(self, transport: Transport, queue: CallQueue, density: float) -> Plan:
        """Return the plan of its calls in steps of that density, which the queue keeps."""
        plan = queue.plans.find(self._key) if self._planned == density else None
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
            queue.plans.keep(self._key, plan)
            self._planned = density
        self.latest = plan
        return plan

    @default_float_mode
    def contribution(self, plan: Plan) -> Contribution:
        """Return what this rank contributes to the step's call: zeros of tensors for which it has no gradient.

        Their residuals are set aside until the next step begins, so that nothing of them is sent, nor added to by a
        rank that keeps sums.
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
                backend, segments, residual, self.shape, self.size, chunks, self._correction.decay, self._hint
            )
        self._add_deferred()
        for name in self.absent():
            if name not in self._set_aside:
                self._set_aside[name] = self.residuals[name].copy()
                self.residuals[name][:] = 0
        if self.nonfinite:  # one NaN, which reaches all ranks, and nothing of what is kept here
            poison = self._zeros(self.size)
            self._views(poison)[min(self.nonfinite)][:1] = float("nan")
            residual, chunks = self.backend.as_tensor(poison, (self.size,)), None
        return Contribution(backend, [Segment(None, residual)], residual, self.shape, self.size, chunks)

    def absent(self) -> list[str]:
        """Return the names of tensors for which this rank has no gradient, in their order."""
        return [spec.name for spec in self.tensors if spec.name not in self.present]

    def mask_velocity(self, contribution: Contribution, result: SparseVector) -> None:
        """Forget the velocity, if momentum masking is on, where this rank has selected and where the result applies.

        Args:
            contribution: of this rank to the call.
            result: the sum over all ranks.
        """
        if self._velocity is not None and self._correction.masking and not self.dense:
            velocity, backend = self.backend.as_tensor(self._velocity, (self.size,)), contribution.backend
            if (taken := contribution.taken) is not None:
                backend.clear(velocity, taken)
            backend.clear(velocity, result)

    def write(
        self, backend: Backend, result: SparseVector, without_gradient: Collection[str]
    ) -> dict[str, SparseVector]:
        """Write the result to `outs`; return the parts of tensors that have none, by name.

        Nothing is written, or returned, of tensors ``without_gradient`` on any rank.
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
    def keep_gradients(self) -> None:
        """Add this step's gradients to the residual, in place of the call that would send them."""
        with self.backend.on_stream(self.last):
            self._add_deferred()

    @default_float_mode
    def discard(self, name: str) -> None:
        """Set the residual and the velocity of a tensor to zero."""
        for kept in (self.residuals, self.velocities):
            if name in kept:
                kept[name][:] = 0

    @default_float_mode
    def scale(self, factor: float) -> None:
        """Multiply the residual and the velocity by ``factor``."""
        self._residual *= factor
        if self._velocity is not None:
            self._velocity *= factor

    @default_float_mode
    def drop_nonfinite(self) -> None:
        """Set NaN and infinities in the residual and the velocity to zero."""
        for kept in (self._residual, self._velocity):
            if kept is not None:
                kept[~np.isfinite(kept)] = 0  # CuPy's for its arrays

    @default_float_mode
    def drop_overflows(self, world_size: int) -> None:
        """Set to zero what has overflowed, and what is so large that the next sum over the ranks could overflow."""
        max_ = float(np.finfo(self._residual.dtype).max) / (4 * world_size)  # wires round up, at most by a factor of 2
        for kept in (self._residual, self._velocity):
            if kept is not None:
                kept[~(abs(kept) <= max_)] = 0

    def _add_deferred(self) -> None:
        for spec in self.tensors:
            if spec.name in self._deferred:
                self._add(spec, self._deferred[spec.name])
                del self._deferred[spec.name]

    def _put_back(self) -> None:
        """Add to the residuals what was set aside. What stands there by now came from the call."""
        while self._set_aside:
            name, kept = next(iter(self._set_aside.items()))
            self.residuals[name] += kept
            del self._set_aside[name]

    def _zeros(self, size: int) -> Array:
        return self.backend.zeros(size, self.accumulator.accumulator)

    def _views(self, flat: Array) -> dict[str, Array]:
        bounds = zip(self.tensors, pairwise(self._offsets), strict=True)
        return {spec.name: flat[begin:end] for spec, (begin, end) in bounds}


class Streams:
    """Contexts that are entered together: for work with the memory of several buckets."""

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
