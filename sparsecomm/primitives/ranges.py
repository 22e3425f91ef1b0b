"""Ranges of indices, one per owner: `scatter` sends every entry to the rank that owns its range.

    scatter      each rank sends each owner its entries in the owner's range

This is one trip. The communicator's cache keeps the ranges from call to call, while they are balanced. Every message
contains a mark: the age and a checksum of the ranges. If marks differ, for example after a call that failed on some
ranks, all ranks notice in the same trip and start again without ranges.

In a first call, each rank also sends samples of its indices to all others. From the samples, the ranks compute ranges
with about equal numbers of entries. If k P is small, they use these from the next call, and ranges of equal length in
this one. Otherwise they exchange the samples before the scatter, in one more trip, because nearly all entries may be in
one of P ranges of equal length.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import partial
from itertools import count, pairwise
from typing import NamedTuple

from sparsecomm.backends.keys import max_key
from sparsecomm.contribution import Contribution
from sparsecomm.primitives.communicator import Communicator, Parcel, Range, num_owners
from sparsecomm.primitives.costs import Costs, Problem
from sparsecomm.tensors.sparse import SparseVector

_MAX_SAMPLES = 32  # per rank
_MAX_FIRST = 2**15  # maximum entries of all ranks, about 256 KB, for which the first call uses ranges of equal length
_CROWDED = 1.5  # make new ranges when the crowding has grown by this factor
AGE_SHIFT = 16  # lowest bit of the age in a mark; the bits below are a checksum


class Ranges(NamedTuple):
    """Ranges of indices, one per rank; ranks that own none have empty ranges."""

    boundaries: list[int]  # first index of each range, and the end of the last
    call: int  # number of the call that made them
    checksum: int  # of `boundaries`
    crowding: float = 0.0  # load of the busiest owner relative to the mean, in the first call with them; 0: unknown
    following: list[int] | None = None  # boundaries for the next call; None: keep these


class Dropped(list[SparseVector]):
    """Rounding errors of a trip, to be recorded once the trip need not be repeated."""

    record_dropped = list[SparseVector].append


def scatter(
    comm: Communicator, gradient: Contribution, own: SparseVector, k: int, number: int = 0
) -> tuple[list[SparseVector], list[int]]:
    """Send each entry to its owner. Takes one trip; one more if ranges differ, and one more if ranges are made first.

    Return the entries of all ranks in this rank's range, ordered by rank; and the key of each rank's entry at position
    ``number`` in the order of selection, or 0.
    """
    no_entries, owners = own.part(0, 0), num_owners(comm.size, k)
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    ranges = comm.cached(Ranges)
    if ranges is not None and ranges.following is not None:
        ranges = Ranges(ranges.following, ranges.call, checksum_of(ranges.following))
    for round_no in count():
        dropped, samples, expected = Dropped(), list[int](), None
        if ranges is None:
            samples = _samples(comm, own, k)
            if comm.size * k <= _MAX_FIRST:
                equal = [own.size * owner // owners for owner in range(owners)]
                boundaries = equal + [own.size] * (comm.size + 1 - owners)
                ranges = Ranges(boundaries, comm.number, checksum_of(boundaries))
        if ranges is None:
            parcels: dict[int, Parcel] = dict.fromkeys(range(comm.size), ((), (0, *samples)))
        else:
            (level,) = comm.backend.nth_keys(own, [min(number, own.nnz)]) if number and own.nnz else (0,)
            words = mark(comm.number - ranges.call, ranges.checksum), level, *samples
            own_range = ranges.boundaries[comm.rank], ranges.boundaries[comm.rank + 1]
            expected = partial(_ranges_if_equal, own_range, words[0])
            pieces = [own.part(*ends) for ends in pairwise(comm.backend.searchsorted(own, ranges.boundaries))]
            parcels = {
                rank: ((piece if rank == comm.rank else comm.round_and_record(piece, dropped),), words)
                for rank, piece in enumerate(pieces)
            }
        by_rank = comm.exchange_parcels(parcels, others, 1, round_no, 2 * k // owners, or_none=True, expected=expected)
        by_rank[comm.rank] = parcels[comm.rank]
        received = [by_rank[rank] for rank in range(comm.size)]
        marks = {mark_of(comm, rank, words) for rank, (_, words) in enumerate(received)}
        if marks == {0}:
            sampled = [comm.checked_words(rank, words, 1 + len(samples)) for rank, (_, words) in enumerate(received)]
            boundaries = _balanced([words[1:] for words in sampled], own.size, comm.size, owners)
            ranges = Ranges(boundaries, comm.number, checksum_of(boundaries))
            continue
        if ranges is None or len(marks) > 1:
            ranges = None
            continue
        levels = [comm.checked_words(rank, rank_words, len(words))[1] for rank, (_, rank_words) in enumerate(received)]
        check_keys(comm, levels.index(max(levels)), levels, own)
        if samples:
            following = _balanced([words[2:] for _, words in received], own.size, comm.size, owners)
            ranges = ranges._replace(following=following)
        comm.cache[Ranges] = ranges
        for entries in dropped:
            gradient.record_dropped(entries)
        return [vector for vectors, _ in received for vector in vectors or (no_entries,)], levels
    raise AssertionError("count has no end")


def owned_ranges(comm: Communicator, k: int) -> list[Range]:
    """Return the owners' ranges after a `scatter`."""
    ranges = comm.cached(Ranges)
    assert ranges is not None
    return list(pairwise(ranges.boundaries[: num_owners(comm.size, k) + 1]))


def rebalance(comm: Communicator, loads: Sequence[int]) -> None:
    """Discard the ranges if they have become much less balanced; ``loads``: number of entries of each owner."""
    ranges = comm.cached(Ranges)
    if ranges is not None and ranges.following is None:
        crowding = max(1.0, max(loads) * len(loads) / max(1, sum(loads)))
        if not ranges.crowding:
            comm.cache[Ranges] = ranges._replace(crowding=crowding)
        elif crowding > _CROWDED * ranges.crowding:
            comm.cache[Ranges] = None


def scatter_time(problem: Problem, costs: Costs) -> float:
    """Return the predicted seconds of a `scatter` with known ranges."""
    P, k = problem.P, problem.k
    return problem.link(costs).trip(P - 1, (P - 1) * (24 + k / num_owners(P, k) * problem.entry_bytes))


def _ranges_if_equal(own: Range, mark: int, source: int, words: Sequence[int]) -> Sequence[Range] | None:
    """Return this rank's range if another rank has the same ranges, that is, if its first word is ``mark``."""
    return [own] if words and words[0] == mark else None


def _samples(comm: Communicator, own: SparseVector, k: int) -> list[int]:
    """Return the number of this rank's entries, and evenly spaced samples of their indices, with an offset per rank."""
    nnz, number = own.nnz, min(_MAX_SAMPLES, max(4, k // (16 * comm.size)))
    chosen = [nnz * (i * comm.size + comm.rank) // (number * comm.size) for i in range(number)] if nnz else []
    return [nnz, *(comm.backend.indices_at(own, chosen) if nnz else [0] * number)]


def _balanced(samples: Sequence[Sequence[int]], n: int, size: int, owners: int) -> list[int]:
    """Return boundaries of ranges with about equal numbers of entries, from the `_samples` of all ranks."""
    weighted = sorted((index, weight) for weight, *indices in samples for index in indices)
    total, before, boundaries = sum(weight for _, weight in weighted), 0, [0]
    for index, weight in weighted:
        while len(boundaries) < owners and before * owners >= total * len(boundaries):
            boundaries.append(min(index, n))
        before += weight
    return boundaries + [n] * (size + 1 - len(boundaries))


def mark(age: int, checksum: int) -> int:
    """Return the mark of cached data that was made ``age`` calls ago: a nonzero integer."""
    return age + 1 << AGE_SHIFT | checksum


def checksum_of(numbers: list[int]) -> int:
    """Return a checksum of `AGE_SHIFT` bits."""
    return zlib.crc32(repr(numbers).encode()) & ((1 << AGE_SHIFT) - 1)


def mark_of(comm: Communicator, rank: int, words: Sequence[int]) -> int:
    """Return the mark, which is the first word of a rank's message; 0: the rank has no cached data."""
    if not words:
        raise comm.broken(rank, "no numbers")
    return words[0]


def check_keys(comm: Communicator, rank: int, keys: Sequence[int], entries: SparseVector) -> None:
    """Raise an error about ``rank`` if a key is too large for the dtype of ``entries``."""
    if keys and max(keys) > max_key(entries):
        raise comm.broken(rank, f"{max(keys)} as the key of a value")
