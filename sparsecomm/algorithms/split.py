"""The exact global top-k: every rank adds up one range of indices, and all find the k-th largest sum together.

Source: the pattern is that of Ok-Topk (Li and Hoefler, "Near-optimal sparse allreduce for distributed deep learning",
PPoPP 2022, Section 3), with exact sums, ranges from weighted samples, and the exact k-th value in place of estimates.

Cost: (P - 1 + 4 log2 P) alpha + 2 (P - 1)/P k b beta per rank, both ways; samples and counts add some percent of k b.

    ranges       7 ranges of indices, one per rank, from samples of what all have selected: each about k of k P entries
    scatter      rank r sends to rank r + 1 what it has in that rank's range, then to r + 2, ..., to r + 6
    sums         each rank adds what it received to its own
    k-th         counts of keys, added over all ranks, corner the k-th largest sum (`threshold`)
    gather       all that may win goes to everyone; everyone takes the first k

Result: at most k entries, the exact top-k of the sum of all ranks' top-k: that of `allgather`, cut to k. The same on
all ranks. Put-back: the rank that added up a range keeps what is not in the result. What rounding to a narrow format
takes stays with the rank that sends; the order is then that of the rounded sums.
"""

from __future__ import annotations

from sparsecomm.algorithms.base import Algorithm, Costs, Problem, log2_ceil
from sparsecomm.algorithms.exchange import (
    ROUNDS,
    gather,
    gather_seconds,
    gather_words,
    rounds_of,
    sum_in_pairs,
    sum_words,
)
from sparsecomm.algorithms.group import Group
from sparsecomm.feedback import Contribution
from sparsecomm.sparse import SparseVector

__all__ = ["SPLIT", "balanced", "owners", "scatter_seconds", "scatter_sum"]

_LEAST = 16  # entries that a range is worth: for fewer, fewer ranks own ranges
_SAMPLES = 32  # per rank at most
_BINS = 256  # at most, of the keys between two bounds


def owners(P: int, k: int) -> int:
    """Ranks that own a range."""
    return min(P, max(1, k // _LEAST))


def samples(P: int, k: int) -> int:
    """Indices that every rank shows of its entries."""
    return min(_SAMPLES, max(2, k // (64 * P)))


def bins(k: int) -> int:
    """Ranges in which keys are counted: a power of two."""
    return min(_BINS, max(16, 1 << (k // 4).bit_length()))


def split(group: Group, gradient: Contribution, k: int) -> SparseVector:
    mine = gradient.topk(k)
    if group.size == 1:
        return mine
    edges = balanced(group, mine, k, 0)
    sums = scatter_sum(group, gradient, mine, edges, ROUNDS)
    winners, losers = group.ops.split_at_key(sums, threshold(group, sums, k, 3 * ROUNDS))
    gradient.put_back(losers)
    winners = group.rounded(winners, gradient)
    union = group.ops.concatenated(gather(group, winners, 2 * ROUNDS, owners(group.size, k)))
    kept, rejected = group.ops.merge_topk(union, group.ops.empty_like(union), k)
    begin, end = group.ops.places(rejected, edges[group.rank : group.rank + 2])
    gradient.put_back(rejected.part(begin, end))
    return kept


def balanced(group: Group, mine: SparseVector, k: int, round: int) -> list[int]:
    """The edges of ranges of about equally many of all ranks' entries; those of ranks beyond the last range are empty.

    Every rank shows the indices of some of its entries, evenly spaced, each for as many as lie between two of them;
    the ranks begin at different places, so that their samples do not coincide where their entries do.
    """
    rank, size, n = group.rank, group.size, mine.size
    nnz, count = mine.nnz, samples(size, k)
    chosen = [nnz * (i * size + rank) // (count * size) for i in range(count)] if nnz else []
    shown = group.ops.indices_at(mine, chosen) if nnz else [0] * count
    everyones = gather_words(group, [nnz, *shown], round)
    weighted = sorted((index, weight) for weight, *indices in everyones for index in indices)
    total, ranges = sum(weight for _, weight in weighted), owners(size, k)
    edges, before = [0], 0
    for index, weight in weighted:
        while len(edges) < ranges and before * ranges >= total * len(edges):
            edges.append(index)
        before += weight
    edges += [n] * (size + 1 - len(edges))
    return edges


def scatter_sum(group: Group, gradient: Contribution, mine: SparseVector, edges: list[int], round: int) -> SparseVector:
    """The sum of all ranks' entries from ``edges[rank]`` to ``edges[rank + 1]``, in order of rank."""
    rank, size = group.rank, group.size
    ends = group.ops.places(mine, edges)
    received: dict[int, SparseVector] = {rank: mine.part(ends[rank], ends[rank + 1])}
    for distance in range(1, size):
        to, source = (rank + distance) % size, (rank - distance) % size
        sends, receives = edges[to] < edges[to + 1], edges[rank] < edges[rank + 1]
        piece = group.rounded(mine.part(ends[to], ends[to + 1]), gradient) if sends else mine
        if sends and receives:
            received[source] = group.exchange(piece, to, source, round)
        elif sends:
            group.send(piece, to, round)
        elif receives:
            received[source] = group.receive(source, round)
    return sum_in_pairs(group, [received[source] for source in sorted(received)])


def threshold(group: Group, sums: SparseVector, k: int, round: int) -> int:
    """A key that k of all ranks' sums reach, and hardly more: how many more do not matter is a small part of k.

    The (k/P)-th largest of every rank bounds the k-th of all from both sides. Between the bounds keys are counted, in
    ever smaller ranges around the k-th.
    """
    share = -(-k // group.size)
    everyones = gather_words(group, [group.ops.nth_key(sums, share), sums.nnz], round)
    if sum(nnz for _, nnz in everyones) <= k:
        return 0
    low, high = min(key for key, _ in everyones), max(key for key, _ in everyones) + 1
    enough, most = k + max(k // 64, 8), bins(k)
    while True:
        round += ROUNDS
        shift = max(0, (high - low - 1).bit_length() - (most.bit_length() - 1))
        counts = sum_words(group, group.ops.count_keys(sums, low, shift, most + 1), round)
        reached, place = 0, len(counts)
        while reached < k:
            place -= 1
            reached += counts[place]
        low, high = low + (place << shift), low + (place + 1 << shift)
        if shift == 0 or reached <= enough:
            return low


def seconds(problem: Problem, costs: Costs) -> float:
    P, k = problem.P, problem.k
    if P == 1:
        return costs.select * problem.n
    rounds = rounds_of(problem, costs)
    often = 1 if k >= 4096 else 2  # keys are counted, by experience
    counts = often * (sum(x.alpha for x in rounds) + 8 * (bins(k) + 1) * sum(x.beta for x in rounds))
    bounds = sum(x.alpha for x in rounds) + 16 * P * rounds[-1].beta
    work = k * ((log2_ceil(P) + 4) * costs.merge + 2 * problem.codec(costs))
    moved = scatter_seconds(problem, costs) + bounds + counts + gather_seconds(problem, costs, k, owners(P, k))
    return costs.select * problem.n + moved + work


def scatter_seconds(problem: Problem, costs: Costs) -> float:
    """Until an owner has its sums: samples, and its part of what every other rank has."""
    P, k, link, rounds = problem.P, problem.k, problem.link(costs), rounds_of(problem, costs)
    shown = sum(x.alpha for x in rounds) + 8 * P * (samples(P, k) + 1) * rounds[-1].beta
    return shown + (P - 1) * (link.alpha + k / owners(P, k) * problem.entry_bytes * link.beta)


SPLIT = Algorithm(
    name="split",
    summary="the exact top-k of the sum of all top-k: each rank adds up a range of indices",
    cost="(P - 1 + 4 log2(P)) alpha + 2 (P - 1)/P k b beta",
    result="at most k entries, the exact top-k of the sum of the local top-k, the same on all ranks",
    source="the pattern of Li and Hoefler (Ok-Topk), PPoPP 2022",
    reselects=True,
    run=split,
    seconds=seconds,
)
