"""What several algorithms do with all ranks: gather what each has, and add up numbers.

Round numbers: each takes the rounds from ``round`` on; `ROUNDS` are enough for any number of ranks. Costs beside them.
"""

from __future__ import annotations

from sparsecomm.primitives.communicator import Communicator
from sparsecomm.primitives.costs import Costs, Link, Problem, log2_ceil
from sparsecomm.tensors.sparse import SparseVector

__all__ = [
    "ROUNDS",
    "broadcast_words",
    "gather",
    "gather_seconds",
    "gather_words",
    "rounds_of",
    "sum_in_pairs",
    "sum_words",
]

ROUNDS = 64


def gather(comm: Communicator, mine: SparseVector, round_no: int, makers: int | None = None) -> list[SparseVector]:
    """The vectors of all ranks, or of the first ``makers``, by rank (Bruck et al., IEEE TPDS 1997, Section 3).

    ceil(log2 P) messages; all the vectors but its own reach every rank once.

        rank       0      1      2      3      4      5      6
        at first   0      1      2      3      4      5      6
        round 0    01     12     23     34     45     56     60      from rank + 1
        round 1    0123   1234   2345   3456   4560   5601   6012    from rank + 2
        round 2    all: the three vectors missing, from rank + 4
    """
    rank, size = comm.rank, comm.size
    makers = size if makers is None else makers

    def run(first: int, count: int) -> list[int]:
        return [m % size for m in range(first, first + count) if m % size < makers]

    held = dict.fromkeys(run(rank, 1), mine)
    for j in range(log2_ceil(size)):
        step = 1 << j
        new = min(step, size - step)
        out, theirs = [held[m] for m in run(rank, new)], run(rank + step, new)
        received = comm.exchange_lists(out, (rank - step) % size, len(theirs), (rank + step) % size, round_no + j)
        held.update(zip(theirs, received, strict=True))
    return [held[maker] for maker in range(makers)]


def gather_seconds(problem: Problem, costs: Costs, entries: float, makers: int | None = None) -> float:
    """Of `gather`, for so many entries in all, each maker's an equal part.

    Where not all ranks are makers, those that have everything soon send it more often.
    """
    P = problem.P
    makers = P if makers is None else makers
    more = 1.0 if makers == P else (1 + log2_ceil(-(-P // makers))) * P / (P - 1)
    nbytes = more * entries * problem.entry_bytes + 16 * makers
    moved = 0.0
    for j, link in enumerate(rounds_of(problem, costs)):
        moved += link.alpha + min(1 << j, P - (1 << j)) / P * nbytes * link.beta
    return moved


def rounds_of(problem: Problem, costs: Costs) -> list[Link]:
    """What each round goes over: to the rank 2^j away, which up to 2^j ranks of a machine have on another one."""
    return [problem.link(costs, sharing=min(1 << j, problem.per_node)) for j in range(log2_ceil(problem.P))]


def gather_words(comm: Communicator, words: list[int], round_no: int) -> list[list[int]]:
    """The words of all ranks, by rank; all have equally many. As `gather`."""
    rank, size, count = comm.rank, comm.size, len(words)
    held = list(words)
    for j in range(log2_ceil(size)):
        step = 1 << j
        new = min(step, size - step) * count
        held += comm.exchange_words(held[:new], (rank - step) % size, (rank + step) % size, new, round_no + j)
    by_rank = [held[i * count : (i + 1) * count] for i in range(size)]
    return by_rank[size - rank :] + by_rank[: size - rank]


def broadcast_words(comm: Communicator, words: list[int], round_no: int) -> list[int]:
    """The words of rank 0: a binomial tree. In round j each rank below 2^j sends them to the rank 2^j above it."""
    rank, size = comm.rank, comm.size
    for j in range(log2_ceil(size)):
        step = 1 << j
        if rank < step and rank + step < size:
            comm.send_words(words, rank + step, round_no + j)
        elif step <= rank < 2 * step:
            words = comm.receive_words(rank - step, len(words), round_no + j)
    return words


def sum_words(comm: Communicator, words: list[int], round_no: int) -> list[int]:
    """The sums of everyone's words, place by place: recursive doubling, after a fold as in `butterfly`."""
    rank, size, count = comm.rank, comm.size, len(words)
    rounds = size.bit_length() - 1
    folded = size - (1 << rounds)
    if rank < 2 * folded and rank % 2 == 0:
        comm.send_words(words, rank + 1, round_no)
        return comm.receive_words(rank + 1, count, round_no + rounds + 1)
    if rank < 2 * folded:
        words = _added(words, comm.receive_words(rank - 1, count, round_no))
    place = rank // 2 if rank < 2 * folded else rank - folded
    for j in range(rounds):
        other = place ^ (1 << j)
        peer = 2 * other + 1 if other < folded else other + folded
        words = _added(words, comm.exchange_words(words, peer, peer, count, round_no + 1 + j))
    if rank < 2 * folded:
        comm.send_words(words, rank - 1, round_no + rounds + 1)
    return words


def _added(a: list[int], b: list[int]) -> list[int]:
    return [x + y for x, y in zip(a, b, strict=True)]


def sum_in_pairs(comm: Communicator, vectors: list[SparseVector]) -> SparseVector:
    """The sum of vectors, neighbours first: the order decides how sums are rounded, so it is the same everywhere."""
    while len(vectors) > 1:
        pairs = [comm.backend.merge(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=False)]
        vectors = pairs + vectors[len(vectors) // 2 * 2 :]
    return vectors[0]
