"""`Check`: counts wrong elements in results."""

from __future__ import annotations

import numpy as np

from sparsecomm.testing.oracles import Vector
from sparsecomm.tools.world import World


class Check:
    """Counts wrong elements in the calls of an algorithm, or of another library. Collective.

    If the result is known, all calls must have this result and leave the same residual. If values are rounded, each
    call is checked by itself, because rounding may depend on earlier calls.
    """

    at = slice(None)  # elements at which `lost` compares sums over all ranks; all by default

    def __init__(self, comm: World, accumulated: Vector, expected: Vector | None) -> None:
        """``accumulated`` is this rank's residual + x, ``expected`` the dense result or, if unknown, ``None``."""
        self.comm, self.accumulated, self.expected, self._known = comm, accumulated, expected, expected is not None
        self._first_residual: Vector | None = None  # the residual after the first call

    def wrong(self, indices: Vector, values: Vector, out: Vector, residual: Vector) -> int:
        """Count the wrong elements of a call on this rank: of its entries, of ``out`` and of its residual."""
        if not self._known:
            self.expected = self._first_residual = None
        wrong = self.different(indices, values, out)
        if self._first_residual is None:
            self._first_residual = residual.copy()
            wrong += self.lost(out, residual)
        return wrong + int(np.count_nonzero(residual != self._first_residual))

    def different(self, indices: Vector | None, values: Vector | None, out: Vector) -> int:
        """Count elements of the entries and of ``out`` that differ in any bit from the expected result."""
        if self.expected is None:
            self.expected = np.zeros_like(self.accumulated)
            first_indices, first_values = self.comm.bcast((indices, values))
            self.expected[first_indices] = first_values
        sparse = np.zeros_like(self.expected)
        sparse[indices] = values
        expected = self.expected.astype(out.dtype)
        return int(np.count_nonzero(out != expected) + np.count_nonzero(sparse != self.expected))

    def lost(self, out: Vector, residual: Vector) -> int:
        """Count elements at which result + residuals differ from the sum of the inputs by more than rounding.

        Return the number on rank 0, and 0 on other ranks.
        """
        result = out if self.expected is None else self.expected
        total, residuals = self.summed(self.accumulated), self.summed(residual)
        rounding = 4 * self.comm.Get_size() * np.finfo(result.dtype).eps * np.abs(total).max(initial=1)
        lost = int(np.count_nonzero(np.abs(residuals + result[self.at] - total) > rounding))
        return lost if self.comm.Get_rank() == 0 else 0

    def summed(self, vector: Vector) -> Vector:
        """Return the sum over all ranks in float64, at the elements ``at``."""
        own = vector[self.at].astype(np.float64)
        total = np.empty_like(own)
        self.comm.Allreduce(own, total)
        return total
