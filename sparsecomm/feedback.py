"""Error feedback: how a rank's gradient enters a collective, and what of it comes back.

With a residual, the gradient that enters is ``residual + x`` (error feedback; Stich et al. 2018, Alg. 1). What this
rank selects leaves the residual; what a merge rejects is put back into the residual of the one rank that owns the
rejection. Put-backs are kept until the collective is complete, so that a failed one loses nothing: every rank then
takes its own selection back and ends with ``residual + x``.
"""

from __future__ import annotations

from typing import Protocol

from sparsecomm.backends.base import Backend
from sparsecomm.tensors.interop import Tensor
from sparsecomm.tensors.sparse import Array, SparseVector

__all__ = ["Accumulated", "Contribution", "Gradient"]


class Contribution(Protocol):
    """A rank's contribution to a call, as an algorithm sees it: what it takes from the rank, and gives back."""

    shape: tuple[int, ...]

    def topk(self, k: int) -> SparseVector:
        """Take the top-k out of the gradient."""

    def whole(self) -> Array:
        """Take the whole gradient: a flat dense array in the accumulator dtype, which the caller may change."""

    def rest(self, total: Array, k: int) -> SparseVector:
        """Return the top-k of ``total``, a dense sum that this rank has made after `whole`; the rest stays here."""

    def put_back(self, entries: SparseVector) -> None:
        """Take entries back that this rank owns and that no result will hold."""


class Gradient:
    """One rank's contribution to one collective call."""

    def __init__(self, backend: Backend, x: Tensor, residual: Tensor | None) -> None:
        self.backend = backend
        self.shape, self.size = x.shape, x.size
        self._x = x
        self._residual = residual
        self._taken: SparseVector | None = None
        self._applied: SparseVector | None = None
        self._whole: Array | None = None
        self._rest: Array | None = None
        self._returned: list[SparseVector] = []

    @property
    def taken(self) -> SparseVector | None:
        """The entries that this rank has selected; None before."""
        return self._taken

    def topk(self, k: int) -> SparseVector:
        self._taken = self.backend.topk(self._x, k, self._residual)
        return self._taken

    def whole(self) -> Array:
        self._whole = self.backend.accumulate(self._x, self._residual)
        return self._whole

    def put_back(self, entries: SparseVector) -> None:
        if self._residual is not None:
            self._returned.append(entries)

    def rest(self, total: Array, k: int) -> SparseVector:
        dense = self.backend.as_tensor(total, self.shape)
        entries = self.backend.topk(dense, k, None)
        self.backend.clear(dense, entries)
        self._rest = total
        return entries

    def held(self, entries: SparseVector) -> Array:
        """Return the values of this rank's gradient where ``entries`` are, in the accumulator dtype."""
        values = self.backend.gather(self._x if self._residual is None else self._residual, entries)
        if self._residual is not None and self._taken is not None:
            self.backend.overlay(values, entries, self._taken)
        return values

    def applied(self, entries: SparseVector) -> None:
        """Note that the result holds all of this rank's gradient where ``entries`` are, and nothing of it elsewhere."""
        self._applied = entries

    def commit(self) -> None:
        """Update the residual, now that the collective is complete."""
        if self._residual is None:
            return
        if self._applied is not None:
            self.rollback()
            self.backend.clear(self._residual, self._applied)
            return
        if self._whole is not None:
            self.backend.cast_into(self._rest, self._residual)
        for entries in self._returned:
            self.backend.scatter_add(self._residual, entries)

    def rollback(self) -> None:
        """Make the residual ``residual + x``, as after a failed collective: all of the gradient stays here."""
        if self._residual is None:
            return
        if self._taken is not None:  # the residual is zero there, so adding is assigning
            self.backend.scatter_add(self._residual, self._taken)
        else:
            self.backend.add_into(self._x, self._residual)


class Accumulated(Gradient):
    """A contribution whose gradient has been added to its residual already."""

    def __init__(self, backend: Backend, residual: Tensor) -> None:
        super().__init__(backend, residual, residual)
        self._all = residual

    def topk(self, k: int) -> SparseVector:
        entries = self.backend.topk(self._all, k, None)
        self.backend.clear(self._all, entries)
        self._taken = entries
        return entries

    def whole(self) -> Array:
        self._whole = self.backend.accumulate(self._all, None)
        return self._whole

    def rollback(self) -> None:
        if self._taken is not None:
            self.backend.scatter_add(self._all, self._taken)
