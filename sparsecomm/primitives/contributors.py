"""Sums as the result of a call, or means over the ranks that contributed: ``op="mean_of_contributors"``.

A rank contributes to an entry if it sends one at that index. Only who has all ranks' entries of an index side by side
can count them. Entries travel without counts, so the sum of two sums has none.
"""

from __future__ import annotations

from sparsecomm.contribution import Contribution
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.primitives.gather import sum_in_pairs
from sparsecomm.tensors.arrays import Array
from sparsecomm.tensors.sparse import SparseVector

__all__ = ["averaged", "averaged_and_quantized"]


def averaged(comm: Communicator, sums: SparseVector, vectors: list[SparseVector]) -> SparseVector:
    """Return sums of ``vectors``, one of each rank that has any; divided, if the call asks for means."""
    if not comm.averages:
        return sums
    return comm.backend.with_values(sums, sums.values / _counts(comm, sums, vectors))


def averaged_and_quantized(
    comm: Communicator, gradient: Contribution, sums: SparseVector, vectors: list[SparseVector]
) -> SparseVector:
    """Return what `averaged` does, as the other ranks will see it; ``gradient`` records what rounding takes."""
    if not comm.averages:
        return comm.quantized(sums, gradient)
    return comm.quantized_means(sums, _counts(comm, sums, vectors), gradient)


def _counts(comm: Communicator, sums: SparseVector, vectors: list[SparseVector]) -> Array:
    """Return how many of the vectors have an entry where each sum is, shape ``(nnz,)``.

    Merging ones takes as long as merging the vectors, and a search for every index many times as long.
    """
    ones = [comm.backend.ones_like(vector) for vector in vectors]
    return comm.backend.values_at(sum_in_pairs(comm, ones), sums)
