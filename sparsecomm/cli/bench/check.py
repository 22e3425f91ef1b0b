"""Whether results are right: against the oracle, or where values are rounded, against what went in."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sparsecomm.cli.oracles import Vector

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Check"]


class Check:
    """Counts wrong elements in the calls of one row, which all give and leave the same. Collective."""

    def __init__(
        self, comm: MPI.Intracomm, given: Vector, *, expected: Vector | None, voted: Vector | None, complete: bool
    ) -> None:
        """
        Args:
            given: this rank's residual + x.
            expected: the dense result; ``None``: it is not known, and must be the same everywhere.
            voted: where the result has entries, if that is known.
            complete: whether the result holds all of the gradients where it has entries.
        """
        self._comm, self._given, self._expected = comm, given, expected
        self._voted, self._complete = voted, complete
        self._left: Vector | None = None  # the residual after the first call

    def wrong(self, indices: Vector, values: Vector, out: Vector, residual: Vector) -> int:
        """Wrong elements of a call on this rank: of its entries, of ``out`` and of its residual."""
        if self._expected is None:
            self._expected = np.zeros_like(self._given)
            there, its = self._comm.bcast((indices, values))
            self._expected[there] = its
        wrong = int(np.count_nonzero(out != self._expected.astype(out.dtype)))
        sparse = np.zeros_like(self._expected)
        sparse[indices] = values
        wrong += int(np.count_nonzero(sparse != self._expected))
        if self._voted is not None:
            wrong += len(np.setxor1d(indices, self._voted))
        if self._complete:
            wrong += int(np.count_nonzero(residual[indices]))
        if self._left is None:
            self._left = residual.copy()
            wrong += self._lost(self._expected, residual)
        return wrong + int(np.count_nonzero(residual != self._left))

    def _lost(self, result: Vector, residual: Vector) -> int:
        """Elements of which a part is neither in the result nor in a residual, beyond what sums round. On rank 0."""
        whole, left = np.empty(result.size), np.empty(result.size)
        self._comm.Allreduce(self._given.astype(np.float64), whole)
        self._comm.Allreduce(residual.astype(np.float64), left)
        rounding = 4 * self._comm.Get_size() * np.finfo(result.dtype).eps * np.abs(whole).max(initial=1)
        lost = int(np.count_nonzero(np.abs(left + result - whole) > rounding))
        return lost if self._comm.Get_rank() == 0 else 0
