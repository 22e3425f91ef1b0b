"""The exact global top-k: every rank adds up one range of indices and sends the sums that may win to all ranks.

Source: the pattern of Ok-Topk (Li and Hoefler, "Near-optimal sparse allreduce for distributed deep learning", PPoPP
2022, Section 3), which also keeps its ranges and its estimate of the k-th value from call to call. Here the sums and
the k-th value are exact: a wrong estimate costs two more trips.

Cost: 2 (alpha + (P - 2) gap) + 2 (P - 1)/P k b beta per rank, with a few percent more entries than k. Each line below
is one trip. The trip in brackets is needed in the first call of a plan, and if the cached bounds do not fit.

    scatter      each rank sends each other rank its entries in that rank's range (`sparsecomm.primitives.ranges`)
                 each rank adds up its range
    [quantiles   each rank sends keys of some of its sums to all, which determine bounds around the k-th key]
    gather       each rank sends its sums that may win to all others: sums above the bounds are sure to win, and sums
                 between the bounds may win. Every rank takes the sure sums and the largest of the others, k in all

If the bytes of all sums take less time than the latency and no value is rounded, the first call gathers all sums,
without quantiles. The bounds for the next call are keys near the k-th key of this call. In each scatter, every rank
sends the key of one of its entries, and all ranks scale the bounds by the growth of these entries. Every message
contains a mark of the bounds, as for ranges. If marks differ, all ranks notice in the same trip and start again without
bounds.

The result equals the k largest entries of `allgather`. The rank that sends records rounding errors as dropped; exact
sums determine the order. A value that rounds to zero is omitted, and the next one wins instead. A sum that does not win
is not recorded: the result lacks its index, so the ranks that selected it take it back.

With op="mean_of_contributors", owners send means, but the sums decide which win. Means and rounded values do not show
which sums are the largest, so messages also contain the keys of the sums between the bounds.

"split:R" keeps R k entries of the sum, R = 2, 3, ...: residuals keep less, at a cost of (P - 1)/P (R + 1) k b beta.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from math import ceil, isqrt
from operator import itemgetter
from typing import NamedTuple

from sparsecomm.algorithms.base import Algorithm
from sparsecomm.backends.keys import keys_of, largest_keys, max_key, scaled_key
from sparsecomm.contribution import Contribution
from sparsecomm.primitives.communicator import Communicator, Parcel, exchange_with_all, num_owners
from sparsecomm.primitives.costs import Costs, Problem, log2_ceil
from sparsecomm.primitives.ranges import (
    AGE_SHIFT,
    Dropped,
    check_keys,
    checksum_of,
    mark,
    mark_of,
    owned_ranges,
    rebalance,
    scatter,
    scatter_time,
)
from sparsecomm.tensors.sparse import SparseVector

_MAX_DOUBT = 8.0
_KEY_BYTES = 0.3  # bytes of compressed keys per entry of a result: about 0.3 keys of one byte each
_GATHER = 8  # first round number of the gather


class Bounds(NamedTuple):
    """Keys between which the k-th key is expected: see `sparsecomm.backends.keys`."""

    low: int  # sums with at least this key are sent. At least k sums are expected to reach it
    high: int  # sums with at least this key are sure to win. At most k sums are expected to reach it
    call: int  # number of the call that made the bounds
    levels: list[int]  # the key of one selected entry of each rank in that call. Bounds are scaled by their growth
    doubt: float = 1.0  # factor that widens the bounds, because earlier bounds were wrong

    def mark(self, number: int) -> int:
        """Return the mark by which ranks compare their bounds in call ``number``."""
        return mark(number - self.call, checksum_of([self.low, self.high]))


class Winners(NamedTuple):
    """The first k sums."""

    sums: SparseVector  # the winning sums, as received
    # The keys of three sums by their distance from the k-th, in places: 0 for the k-th sum, positive for a sum above
    # it, negative for a sum below it. Empty if unknown.
    keys: dict[int, int]
    complete: bool  # whether there were at most k sums


def split(comm: Communicator, gradient: Contribution, k: int, ratio: int = 1) -> SparseVector:
    """Return the exact top-(ratio * k) of the sum of all ranks' top-k."""
    entries, num_winners = gradient.topk(k), ratio * k
    if comm.size == 1:
        return entries
    pieces, levels = scatter(comm, gradient, entries, k, max(1, entries.nnz // 2))
    ranges = owned_ranges(comm, k)
    owners = len(ranges)
    sums, counts = comm.sums(pieces)
    load = sum(piece.nnz for piece in pieces)
    bounds = comm.cached(Bounds)
    if bounds is not None:
        low, high = (scaled_key(sums, key, bounds.levels, levels) for key in (bounds.low, bounds.high))
        bounds = bounds._replace(low=low, high=max(high, low + 1))
    elif comm.sends_exact_sums and comm.is_latency_bound((comm.size - 1) * num_winners):
        # Not with rounded values, because the costs of links would then decide which values are rounded.
        bounds = Bounds(0, max_key(sums) + 1, comm.number, levels)
    doubt, num_vectors = 1.0, 1 if comm.sends_exact_sums else 2
    for round_no in count(_GATHER):
        dropped, own_mark = Dropped(), 0 if bounds is None else bounds.mark(comm.number)
        if bounds is None:
            numbers = _quantile_numbers(sums.nnz)
            own: Parcel = (), (0, sums.nnz, *comm.backend.nth_keys(sums, numbers))
        else:
            own = _candidates(comm, dropped, sums, counts, bounds, load)
        parcels = exchange_with_all(
            comm, own, num_vectors, round_no, 2 * num_winners // owners, owners, or_none=True, ranges=ranges
        )
        marks = {mark_of(comm, owner, words) for owner, (_, words) in enumerate(parcels)}
        if own_mark not in marks:  # this rank owns no range
            bounds = None
        if marks == {0}:
            bounds = Bounds(*_bracket(comm, sums, parcels, num_winners), comm.number, levels, doubt)
        elif len(marks) > 1:
            bounds, doubt = None, 1.0
        else:
            low = 0 if bounds is None else bounds.low
            spare = int(_margin(num_winners) * (1.0 if bounds is None else bounds.doubt))
            from_quantiles = marks.pop() >> AGE_SHIFT == 1
            winners = _winners(comm, parcels, num_winners, low, spare, from_quantiles=from_quantiles)
            if winners is not None:
                for entries in dropped:
                    gradient.record_dropped(entries)
                rebalance(comm, [words[1] for _, words in parcels])
                if bounds is not None:  # None: this rank owns no range, and lacks the bounds of the owners
                    comm.cache[Bounds] = _next_bounds(winners, spare, bounds, comm.number, levels)
                return winners.sums
            doubt = min(2 * bounds.doubt, _MAX_DOUBT) if bounds is not None else 1.0
            bounds = None
    raise AssertionError("count has no end")


def _candidates(
    comm: Communicator, dropped: Dropped, sums: SparseVector, counts: SparseVector | None, bounds: Bounds, load: int
) -> Parcel:
    """Return this rank's sums that may win, and words: the mark, its load, and whether it has other sums.

    If messages do not show which sums are the largest, the sure sums and those between the bounds are two vectors. Then
    more words follow: for each vector the number of sums that rounded to zero, and the keys of the second vector.
    """
    sure, near = comm.backend.split_by_key(sums, bounds.low, None if comm.sends_exact_sums else bounds.high)
    words = [bounds.mark(comm.number), load, int(sure.nnz + near.nnz < sums.nnz)]
    if comm.sends_exact_sums:
        return (near,), words
    sent = [comm.averaged(vector, counts, dropped) for vector in (sure, near)]
    words += [sure.nnz - sent[0].nnz, near.nnz - sent[1].nnz]
    return sent, [*words, *(key - bounds.low for key in keys_of(comm.backend.values_at(near, sent[1])))]


def _winners(
    comm: Communicator, parcels: Sequence[Parcel], num_winners: int, low: int, spare: int, *, from_quantiles: bool
) -> Winners | None:
    """Return the first ``num_winners`` of all candidates; None if the bounds were wrong.

    They were wrong if a sum that was not sent may win, or if more than ``num_winners`` sums are sure. ``parcels`` are
    the `_candidates` of each owner; their keys are relative to ``low``. `Winners.keys` are ``spare`` places above and
    below the k-th. With ``from_quantiles``, the bounds are from this call and cannot be wrong.
    """
    backend, fixed = comm.backend, 3 if comm.sends_exact_sums else 5
    for owner, (vectors, words) in enumerate(parcels):
        num_keys = 0 if comm.sends_exact_sums or not vectors else vectors[1].nnz
        if not vectors or len(words) != fixed + num_keys:
            raise comm.broken(owner, f"{len(vectors)} vectors and {len(words)} numbers")
        check_keys(comm, owner, [low + key for key in words[fixed:]], vectors[-1])
    others = any(words[2] for _, words in parcels)
    near = backend.concatenate_entries([vectors[-1] for vectors, _ in parcels])
    if comm.sends_exact_sums:
        if near.nnz < num_winners and others:
            return None
        sums = backend.merge_topk(near, near.part(0, 0), num_winners)[0]
        above, below = min(spare, max(0, sums.nnz - 1)), min(spare, near.nnz - sums.nnz)
        numbers = [sums.nnz - above, sums.nnz, sums.nnz + below] if sums.nnz else []
        by_distance = dict(zip((above, 0, -below), backend.nth_keys(near, numbers), strict=False))
        return Winners(sums, by_distance, near.nnz <= num_winners and not others)
    sure = backend.concatenate_entries([vectors[0] for vectors, _ in parcels])
    num_sure = sure.nnz + sum(words[3] for _, words in parcels)
    total = num_sure + near.nnz + sum(words[4] for _, words in parcels)
    if from_quantiles and num_sure > num_winners:  # contradicts the quantiles that the owners have sent
        sizes = [vectors[0].nnz + words[3] for vectors, words in parcels]
        raise comm.broken(sizes.index(max(sizes)), f"{max(sizes)} entries above the bound, of {num_sure} in all")
    if not from_quantiles and (num_sure > num_winners or (total < num_winners and others)):
        return None
    keys = [key for _, words in parcels for key in words[fixed:]]
    taken = min(len(keys), max(0, num_winners - num_sure))
    above, below = min(spare, max(0, taken - 1)), min(spare, len(keys) - taken)
    by_distance, sums = {}, sure
    if taken:
        positions, nth = largest_keys(keys, taken, [taken - above, taken, taken + below])
        by_distance = {distance: low + key for distance, key in zip((above, 0, -below), nth, strict=True)}
        sums = backend.merge(sure, backend.entries_at(near, positions))
    return Winners(sums, by_distance, total <= num_winners and not others)


def _next_bounds(winners: Winners, spare: int, bounds: Bounds, number: int, levels: list[int]) -> Bounds | None:
    """Return the bounds for the next call, extrapolated so that ``spare`` sums are between the k-th and each bound."""
    if not winners.keys:
        return None
    kth = winners.keys[0]
    above, below = max(winners.keys), -min(winners.keys)
    up = (winners.keys[above] - kth) / max(1, above) * spare
    down = (kth - winners.keys[-below]) / max(1, below) * spare
    up, down = up or down or kth >> 14, down or up or kth >> 14
    low = 0 if winners.complete else max(0, kth - ceil(down))
    return Bounds(low, kth + 1 + int(up), number, levels, max(1.0, 0.9 * bounds.doubt))


def _margin(num_winners: int) -> int:
    """Return the expected change, from call to call, of the number of sums above a key."""
    return num_winners // 64 + 3 * isqrt(num_winners)


def _quantile_numbers(nnz: int) -> list[int]:
    """Return the numbers n, from 1, of the n-th largest sums whose keys an owner of ``nnz`` sums sends."""
    if not nnz:
        return []
    numbers, number = [], 1
    while number < nnz:
        numbers.append(number)
        number = max(number + 1, number * 9 // 8)  # few keys, and few sums that are sent beyond the winners
    return [*numbers, nnz]


def _bracket(comm: Communicator, sums: SparseVector, parcels: Sequence[Parcel], num_winners: int) -> tuple[int, int]:
    """Return `Bounds.low` and `Bounds.high`. At least ``num_winners`` sums (or all) reach the first, fewer the second.

    The ``parcels`` of owners contain 0, the number of sums, and the keys of their `_quantile_numbers`.
    """
    steps, total = [], 0  # key, additional sums that certainly reach it, and additional sums that may reach it
    for owner, (_, (_, *quantiles)) in enumerate(parcels):
        nnz, *keys = quantiles or (comm.num_elements + 1,)
        numbers = _quantile_numbers(min(nnz, comm.num_elements))
        if nnz > comm.num_elements or len(keys) != len(numbers):
            raise comm.broken(owner, f"{len(keys)} keys of {nnz} sums")
        check_keys(comm, owner, keys, sums)
        total += nnz
        steps += [
            (key, number - before, after - number)
            for key, before, number, after in zip(keys, [0, *numbers], numbers, [*numbers[1:], nnz + 1], strict=False)
        ]
    steps.sort(key=itemgetter(0), reverse=True)  # steps with equal keys keep their order
    low, high, reached, may_reach = 0, 0, 0, 0
    for key, at_least, also in steps:
        if not high and may_reach + also > min(num_winners, total) - _margin(num_winners):
            high = key + 1
        reached, may_reach = reached + at_least, may_reach + also
        if reached >= num_winners:
            low = key if total > num_winners else 0
            break
    return low, high


def predicted_time(problem: Problem, costs: Costs, ratio: int = 1) -> float:
    """Return the predicted seconds of a call with valid ranges and bounds in the cache."""
    P, k = problem.P, problem.k
    num_winners = min(ratio, P) * k
    if P == 1:
        return costs.select * problem.n
    keys = _KEY_BYTES if not problem.exact_sums else 0.0
    sent = (num_winners + _margin(num_winners)) * problem.entry_bytes + num_winners * keys + 24 * num_owners(P, k)
    gathered = problem.link(costs).trip(P - 1, (P - 1) / num_owners(P, k) * sent)
    codec = problem.codec(costs)
    work = k * (log2_ceil(P) * costs.merge + codec) + num_winners * (4 * costs.merge + codec)
    return costs.select * problem.n + scatter_time(problem, costs) + gathered + work


ALGORITHM = Algorithm(
    name="split",
    summary="the exact top-k of the sum of all ranks' top-k: each rank adds up a range of indices",
    cost="2 alpha + 2 (P - 2) gap + 2 (P - 1)/P k b beta",
    result="at most k entries, the exact top-k of the sum of the local top-k",
    source="the pattern of Li and Hoefler (Ok-Topk), PPoPP 2022",
    run=split,
    predicted_time=predicted_time,
    bounded_result=True,
    automatic=True,
    cannot_count_contributors="",
)


def split_with_ratio(ratio: int) -> Algorithm:
    """Return "split:ratio", whose result holds ``ratio`` times as many entries as a rank selects."""
    return replace(
        ALGORITHM,
        name=f"{ALGORITHM.name}:{ratio}",
        summary=f"the exact top-({ratio} k) of the sum of all ranks' top-k: each rank adds up a range of indices",
        cost=f"2 alpha + 2 (P - 2) gap + {ratio + 1} (P - 1)/P k b beta",
        result=f"at most {ratio} k entries, the exact top-({ratio} k) of the sum of the local top-k",
        run=partial(split, ratio=ratio),
        predicted_time=partial(predicted_time, ratio=ratio),
        automatic=False,
    )
