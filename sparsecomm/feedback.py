"""The put-back arithmetic: how a rank's gradient enters a collective, and what of it comes back.

With a residual, the gradient that enters is ``residual + x`` (error feedback; Stich et al. 2018, Alg. 1). What this
rank selects leaves the residual; what a merge rejects is put back into the residual of the one rank that owns the
rejection. Put-backs are kept until the collective is complete, so that a failed one loses nothing: every rank then
takes its own selection back and ends with ``residual + x``.
"""

from __future__ import annotations

from sparsecomm.interop import Tensor
from sparsecomm.ops.base import Ops
from sparsecomm.sparse import Array, SparseVector

__all__ = ["Gradient"]


class Gradient:
    """One rank's contribution to one collective call."""

    def __init__(self, ops: Ops, x: Tensor, residual: Tensor | None) -> None:
        self.ops = ops
        self.shape = x.shape
        self._x = x
        self._residual = residual
        self._taken: SparseVector | None = None
        self._whole: Array | None = None
        self._returned: list[SparseVector] = []

    def topk(self, k: int) -> SparseVector:
        """Take the top-k out of the gradient."""
        self._taken = self.ops.topk(self._x, k, self._residual)
        return self._taken

    def whole(self) -> Array:
        """Take the whole gradient, as a flat dense array of the caller's own, in the type in which sums are carried."""
        self._whole = self.ops.accumulate(self._x, self._residual)
        return self._whole

    def put_back(self, entries: SparseVector) -> None:
        """Entries that this rank owns and that no result will hold."""
        if self._residual is not None:
            self._returned.append(entries)

    def commit(self) -> None:
        """The collective is complete: update the residual."""
        if self._residual is None:
            return
        if self._whole is not None:
            self.ops.store(None, self._residual)
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
