"""The put-back arithmetic: how a rank's gradient enters a collective, and what of it comes back.

With a residual, the gradient that enters is ``residual + x`` (error feedback; Stich et al. 2018, Alg. 1). What this
rank selects leaves the residual; what a merge rejects is put back into the residual of the one rank that owns the
rejection. Put-backs are kept until the collective is complete, so that a failed one loses nothing: every rank then
takes its own selection back and ends with ``residual + x``.
"""

from __future__ import annotations

from typing import Protocol

from sparsecomm.interop import Tensor
from sparsecomm.ops.base import Ops
from sparsecomm.sparse import Array, SparseVector

__all__ = ["Accumulated", "Contribution", "Gradient"]


class Contribution(Protocol):
    """What an algorithm takes from a rank, and gives back."""

    shape: tuple[int, ...]

    def topk(self, k: int) -> SparseVector:
        """Take the top-k out of the gradient."""

    def whole(self) -> Array:
        """Take the whole gradient, as a flat dense array of the caller's own, in the type in which sums are carried."""

    def rest(self, total: Array, k: int) -> SparseVector:
        """After `whole`: the top-k of a dense sum that this rank has made. What is left of it stays here."""

    def put_back(self, entries: SparseVector) -> None:
        """Entries that this rank owns and that no result will hold."""


class Gradient:
    """One rank's contribution to one collective call."""

    def __init__(self, ops: Ops, x: Tensor, residual: Tensor | None) -> None:
        self.ops = ops
        self.shape = x.shape
        self._x = x
        self._residual = residual
        self._taken: SparseVector | None = None
        self._applied: SparseVector | None = None
        self._whole: Array | None = None
        self._rest: Array | None = None
        self._returned: list[SparseVector] = []

    @property
    def taken(self) -> SparseVector | None:
        """What this rank has selected, once it has."""
        return self._taken

    def topk(self, k: int) -> SparseVector:
        self._taken = self.ops.topk(self._x, k, self._residual)
        return self._taken

    def whole(self) -> Array:
        self._whole = self.ops.accumulate(self._x, self._residual)
        return self._whole

    def put_back(self, entries: SparseVector) -> None:
        if self._residual is not None:
            self._returned.append(entries)

    def rest(self, total: Array, k: int) -> SparseVector:
        dense = self.ops.flat(total, self.shape)
        entries = self.ops.topk(dense, k, None)
        self.ops.clear(dense, entries)
        self._rest = total
        return entries

    def held(self, entries: SparseVector) -> Array:
        """What this rank's gradient has where ``entries`` are, in the type in which sums are carried."""
        values = self.ops.gather(self._x if self._residual is None else self._residual, entries)
        if self._residual is not None and self._taken is not None:
            self.ops.overlay(values, entries, self._taken)
        return values

    def applied(self, entries: SparseVector) -> None:
        """The result holds all of this rank's gradient where ``entries`` are, and nothing of it elsewhere."""
        self._applied = entries

    def commit(self) -> None:
        """The collective is complete: update the residual."""
        if self._residual is None:
            return
        if self._applied is not None:
            self.rollback()
            self.ops.clear(self._residual, self._applied)
            return
        if self._whole is not None:
            self.ops.store(self._rest, self._residual)
        for entries in self._returned:
            self.ops.scatter_add(self._residual, entries)

    def rollback(self) -> None:
        """The collective has failed here, so all of this rank's gradient stays here: ``residual + x``."""
        if self._residual is None:
            return
        if self._taken is not None:  # its places hold zero, so adding is assigning
            self.ops.scatter_add(self._residual, self._taken)
        else:
            self.ops.absorb(self._x, self._residual)


class Accumulated(Gradient):
    """A contribution whose gradient has been added to its residual already."""

    def __init__(self, ops: Ops, residual: Tensor) -> None:
        super().__init__(ops, residual, residual)
        self._all = residual

    def topk(self, k: int) -> SparseVector:
        entries = self.ops.topk(self._all, k, None)
        self.ops.clear(self._all, entries)
        self._taken = entries
        return entries

    def whole(self) -> Array:
        self._whole = self.ops.accumulate(self._all, None)
        return self._whole

    def rollback(self) -> None:
        if self._taken is not None:
            self.ops.scatter_add(self._all, self._taken)
