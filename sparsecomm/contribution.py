"""What one rank puts into one call, and what comes back: error feedback.

With a residual, the gradient that enters is ``residual + x`` (error feedback; Stich et al. 2018, Alg. 1), or ``decay *
residual + x``, so that old entries are forgotten by and by (Sarfi et al., "SparseLoCo", 2025, Alg. 1). What this rank
selects leaves the residual. What the result does not hold of it comes back, by one rule:

    An entry that a rank selected, at an index that the result does not hold, goes back to that rank, whole. A partial
    sum that was dropped at an index that the result does hold stays with the rank that dropped it.

No gradient mass is lost, whatever the algorithm. At an index outside the result all that ranks selected goes back to
those who selected it, and what was dropped of it on the way is forgotten. At an index inside, the result and what was
dropped add up to what was selected. So an algorithm only notes what it drops, and `Contribution.commit` does the rest,
when the collective is complete. A failed one loses nothing either: every rank takes its own selection back and ends
with ``residual + x``, and a residual that decays has done so once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from sparsecomm.backends.base import Backend
from sparsecomm.tensors.interop import Tensor
from sparsecomm.tensors.sparse import Array, SparseVector, index_dtype

__all__ = ["Chunks", "Contribution", "Segment", "ThresholdHint"]

_BEFORE, _DECAYED, _SUM = range(3)  # what a residual holds
_MAX = 3  # times k entries may reach the threshold; more cost more than a second pass now and then


class Chunks(NamedTuple):
    """Selection by chunk: the first ``k`` entries, in the order of selection, of every ``length`` elements.

    Attributes:
        offsets: where each of several tensors begins that lie one after another, and where the last one ends: each has
            chunks of its own. Empty: there is one tensor.
    """

    k: int
    length: int
    offsets: tuple[int, ...] = ()

    def total(self, size: int) -> int:
        """Return how many entries that is of ``size`` elements, unless too many are zero: the k of an algorithm."""
        sizes = [end - begin for begin, end in pairwise(self.offsets or (0, size))]
        return sum(each // self.length * self.k + min(self.k, each % self.length) for each in sizes)


class Segment:
    """A part of the memory that enters a call.

    Attributes:
        gradient: what is added to the residual; ``None``: it has been added before.
        residual: its part of the residual, of as many elements; ``None``: there is no residual.
        offset: of this part, in elements.
        holds: what the residual holds now: what it did before, that after its decay, or the sum with the gradient.
    """

    __slots__ = ("gradient", "holds", "offset", "residual")

    def __init__(self, gradient: Tensor | None, residual: Tensor | None, offset: int = 0) -> None:
        self.gradient, self.residual, self.offset = gradient, residual, offset
        self.holds = _BEFORE


class ThresholdHint:
    """A magnitude that a few more than k entries are expected to reach.

    It is the smallest that was selected in the step before, times a factor that follows what became of it: residuals
    grow in the beginning, and settle.

    Attributes:
        threshold: the magnitude; 0 where nothing is known.
        factor: what the smallest magnitude is multiplied by.
    """

    def __init__(self) -> None:
        self.threshold, self.factor = 0.0, 0.9

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


class Contribution:
    """One rank's contribution to one call.

    An algorithm takes entries out of it by `topk` or `topk_of_ranges`, or all of it by `whole`, and notes with `drop`
    what it has dropped. By `first_sums` it takes sums, of which others stay here. Then `commit` or `rollback` ends it.
    Every method but these two either does its work or raises and changes nothing.

    Attributes:
        shape, size: of the gradient.
        backend: of its device, and of the call.
        taken: the entries that this rank has selected, which have left the residual; ``None``: none, or all.
        num_taken: how many that are; ``None``: all, or nothing was asked for.
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
            backend: of the device.
            segments: what enters, in order; together they are all of ``size`` elements.
            residual: of all segments, in one piece; ``None``: there is none.
            shape, size: of the gradient.
            chunks: how to select; ``None``: the first k of the whole.
            decay: what the residual is multiplied by, once, before gradients are added.
            hint: what selections of the same memory were like before, if there are several segments.
        """
        self.backend, self.shape, self.size = backend, shape, size
        self._parts: list[SparseVector] | None = None  # what this rank has selected
        self._segments, self._residual = segments, residual
        self._chunks, self._decay, self._hint = chunks, decay, hint
        self._out: list[tuple[Tensor | None, SparseVector]] = []  # entries that have left a part of the residual
        self._whole = False  # `whole` has taken it
        self._kept: tuple[Tensor, Array] | None = None  # a part of the residual, and what it will be
        self._changed: tuple[Tensor, SparseVector] | None = None  # a part of it, and what was where sums are now
        self._dropped: list[SparseVector] = []
        self._committed = 0  # steps of `commit`

    @property
    def taken(self) -> SparseVector | None:
        if self._parts and len(self._parts) > 1:
            self._parts = [self.backend.concatenate_entries(self._parts)]
        return self._parts[0] if self._parts else None

    @property
    def num_taken(self) -> int | None:
        return None if self._parts is None else sum(part.nnz for part in self._parts)

    # -- for algorithms -----------------------------------------------------------------------------------------------

    def topk(self, k: int) -> SparseVector:
        """Take what this rank selects out of the gradient: its top-k, or those of its chunks, which are k together."""
        if self._chunks is not None:
            taken = self._take_by_chunk(self._chunks)
        elif len(self._segments) == 1:
            taken = self._take(self._segments[0], k)
        else:
            taken = self._take_of_several(k)
        self._parts = [taken]
        return taken

    def whole(self) -> Array:
        """Take the whole gradient: a flat dense array in the accumulator dtype, which the caller may change."""
        first = self._segments[0]
        if len(self._segments) == 1 and first.gradient is not None:
            self._let_decay(first)
            total = self.backend.accumulate(first.gradient, first.residual)
        else:
            self._add()
            assert self._residual is not None
            total = self.backend.accumulate(self._residual, None)
        self._whole = True
        return total

    def topk_of_ranges(self, ranges: Sequence[tuple[int, int, int]]) -> list[SparseVector]:
        """Take the first k entries of each of some ranges: where it begins, where it ends, and its k, in order."""
        if self._residual is not None:
            self._add()
        self._parts = found = []
        for begin, end, k in ranges:
            part = self._part(begin, end)
            first = self.backend.topk(part, k, None) if self._residual is None else self._take_topk(part, k)
            found.append(self._joined([first], [begin]))
        return found

    def first_sums(self, begin: int, end: int, received: Sequence[SparseVector], k: int) -> SparseVector:
        """Return the first k sums of what is here between two indices and what other ranks have sent.

        The other sums stay with this rank: `commit` puts them in the place of what is there.
        """
        backend, residual = self.backend, self._residual
        if residual is not None:
            self._add()
        part = self._part(begin, end)
        in_place = residual is not None and residual.dtype.itemsize > 2  # which holds sums as they are
        dense = part if in_place else backend.as_tensor(backend.accumulate(part, None), (end - begin,))
        if received:
            (addends,) = backend.split_at_indices(backend.sum_in_pairs([*received]), [begin, end])
            if in_place:
                before = backend.memory_of(part)[addends.indices]
                self._changed = part, SparseVector.trusted(addends.indices, before, addends.size, addends.shape)
            backend.scatter_add(dense, addends)
        if in_place:
            first = self._take_topk(part, k)
        else:
            first = backend.take_topk(dense, k)
            if residual is not None:
                self._kept = part, backend.memory_of(dense)
        return self._joined([first], [begin])

    def drop(self, entries: SparseVector) -> None:
        """Record entries that this rank has dropped: rejected by a merge, or taken by rounding.

        What of them stands at an index that the result holds stays here. Elsewhere they are forgotten, as the ranks
        that selected them take them back.
        """
        if self._residual is not None:
            self._dropped.append(entries)

    # -- the end ------------------------------------------------------------------------------------------------------

    def commit(self, result: SparseVector, *, rejects: bool = True) -> None:
        """Update the residual, now that the collective is complete. If memory runs out, call it again: it goes on.

        Args:
            result: the sum over all ranks, before a mean is taken; only its indices are looked at.
            rejects: whether the algorithm rejects entries. Otherwise that sum and what was dropped add up to what was
                selected at every index, and nothing need be looked for.
        """
        residual, backend = self._residual, self.backend
        if residual is None:
            return
        if not self._committed:
            if self._whole:
                backend.cast_into(None, residual)
            elif self._kept is not None:
                backend.cast_into(self._kept[1], self._kept[0])
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
        """Make the residual ``decay * residual + x``, as after a failed collective: all of the gradient stays here.

        Where `commit` has begun to change the residual, this does nothing.
        """
        if self._residual is None or self._committed:
            return
        self._add()
        while self._out:
            residual, entries = self._out[-1]  # the residual is zero there, so adding is assigning
            assert residual is not None
            self.backend.scatter_add(residual, entries)
            self._out.pop()
        if self._changed is not None:
            self.backend.clear(*self._changed)
            self.backend.scatter_add(*self._changed)
            self._changed = None

    # -- selection ----------------------------------------------------------------------------------------------------

    def _take(self, segment: Segment, k: int) -> SparseVector:
        """Take the top-k of a segment, whose gradient is added in the same pass."""
        gradient, residual = segment.gradient, segment.residual
        if gradient is None:
            assert residual is not None
            return self._take_topk(residual, k)
        self._let_decay(segment)
        entries = self.backend.topk(gradient, k, residual)
        segment.holds = _SUM
        self._out.append((residual, entries))
        return entries

    def _take_by_chunk(self, chunks: Chunks) -> SparseVector:
        """Take the first k of every chunk of each segment. Residuals decay and gradients are added in the same pass.

        What is selected does not depend on the memory in which segments lie.
        """
        backend, k, length = self.backend, chunks.k, chunks.length
        parts, offsets = [], []
        for segment in self._segments:
            gradient, residual, offset = segment.gradient, segment.residual, segment.offset
            if gradient is None:
                assert residual is not None
                for begin, end in pairwise(chunks.offsets or (0, residual.size)):
                    part = residual.part(begin, end)
                    entries = backend.topk_by_chunk(part, k, length, None)
                    backend.clear(part, entries)
                    self._out.append((part, entries))
                    parts.append(entries)
                    offsets.append(offset + begin)
            else:
                entries = backend.topk_by_chunk(gradient, k, length, residual, self._decay)
                segment.holds = _SUM
                self._out.append((residual, entries))
                parts.append(entries)
                offsets.append(offset)
        return parts[0] if len(parts) == 1 else self._joined(parts, offsets)

    def _take_of_several(self, k: int) -> SparseVector:
        """Take the top-k of several segments, in one pass over them if something is known of their magnitudes."""
        assert self._residual is not None
        reached, hint = None, self._hint
        if hint is not None and hint.threshold:
            entries, reached = self._take_by_threshold(k, hint.threshold)
        else:
            self._add()
            entries = self._take_topk(self._residual, k)
        if hint is not None:
            hint.update(float(np.abs(entries.values).min()) if entries.nnz == k else 0.0, reached, k)
        return entries

    def _take_by_threshold(self, k: int, threshold: float) -> tuple[SparseVector, int]:
        """Take the top-k, and return how many entries reached the threshold.

        Of each segment all entries are taken that reach it. If these are k or more, the top-k are among them, and the
        others go back; if they are fewer, the rest is selected from what is left. So the result is exact whatever the
        threshold is.
        """
        backend, residual = self.backend, self._residual
        assert residual is not None
        parts = []
        for segment in self._segments:
            self._let_decay(segment)
            assert segment.gradient is not None
            entries = backend.threshold(segment.gradient, threshold, segment.residual)
            segment.holds = _SUM
            self._out.append((segment.residual, entries))
            parts.append(entries)
        candidates = self._joined(parts, [segment.offset for segment in self._segments])
        reached = candidates.nnz
        if reached < k:
            rest = self._take_topk(residual, k - reached)
            return backend.merge(candidates, rest), reached
        entries, others = backend.merge_topk(candidates, backend.empty_like(candidates), k)
        backend.scatter_add(residual, others)
        self._out = [(residual, entries)]
        return entries, reached

    def _joined(self, parts: list[SparseVector], offsets: list[int]) -> SparseVector:
        """Return the entries of parts, which begin at these offsets, as one vector."""
        index, moved = index_dtype(self.size), []
        for part, offset in zip(parts, offsets, strict=True):
            indices = part.indices.astype(index, copy=False) + index.type(offset)
            moved.append(SparseVector.trusted(indices, part.values, self.size, self.shape))
        return self.backend.concatenate_entries(moved)

    def _part(self, begin: int, end: int) -> Tensor:
        """Return a part of the residual, with gradients added; of the gradient if there is no residual."""
        whole = self._segments[0].gradient if self._residual is None else self._residual
        assert whole is not None
        return whole.part(begin, end)

    def _take_topk(self, residual: Tensor, k: int) -> SparseVector:
        """Take the top-k out of a part of the residual."""
        entries = self.backend.take_topk(residual, k)
        self._out.append((residual, entries))
        return entries

    def _let_decay(self, segment: Segment) -> None:
        """Let a segment's residual decay, once."""
        if segment.holds == _BEFORE:
            if self._decay < 1 and segment.residual is not None:
                self.backend.scale(segment.residual, self._decay)
            segment.holds = _DECAYED

    def _add(self) -> None:
        """Add the gradients that have not been added to their segments of the residual."""
        for segment in self._segments:
            if segment.holds != _SUM and segment.gradient is not None:
                assert segment.residual is not None
                self._let_decay(segment)
                self.backend.add_into(segment.gradient, segment.residual)
                segment.holds = _SUM
