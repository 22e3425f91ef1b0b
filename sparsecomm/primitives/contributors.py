"""Sums as the result of a call, or means over the ranks that contributed: ``op="mean_of_contributors"``.

A rank contributes to an entry if it sends one at that index. Only who has all ranks' entries of an index side by side
can count them. Entries travel without counts, so the sum of two sums has none.
"""

from __future__ import annotations

from sparsecomm.primitives.communicator import Communicator, Drops
from sparsecomm.tensors.sparse import SparseVector

__all__ = ["averaged", "averaged_and_quantized", "sums_of"]


def averaged(comm: Communicator, vectors: list[SparseVector]) -> SparseVector:
    """Return the sums of ``vectors``, one of each rank that has any; divided, if the call asks for means."""
    sums, counted = sums_of(comm, vectors)
    return sums if counted is None else comm.backend.means(sums, counted.values)


def sums_of(comm: Communicator, vectors: list[SparseVector]) -> tuple[SparseVector, SparseVector | None]:
    """Return the sums of ``vectors``, and of how many of them each is; ``None`` unless the call asks for means."""
    if comm.averages:
        return comm.backend.sum_and_count(vectors)
    return comm.backend.sum_in_pairs(vectors), None


def averaged_and_quantized(
    comm: Communicator, gradient: Drops, sums: SparseVector, counted: SparseVector | None
) -> SparseVector:
    """Return sums, divided if the call asks for means, as the other ranks will see them.

    Args:
        comm: the ranks.
        gradient: records what rounding takes.
        sums: some of those that `sums_of` returned.
        counted: what it returned beside them.
    """
    if counted is None:
        return comm.quantized(sums, gradient)
    return comm.quantized_means(sums, comm.backend.values_at(counted, sums), gradient)
