"""Gathers, broadcasts and sums that several algorithms share.

Each takes the round numbers from ``round_no`` on; `ROUNDS` are enough for any number of ranks. Predicted times stand
beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from sparsecomm.primitives.communicator import Communicator
from sparsecomm.primitives.costs import Costs, Link, Problem, log2_ceil
from sparsecomm.tensors.sparse import SparseVector

__all__ = [
    "ROUNDS",
    "broadcast_words",
    "gather",
    "gather_time",
    "gather_words",
    "links_by_step",
    "sum_in_pairs",
    "sum_words",
]

ROUNDS = 64

T = TypeVar("T")

# Sends items to ``dst`` while it receives ``count`` from ``src``: exchange(items, dst, count, src, round_no).
Exchange = Callable[[list[T], int, int, int, int], list[T]]


def gather(comm: Communicator, mine: SparseVector, round_no: int, num_makers: int | None = None) -> list[SparseVector]:
    """Return the vectors of all ranks, or of the first ``num_makers``, in order of rank."""
    return _bruck(comm, mine, comm.exchange_lists, round_no, num_makers)


def gather_words(comm: Communicator, words: list[int], round_no: int) -> list[list[int]]:
    """Return the words of all ranks, in order of rank. All ranks give equally many words."""
    length = len(words)

    def exchange(items: list[list[int]], dst: int, count: int, src: int, round_no: int) -> list[list[int]]:
        sent = [word for item in items for word in item]
        received = comm.exchange_words(sent, dst, src, count * length, round_no)
        return [received[i * length : (i + 1) * length] for i in range(count)]

    return _bruck(comm, words, exchange, round_no)


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
        received = exchange(sent, dst, len(expected), src, round_no + step)
        held.update(zip(expected, received, strict=True))
    return [held[maker] for maker in range(num_makers)]


def gather_time(problem: Problem, costs: Costs, entries: float, num_makers: int | None = None) -> float:
    """Return the predicted seconds of `gather`, for ``entries`` in all, an equal part from each maker.

    Where not all ranks are makers, those that have everything soon send it more often.
    """
    P = problem.P
    num_makers = P if num_makers is None else num_makers
    repeats = 1.0 if num_makers == P else (1 + log2_ceil(-(-P // num_makers))) * P / (P - 1)
    nbytes = repeats * entries * problem.entry_bytes + 16 * num_makers
    links = enumerate(links_by_step(problem, costs))
    return sum(link.alpha + min(1 << step, P - (1 << step)) / P * nbytes * link.beta for step, link in links)


def links_by_step(problem: Problem, costs: Costs) -> list[Link]:
    """Return the link of each step of `gather`: to the rank 2^step away, which up to 2^step ranks of a node share."""
    return [problem.link(costs, sharing=min(1 << step, problem.per_node)) for step in range(log2_ceil(problem.P))]


def broadcast_words(comm: Communicator, words: list[int], round_no: int) -> list[int]:
    """Return the words of rank 0 (a binomial tree: in step j each rank below 2^j sends to the rank 2^j above it)."""
    rank, size = comm.rank, comm.size
    for step in range(log2_ceil(size)):
        distance = 1 << step
        if rank < distance and rank + distance < size:
            comm.send_words(words, rank + distance, round_no + step)
        elif distance <= rank < 2 * distance:
            words = comm.receive_words(rank - distance, len(words), round_no + step)
    return words


def sum_words(comm: Communicator, words: list[int], round_no: int) -> list[int]:
    """Return the sums of all ranks' words, word by word: recursive doubling, after a fold."""
    fold, length = comm.fold, len(words)
    unfold = round_no + fold.steps + 1
    if fold.hands_over:
        comm.send_words(words, fold.partner, round_no)
        return comm.receive_words(fold.partner, length, unfold)
    if fold.partner >= 0:
        words = _added(words, comm.receive_words(fold.partner, length, round_no))
    for step, peer in enumerate(fold.peers):
        words = _added(words, comm.exchange_words(words, peer, peer, length, round_no + 1 + step))
    if fold.partner >= 0:
        comm.send_words(words, fold.partner, unfold)
    return words


def _added(a: list[int], b: list[int]) -> list[int]:
    return [x + y for x, y in zip(a, b, strict=True)]


def sum_in_pairs(comm: Communicator, vectors: list[SparseVector]) -> SparseVector:
    """Return the sum of vectors, neighbours first: the order decides how sums are rounded, so it is fixed."""
    while len(vectors) > 1:
        pairs = [comm.backend.merge(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=False)]
        vectors = pairs + vectors[len(vectors) // 2 * 2 :]
    return vectors[0]
