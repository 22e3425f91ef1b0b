"""The check of results: against the oracle, or where values are rounded, against what went in."""

from __future__ import annotations

import numpy as np

from sparsecomm.cli.oracles import Vector
from sparsecomm.cli.world import World

__all__ = ["Check"]


class Check:
    """Counts wrong elements in the calls of one contender, which all give and leave the same. Collective."""

    at = slice(None)  # the elements whose sums over all ranks are compared

    def __init__(self, comm: World, given: Vector, expected: Vector | None) -> None:
        """
        Args:
            given: this rank's residual + x.
            expected: the dense result; ``None``: it is not known, and must be the same everywhere.
        """
        self.comm, self.given, self.expected = comm, given, expected
        self._left: Vector | None = None  # the residual after the first call

    def wrong(self, indices: Vector | None, values: Vector | None, out: Vector, residual: Vector | None) -> int:
        """Count wrong elements of a call on this rank: of its entries, of ``out`` and of its residual.

        Without ``indices`` and ``values`` the call gave no entries, and without ``residual`` it keeps none.
        """
        wrong = self.different(indices, values, out)
        if residual is None:
            return wrong
        if self._left is None:
            self._left = residual.copy()
            wrong += self._lost(out if indices is None or self.expected is None else self.expected, residual)
        return wrong + int(np.count_nonzero(residual != self._left))

    def different(self, indices: Vector | None, values: Vector | None, out: Vector) -> int:
        """Count elements of the entries and of ``out`` that are not to the bit what is expected."""
        if self.expected is None:
            self.expected = np.zeros_like(self.given)
            there, its = self.comm.bcast((indices, values))
            self.expected[there] = its
        sparse = np.zeros_like(self.expected)
        sparse[indices] = values
        expected = self.expected.astype(out.dtype)
        return int(np.count_nonzero(out != expected) + np.count_nonzero(sparse != self.expected))

    def _lost(self, result: Vector, residual: Vector) -> int:
        """Count elements of which a part is neither in the result nor in a residual, beyond rounding. On rank 0."""
        whole, left = self.summed(self.given), self.summed(residual)
        rounding = 4 * self.comm.Get_size() * np.finfo(result.dtype).eps * np.abs(whole).max(initial=1)
        lost = int(np.count_nonzero(np.abs(left + result[self.at] - whole) > rounding))
        return lost if self.comm.Get_rank() == 0 else 0

    def summed(self, vector: Vector) -> Vector:
        """Return the sum over all ranks in float64, at the places that are compared."""
        mine = vector[self.at].astype(np.float64)
        total = np.empty_like(mine)
        self.comm.Allreduce(mine, total)
        return total
