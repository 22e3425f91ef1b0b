"""Segments of a dense vector, and how they travel around a ring of ranks."""

from __future__ import annotations

from itertools import pairwise

from sparsecomm.primitives.communicator import Communicator
from sparsecomm.tensors.sparse import Array

__all__ = ["gather_segments", "segments_of"]


def segments_of(array: Array, count: int) -> list[Array]:
    """Return ``count`` views of a flat array, one after another, of equal lengths but for one element."""
    boundaries = [len(array) * i // count for i in range(count + 1)]
    return [array[begin:end] for begin, end in pairwise(boundaries)]


def gather_segments(comm: Communicator, mine: Array, boundaries: list[int], round_no: int) -> list[Array]:
    """Return all ranks' segments, in order of rank: P - 1 messages to the next rank.

    Args:
        mine: this rank's segment, ``boundaries[rank]`` to ``boundaries[rank + 1]`` of a vector. It is in the result.
    """
    rank, size = comm.rank, comm.size
    dst, src = (rank + 1) % size, (rank - 1) % size
    segments = {rank: mine}
    for step in range(size - 1):
        maker = (src - step) % size
        expected = boundaries[maker + 1] - boundaries[maker]
        segments[maker] = comm.exchange_dense(segments[(rank - step) % size], dst, src, expected, round_no + step)
    return [segments[maker] for maker in range(size)]
