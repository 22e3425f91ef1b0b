"""The tensors that one call sends, and what this rank keeps of them from step to step."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

from sparsecomm import backends
from sparsecomm.feedback import Accumulated, Gradient
from sparsecomm.reducer.layout import Group, Spec
from sparsecomm.reducer.momentum import Correction
from sparsecomm.reducer.pieces import Edge, Piece, Pieces
from sparsecomm.tensors.dtypes import FLOAT32
from sparsecomm.tensors.interop import CPU, Tensor
from sparsecomm.tensors.sparse import Array, SparseVector

__all__ = ["Unit"]


class Unit:
    """One flat residual for all tensors of a group, the velocity if there is momentum, and where each tensor is.

    Attributes:
        backend: the arithmetic of the tensors' device.
        group: the tensors.
        size: elements of all of them.
        waiting: names of which nothing has come in this step.
        outs: where results of this step go, by name.
        last: the gradient that came last.
        poisoned: a gradient of this step was not finite.
        result: the sum over all ranks, once the step's call is made.
    """

    def __init__(self, group: Group, correction: Correction) -> None:
        self.group, self._correction = group, correction
        device, self.accumulator = (
            (group.specs[0].device, group.specs[0].accumulator) if group.specs else (CPU, FLOAT32)
        )
        self.backend = backends.of(device)
        self.edges = [0, *accumulate(spec.size for spec in group.specs)]
        self.size = self.edges[-1]
        self._places = {spec.name: i for i, spec in enumerate(group.specs)}
        with self.backend.on_stream(None):
            self._residual = self.backend.zeros(self.size, self.accumulator.accumulator)
            self._velocity = (
                self.backend.zeros(self.size, self.accumulator.accumulator) if correction.momentum else None
            )
        self._edge = Edge()
        self.begin()

    def begin(self) -> None:
        """A new step."""
        self.waiting = set(self._places)
        self.started: set[str] = set()
        self.outs: dict[str, Tensor] = {}
        self.last: Tensor | None = None
        self.poisoned = False
        self.result: SparseVector | None = None
        self._given: dict[str, Tensor] = {}

    # -- gradients in -------------------------------------------------------------------------------------------------

    def add(self, spec: Spec, gradient: Tensor | None, scale: float = 1.0) -> None:
        """Add a gradient, or a part of it, of a tensor; ``None`` stands for zeros."""
        first = spec.name not in self.started
        self.started.add(spec.name)
        part = self._part(self._residual, spec)
        if self._velocity is None and scale == 1.0:
            if gradient is not None:
                self.backend.add_into(gradient, self.backend.as_tensor(part, spec.shape))
            return
        if gradient is None:
            g = self.backend.zeros(spec.size, self.accumulator.accumulator)
        else:
            g = self.backend.accumulate(gradient, None)
            if scale != 1.0:
                g *= scale
        if self._velocity is None:
            part += g
        else:
            part += self._correction.velocity(self._part(self._velocity, spec), g, first)

    def squares(self, gradient: Tensor) -> float:
        """The sum of the squares of its elements."""
        with self.backend.on_stream(gradient):
            g = self.backend.accumulate(gradient, None).astype("f8")  # squares may exceed float32
            return float((g * g).sum())

    def give(self, spec: Spec, gradient: Tensor) -> None:
        """The whole gradient of a tensor, which will be added when the call is made."""
        self.started.add(spec.name)
        self._given[spec.name] = gradient

    def takes_whole(self, spec: Spec) -> bool:
        """Whether `give` can be used instead of `add`: the call then adds and selects in one pass."""
        alone = len(self.group.specs) == 1
        return self._velocity is None and spec.name not in self.started and (alone or spec.device.kind == "cpu")

    # -- the call -----------------------------------------------------------------------------------------------------

    def contribution(self, there: backends.Backend) -> Gradient:
        """For the step's call, which ``there`` makes."""
        residual = self.backend.as_tensor(self._residual, (self.size,))
        if self.poisoned:  # one NaN, which reaches all ranks, and nothing of what is kept here
            self._add_given()
            flat = self.backend.zeros(self.size, self.accumulator.accumulator)
            flat[:1] = float("nan")
            return Accumulated(there, self.backend.as_tensor(flat, (self.size,)))
        if len(self._given) < len(self.group.specs):
            self._add_given()
            return Accumulated(there, residual)
        if len(self.group.specs) == 1:
            return Gradient(there, self._given[self.group.specs[0].name], residual)
        return Pieces(there, residual, [self._piece(spec.name) for spec in self.group.specs], self._edge)

    def _add_given(self) -> None:
        for name in self._given:
            piece = self._piece(name)
            self.backend.add_into(piece.gradient, piece.residual)

    def _piece(self, name: str) -> Piece:
        """What was given for a tensor, beside its part of the residual."""
        place = self._places[name]
        spec = self.group.specs[place]
        part = self.backend.as_tensor(self._part(self._residual, spec), spec.shape)
        return Piece(self._given[name], part, self.edges[place])

    def sent(self, there: backends.Backend, entries: SparseVector) -> None:
        """These entries have left this rank."""
        if self._velocity is not None and self._correction.masking and not self.group.dense:
            there.clear(self.backend.as_tensor(self._velocity, (self.size,)), entries)

    def write(self, there: backends.Backend, result: SparseVector) -> dict[str, SparseVector]:
        """Write the result to where it belongs; what has no place is returned by name."""
        left = {}
        parts = [result] if len(self.group.specs) == 1 else there.split_at_indices(result, self.edges)
        for spec, part in zip(self.group.specs, parts, strict=True):
            if spec.name in self.outs:
                there.densify(self.outs[spec.name], part)
            else:
                part.shape = spec.shape
                left[spec.name] = part
        return left

    def take_back(self, rank: int, ranks: int) -> None:
        """The step's result is not used: each rank puts back a share of it."""
        if self.result is None:
            return
        with self.backend.on_stream(None):
            residual = self.backend.as_tensor(self._residual, (self.size,))
            self.backend.scatter_add(residual, self.result.shard(rank, ranks))

    # -- state --------------------------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """Residuals and velocities by name: views, flat."""
        specs = self.group.specs
        residuals = {spec.name: self._part(self._residual, spec) for spec in specs}
        velocity = self._velocity
        return residuals, {} if velocity is None else {spec.name: self._part(velocity, spec) for spec in specs}

    def scale(self, factor: float) -> None:
        self._residual *= factor
        if self._velocity is not None:
            self._velocity *= factor

    def _part(self, flat: Any, spec: Spec) -> Any:
        place = self._places[spec.name]
        return flat[self.edges[place] : self.edges[place + 1]]
