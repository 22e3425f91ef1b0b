"""A bucket: the tensors that one call sends, and what this rank keeps of them from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from itertools import accumulate

from sparsecomm.backends import Backend, Backends, default_float_mode
from sparsecomm.contribution import Chunks, Contribution, Segment, ThresholdHint
from sparsecomm.reducer.clipping import MedianNorm
from sparsecomm.reducer.layout import TensorSpec
from sparsecomm.reducer.momentum import MomentumCorrection
from sparsecomm.tensors.dtypes import FLOAT32
from sparsecomm.tensors.interop import CPU, Tensor
from sparsecomm.tensors.sparse import Array, SparseVector

__all__ = ["Bucket"]


class Bucket:
    """Tensors of one device and accumulator dtype, with one flat residual, and the velocity if there is momentum.

    Methods that take a ``backend`` are part of the bucket's call and work on that backend's stream. All others are
    called within `on_stream`.

    Attributes:
        tensors: in the order in which they lie in the flat vectors.
        dense: whether they are summed whole.
        device: theirs.
        backend: that of their device, for all but calls; its owner is the reducer.
        size: elements of all tensors.
        accumulator: the type of the residual.
        missing: names whose gradient has not been pushed in this step.
        started: names of which a gradient, or a part of one, has been added in this step.
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
        self.begin()

    @property
    def nbytes(self) -> int:
        """Bytes of the sums of all tensors."""
        return self.size * self.accumulator.itemsize

    def begin(self) -> None:
        """Begin a new step."""
        self.missing = set(self._positions)
        self.started: set[str] = set()
        self.outs: dict[str, Tensor] = {}
        self.last: Tensor | None = None
        self.nonfinite = False
        self._deferred: dict[str, Tensor] = {}
        self._decayed: set[str] = set()  # names whose residual has decayed in this step
        self._postponed: dict[TensorSpec, tuple[Tensor | None, list[object]]] = {}  # and what was done to add it
        self._norm: MedianNorm | None = None  # to which they are clipped
        self._accumulated: set[str] = set()  # names of which a part is in the velocity
        self._added: list[None] = []  # as many as of these have been added, the first ones

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
    def add(
        self,
        spec: TensorSpec,
        gradient: Tensor | None,
        scale: float,
        done: list[object],
        backend: Backend | None = None,
    ) -> None:
        """Add a tensor's gradient, or a part of it, times ``scale``; ``None`` stands for zeros.

        What has been done is appended to ``done``. With that it goes on where it was interrupted. ``backend``: that of
        the call, if the call does this.
        """
        backend = self.backend if backend is None else backend
        self._start(spec)
        first = spec.name not in self._accumulated
        if None in done:
            self._accumulated.add(spec.name)
            return
        residual = self._view(self._residual, spec)
        if self._velocity is None and (scale == 1.0 or gradient is None):
            if gradient is not None and not done:  # its one entry is the backend's
                backend.add_into(gradient, backend.as_tensor(residual, spec.shape), done)
            return
        if gradient is None:
            g = backend.zeros(spec.size, self.accumulator.accumulator)
        else:
            g = backend.accumulate(gradient, None)
            if scale != 1.0:
                g *= scale
        if self._velocity is not None:
            g = self._correction.update(self._view(self._velocity, spec), g, first, done)
        residual += g
        done.append(None)  # no signal comes between the two
        self._accumulated.add(spec.name)

    def can_defer(self, spec: TensorSpec) -> bool:
        """Return whether a whole gradient may be given to `defer` instead of `add`."""
        alone = len(self.tensors) == 1
        new = spec.name not in self.started or spec.name in self._deferred
        return self._velocity is None and new and (alone or spec.device.kind == "cpu")

    def defer(self, spec: TensorSpec, gradient: Tensor) -> None:
        """Leave it to the call to add this whole gradient: it then adds and selects in one pass."""
        self.started.add(spec.name)
        self._deferred[spec.name] = gradient

    def postpone(self, spec: TensorSpec, gradient: Tensor | None, norm: MedianNorm) -> None:
        """Leave it to the call to add this gradient, clipped as ``norm`` then says."""
        self._norm = norm
        self._postponed.setdefault(spec, (gradient, []))

    @default_float_mode
    def sum_of_squares(self, gradient: Tensor) -> float:
        """Return the sum of the squares of a gradient's elements."""
        g = self.backend.accumulate(gradient, None).astype("f8")  # squares may exceed float32
        return float((g * g).sum())

    # -- the call -----------------------------------------------------------------------------------------------------

    def selection(self, density: float) -> tuple[int, Chunks | None]:
        """Return how many entries a rank selects, and how, if it is of each chunk of a tensor."""
        if self._chunk is None:
            return min(self.size, max(1, round(density * self.size))), None
        chunks = Chunks(max(1, round(density * self._chunk)), self._chunk, tuple(self._offsets))
        return chunks.total(self.size), chunks

    @default_float_mode
    def contribution(self, backend: Backend, chunks: Chunks | None = None) -> Contribution:
        """Return what this rank contributes to the step's call; ``chunks``: how it selects, as `selection` says."""
        residual = self.backend.as_tensor(self._residual, (self.size,))
        shape, size = (self.size,), self.size
        if self.nonfinite:  # one NaN, which reaches all ranks, and nothing of what is kept here
            self._add_deferred()
            poison = self._zeros(size)
            poison[:1] = float("nan")
            contributed = self.backend.as_tensor(poison, shape)
            return Contribution(backend, (Segment(None, contributed),), contributed, shape, size)
        if len(self._deferred) < len(self.tensors):
            self._add_deferred()
            return Contribution(backend, (Segment(None, residual),), residual, shape, size, chunks)
        segments = [self._segment(spec.name) for spec in self.tensors]
        decay = 1.0 if self._decayed else self._correction.decay
        return Contribution(backend, segments, residual, shape, size, chunks, decay, self._hint)

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
            self._deferred = {}
            self._add_postponed(self.backend, True)

    def _start(self, spec: TensorSpec) -> None:
        """Note that a tensor's gradient has come, or a part of it, which is about to be added to its residual."""
        self._let_decay(spec.name)
        self.started.add(spec.name)

    def _let_decay(self, name: str) -> None:
        """Let a tensor's residual decay, once in a step."""
        if self._correction.decay < 1 and name not in self._decayed:
            residual = self._view(self._residual, self.tensors[self._positions[name]])
            residual *= self._correction.decay  # no signal comes between this and the note of it
            self._decayed.add(name)

    def _add_deferred(self) -> None:
        for name in list(self._deferred)[len(self._added) :]:
            self._let_decay(name)
            segment = self._segment(name)
            self.backend.add_into(segment.gradient, segment.residual, self._added)

    def _add_postponed(self, backend: Backend, anyhow: bool) -> None:
        """Add what was postponed, on the stream of ``backend``; unclipped, if ``anyhow``, where no norm is known.

        Raises:
            TransportError: the norm is not known.
        """
        if self._norm is None:
            return
        scale = self._norm.factor or 1.0 if anyhow else self._norm.known_factor()
        for spec, (gradient, done) in self._postponed.items():
            self.add(spec, gradient, scale, done, backend)

    def _segment(self, name: str) -> Segment:
        """Return a deferred gradient with its part of the residual."""
        position = self._positions[name]
        spec = self.tensors[position]
        part = self.backend.as_tensor(self._view(self._residual, spec), spec.shape)
        return Segment(self._deferred[name], part, self._offsets[position])

    # -- state --------------------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return residuals and velocities by name: flat views. Without momentum there are no velocities."""
        residuals = {spec.name: self._view(self._residual, spec) for spec in self.tensors}
        velocity = self._velocity
        return residuals, {} if velocity is None else {spec.name: self._view(velocity, spec) for spec in self.tensors}

    @default_float_mode
    def scale(self, factor: float, done: list[Bucket]) -> None:
        """Multiply the residual and the velocity by ``factor``, and append the bucket to ``done``."""
        self._residual *= factor
        if self._velocity is not None:
            self._velocity *= factor
        done.append(self)  # no signal comes between these

    def _zeros(self, size: int) -> Array:
        return self.backend.zeros(size, self.accumulator.accumulator)

    def _view(self, flat: Array, spec: TensorSpec) -> Array:
        position = self._positions[spec.name]
        return flat[self._offsets[position] : self._offsets[position + 1]]
