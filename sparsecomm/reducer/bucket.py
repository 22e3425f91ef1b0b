"""A bucket: the tensors that one call sends, and what this rank keeps of them from step to step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import accumulate
from typing import Any

from sparsecomm.backends import Backend, Backends, default_float_mode
from sparsecomm.contribution import Chunks, Contribution, Segment, ThresholdHint
from sparsecomm.reducer.layout import TensorSpec
from sparsecomm.reducer.momentum import MomentumCorrection
from sparsecomm.tensors.dtypes import FLOAT32
from sparsecomm.tensors.interop import CPU, Tensor
from sparsecomm.tensors.sparse import Array, SparseVector

__all__ = ["Bucket", "Streams"]


class Bucket:
    """Tensors of one device and accumulator dtype, with one flat residual, and the velocity if there is momentum.

    Methods that take a ``backend`` are part of the bucket's call and work on that backend's stream. All others are
    called within `on_stream`.

    Attributes:
        tensors: in the order in which they lie in the flat vectors.
        dense: whether they are summed whole.
        device, accumulator: of all tensors; the latter is the type of the residual.
        backend: that of their device, for all but calls; its owner is the reducer.
        size: elements of all tensors.
        shape: of what is sent: that of a tensor alone; else it is flat.
        key, planned: by which the plan of its calls is kept, and for which density.
        missing: names whose whole gradient has not come in this step.
        outs: where this step's sums go, by name.
        last: the gradient that was added last.
        nonfinite: a gradient of this step was not finite, and was dropped.
    """

    def __init__(
        self,
        tensors: Sequence[TensorSpec],
        dense: bool,
        correction: MomentumCorrection,
        backends: Backends,
        chunk: int | None = None,
    ) -> None:
        """Make a bucket.

        Args:
            tensors: none: a bucket of tensors without elements, which is never sent.
            dense: as above.
            correction: of the gradients.
            backends: for all but calls.
            chunk: elements of a chunk, of each of which entries are selected; ``None``: they are of the whole bucket.
        """
        self._chunk = chunk
        self.tensors, self.dense, self._correction = tuple(tensors), dense, correction
        self.device, self.accumulator = (tensors[0].device, tensors[0].accumulator) if tensors else (CPU, FLOAT32)
        self.backend = backends.of(self.device)
        self._timeline = self.backend.timeline()
        self._offsets = [0, *accumulate(spec.size for spec in tensors)]
        self.size = self._offsets[-1]
        self._positions = {spec.name: i for i, spec in enumerate(tensors)}
        with self.on_stream(None):
            self._residual = self._zeros(self.size)
            self._velocity = self._zeros(self.size) if correction.momentum else None
        self._hint = ThresholdHint()
        self.shape = tensors[0].shape if len(tensors) == 1 else (self.size,)
        self.key, self.planned = object(), 0.0
        self.begin()

    @property
    def nbytes(self) -> int:
        """Bytes of the sums of all tensors."""
        return self.size * self.accumulator.itemsize

    def begin(self) -> None:
        """Begin a new step."""
        self.missing = set(self._positions)
        self.outs: dict[str, Tensor] = {}
        self.last: Tensor | None = None
        self.nonfinite = False
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
    def take(self, spec: TensorSpec, gradient: Tensor | None, *, scale: float, last: bool, check: bool) -> None:
        """Take a tensor's gradient, or a part of it; ``None`` stands for zeros.

        Args:
            spec: of the tensor.
            gradient: times ``scale`` it is added to the residual, by way of the velocity if there is one. Where the
                call can add it and select in one pass, it is left to that.
            last: it is the whole, or the last part.
            check: drop a gradient that is not finite.
        """
        if check and gradient is not None and spec.size and not self.backend.finite(gradient):
            self.nonfinite = True
        elif gradient is not None and last and scale == 1.0 and not check and self._can_defer(spec):
            self._deferred[spec.name] = gradient
        elif spec.size:
            self._add(spec, gradient, scale)
        if gradient is not None:
            self.last = gradient
        if last:
            self.missing.discard(spec.name)

    @default_float_mode
    def sum_of_squares(self, gradient: Tensor) -> float:
        """Return the sum of the squares of a gradient's elements."""
        g = self.backend.accumulate(gradient, None).astype("f8")  # squares may exceed float32
        return float((g * g).sum())

    def _can_defer(self, spec: TensorSpec) -> bool:
        """Return whether a whole gradient may be left to the call."""
        alone = len(self.tensors) == 1
        return bool(
            spec.size
            and self._velocity is None
            and spec.name not in self._added
            and (alone or spec.device.kind == "cpu")
        )

    def _add(self, spec: TensorSpec, gradient: Tensor | None, scale: float = 1.0) -> None:
        """Add a gradient to its residual."""
        name, backend, residual = spec.name, self.backend, self._view(self._residual, spec)
        g, first = None, name not in self._added
        if gradient is not None and (self._velocity is not None or scale != 1.0):
            g = backend.accumulate(gradient, None)
            if scale != 1.0:
                g *= scale
        if first and self._correction.decay < 1:  # once in a step
            residual *= self._correction.decay
        self._added.add(name)
        if self._velocity is not None:
            g = backend.zeros(spec.size, residual.dtype) if g is None else g
            g = self._correction.update(self._view(self._velocity, spec), g, first)
        if g is not None:
            residual += g
        elif gradient is not None:
            backend.add_into(gradient, backend.as_tensor(residual, spec.shape))

    # -- the call -----------------------------------------------------------------------------------------------------

    def selection(self, density: float) -> tuple[int, Chunks | None]:
        """Return how many entries a rank selects, and how, if it is of each chunk of a tensor."""
        if self._chunk is None or self.dense:
            return min(self.size, max(1, round(density * self.size))), None
        chunks = Chunks(max(1, round(density * self._chunk)), self._chunk, tuple(self._offsets))
        return chunks.total(self.size), chunks

    @default_float_mode
    def contribution(self, backend: Backend, chunks: Chunks | None) -> Contribution:
        """Return what this rank contributes to the step's call; ``chunks``: how it selects, as `selection` says."""
        residual = self.backend.as_tensor(self._residual, (self.size,))
        if self.nonfinite:  # one NaN, which reaches all ranks, and nothing of what is kept here
            self._add_deferred()
            poison = self._zeros(self.size)
            poison[:1] = float("nan")
            residual, chunks = self.backend.as_tensor(poison, (self.size,)), None
        elif len(self._deferred) == len(self.tensors):
            segments = [self._segment(spec) for spec in self.tensors]
            return Contribution(
                backend, segments, residual, self.shape, self.size, chunks, self._correction.decay, self._hint
            )
        self._add_deferred()
        return Contribution(backend, [Segment(None, residual)], residual, self.shape, self.size, chunks)

    def mask_velocity(self, backend: Backend, taken: SparseVector | None, result: SparseVector) -> None:
        """Forget the velocity, if momentum masking is on, where this rank has selected and where the result applies.

        Args:
            backend: of the call.
            taken: what this rank has selected; ``None``: nothing, since ranks were summed before a selection.
            result: the sum over all ranks.
        """
        if self._velocity is not None and self._correction.masking and not self.dense:
            velocity = self.backend.as_tensor(self._velocity, (self.size,))
            if taken is not None:
                backend.clear(velocity, taken)
            backend.clear(velocity, result)

    def write(self, backend: Backend, result: SparseVector) -> dict[str, SparseVector]:
        """Write the result to `outs`; return the parts of tensors that have none, by name."""
        left = {}
        parts = [result] if len(self.tensors) == 1 else backend.split_at_indices(result, self._offsets)
        for spec, part in zip(self.tensors, parts, strict=True):
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

    def _add_deferred(self) -> None:
        for spec in self.tensors:
            if spec.name in self._deferred:
                self._add(spec, self._deferred[spec.name])
                del self._deferred[spec.name]

    def _segment(self, spec: TensorSpec) -> Segment:
        """Return a deferred gradient with its part of the residual."""
        residual = self.backend.as_tensor(self._view(self._residual, spec), spec.shape)
        return Segment(self._deferred[spec.name], residual, self._offsets[self._positions[spec.name]])

    # -- state --------------------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return residuals and velocities by name: flat views. Without momentum there are no velocities."""
        residuals = {spec.name: self._view(self._residual, spec) for spec in self.tensors}
        velocity = self._velocity
        return residuals, {} if velocity is None else {spec.name: self._view(velocity, spec) for spec in self.tensors}

    @default_float_mode
    def scale(self, factor: float) -> None:
        """Multiply the residual and the velocity by ``factor``."""
        self._residual *= factor
        if self._velocity is not None:
            self._velocity *= factor

    def _zeros(self, size: int) -> Array:
        return self.backend.zeros(size, self.accumulator.accumulator)

    def _view(self, flat: Array, spec: TensorSpec) -> Array:
        position = self._positions[spec.name]
        return flat[self._offsets[position] : self._offsets[position + 1]]


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
