"""`Contribution`: what one rank's gradient and residual contribute to a call, and what the residual holds afterwards.

With a residual, the call sums ``residual + x`` (error feedback; Stich et al. 2018, Alg. 1), or ``decay * residual +
x``, so that old entries fade (Sarfi et al., "SparseLoCo", 2025, Alg. 1). Entries that this rank selects leave the
residual. Gradient that is missing from the result returns to a residual, index by index:

    If the result has no entry at an index, each rank takes back its selected entry, and dropped partial sums are
    ignored. If the result has an entry there, each rank keeps the partial sums that it dropped.

So no gradient is lost. An algorithm only records what it drops; `Contribution.commit` applies the rule when the call is
decided. After a failed call, the residual is ``decay * residual + x``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from sparsecomm.backends.base import Backend
from sparsecomm.tensors.interop import Tensor
from sparsecomm.tensors.sparse import Array, SparseVector, index_dtype

_BEFORE, _DECAYED, _SUM = range(3)  # contents of a residual
_MAX_REACHED = 3  # if more than this multiple of k entries reach the threshold, it is raised


class Chunks(NamedTuple):
    """Selection by chunk: the top ``k`` of every ``length`` elements.

    Chunks do not cross tensors: ``offsets`` has the begin of each tensor and the end of the last one. It is empty for a
    single tensor.
    """

    k: int
    length: int
    offsets: tuple[int, ...] = ()

    def total(self, size: int) -> int:
        """Return the number of entries selected from ``size`` nonzero elements."""
        sizes = [end - begin for begin, end in pairwise(self.offsets or (0, size))]
        return sum(each // self.length * self.k + min(self.k, each % self.length) for each in sizes)


class Segment:
    """A part of a gradient with its part of the residual.

    Attributes:
        gradient: the part of the gradient; ``None`` if it has already been added to the residual.
        residual: the part of the residual; ``None`` if there is no residual.
        offset: of this part, in elements.
        holds: whether the residual is as before the call, decayed, or the sum with the gradient.
    """

    __slots__ = ("gradient", "holds", "offset", "residual")

    def __init__(self, gradient: Tensor | None, residual: Tensor | None, offset: int = 0) -> None:
        self.gradient, self.residual, self.offset = gradient, residual, offset
        self.holds = _BEFORE


class ThresholdHint:
    """A guess of the ``threshold`` that slightly more than k entries reach; 0 if it is unknown.

    It is the smallest magnitude selected in the previous step, times a factor. The factor adapts to the number of
    entries that reached the threshold, since residuals grow in the first steps.
    """

    def __init__(self) -> None:
        self.threshold, self.factor = 0.0, 0.9

    def update(self, smallest: float, reached: int | None, k: int) -> None:
        """Update the threshold after a step.

        ``smallest``: the smallest selected magnitude; 0 if fewer than k entries were selected. ``reached``: number of
        entries that reached the threshold; ``None`` if it was not used.
        """
        if reached is not None:
            self.factor *= 0.9 if reached < k else 1.05 if reached > _MAX_REACHED * k else 1.0
        self.threshold = self.factor * smallest if math.isfinite(smallest) else 0.0


class Contribution:
    """One rank's contribution to one call.

    An algorithm selects entries with `topk` or `topk_of_ranges`, or takes the dense gradient with `whole`, and records
    dropped entries with `drop`. `commit` or `rollback` ends the contribution. All other methods either succeed, or
    raise and change nothing.

    Attributes:
        shape, size: of the gradient.
        backend: of its device and of the call.
        taken: the entries that this rank has selected and removed from the residual; ``None`` before a selection and
            after `whole`.
        num_taken: the number of these entries, or ``None``.
    """

    def __init__(
        self,
        backend: Backend,
        segments: Sequence[Segment],
        residual: Tensor | None,
        shape: tuple[int, ...],
        size: int,
        chunks: Chunks | None = None,
        decay: float = 1.0,
        hint: ThresholdHint | None = None,
    ) -> None:
        """Prepare a contribution.

        Args:
            segments: the parts of the gradient in order, together ``size`` elements.
            residual: residual of all segments in one piece, or ``None``.
            chunks: selection by chunk; ``None`` selects from the whole gradient.
            decay: factor of the residual, applied once before gradients are added.
            hint: expected threshold of the selection, for several segments.
        """
        self.backend, self.shape, self.size = backend, shape, size
        self._segments, self._residual = segments, residual
        self._chunks, self._decay, self._hint = chunks, decay, hint
        self._selection: SparseVector | None = None  # see `with_selection`
        self._parts: list[SparseVector] | None = None  # the entries that this rank has selected
        self._removed: list[tuple[Tensor | None, SparseVector]] = []  # entries removed from a range of the residual
        self._took_whole = False
        self._replacement: tuple[Tensor, Array] | None = None  # a range of the residual, and its values after `commit`
        self._overwritten: tuple[Tensor, SparseVector] | None = None  # a range, and its entries before sums were added
        self._dropped: list[SparseVector] = []
        self._committed = 0  # completed steps of `commit`

    @property
    def taken(self) -> SparseVector | None:
        if self._parts and len(self._parts) > 1:
            self._parts = [self.backend.concatenate_entries(self._parts)]
        return self._parts[0] if self._parts else None

    @property
    def num_taken(self) -> int | None:
        return None if self._parts is None else sum(part.nnz for part in self._parts)

    def topk(self, k: int) -> SparseVector:
        """Select this rank's top-k, or the top entries of its chunks, k in all."""
        if self._selection is not None:
            return self._selection
        if self._chunks is not None:
            taken = self._take_by_chunk(self._chunks)
        elif len(self._segments) == 1:
            taken = self._take(self._segments[0], k)
        else:
            taken = self._take_of_several(k)
        self._parts = [taken]
        return taken

    def with_selection(self, entries: SparseVector) -> Contribution:
        """Return a contribution that selects ``entries``, for a stage that sums them. It shares the dropped entries."""
        stage = copy(self)
        stage._selection = entries
        return stage

    def whole(self) -> Array:
        """Take the whole gradient, as a flat dense array in the accumulator dtype that the caller may change."""
        if self._selection is not None:
            raise NotImplementedError("this stage sums selected entries")
        first = self._segments[0]
        if len(self._segments) == 1 and first.gradient is not None:
            self._apply_decay(first)
            total = self.backend.accumulate(first.gradient, first.residual)
        else:
            self._add_gradients()
            assert self._residual is not None
            total = self.backend.accumulate(self._residual, None)
        self._took_whole = True
        return total

    def topk_of_ranges(self, ranges: Sequence[tuple[int, int, int]]) -> list[SparseVector]:
        """Select the top-k of each range, given as (begin, end, k), in order."""
        if self._residual is not None:
            self._add_gradients()
        self._parts = found = []
        for begin, end, k in ranges:
            part = self._range(begin, end)
            first = self.backend.topk(part, k, None) if self._residual is None else self._take_topk(part, k)
            found.append(self._concatenate([first], [begin]))
        return found

    def topk_of_sums(self, begin: int, end: int, received: Sequence[SparseVector], k: int) -> SparseVector:
        """Add received entries to this rank's elements between two indices, and select the top-k of the sums.

        The remaining sums stay in this rank's residual when `commit` ends the call.
        """
        backend, residual = self.backend, self._residual
        if residual is not None:
            self._add_gradients()
        part = self._range(begin, end)
        in_place = residual is not None and residual.dtype.itemsize > 2  # 16-bit residuals would round the sums
        dense = part if in_place else backend.as_tensor(backend.accumulate(part, None), (end - begin,))
        if received:
            (addends,) = backend.split_at_indices(backend.sum_in_pairs([*received]), [begin, end])
            if in_place:
                before = backend.memory_of(part)[addends.indices]
                self._overwritten = part, SparseVector.trusted(addends.indices, before, addends.size, addends.shape)
            backend.scatter_add(dense, addends)
        if in_place:
            first = self._take_topk(part, k)
        else:
            first = backend.take_topk(dense, k)
            if residual is not None:
                self._replacement = part, backend.memory_of(dense)
        return self._concatenate([first], [begin])

    def drop(self, entries: SparseVector) -> None:
        """Record entries that this rank has dropped: rejected by a merge, or lost in rounding."""
        if self._residual is not None:
            self._dropped.append(entries)

    def commit(self, result: SparseVector, *, rejects: bool = True) -> None:
        """Update the residual after a successful call. If it runs out of memory, call it again to continue.

        Only the indices of ``result`` are used. ``rejects``: as in `Algorithm`. If false, the result plus all dropped
        entries equals the sum of all ranks' selected entries, so no index needs to be looked up in the result.
        """
        residual, backend = self._residual, self.backend
        if residual is None:
            return
        if not self._committed:
            if self._took_whole:
                backend.cast_into(None, residual)  # zero
            elif self._replacement is not None:
                part, sums = self._replacement
                backend.cast_into(sums, part)
            self._committed = 1
        while self._committed <= len(self._dropped):
            entries = self._dropped[self._committed - 1]
            if rejects:
                backend.scatter_add_where(residual, entries, result, True)
            else:
                backend.scatter_add(residual, entries)
            self._committed += 1
        if rejects and self._committed == len(self._dropped) + 1 and (taken := self.taken) is not None:
            backend.scatter_add_where(residual, taken, result, False)
        self._committed = len(self._dropped) + 2

    def rollback(self) -> None:
        """Set the residual to ``decay * residual + x``, as after a failed call. Ignored if `commit` has begun."""
        if self._residual is None or self._committed:
            return
        self._add_gradients()
        while self._removed:
            residual, entries = self._removed[-1]  # the residual is zero there, so adding restores it
            assert residual is not None
            self.backend.scatter_add(residual, entries)
            self._removed.pop()
        if self._overwritten is not None:
            self.backend.clear(*self._overwritten)
            self.backend.scatter_add(*self._overwritten)
            self._overwritten = None

    def _take(self, segment: Segment, k: int) -> SparseVector:
        """Select the top-k of a segment, and add its gradient in the same pass."""
        gradient, residual = segment.gradient, segment.residual
        if gradient is None:
            assert residual is not None
            return self._take_topk(residual, k)
        self._apply_decay(segment)
        entries = self.backend.topk(gradient, k, residual)
        segment.holds = _SUM
        self._removed.append((residual, entries))
        return entries

    def _take_by_chunk(self, chunks: Chunks) -> SparseVector:
        """Select the top-k of every chunk of each segment. The same pass decays residuals and adds gradients."""
        backend, k, length = self.backend, chunks.k, chunks.length
        parts, offsets = [], []
        for segment in self._segments:
            gradient, residual = segment.gradient, segment.residual
            if gradient is not None:
                parts.append(backend.topk_by_chunk(gradient, k, length, residual, self._decay))
                segment.holds = _SUM
                self._removed.append((residual, parts[-1]))
                offsets.append(segment.offset)
                continue
            assert residual is not None
            for begin, end in pairwise(chunks.offsets or (0, residual.size)):
                part = residual.part(begin, end)
                parts.append(backend.topk_by_chunk(part, k, length, None))
                backend.clear(part, parts[-1])
                self._removed.append((part, parts[-1]))
                offsets.append(segment.offset + begin)
        return parts[0] if len(parts) == 1 else self._concatenate(parts, offsets)

    def _take_of_several(self, k: int) -> SparseVector:
        """Select the top-k of several segments, in one pass if the hint has a threshold."""
        assert self._residual is not None
        reached, hint = None, self._hint
        if hint is not None and hint.threshold:
            entries, reached = self._take_by_threshold(k, hint.threshold)
        else:
            self._add_gradients()
            entries = self._take_topk(self._residual, k)
        if hint is not None:
            hint.update(float(np.abs(entries.values).min()) if entries.nnz == k else 0.0, reached, k)
        return entries

    def _take_by_threshold(self, k: int, threshold: float) -> tuple[SparseVector, int]:
        """Return the exact top-k, whatever the threshold, and the number of entries that reached it.

        If more than k entries reach it, all but the top-k return to the residual. If fewer do, the rest is selected
        from the residual.
        """
        backend, residual = self.backend, self._residual
        assert residual is not None
        parts = []
        for segment in self._segments:
            self._apply_decay(segment)
            assert segment.gradient is not None
            entries = backend.threshold(segment.gradient, threshold, segment.residual)
            segment.holds = _SUM
            self._removed.append((segment.residual, entries))
            parts.append(entries)
        candidates = self._concatenate(parts, [segment.offset for segment in self._segments])
        reached = candidates.nnz
        if reached < k:
            rest = self._take_topk(residual, k - reached)
            return backend.merge(candidates, rest), reached
        entries, others = backend.merge_topk(candidates, candidates.part(0, 0), k)
        backend.scatter_add(residual, others)
        self._removed = [(residual, entries)]
        return entries, reached

    def _concatenate(self, parts: list[SparseVector], offsets: list[int]) -> SparseVector:
        """Concatenate entries of ranges of the gradient. ``offsets``: where the ranges begin."""
        index, moved = index_dtype(self.size), []
        for part, offset in zip(parts, offsets, strict=True):
            indices = part.indices.astype(index, copy=False) + index.type(offset)
            moved.append(SparseVector.trusted(indices, part.values, self.size, self.shape))
        return self.backend.concatenate_entries(moved)

    def _range(self, begin: int, end: int) -> Tensor:
        """Return a range of the residual, after gradients were added, or of the gradient if there is no residual."""
        dense = self._segments[0].gradient if self._residual is None else self._residual
        assert dense is not None
        return dense.part(begin, end)

    def _take_topk(self, residual: Tensor, k: int) -> SparseVector:
        """Select the top-k of a range of the residual, and remove it."""
        entries = self.backend.take_topk(residual, k)
        self._removed.append((residual, entries))
        return entries

    def _apply_decay(self, segment: Segment) -> None:
        """Multiply a segment's residual by the decay, once."""
        if segment.holds == _BEFORE:
            if self._decay < 1 and segment.residual is not None:
                self.backend.scale(segment.residual, self._decay)
            segment.holds = _DECAYED

    def _add_gradients(self) -> None:
        """Add all gradients to the residual that were not added yet."""
        for segment in self._segments:
            if segment.holds != _SUM and segment.gradient is not None:
                assert segment.residual is not None
                self._apply_decay(segment)
                self.backend.add_into(segment.gradient, segment.residual)
                segment.holds = _SUM
