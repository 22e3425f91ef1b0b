"""The check of results: against the oracle, or where values are rounded, against what went in."""

from __future__ import annotations

import zlib

import numpy as np

from sparsecomm.cli.oracles import Vector
from sparsecomm.cli.world import World

__all__ = ["Check"]


class Check:
    """Counts wrong elements in the calls of one contender, which all give and leave the same. Collective."""

    def __init__(
        self,
        comm: World,
        given: Vector,
        *,
        expected: Vector | None,
        voted: Vector | None = None,
        complete: bool = False,
        error: float | None = None,
        stride: int = 1,
    ) -> None:
        """
        Args:
            given: this rank's residual + x.
            expected: the dense result; ``None``: it is not known, and must be the same everywhere.
            voted: where the result has entries, if that is known.
            complete: whether the result holds all of the gradients where it has entries.
            error: how far ``out`` may be from ``expected``, by default the sum of what was given, as
                `Contender.error`; ``None``: to the bit.
            stride: sums over all ranks are compared at every so many elements.
        """
        self._comm, self._given, self._expected = comm, given, expected
        self._voted, self._complete, self._error = voted, complete, error
        self._at = slice(None, None, stride)
        self._left: Vector | None = None  # the residual after the first call

    def wrong(self, indices: Vector | None, values: Vector | None, out: Vector, residual: Vector | None) -> int:
        """Count wrong elements of a call on this rank: of its entries, of ``out`` and of its residual.

        Without ``indices`` and ``values`` the call gave no entries, and without ``residual`` it keeps none.
        """
        wrong = self._different(indices, values, out) if self._error is None else self._distant(out)
        if residual is None:
            return wrong
        if self._complete:
            wrong += int(np.count_nonzero(residual[indices]))
        if self._left is None:
            self._left = residual.copy()
            wrong += self._lost(out if indices is None or self._expected is None else self._expected, residual)
        return wrong + int(np.count_nonzero(residual != self._left))

    def _different(self, indices: Vector | None, values: Vector | None, out: Vector) -> int:
        """Count elements of the entries and of ``out`` that are not to the bit what is expected."""
        if self._expected is None:
            self._expected = np.zeros_like(self._given)
            there, its = self._comm.bcast((indices, values))
            self._expected[there] = its
        sparse = np.zeros_like(self._expected)
        sparse[indices] = values
        wrong = np.count_nonzero(out != self._expected.astype(out.dtype)) + np.count_nonzero(sparse != self._expected)
        if self._voted is not None and indices is not None:
            wrong += len(np.setxor1d(indices, self._voted))
        return int(wrong)

    def _distant(self, out: Vector) -> int:
        """Count elements of ``out`` that are further from what is expected than `error`, and ranks that differ."""
        assert self._error is not None
        found, expected = out, self._expected
        if expected is None:
            found, expected = out[self._at], self._summed(self._given)
        addends = sum(self._comm.allgather(float(np.abs(self._given).max())))
        bound = (4 * self._comm.Get_size() * np.finfo(out.dtype).eps + self._error) * addends
        wrong = np.count_nonzero(~(np.abs(found - expected) <= bound))
        return int(wrong) + len(set(self._comm.allgather(zlib.crc32(out.data)))) - 1

    def _lost(self, result: Vector, residual: Vector) -> int:
        """Count elements of which a part is neither in the result nor in a residual, beyond rounding. On rank 0."""
        whole, left = self._summed(self._given), self._summed(residual)
        rounding = 4 * self._comm.Get_size() * np.finfo(result.dtype).eps * np.abs(whole).max(initial=1)
        lost = int(np.count_nonzero(np.abs(left + result[self._at] - whole) > rounding))
        return lost if self._comm.Get_rank() == 0 else 0

    def _summed(self, vector: Vector) -> Vector:
        """Return the sum over all ranks in float64, at the places that are compared."""
        mine = vector[self._at].astype(np.float64)
        total = np.empty_like(mine)
        self._comm.Allreduce(mine, total)
        return total
