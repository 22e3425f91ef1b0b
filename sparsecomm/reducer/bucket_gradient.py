"""The contribution of a bucket whose gradients lie apart, and have not been added to its residual yet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sparsecomm.backends import Backend
from sparsecomm.feedback import Accumulated, Chunks, concatenate_parts
from sparsecomm.tensors.interop import Tensor
from sparsecomm.tensors.sparse import Array, SparseVector

__all__ = ["BucketGradient", "Segment", "SegmentedGradient", "ThresholdHint"]

_MAX = 3  # times k entries may reach the threshold; more cost more than a second pass now and then


@dataclass(slots=True)
class ThresholdHint:
    """A magnitude that a few more than k entries are expected to reach.

    It is the smallest that was selected in the step before, times a factor that follows what became of it: residuals
    grow in the beginning, and settle.

    Attributes:
        threshold: the magnitude; 0 where nothing is known.
        factor: what the smallest magnitude is multiplied by.
    """

    threshold: float = 0.0
    factor: float = 0.9

    def update(self, smallest: float, reached: int | None, k: int) -> None:
        """Learn from a step.

        Args:
            smallest: the smallest magnitude that was selected; 0 if fewer than k entries were.
            reached: how many entries reached the threshold; ``None``: it was not used.
            k: how many entries were asked for.
        """
        if reached is not None:
            self.factor *= 0.9 if reached < k else 1.05 if reached > _MAX * k else 1.0
        self.threshold = self.factor * smallest if math.isfinite(smallest) else 0.0


@dataclass(frozen=True, slots=True)
class Segment:
    """A tensor's gradient, its part of the bucket's residual, and the offset of that part in elements."""

    gradient: Tensor
    residual: Tensor
    offset: int


class SegmentedGradient(Accumulated):
    """A contribution of gradients that are still to be added to their segments of the residual.

    The ``topk`` of a subclass adds them one after another, and notes what it takes out of each in ``_reached``.
    """

    def __init__(
        self,
        backend: Backend,
        residual: Tensor,
        segments: Sequence[Segment],
        chunks: Chunks | None = None,
        decay: float = 1.0,
    ) -> None:
        """Prepare a contribution.

        Args:
            backend: of the call.
            residual: of the whole bucket.
            segments: with the gradients.
            chunks: how to select; ``None``: the first k of the whole.
            decay: what a segment of the residual is multiplied by, once, before its gradient is added.
        """
        super().__init__(backend, residual, chunks)
        self._segments, self._segment_decay = segments, decay
        self._reached: list[SparseVector] = []  # of the first segments, whose gradients thereby are in the residual
        self._faded: list[None] = []  # as many as segments after those have decayed
        self._added: list[None] = []  # and as many as have got their gradients

    def whole(self) -> Array:
        self._add()
        return super().whole()

    def rollback(self) -> None:
        self._add()
        if not self._reached:
            return super().rollback()
        for step, (segment, entries) in enumerate(zip(self._segments, self._reached, strict=False)):
            self._put_back(segment.residual, entries, step)
        return None

    def _add(self) -> None:
        """Add the segments that have not been added."""
        for segment in self._segments[len(self._reached) + len(self._added) :]:
            if self._segment_decay < 1 and len(self._faded) == len(self._added):
                self.backend.scale(segment.residual, self._segment_decay)
                self._faded.append(None)
            self.backend.add_into(segment.gradient, segment.residual)
            self._added.append(None)

    def _together(self) -> SparseVector:
        """Return what was taken out of all segments."""
        return concatenate_parts(
            self.backend, self._reached, [segment.offset for segment in self._segments], self._all.size
        )


class BucketGradient(SegmentedGradient):
    """A contribution that adds gradients to a residual and selects from the sum, in one pass over both.

    Of each segment all entries are taken that reach a threshold known from the step before. If these are k or more,
    the top-k are among them, and the others go back; if they are fewer, the rest is selected from what is left. So
    the result is exact whatever the threshold is.
    """

    def __init__(self, backend: Backend, residual: Tensor, segments: Sequence[Segment], hint: ThresholdHint) -> None:
        super().__init__(backend, residual, segments)
        self._hint = hint
        self._below: list[SparseVector] = []  # at most one: what was selected below the threshold

    def topk(self, k: int) -> SparseVector:
        reached = None
        if self._hint.threshold:
            entries, reached = self._topk_by_threshold(k)
            self._taken.append(entries)
        else:
            self._add()
            entries = super().topk(k)
        smallest = float(np.abs(entries.values).min()) if entries.nnz == k else 0.0
        self._hint.update(smallest, reached, k)
        return entries

    def rollback(self) -> None:
        super().rollback()
        for entries in self._below:
            self._put_back(self._all, entries, len(self._reached))

    def _topk_by_threshold(self, k: int) -> tuple[SparseVector, int]:
        """Return the top-k, and how many entries reached the threshold."""
        for segment in self._segments:
            self._reached.append(self.backend.threshold(segment.gradient, self._hint.threshold, segment.residual))
        candidates = self._together()
        if candidates.nnz < k:
            rest = self.backend.topk(self._all, k - candidates.nnz, None)
            self._below.append(rest)
            self.backend.clear(self._all, rest)
            return self.backend.merge(candidates, rest), candidates.nnz
        entries, rejected = self.backend.merge_topk(candidates, self.backend.empty_like(candidates), k)
        self.backend.scatter_add(self._all, rejected)
        return entries, candidates.nnz
