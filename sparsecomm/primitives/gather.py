"""Gathers that several algorithms share.

Where delays are long, each rank sends what it has to all others at once, in one trip; otherwise ranks hand on what they
have heard, in log2 P steps. `Costs.at_once` decides, the same on all ranks.

Each takes the round numbers from ``round_no`` on; `ROUNDS` are enough for any number of ranks. Predicted times stand
beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from sparsecomm.primitives.communicator import Communicator, Parcel, Range
from sparsecomm.primitives.costs import Costs, Problem, log2_ceil
from sparsecomm.tensors.sparse import SparseVector

__all__ = ["ROUNDS", "broadcast_words", "exchange_with_all", "gather", "gather_time", "gather_words"]

ROUNDS = 64

T = TypeVar("T")

# Sends items to ``dst`` while it receives those of makers from ``src``: exchange(items, dst, makers, src, round_no).
Exchange = Callable[[list[T], int, list[int], int, int], list[T]]


def gather(
    comm: Communicator, mine: SparseVector, round_no: int, ranges: Sequence[Range] | None = None
) -> list[SparseVector]:
    """Return the vectors of all ranks, in order of rank.

    ``ranges``: of indices, for each of the first ranks, whose vectors alone are gathered.
    """
    num_makers = comm.size if ranges is None else len(ranges)
    if comm.reaches_all_at_once:
        found = exchange_with_all(comm, ((mine,), ()), 1, round_no, mine.nnz, num_makers, ranges=ranges)
        return [vector for vectors, _ in found for vector in vectors]
    within = [(0, comm.num_elements)] * num_makers if ranges is None else ranges

    def exchange(items: list[SparseVector], dst: int, makers: list[int], src: int, step: int) -> list[SparseVector]:
        return comm.exchange_lists(items, dst, [within[maker] for maker in makers], src, step)

    return _bruck(comm, mine, exchange, round_no, num_makers)


def gather_words(comm: Communicator, words: list[int], round_no: int) -> list[list[int]]:
    """Return the words of all ranks, in order of rank. All ranks give equally many words."""
    length = len(words)
    if comm.reaches_all_at_once:
        everyones = [list(found) for _, found in exchange_with_all(comm, ((), words), 0, round_no)]
        for rank, found in enumerate(everyones):
            if len(found) != length:
                raise comm.broken(rank, f"{len(found)} numbers instead of {length}")
        return everyones

    def exchange(items: list[list[int]], dst: int, makers: list[int], src: int, round_no: int) -> list[list[int]]:
        sent = [word for item in items for word in item]
        received = comm.exchange_words(sent, dst, src, len(makers) * length, round_no)
        return [received[i * length : (i + 1) * length] for i in range(len(makers))]

    return _bruck(comm, words, exchange, round_no)


def exchange_with_all(
    comm: Communicator,
    mine: Parcel,
    num_vectors: int,
    round_no: int,
    count: int = 0,
    num_makers: int | None = None,
    *,
    or_none: bool = False,
    ranges: Sequence[Range] | None = None,
) -> list[Parcel]:
    """Return the parcels of all ranks, or of the first ``num_makers``, in order of rank: in one trip.

    The arguments are those of `Communicator.exchange_parcels`. Who is no maker sends nothing. ``ranges``: for each
    maker, the range in which the indices of its vectors must lie.
    """
    makers = range(comm.size if num_makers is None else num_makers)
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    sends = dict.fromkeys(others, mine) if comm.rank in makers else {}
    sources = [maker for maker in makers if maker != comm.rank]
    range_of = None if ranges is None else lambda maker, words: ranges[maker]
    found = comm.exchange_parcels(sends, sources, num_vectors, round_no, count, or_none=or_none, range_of=range_of)
    found[comm.rank] = mine
    return [found[maker] for maker in makers]


def _bruck(comm: Communicator, mine: T, exchange: Exchange[T], round_no: int, num_makers: int | None = None) -> list[T]:
    """Return the items of all ranks, or of the first ``num_makers`` (Bruck et al., IEEE TPDS 1997, Section 3).

    ceil(log2 P) messages; all the items but its own reach every rank once.

        rank       0      1      2      3      4      5      6
        at first   0      1      2      3      4      5      6
        step 0     01     12     23     34     45     56     60      from rank + 1
        step 1     0123   1234   2345   3456   4560   5601   6012    from rank + 2
        step 2     all: the three items missing, from rank + 4
    """
    rank, size = comm.rank, comm.size
    num_makers = size if num_makers is None else num_makers

    def makers(first: int, count: int) -> list[int]:
        return [maker % size for maker in range(first, first + count) if maker % size < num_makers]

    held = dict.fromkeys(makers(rank, 1), mine)
    for step in range(log2_ceil(size)):
        distance = 1 << step
        new = min(distance, size - distance)
        sent, expected = [held[maker] for maker in makers(rank, new)], makers(rank + distance, new)
        dst, src = (rank - distance) % size, (rank + distance) % size
        received = exchange(sent, dst, expected, src, round_no + step)
        held.update(zip(expected, received, strict=True))
    return [held[maker] for maker in range(num_makers)]


def gather_time(problem: Problem, costs: Costs, entries: float, num_makers: int | None = None) -> float:
    """Return the predicted seconds of `gather`, for ``entries`` in all, an equal part from each maker.

    Where not all ranks are makers, those that have everything soon send it more often.
    """
    P = problem.P
    num_makers = P if num_makers is None else num_makers
    if costs.at_once(P, problem.P if problem.num_nodes is None else problem.num_nodes):
        sent = (P - 1) / num_makers  # of all, by a maker; whoever is none receives all
        nbytes = max(sent, 1 - 1 / num_makers if num_makers == P else 1) * entries * problem.entry_bytes
        return problem.link(costs).trip(P - 1, nbytes + 24 * (P - 1))
    repeats = 1.0 if num_makers == P else (1 + log2_ceil(-(-P // num_makers))) * P / (P - 1)
    nbytes = repeats * entries * problem.entry_bytes + 16 * num_makers
    seconds = 0.0
    for step in range(log2_ceil(P)):  # to the rank 2^step away, which up to 2^step ranks of a node share
        link = problem.link(costs, sharing=min(1 << step, problem.per_node))
        seconds += link.alpha + min(1 << step, P - (1 << step)) / P * nbytes * link.beta
    return seconds


def broadcast_words(comm: Communicator, words: list[int], round_no: int) -> list[int]:
    """Return the words of rank 0: from it to all, or along a binomial tree, in whose step j each rank below 2^j sends
    to the rank 2^j above it.
    """
    rank, size = comm.rank, comm.size
    if comm.reaches_all_at_once:
        (_, found), *_ = exchange_with_all(comm, ((), words), 0, round_no, num_makers=1)
        if len(found) != len(words):
            raise comm.broken(0, f"{len(found)} numbers instead of {len(words)}")
        return list(found)
    for step in range(log2_ceil(size)):
        distance = 1 << step
        if rank < distance and rank + distance < size:
            comm.send_words(words, rank + distance, round_no + step)
        elif distance <= rank < 2 * distance:
            words = comm.receive_words(rank - distance, len(words), round_no + step)
    return words
