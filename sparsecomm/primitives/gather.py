"""Gathers and broadcasts. Each function uses up to `ROUNDS` round numbers, beginning with ``round_no``.

If delays are long, each rank sends to all others at once, in one trip. Otherwise ranks forward received messages in
log2 P steps. `Costs.at_once` decides between the two, and decides the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

from sparsecomm.primitives.communicator import Communicator, Parcel, Range
from sparsecomm.primitives.costs import Costs, Problem, log2_ceil
from sparsecomm.tensors.sparse import SparseVector

__all__ = ["ROUNDS", "broadcast_words", "exchange_with_all", "gather", "gather_time", "gather_words"]

ROUNDS = 64


def gather(
    comm: Communicator, own: SparseVector, round_no: int, ranges: Sequence[Range] | None = None
) -> list[SparseVector]:
    """Return the vectors of all ranks, ordered by rank.

    ``ranges``: gather only the vectors of the first ``len(ranges)`` ranks, whose indices must be in these ranges.
    """
    gathered = exchange_with_all if comm.reaches_all_at_once else _bruck
    senders = None if ranges is None else len(ranges)
    parcels = gathered(comm, ((own,), ()), 1, round_no, own.nnz, senders, ranges=ranges)
    return [vector for vectors, _ in parcels for vector in vectors]


def gather_words(comm: Communicator, words: list[int], round_no: int) -> list[list[int]]:
    """Return the words of all ranks, ordered by rank. All ranks must pass the same number of words."""
    gathered = exchange_with_all if comm.reaches_all_at_once else _bruck
    parcels = gathered(comm, ((), words), 0, round_no)
    return [list(comm.checked_words(rank, theirs, len(words))) for rank, (_, theirs) in enumerate(parcels)]


def broadcast_words(comm: Communicator, words: list[int], round_no: int) -> list[int]:
    """Return the words of rank 0, which sends them to all ranks at once or along a binomial tree.

    In step j of the tree, each rank below 2^j sends to the rank 2^j above it.
    """
    rank, size = comm.rank, comm.size
    if comm.reaches_all_at_once:
        (_, found), *_ = exchange_with_all(comm, ((), words), 0, round_no, num_senders=1)
        return list(comm.checked_words(0, found, len(words)))
    for step in range(log2_ceil(size)):
        distance = 1 << step
        if rank < distance and rank + distance < size:
            comm.send_words(words, rank + distance, round_no + step)
        elif distance <= rank < 2 * distance:
            words = list(comm.receive_words(rank - distance, len(words), round_no + step))
    return words


def exchange_with_all(
    comm: Communicator,
    own: Parcel,
    num_vectors: int,
    round_no: int,
    count: int = 0,
    num_senders: int | None = None,
    *,
    or_none: bool = False,
    ranges: Sequence[Range] | None = None,
) -> list[Parcel]:
    """Return the parcels of all ranks, or of the first ``num_senders``, ordered by rank, in one trip.

    Arguments are as in `Communicator.exchange_parcels`. ``ranges``: for each sender, the range of its vectors' indices.
    """
    senders = range(comm.size if num_senders is None else num_senders)
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    sends = dict.fromkeys(others, own) if comm.rank in senders else {}
    sources = [sender for sender in senders if sender != comm.rank]
    ranges_of = None if ranges is None else lambda sender, words: [ranges[sender]] * num_vectors
    found = comm.exchange_parcels(sends, sources, num_vectors, round_no, count, or_none=or_none, ranges_of=ranges_of)
    found[comm.rank] = own
    return [found[sender] for sender in senders]


def _bruck(
    comm: Communicator,
    own: Parcel,
    num_vectors: int,
    round_no: int,
    count: int = 0,
    num_senders: int | None = None,
    *,
    ranges: Sequence[Range] | None = None,
) -> list[Parcel]:
    """Return the same as `exchange_with_all`, in log2 P steps (Bruck et al., IEEE TPDS 1997, Section 3).

    All parcels must have the same numbers of vectors and words.

        rank       0      1      2      3      4      5      6
        at first   0      1      2      3      4      5      6
        step 0     01     12     23     34     45     56     60      from rank + 1
        step 1     0123   1234   2345   3456   4560   5601   6012    from rank + 2
        step 2     all: the three parcels missing, from rank + 4
    """
    rank, size, num_words = comm.rank, comm.size, len(own[1])
    num_senders = size if num_senders is None else num_senders

    def senders(first: int, length: int) -> list[int]:
        return [sender % size for sender in range(first, first + length) if sender % size < num_senders]

    held, expected = dict.fromkeys(senders(rank, 1), own), list[int]()

    def expected_ranges(source: int, words: Sequence[int]) -> list[Range] | None:
        return None if ranges is None else [ranges[sender] for sender in expected for _ in range(num_vectors)]

    for step in range(log2_ceil(size)):
        distance = 1 << step
        length = min(distance, size - distance)
        sent, expected = [held[sender] for sender in senders(rank, length)], senders(rank + distance, length)
        parcel = [v for vectors, _ in sent for v in vectors], [word for _, words in sent for word in words]
        dst, src = (rank - distance) % size, (rank + distance) % size
        vectors, words = comm.exchange_parcels(
            {dst: parcel},
            (src,),
            num_vectors * len(expected),
            round_no + step,
            count * len(expected),
            ranges_of=expected_ranges,
        )[src]
        comm.checked_words(src, words, num_words * len(expected))
        for i, sender in enumerate(expected):
            held[sender] = (
                vectors[i * num_vectors : (i + 1) * num_vectors],
                words[i * num_words : (i + 1) * num_words],
            )
    return [held[sender] for sender in range(num_senders)]


def gather_time(problem: Problem, costs: Costs, entries: float, num_senders: int | None = None) -> float:
    """Return the predicted seconds of `gather`. ``entries`` is the total over all senders, which send equal shares.

    If only some ranks are senders, some ranks have all entries before the last step and send them more than once.
    """
    P = problem.P
    num_senders = P if num_senders is None else num_senders
    if costs.at_once(P, problem.P if problem.num_nodes is None else problem.num_nodes):
        sent = (P - 1) / num_senders  # entries that one sender sends / ``entries``
        nbytes = max(sent, 1 - 1 / num_senders if num_senders == P else 1) * entries * problem.entry_bytes
        return problem.link(costs).trip(P - 1, nbytes + 24 * (P - 1))
    repeats = 1.0 if num_senders == P else (1 + log2_ceil(-(-P // num_senders))) * P / (P - 1)
    nbytes = repeats * entries * problem.entry_bytes + 16 * num_senders
    seconds = 0.0
    for step in range(log2_ceil(P)):  # up to 2^step ranks of a node share its link in a step
        link = problem.link(costs, sharing=min(1 << step, problem.per_node))
        seconds += link.alpha + min(1 << step, P - (1 << step)) / P * nbytes * link.beta
    return seconds
