"""Error feedback: how a rank's gradient enters a collective, and what of it comes back.

With a residual, the gradient that enters is ``residual + x`` (error feedback; Stich et al. 2018, Alg. 1), or ``decay *
residual + x``, so that old entries are forgotten by and by (Sarfi et al., "SparseLoCo", 2025, Alg. 1). What this rank
selects leaves the residual. What the result does not hold of it comes back, by one rule:

    An entry that a rank selected, at an index that the result does not hold, goes back to that rank, whole. A partial
    sum that was dropped at an index that the result does hold stays with the rank that dropped it.

No gradient mass is lost, whatever the algorithm. At an index outside the result all that ranks selected goes back to
those who selected it, and what was dropped of it on the way is forgotten. At an index inside, the result and what was
dropped add up to what was selected. So an algorithm only notes what it drops, and `Gradient.commit` does the rest, when
the collective is complete. A failed one loses nothing either: every rank takes its own selection back and ends with
``residual + x``, and a residual that decays has done so once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from sparsecomm.backends.base import Backend
from sparsecomm.tensors.interop import Tensor
from sparsecomm.tensors.sparse import Array, SparseVector, index_dtype

__all__ = ["Accumulated", "Chunks", "Contribution", "Gradient", "concatenate_parts"]


@dataclass(frozen=True, slots=True)
class Chunks:
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

    def of(self, backend: Backend, x: Tensor) -> SparseVector:
        """Return what is selected of a tensor of all elements."""
        if not self.offsets:
            return backend.topk_by_chunk(x, self.k, self.length, None)
        tensors = [x.part(begin, end) for begin, end in pairwise(self.offsets)]
        parts = [backend.topk_by_chunk(tensor, self.k, self.length, None) for tensor in tensors]
        return concatenate_parts(backend, parts, self.offsets[:-1], x.size)


def concatenate_parts(
    backend: Backend, parts: Sequence[SparseVector], offsets: Sequence[int], size: int
) -> SparseVector:
    """Return the entries of parts of a vector of ``size`` elements, which begin at these offsets, as one vector."""
    index, moved = index_dtype(size), []
    for part, offset in zip(parts, offsets, strict=True):
        indices = part.indices.astype(index, copy=False)
        if offset:
            indices = indices + index.type(offset)
        moved.append(SparseVector.trusted(indices, part.values, size, (size,)))
    return backend.concatenate_entries(moved)


class Contribution(Protocol):
    """A rank's contribution to a call, as an algorithm sees it: what it takes from the rank, and what it drops."""

    shape: tuple[int, ...]

    def topk(self, k: int) -> SparseVector:
        """Take what this rank selects out of the gradient: its top-k, or those of its chunks, which are k together."""

    def whole(self) -> Array:
        """Take the whole gradient: a flat dense array in the accumulator dtype, which the caller may change."""

    def rest(self, total: Array, k: int) -> SparseVector:
        """Return the top-k of ``total``, a dense sum that this rank has made after `whole`, or those of its chunks.

        They are what this rank selects; the rest of ``total`` stays here.
        """

    def drop(self, entries: SparseVector) -> None:
        """Record entries that this rank has dropped: rejected by a merge, or taken by rounding.

        What of them stands at an index that the result holds stays here. Elsewhere they are forgotten, as the ranks
        that selected them take them back.
        """


class Gradient:
    """One rank's contribution to one collective call.

    An exception of a signal handler may interrupt every method, and loses nothing. Called again, `commit` and
    `rollback` go on from where they stopped: what changes the residual is noted in the same step (see `Backend`).
    """

    def __init__(
        self, backend: Backend, x: Tensor, residual: Tensor | None, chunks: Chunks | None = None, decay: float = 1.0
    ) -> None:
        """Prepare a contribution.

        Args:
            backend: of the device of x.
            x: the gradient.
            residual: as in `sparsecomm.sparse_allreduce`.
            chunks: how to select; ``None``: the first k of the whole.
            decay: what the residual is multiplied by before x is added, once.
        """
        self.backend = backend
        self.shape, self.size = x.shape, x.size
        self._x = x
        self._residual, self._chunks, self._decay = residual, chunks, decay
        self._decayed: list[None] = []  # at most one
        self._taken: list[SparseVector] = []  # at most one
        self._selected: SparseVector | None = None  # if it is not what was taken
        self._applied: SparseVector | None = None
        self._whole: Array | None = None
        self._rest: Array | None = None
        self._dropped: list[SparseVector] = []
        self._committed: list[None] = []  # as many as steps of `commit` have been done
        self._rolled_back: list[None] = []  # the same of `rollback`

    @property
    def taken(self) -> SparseVector | None:
        """The entries that have left the residual, selected by this rank; None before."""
        return self._taken[0] if self._taken else None

    def topk(self, k: int) -> SparseVector:
        if self._chunks is None:
            self._let_decay()
            entries = self.backend.topk(self._x, k, self._residual)
            self._taken.append(entries)
            return entries
        decay = 1.0 if self._decayed else self._decay
        entries = self.backend.topk_by_chunk(self._x, self._chunks.k, self._chunks.length, self._residual, decay)
        self._taken.append(entries)
        return entries

    def whole(self) -> Array:
        self._let_decay()
        self._whole = self.backend.accumulate(self._x, self._residual)
        return self._whole

    def drop(self, entries: SparseVector) -> None:
        if self._residual is not None:
            self._dropped.append(entries)

    def rest(self, total: Array, k: int) -> SparseVector:
        dense = self.backend.as_tensor(total, self.shape)
        entries = self._selected_of(dense, k)
        self.backend.clear(dense, entries)
        self._rest, self._selected = total, entries
        return entries

    def held(self, entries: SparseVector) -> Array:
        """Return the values of this rank's gradient where ``entries`` are, in the accumulator dtype."""
        values = self.backend.gather(self._x if self._residual is None else self._residual, entries)
        if self._residual is not None and self._taken:
            self.backend.overlay(values, entries, self._taken[0])
        return values

    def applied(self, entries: SparseVector) -> None:
        """Note that the result holds all of this rank's gradient where ``entries`` are, and nothing of it elsewhere."""
        self._applied = entries

    def commit(self, result: SparseVector, *, rejects: bool = True) -> None:
        """Update the residual, now that the collective is complete.

        Args:
            result: the sum over all ranks, before a mean is taken; only its indices are looked at.
            rejects: whether the algorithm rejects entries. Otherwise that sum and what was dropped add up to what was
                selected at every index, and nothing need be looked for.
        """
        residual, done = self._residual, self._committed
        if residual is None:
            return
        if self._applied is not None:
            self.rollback()
            self.backend.clear(residual, self._applied)
            return
        whole = self._whole is not None
        if whole and not done:
            self.backend.cast_into(self._rest, residual)
            done.append(None)
        for entries in self._dropped[len(done) - whole :]:
            if rejects:
                self.backend.scatter_add_where(residual, entries, result, True)
            else:
                self.backend.scatter_add(residual, entries)
            done.append(None)
        selected = self._selected or self.taken
        if rejects and selected is not None and len(done) == whole + len(self._dropped):
            self.backend.scatter_add_where(residual, selected, result, False)
            done.append(None)

    def rollback(self) -> None:
        """Make the residual ``decay * residual + x``, as after a failed collective: all of the gradient stays here."""
        if self._residual is None or self._rolled_back:
            return
        if self._taken:  # the residual is zero there, so adding is assigning
            self.backend.scatter_add(self._residual, self._taken[0])
        else:
            self._let_decay()
            self.backend.add_into(self._x, self._residual)
        self._rolled_back.append(None)

    @property
    def committing(self) -> bool:
        """Whether `commit` has begun to change the residual in a way that `rollback` cannot restore."""
        return bool(self._committed)

    def _let_decay(self) -> None:
        if self._decay < 1 and self._residual is not None and not self._decayed:
            self.backend.scale(self._residual, self._decay)
            self._decayed.append(None)

    def _selected_of(self, dense: Tensor, k: int) -> SparseVector:
        """Return what is selected of a tensor that stands for the whole gradient."""
        return self.backend.topk(dense, k, None) if self._chunks is None else self._chunks.of(self.backend, dense)


class Accumulated(Gradient):
    """A contribution whose gradient has been added to its residual already."""

    def __init__(self, backend: Backend, residual: Tensor, chunks: Chunks | None = None) -> None:
        super().__init__(backend, residual, residual, chunks)
        self._all = residual

    def topk(self, k: int) -> SparseVector:
        entries = self._selected_of(self._all, k)
        self._taken.append(entries)
        self.backend.clear(self._all, entries)
        return entries

    def whole(self) -> Array:
        self._whole = self.backend.accumulate(self._all, None)
        return self._whole

    def rollback(self) -> None:
        if self._taken:
            self._put_back(self._all, self._taken[0], 0)

    def _put_back(self, residual: Tensor, entries: SparseVector, step: int) -> None:
        """Do step number ``step`` of `rollback` unless it is done: put back entries that were cleared, or were not."""
        if len(self._rolled_back) == step:
            self.backend.clear(residual, entries)
            self.backend.scatter_add(residual, entries)
            self._rolled_back.append(None)
