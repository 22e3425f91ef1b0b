"""Sums as the result of a call, or means over the ranks that contributed: ``op="mean_of_contributors"``.

A rank contributes to an entry if it sends one at that index. Only who has all ranks' entries of an index side by side
can count them. Entries travel without counts, so the sum of two sums has none.
"""

from __future__ import annotations

from sparsecomm.feedback import Contribution
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.tensors.sparse import SparseVector

__all__ = ["averaged", "averaged_and_quantized"]


def averaged(comm: Communicator, sums: SparseVector, vectors: list[SparseVector]) -> SparseVector:
    """Return sums of ``vectors``, one of each rank that has any; divided, if the call asks for means."""
    if not comm.averages:
        return sums
    return comm.backend.with_values(sums, sums.values / comm.backend.contributors(sums, vectors))


def averaged_and_quantized(
    comm: Communicator, gradient: Contribution, sums: SparseVector, vectors: list[SparseVector]
) -> SparseVector:
    """Return what `averaged` does, as the other ranks will see it; ``gradient`` records what rounding takes."""
    if not comm.averages:
        return comm.quantized(sums, gradient)
    return comm.quantized_means(sums, comm.backend.contributors(sums, vectors), gradient)
