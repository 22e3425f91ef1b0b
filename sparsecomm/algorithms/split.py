"""The exact global top-k: every rank adds up one range of indices, and all find the k-th largest sum together.

Source: the pattern is that of Ok-Topk (Li and Hoefler, "Near-optimal sparse allreduce for distributed deep learning",
PPoPP 2022, Section 3), with exact sums, ranges from weighted samples, and the exact k-th value in place of estimates.

Cost: (P - 1 + 4 log2 P) alpha + 2 (P - 1)/P k b beta per rank, both ways; samples and counts add some percent of k b.

    ranges       7 ranges of indices, one per rank, from samples of what all have selected: each about k of k P entries
    scatter      rank r sends to rank r + 1 what it has in that rank's range, then to r + 2, ..., to r + 6
    sums         each rank adds what it received to its own
    k-th         counts of keys, added over all ranks, corner the k-th largest sum (`kth_key`)
    gather       all that may win goes to everyone; everyone takes the first k

Result: at most k entries, the exact top-k of the sum of all ranks' top-k: that of `allgather`, cut to k. The same on
all ranks. Dropped: what quantizing to a narrow format takes, by the rank that sends; the order is then that of the
rounded sums. A sum that does not win needs no record: it is all that was selected at its index, and the result does not
hold that index, so the ranks that selected it take it back.

With op="mean_of_contributors" the sums decide, too: their owner divides those that win by the number of ranks that sent
something, and they travel as means, with no byte more. Means do not show whose sums are the largest, so the k-th sum is
cornered to the bit, which takes a count or two more.

"split:R" keeps R k entries of the sum, R = 2, 3, ...: less waits in residuals, for (P - 1)/P (R + 1) k b beta.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from sparsecomm.algorithms.base import Algorithm
from sparsecomm.contribution import Contribution
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.primitives.contributors import averaged_and_quantized
from sparsecomm.primitives.costs import Costs, Problem, log2_ceil
from sparsecomm.primitives.gather import (
    ROUNDS,
    gather,
    gather_time,
    gather_words,
    links_by_step,
    sum_in_pairs,
    sum_words,
)
from sparsecomm.tensors.sparse import SparseVector

__all__ = ["ALGORITHM", "balanced", "num_owners", "scatter", "scatter_time", "with_larger_result"]

_MIN_ENTRIES = 16  # entries that a range is worth: for fewer, fewer ranks own ranges
_SAMPLES = 32  # per rank at most
_BINS = 256  # at most, of the keys between two bounds


def num_owners(P: int, k: int) -> int:
    """Return how many ranks own a range."""
    return min(P, max(1, k // _MIN_ENTRIES))


def num_samples(P: int, k: int) -> int:
    """Return how many indices every rank shows of its entries."""
    return min(_SAMPLES, max(2, k // (64 * P)))


def num_bins(k: int) -> int:
    """Return in how many ranges keys are counted: a power of two."""
    return min(_BINS, max(16, 1 << (k // 4).bit_length()))


def split(comm: Communicator, gradient: Contribution, k: int, ratio: int = 1) -> SparseVector:
    """Return the exact top-(ratio * k) of the sum of all ranks' top-k."""
    mine, kept = gradient.topk(k), ratio * k
    if comm.size == 1:
        return mine
    boundaries = balanced(comm, mine, k, 0)
    pieces = scatter(comm, gradient, mine, boundaries, ROUNDS)
    sums = sum_in_pairs(comm, pieces)
    key, reached = kth_key(comm, sums, kept, 4 * ROUNDS, exact=comm.averages)
    winners = comm.backend.reaching_key(sums, key)
    if comm.averages and reached > kept:
        winners = without_last_equals(comm, winners, key, reached - kept, 3 * ROUNDS)
    winners = averaged_and_quantized(comm, gradient, winners, pieces)
    union = comm.backend.concatenate_entries(gather(comm, winners, 2 * ROUNDS, num_owners(comm.size, k)))
    return comm.backend.merge_topk(union, comm.backend.empty_like(union), kept)[0]


def balanced(comm: Communicator, mine: SparseVector, k: int, round_no: int) -> list[int]:
    """Return the boundaries of ranges that hold about equally many of all ranks' entries; further ranges are empty.

    Every rank shows the indices of some of its entries, evenly spaced, each for as many as lie between two of them;
    the ranks begin at different entries, so that their samples do not coincide where their entries do.
    """
    rank, size, n = comm.rank, comm.size, mine.size
    nnz, count = mine.nnz, num_samples(size, k)
    chosen = [nnz * (i * size + rank) // (count * size) for i in range(count)] if nnz else []
    shown = comm.backend.indices_at(mine, chosen) if nnz else [0] * count
    everyones = gather_words(comm, [nnz, *shown], round_no)
    weighted = sorted((index, weight) for weight, *indices in everyones for index in indices)
    total, ranges = sum(weight for _, weight in weighted), num_owners(size, k)
    boundaries, before = [0], 0
    for index, weight in weighted:
        while len(boundaries) < ranges and before * ranges >= total * len(boundaries):
            boundaries.append(index)
        before += weight
    boundaries += [n] * (size + 1 - len(boundaries))
    return boundaries


def scatter(
    comm: Communicator, gradient: Contribution, mine: SparseVector, boundaries: list[int], round_no: int
) -> list[SparseVector]:
    """Return ranks' entries from ``boundaries[rank]`` to ``boundaries[rank + 1]``, in order of rank.

    They are those of all ranks; of this one alone, where the range is empty.
    """
    rank, size = comm.rank, comm.size
    ends = comm.backend.searchsorted(mine, boundaries)
    received: dict[int, SparseVector] = {rank: mine.part(ends[rank], ends[rank + 1])}
    for distance in range(1, size):
        dst, src = (rank + distance) % size, (rank - distance) % size
        sends, receives = boundaries[dst] < boundaries[dst + 1], boundaries[rank] < boundaries[rank + 1]
        piece = comm.quantized(mine.part(ends[dst], ends[dst + 1]), gradient) if sends else mine
        if sends and receives:
            received[src] = comm.exchange(piece, dst, src, round_no)
        elif sends:
            comm.send(piece, dst, round_no)
        elif receives:
            received[src] = comm.receive(src, round_no)
    return [received[src] for src in sorted(received)]


def kth_key(comm: Communicator, sums: SparseVector, k: int, round_no: int, *, exact: bool) -> tuple[int, int]:
    """Return a key that k of all ranks' sums reach, and hardly more; and how many do.

    How many more is a small part of k. If ``exact``, it is the k-th largest key: more reach it only if they are equal.

    The (k/P)-th largest of every rank bounds the k-th of all from both sides. Between the bounds keys are counted, in
    ever smaller ranges around the k-th.
    """
    shard = -(-k // comm.size)
    everyones = gather_words(comm, [comm.backend.nth_key(sums, shard), sums.nnz], round_no)
    total = sum(nnz for _, nnz in everyones)
    if total <= k:
        return 0, total
    low, high = min(key for key, _ in everyones), max(key for key, _ in everyones) + 1
    enough, bins = k if exact else k + max(k // 64, 8), num_bins(k)
    while True:
        round_no += ROUNDS
        shift = max(0, (high - low - 1).bit_length() - (bins.bit_length() - 1))
        counts = sum_words(comm, comm.backend.count_keys(sums, low, shift, bins + 1), round_no)
        reached, bin_no = 0, len(counts)
        while reached < k:
            bin_no -= 1
            reached += counts[bin_no]
        low, high = low + (bin_no << shift), low + (bin_no + 1 << shift)
        if shift == 0 or reached <= enough:
            return low, reached


def without_last_equals(
    comm: Communicator, winners: SparseVector, key: int, surplus: int, round_no: int
) -> SparseVector:
    """Return the winners of this rank's range without its part of the ``surplus``.

    These are the last ones, by index, of all ranks' winners whose key is ``key``, the smallest there is.
    """
    equals = [count for (count,) in gather_words(comm, [comm.backend.count_keys(winners, key, 0, 2)[0]], round_no)]
    dropped = min(equals[comm.rank], max(0, surplus - sum(equals[comm.rank + 1 :])))
    if dropped == winners.nnz:
        return comm.backend.empty_like(winners)
    return comm.backend.merge_topk(winners, comm.backend.empty_like(winners), winners.nnz - dropped)[0]


def predicted_time(problem: Problem, costs: Costs, ratio: int = 1) -> float:
    """Return the seconds of a call, as predicted."""
    P, k = problem.P, problem.k
    kept = min(ratio, P) * k
    if P == 1:
        return costs.select * problem.n
    rounds = links_by_step(problem, costs)
    times = 1 if k >= 4096 else 2  # that keys are counted, by experience
    counts = times * (sum(x.alpha for x in rounds) + 2 * (num_bins(k) + 1) * sum(x.beta for x in rounds))
    bounds = sum(x.alpha for x in rounds) + 16 * P * rounds[-1].beta
    work = k * (log2_ceil(P) * costs.merge + problem.codec(costs)) + kept * (4 * costs.merge + problem.codec(costs))
    moved = scatter_time(problem, costs) + bounds + counts + gather_time(problem, costs, kept, num_owners(P, k))
    return costs.select * problem.n + moved + work


def scatter_time(problem: Problem, costs: Costs) -> float:
    """Return the predicted seconds until an owner has its sums: samples, and its part of what other ranks have."""
    P, k, link, rounds = problem.P, problem.k, problem.link(costs), links_by_step(problem, costs)
    shown = sum(x.alpha for x in rounds) + 8 * P * (num_samples(P, k) + 1) * rounds[-1].beta
    return shown + (P - 1) * (link.alpha + k / num_owners(P, k) * problem.entry_bytes * link.beta)


ALGORITHM = Algorithm(
    name="split",
    summary="the exact top-k of the sum of all top-k: each rank adds up a range of indices",
    cost="(P - 1 + 4 log2(P)) alpha + 2 (P - 1)/P k b beta",
    result="at most k entries, the exact top-k of the sum of the local top-k",
    source="the pattern of Li and Hoefler (Ok-Topk), PPoPP 2022",
    run=split,
    predicted_time=predicted_time,
    reselects=True,
    automatic=True,
    contributors_unknown="",
)


def with_larger_result(ratio: int) -> Algorithm:
    """Return "split:ratio", whose result holds ``ratio`` times as many entries as a rank selects."""
    return replace(
        ALGORITHM,
        name=f"{ALGORITHM.name}:{ratio}",
        summary=f"the exact top-({ratio} k) of the sum of all top-k: each rank adds up a range of indices",
        cost=f"(P - 1 + 4 log2(P)) alpha + {ratio + 1} (P - 1)/P k b beta",
        result=f"at most {ratio} k entries, the exact top-({ratio} k) of the sum of the local top-k",
        run=partial(split, ratio=ratio),
        predicted_time=partial(predicted_time, ratio=ratio),
        automatic=False,
    )
