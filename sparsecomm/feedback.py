"""Error feedback: how a rank's gradient enters a collective, and what of it comes back.

With a residual, the gradient that enters is ``residual + x`` (error feedback; Stich et al. 2018, Alg. 1). What this
rank selects leaves the residual. What the result does not hold of it comes back, by one rule:

    An entry that a rank selected, at an index that the result does not hold, goes back to that rank, whole. A partial
    sum that was dropped at an index that the result does hold stays with the rank that dropped it.

No gradient mass is lost, whatever the algorithm. At an index outside the result all that ranks selected goes back to
those who selected it, and what was dropped of it on the way is forgotten. At an index inside, the result and what was
dropped add up to what was selected. So an algorithm only notes what it drops, and `Gradient.commit` does the rest, when
the collective is complete. A failed one loses nothing either: every rank takes its own selection back and ends with
``residual + x``.
"""

from __future__ import annotations

from typing import Protocol

from sparsecomm.backends.base import Backend
from sparsecomm.tensors.interop import Tensor
from sparsecomm.tensors.sparse import Array, SparseVector

__all__ = ["Accumulated", "Contribution", "Gradient"]


class Contribution(Protocol):
    """A rank's contribution to a call, as an algorithm sees it: what it takes from the rank, and what it drops."""

    shape: tuple[int, ...]

    def topk(self, k: int) -> SparseVector:
        """Take the top-k out of the gradient: what this rank selects."""

    def whole(self) -> Array:
        """Take the whole gradient: a flat dense array in the accumulator dtype, which the caller may change."""

    def rest(self, total: Array, k: int) -> SparseVector:
        """Return the top-k of ``total``, a dense sum that this rank has made after `whole`.

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

    def __init__(self, backend: Backend, x: Tensor, residual: Tensor | None) -> None:
        self.backend = backend
        self.shape, self.size = x.shape, x.size
        self._x = x
        self._residual = residual
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
        return self.backend.topk(self._x, k, self._residual, self._taken)

    def whole(self) -> Array:
        self._whole = self.backend.accumulate(self._x, self._residual)
        return self._whole

    def drop(self, entries: SparseVector) -> None:
        if self._residual is not None:
            self._dropped.append(entries)

    def rest(self, total: Array, k: int) -> SparseVector:
        dense = self.backend.as_tensor(total, self.shape)
        entries = self.backend.topk(dense, k, None)
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
            self.backend.cast_into(self._rest, residual, done)
        for entries in self._dropped[len(done) - whole :]:
            if rejects:
                self.backend.scatter_add_where(residual, entries, result, True, done)
            else:
                self.backend.scatter_add(residual, entries, done)
        selected = self._selected or self.taken
        if rejects and selected is not None and len(done) == whole + len(self._dropped):
            self.backend.scatter_add_where(residual, selected, result, False, done)

    def rollback(self) -> None:
        """Make the residual ``residual + x``, as after a failed collective: all of the gradient stays here."""
        if self._residual is None or self._rolled_back:
            return
        if self._taken:  # the residual is zero there, so adding is assigning
            self.backend.scatter_add(self._residual, self._taken[0], self._rolled_back)
        else:
            self.backend.add_into(self._x, self._residual, self._rolled_back)

    @property
    def committing(self) -> bool:
        """Whether `commit` has begun to change the residual in a way that `rollback` cannot restore."""
        return bool(self._committed)


class Accumulated(Gradient):
    """A contribution whose gradient has been added to its residual already."""

    def __init__(self, backend: Backend, residual: Tensor) -> None:
        super().__init__(backend, residual, residual)
        self._all = residual

    def topk(self, k: int) -> SparseVector:
        entries = self.backend.topk(self._all, k, None, self._taken)
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
            self.backend.scatter_add(residual, entries, self._rolled_back)
