"""A contribution whose gradients are in several places, and have not been added to the residual yet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sparsecomm.backends import Backend
from sparsecomm.feedback import Accumulated
from sparsecomm.tensors.interop import Tensor
from sparsecomm.tensors.sparse import Array, SparseVector, index_dtype

__all__ = ["Edge", "Piece", "Pieces"]

_MAX = 3  # times k entries may reach the edge; more cost more than a second pass now and then


@dataclass(slots=True)
class Edge:
    """A magnitude that a few more than k entries are expected to reach; 0 where nothing is known.

    It is the smallest that was selected in the step before, times a factor that follows what became of it: residuals
    grow in the beginning, and settle.
    """

    magnitude: float = 0.0
    factor: float = 0.9

    def follow(self, least: float, reached: int | None, k: int) -> None:
        """After a step: the smallest magnitude selected (0: of fewer than k), and how many had reached the edge."""
        if reached is not None:
            self.factor *= 0.9 if reached < k else 1.05 if reached > _MAX * k else 1.0
        self.magnitude = self.factor * least if math.isfinite(least) else 0.0


@dataclass(frozen=True, slots=True)
class Piece:
    """A gradient, the part of the residual that it belongs to, and where that part begins."""

    gradient: Tensor
    residual: Tensor
    begin: int


class Pieces(Accumulated):
    """Adds gradients to a residual and selects from the sum in one pass over both.

    Of each piece all entries are taken that reach the edge, known from the step before. The top-k are among them if
    they are k or more, and the others go back; if they are fewer, the rest is selected from what is left. So the
    result is exact whatever the edge is.
    """

    def __init__(self, backend: Backend, residual: Tensor, pieces: Sequence[Piece], edge: Edge) -> None:
        super().__init__(backend, residual)
        self._pieces, self._edge, self._added = pieces, edge, False

    def topk(self, k: int) -> SparseVector:
        reached = None
        if self._edge.magnitude:
            entries, reached = self._reaching(k)
        else:
            self._add()
            entries = super().topk(k)
        self._taken = entries
        least = float(np.abs(entries.values).min()) if entries.nnz == k else 0.0
        self._edge.follow(least, reached, k)
        return entries

    def whole(self) -> Array:
        self._add()
        return super().whole()

    def rollback(self) -> None:
        self._add()
        super().rollback()

    def _add(self) -> None:
        if not self._added:
            self._added = True
            for piece in self._pieces:
                self.backend.add_into(piece.gradient, piece.residual)

    def _reaching(self, k: int) -> tuple[SparseVector, int]:
        """The top-k, and how many entries reached the edge."""
        self._added = True
        size, index = self._all.size, index_dtype(self._all.size)
        parts = []
        for piece in self._pieces:
            found = self.backend.threshold(piece.gradient, self._edge.magnitude, piece.residual)
            indices = found.indices.astype(index, copy=False)
            if piece.begin:
                indices = indices + index.type(piece.begin)
            parts.append(SparseVector.trusted(indices, found.values, size, (size,)))
        candidates = self.backend.concatenate_entries(parts)
        nothing = self.backend.empty_like(candidates)
        if candidates.nnz < k:
            rest = self.backend.topk(self._all, k - candidates.nnz, None)
            self.backend.clear(self._all, rest)
            return self.backend.merge(candidates, rest), candidates.nnz
        entries, others = self.backend.merge_topk(candidates, nothing, k)
        self.backend.scatter_add(self._all, others)
        return entries, candidates.nnz
