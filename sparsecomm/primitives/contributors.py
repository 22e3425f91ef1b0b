"""Sums as the result of a call, or means over the ranks that contributed: ``op="mean_of_contributors"``.

A rank contributes to an entry if it sends one at that index. Only who has all ranks' entries of an index side by side
can count them. Entries travel without counts, so the sum of two sums has none.
"""

from __future__ import annotations

from sparsecomm.primitives.communicator import Communicator, Drops
from sparsecomm.primitives.gather import sum_in_pairs
from sparsecomm.tensors.sparse import SparseVector

__all__ = ["averaged", "averaged_and_quantized", "contributors"]


def averaged(comm: Communicator, sums: SparseVector, vectors: list[SparseVector]) -> SparseVector:
    """Return sums of ``vectors``, one of each rank that has any; divided, if the call asks for means."""
    counted = contributors(comm, vectors)
    if counted is None:
        return sums
    return comm.backend.with_values(sums, sums.values / comm.backend.values_at(counted, sums))


def contributors(comm: Communicator, vectors: list[SparseVector]) -> SparseVector | None:
    """Return how many of the vectors have an entry at each index; ``None`` unless the call asks for means.

    Merging ones takes as long as merging the vectors, and a search for every index many times as long.
    """
    if not comm.averages:
        return None
    return sum_in_pairs(comm, [comm.backend.ones_like(vector) for vector in vectors])


def averaged_and_quantized(
    comm: Communicator, gradient: Drops, sums: SparseVector, counted: SparseVector | None
) -> SparseVector:
    """Return sums, divided if the call asks for means, as the other ranks will see them.

    Args:
        comm: the ranks.
        gradient: records what rounding takes.
        sums: of vectors.
        counted: the `contributors` of these.
    """
    if counted is None:
        return comm.quantized(sums, gradient)
    return comm.quantized_means(sums, comm.backend.values_at(counted, sums), gradient)
