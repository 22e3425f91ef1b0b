"""Sums, or with ``op="mean_of_contributors"`` means over the ranks that contributed to each entry.

A rank contributes to an entry if it sends one at that index. Contributors can be counted only while the entries of all
ranks are separate, because messages contain no counts.
"""

from __future__ import annotations

from sparsecomm.primitives.communicator import Communicator, Drops
from sparsecomm.tensors.sparse import SparseVector

__all__ = ["averaged", "averaged_and_quantized", "sums_of"]


def averaged(comm: Communicator, vectors: list[SparseVector]) -> SparseVector:
    """Return the sum of ``vectors``, each of one rank; divided by the counts if the call asks for means."""
    sums, counts = sums_of(comm, vectors)
    return sums if counts is None else comm.backend.means(sums, counts.values)


def sums_of(comm: Communicator, vectors: list[SparseVector]) -> tuple[SparseVector, SparseVector | None]:
    """Return the sum of ``vectors``, and the number of contributors of each entry if the call asks for means."""
    if comm.averages:
        return comm.backend.sum_and_count(vectors)
    return comm.backend.sum_in_pairs(vectors), None


def averaged_and_quantized(
    comm: Communicator, gradient: Drops, sums: SparseVector, counts: SparseVector | None
) -> SparseVector:
    """Return sums, divided if the call asks for means, as other ranks receive them.

    Args:
        comm: the ranks.
        gradient: records rounding errors.
        sums: some of the sums that `sums_of` returned.
        counts: the counts that it returned.
    """
    if counts is None:
        return comm.quantized(sums, gradient)
    return comm.quantized_means(sums, comm.backend.values_at(counts, sums), gradient)
