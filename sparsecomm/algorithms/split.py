"""The exact global top-k: every rank adds up one range of indices, and sends what may win to everyone.

Source: the pattern is that of Ok-Topk (Li and Hoefler, "Near-optimal sparse allreduce for distributed deep learning",
PPoPP 2022, Section 3), which also keeps its ranges and its estimate of the k-th value from call to call. Here sums are
exact, and so is the k-th: an estimate that was wrong costs two trips.

Cost: 2 (alpha + (P - 2) gap) + 2 (P - 1)/P k b beta per rank, both ways, with some percent more entries than k. Each
line below is one trip; that in brackets is for the first call of a plan, and where what was kept did not fit.

    scatter      each rank sends each other one what it has in that one's range
                 each rank adds up its range
    [quantiles   each rank shows keys of some of its sums to all: hardly more than k sums lie above some key]
    gather       each rank sends to all its sums that may win: those of which it is sure, and those near the k-th
                 everyone takes those that are sure and the first of the others, k in all

In a first call each rank also shows indices of some of its entries to all, so that in the next one each range holds
about k of k P. Ranges are equally long until then if k P is small. Otherwise they are made from the indices before the
scatter, which takes one more trip: nearly all entries may lie in one of P equally long ranges.

Where all sums take less time to send than a trip, and none is rounded, the first call gathers them all, without
quantiles. Ranges stay while they are balanced. Keys near the k-th largest of this call are the bounds for the next one.
They are scaled by how much one entry of each rank, which the scatter brings along, has grown. Every message names the
call in which its ranges or bounds were made, and contains a checksum of them. If they differ between ranks, for example
after a call that some ranks left, all ranks notice in that trip and begin again as in a first call.

Result: at most k entries, the exact top-k of the sum of all ranks' top-k: that of `allgather`, cut to k. The same on
all ranks. Dropped: what quantizing to a narrow format takes, by the rank that sends; the order is that of the exact
sums of what was received. A sum that does not win needs no record: it is all that was selected at its index, and the
result does not hold that index, so the ranks that selected it take it back.

With op="mean_of_contributors" the sums decide, too: their owner divides them by the number of ranks that sent
something, and they travel as means. Where the values that travel do not show whose sums are the largest, so as these,
and narrow ones, the keys of those near the k-th travel beside them.

"split:R" keeps R k entries of the sum, R = 2, 3, ...: less waits in residuals, for (P - 1)/P (R + 1) k b beta.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import count, pairwise
from math import ceil, isqrt, sqrt
from operator import itemgetter
from typing import NamedTuple

from sparsecomm.algorithms.base import Algorithm
from sparsecomm.contribution import Contribution
from sparsecomm.primitives.communicator import Communicator, Parcel, Range
from sparsecomm.primitives.contributors import averaged_and_quantized, sums_of
from sparsecomm.primitives.costs import Costs, Problem, log2_ceil
from sparsecomm.primitives.gather import exchange_with_all
from sparsecomm.tensors.sparse import SparseVector

__all__ = ["ALGORITHM", "num_owners", "ranges_of", "scatter", "scatter_time", "watch", "with_larger_result"]

_MIN_ENTRIES = 16  # entries that a range is worth: for fewer, fewer ranks own ranges
_SAMPLES = 32  # per rank at most
_MAX_DOUBT = 8.0
_NEAR = 0.3  # part of a result whose keys travel beside them, if any do, in trainings by local steps of 4 and 8 ranks
_FEW = 2**15  # entries of all ranks that one owner may receive in a first call, about 256 KB
_CROWDED = 1.5  # times as crowded as when they were chosen: ranges are chosen anew
_SCATTER, _GATHER = 0, 8  # round numbers
_AGE_AT = 16  # the bit of a mark from which on it says how many calls ago; a checksum is below


def num_owners(P: int, k: int) -> int:
    """Return how many ranks own a range."""
    return min(P, max(1, k // _MIN_ENTRIES))


def num_samples(P: int, k: int) -> int:
    """Return how many indices every rank shows of its entries."""
    return min(_SAMPLES, max(4, k // (16 * P)))


def split(comm: Communicator, gradient: Contribution, k: int, ratio: int = 1) -> SparseVector:
    """Return the exact top-(ratio * k) of the sum of all ranks' top-k."""
    mine, kept = gradient.topk(k), ratio * k
    if comm.size == 1:
        return mine
    pieces, levels = scatter(comm, gradient, mine, k, max(1, mine.nnz // 2))
    return top_sums(comm, gradient, pieces, levels, kept, ranges_of(comm, k))


# -- ranges, and the sums of each -------------------------------------------------------------------------------------


class Ranges(NamedTuple):
    """Ranges of indices, one per rank.

    Attributes:
        boundaries: where each begins, and where the last one ends.
        made: the number of the call whose samples they are from.
        checksum: of ``boundaries``.
        crowding: how many times the load of the mean owner the busiest one had in that call; 0: not known yet.
        following: the boundaries for the next call, which these are not balanced enough for; ``None``: they stay.
    """

    boundaries: list[int]
    made: int
    checksum: int
    crowding: float = 0.0
    following: list[int] | None = None


class Dropped(list[SparseVector]):
    """What rounding takes from entries that may have to be sent again otherwise."""

    drop = list[SparseVector].append


def scatter(
    comm: Communicator, gradient: Contribution, mine: SparseVector, k: int, number: int = 0
) -> tuple[list[SparseVector], list[int]]:
    """Return what all ranks have in this rank's range, in order of rank.

    And the key of each rank's entry of that ``number``, in the order of selection; 0 where there is none. This takes
    one trip, one more if the ranks' ranges differ, and one more if ranges are made first.
    """
    nothing, owners = comm.backend.empty_like(mine), num_owners(comm.size, k)
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    ranges: Ranges | None = comm.kept.get("ranges")
    if ranges is not None and ranges.following is not None:
        ranges = Ranges(ranges.following, ranges.made, checksum_of(ranges.following))
    for round_no in count(_SCATTER):
        dropped, shown, range_of = Dropped(), list[int](), None
        if ranges is None:
            shown = samples(comm, mine, k)
            if comm.size * k <= _FEW:
                ranges = equally_long(mine.size, comm.size, owners, comm.number)
        if ranges is None:
            parcels: dict[int, Parcel] = dict.fromkeys(range(comm.size), ((), (0, *shown)))
        else:
            (level,) = comm.backend.nth_keys(mine, [min(number, mine.nnz)]) if number and mine.nnz else (0,)
            words = mark(comm.number - ranges.made, ranges.checksum), level, *shown
            begin, end = ranges.boundaries[comm.rank : comm.rank + 2]
            range_of = partial(_range_if_alike, (begin, end), words[0])
            parcels = {
                rank: ((piece if rank == comm.rank else comm.quantized(piece, dropped),), words)
                for rank, piece in enumerate(pieces_of(comm, mine, ranges.boundaries))
            }
        found = comm.exchange_parcels(parcels, others, 1, round_no, 2 * k // owners, or_none=True, range_of=range_of)
        found[comm.rank] = parcels[comm.rank]
        everyones = [found[rank] for rank in range(comm.size)]
        marks = {mark_of(comm, rank, words) for rank, (_, words) in enumerate(everyones)}
        if marks == {0}:
            check_words(comm, everyones, 1 + len(shown))
            boundaries = balanced([words[1:] for _, words in everyones], mine.size, comm.size, owners)
            ranges = Ranges(boundaries, comm.number, checksum_of(boundaries))
            continue
        if ranges is None or len(marks) > 1:
            ranges = None
            continue
        check_words(comm, everyones, len(words))
        levels = [level for _, (_, level, *_) in everyones]
        check_keys(comm, levels.index(max(levels)), levels, mine)
        if shown:
            following = balanced([words[2:] for _, words in everyones], mine.size, comm.size, owners)
            ranges = ranges._replace(following=following)
        comm.kept["ranges"] = ranges
        for entries in dropped:
            gradient.drop(entries)
        return [vector for vectors, _ in everyones for vector in vectors or (nothing,)], levels
    raise AssertionError("count has no end")


def _range_if_alike(own: Range, mark: int, source: int, words: Sequence[int]) -> Range | None:
    """Return this rank's ``own`` range if another rank goes by the same ranges: its first word is ``mark``, too."""
    return own if words and words[0] == mark else None


def ranges_of(comm: Communicator, k: int) -> list[Range]:
    """Return the owners' ranges, which `scatter` has left."""
    ranges: Ranges = comm.kept["ranges"]
    return list(pairwise(ranges.boundaries[: num_owners(comm.size, k) + 1]))


def pieces_of(comm: Communicator, mine: SparseVector, boundaries: list[int]) -> list[SparseVector]:
    """Return what this rank has in each range."""
    return [mine.part(begin, end) for begin, end in pairwise(comm.backend.searchsorted(mine, boundaries))]


def samples(comm: Communicator, mine: SparseVector, k: int) -> list[int]:
    """Return how many entries this rank has, and the indices of some of them, evenly spaced.

    Ranks begin at different entries, so that their samples do not coincide where their entries do.
    """
    nnz, number = mine.nnz, num_samples(comm.size, k)
    chosen = [nnz * (i * comm.size + comm.rank) // (number * comm.size) for i in range(number)] if nnz else []
    return [nnz, *(comm.backend.indices_at(mine, chosen) if nnz else [0] * number)]


def equally_long(n: int, size: int, owners: int, number: int) -> Ranges:
    """Return equally long ranges of n elements, made in call ``number``; ranks that own none get empty ranges."""
    boundaries = [n * owner // owners for owner in range(owners)] + [n] * (size + 1 - owners)
    return Ranges(boundaries, number, checksum_of(boundaries))


def balanced(everyones: Sequence[Sequence[int]], n: int, size: int, owners: int) -> list[int]:
    """Return the boundaries of ranges that hold about equally many of all ranks' entries; further ranges are empty.

    ``everyones``: the `samples` of each rank, of which each index stands for as many entries as lie between two.
    """
    weighted = sorted((index, weight) for weight, *indices in everyones for index in indices)
    total, before, boundaries = sum(weight for _, weight in weighted), 0, [0]
    for index, weight in weighted:
        while len(boundaries) < owners and before * owners >= total * len(boundaries):
            boundaries.append(min(index, n))
        before += weight
    return boundaries + [n] * (size + 1 - len(boundaries))


def watch(comm: Communicator, loads: Sequence[int]) -> None:
    """Forget the ranges if they are much more crowded than when they were made; ``loads``: of their owners."""
    ranges: Ranges | None = comm.kept.get("ranges")
    if ranges is not None and ranges.following is None:
        crowding = max(1.0, max(loads) * len(loads) / max(1, sum(loads)))
        if not ranges.crowding:
            comm.kept["ranges"] = ranges._replace(crowding=crowding)
        elif crowding > _CROWDED * ranges.crowding:
            comm.kept["ranges"] = None


def mark(age: int, checksum: int) -> int:
    """Return the mark, which is not 0, of numbers that were made so many calls ago; of 32 bits, if that is not long."""
    return age + 1 << _AGE_AT | checksum


def checksum_of(numbers: list[int]) -> int:
    """Return a checksum of `_AGE_AT` bits."""
    return zlib.crc32(repr(numbers).encode()) & ((1 << _AGE_AT) - 1)


def mark_of(comm: Communicator, rank: int, words: Sequence[int]) -> int:
    """Return the first word of a rank: which call made what it goes by; 0: it has nothing to go by."""
    if not words:
        raise comm.broken(rank, "no numbers")
    return words[0]


def check_words(comm: Communicator, parcels: Sequence[Parcel], expected: int) -> None:
    """Raise unless each rank has sent so many words."""
    for rank, (_, words) in enumerate(parcels):
        if len(words) != expected:
            raise comm.broken(rank, f"{len(words)} numbers instead of {expected}")


def check_keys(comm: Communicator, rank: int, keys: Sequence[int], entries: SparseVector) -> None:
    """Raise unless these are keys of values of the type of ``entries``; ``rank``: that has sent the largest."""
    if keys and max(keys) > comm.backend.max_key(entries):
        raise comm.broken(rank, f"{max(keys)} as the key of a value")


# -- the k-th largest sum ---------------------------------------------------------------------------------------------


class Bounds(NamedTuple):
    """Where the k-th key is thought to be, as keys: see `Backend`.

    Attributes:
        low: at least k sums are expected to reach it; all are sent that do.
        high: at most k are expected to reach it, which are then sure to win.
        made: the number of the call that made them.
        levels: keys of entries that ranks had selected in that call: the bounds rise and fall with these.
        doubt: how many times as far apart they are as chance wants, since others were wrong.
    """

    low: int
    high: int
    made: int
    levels: list[int]
    doubt: float = 1.0

    def mark(self, number: int) -> int:
        """Return the number by which ranks compare their bounds in call ``number``."""
        return mark(number - self.made, checksum_of([self.low, self.high]))


class Winners(NamedTuple):
    """The first k sums.

    Attributes:
        sums: as they travelled.
        keys: by how many sums they are above the k-th: the key of that, of one above, and of one below; none if they
            are not known.
        everything: there were no more sums than k.
    """

    sums: SparseVector
    keys: dict[int, int]
    everything: bool


def top_sums(
    comm: Communicator,
    gradient: Contribution,
    pieces: list[SparseVector],
    levels: list[int],
    kept: int,
    ranges: list[Range],
) -> SparseVector:
    """Return the first ``kept`` sums of all owners' pieces: in one trip, or two if the bounds must be found first.

    ``ranges``: of the owners.
    """
    owners = len(ranges)
    sums, counted = sums_of(comm, pieces)
    load = sum(piece.nnz for piece in pieces)
    bounds: Bounds | None = comm.kept.get("bounds")
    if bounds is not None:
        low, high = (comm.backend.scaled_key(sums, key, bounds.levels, levels) for key in (bounds.low, bounds.high))
        bounds = bounds._replace(low=low, high=max(high, low + 1))
    elif comm.shows_sums and comm.is_less_than_a_trip((comm.size - 1) * kept):  # links must not decide what is rounded
        bounds = Bounds(0, comm.backend.max_key(sums) + 1, comm.number, levels)
    doubt, num_vectors = 1.0, 1 if comm.shows_sums else 2
    for round_no in count(_GATHER):
        dropped, own_mark = Dropped(), 0 if bounds is None else bounds.mark(comm.number)
        if bounds is None:
            mine: Parcel = (), (0, sums.nnz, *comm.backend.nth_keys(sums, shown_numbers(sums.nnz, kept, comm.size)))
        else:
            mine = candidates(comm, dropped, sums, counted, bounds, own_mark, load)
        parcels = exchange_with_all(
            comm, mine, num_vectors, round_no, 2 * kept // owners, owners, or_none=True, ranges=ranges
        )
        marks = {mark_of(comm, owner, words) for owner, (_, words) in enumerate(parcels)}
        if own_mark not in marks:  # this rank owns no range
            bounds = None
        if marks == {0}:
            bounds = Bounds(*bracket(comm, sums, parcels, kept), comm.number, levels, doubt)
        elif len(marks) > 1:
            bounds, doubt = None, 1.0
        else:
            low = 0 if bounds is None else bounds.low
            spare = int(margin(kept) * (1.0 if bounds is None else bounds.doubt))
            surveyed = marks.pop() >> _AGE_AT == 1
            winners = first(comm, parcels, kept, low, spare, surveyed=surveyed)
            if winners is not None:
                for entries in dropped:
                    gradient.drop(entries)
                watch(comm, [words[1] for _, words in parcels])
                if bounds is not None:  # else others have some, and this rank owns no range
                    comm.kept["bounds"] = next_bounds(winners, spare, bounds, comm.number, levels)
                return winners.sums
            doubt = min(2 * bounds.doubt, _MAX_DOUBT) if bounds is not None else 1.0
            bounds = None
    raise AssertionError("count has no end")


def candidates(
    comm: Communicator,
    dropped: Dropped,
    sums: SparseVector,
    counted: SparseVector | None,
    bounds: Bounds,
    own_mark: int,
    load: int,
) -> Parcel:
    """Return what this rank sends to all: the sums that may win, its load, and whether it has others.

    Where the values that travel do not show whose sums are the largest, those that are sure to win go apart from those
    near the k-th, of which the keys travel, too, and it is told how many of both rounding has made zero.
    """
    sure, near = comm.backend.split_by_key(sums, bounds.low, None if comm.shows_sums else bounds.high)
    words = [own_mark, load, int(sure.nnz + near.nnz < sums.nnz)]
    if comm.shows_sums:
        return (near,), words
    sent = [averaged_and_quantized(comm, dropped, each, counted) for each in (sure, near)]
    words += [sure.nnz - sent[0].nnz, near.nnz - sent[1].nnz]
    return sent, [*words, *(key - bounds.low for key in comm.backend.keys_at(near, sent[1]))]


def first(
    comm: Communicator, parcels: Sequence[Parcel], kept: int, low: int, spare: int, *, surveyed: bool
) -> Winners | None:
    """Return the first ``kept`` of all candidates; None if sums may win that were not sent, or too many are sure.

    Args:
        comm: the ranks.
        parcels: the `candidates` of each owner.
        kept: how many win.
        low: the bound above which keys are told.
        spare: how many sums above the k-th, and below it, the keys of `Winners` are wanted.
        surveyed: the bounds are from this call's quantiles, and cannot be wrong.
    """
    backend, fixed = comm.backend, 3 if comm.shows_sums else 5
    for owner, (vectors, words) in enumerate(parcels):
        num_keys = 0 if comm.shows_sums or not vectors else vectors[1].nnz
        if not vectors or len(words) != fixed + num_keys:
            raise comm.broken(owner, f"{len(vectors)} vectors and {len(words)} numbers")
        check_keys(comm, owner, [low + key for key in words[fixed:]], vectors[-1])
    left = any(words[2] for _, words in parcels)
    near = backend.concatenate_entries([vectors[-1] for vectors, _ in parcels])
    if comm.shows_sums:
        if near.nnz < kept and left:
            return None
        sums = backend.merge_topk(near, backend.empty_like(near), kept)[0]
        above, below = min(spare, max(0, sums.nnz - 1)), min(spare, near.nnz - sums.nnz)
        numbers = [sums.nnz - above, sums.nnz, sums.nnz + below] if sums.nnz else []
        found = dict(zip((above, 0, -below), backend.nth_keys(near, numbers), strict=False))
        return Winners(sums, found, near.nnz <= kept and not left)
    sure = backend.concatenate_entries([vectors[0] for vectors, _ in parcels])
    num_sure = sure.nnz + sum(words[3] for _, words in parcels)
    total = num_sure + near.nnz + sum(words[4] for _, words in parcels)
    if surveyed and num_sure > kept:  # by what the owners have said of their sums, fewer reach the bound
        counts = [vectors[0].nnz + words[3] for vectors, words in parcels]
        raise comm.broken(counts.index(max(counts)), f"{max(counts)} entries above the bound, of {num_sure} in all")
    if not surveyed and (num_sure > kept or (total < kept and left)):
        return None
    keys = [key for _, words in parcels for key in words[fixed:]]
    taken = min(len(keys), max(0, kept - num_sure))
    above, below = min(spare, max(0, taken - 1)), min(spare, len(keys) - taken)
    found, sums = {}, sure
    if taken:
        positions, (above_kth, kth, below_kth) = backend.largest_keys(
            keys, [taken, taken - above, taken, taken + below]
        )
        found = {above: low + above_kth, 0: low + kth, -below: low + below_kth}
        sums = backend.merge(sure, backend.entries_at(near, positions))
    return Winners(sums, found, total <= kept and not left)


def next_bounds(winners: Winners, spare: int, bounds: Bounds, number: int, levels: list[int]) -> Bounds | None:
    """Return what to go by in the next call: ``spare`` sums of this one lie between the k-th and each bound.

    Where so many are not known on one side, they are thought to be as far apart as those that are, or as those on the
    other side.
    """
    if not winners.keys:
        return None
    kth = winners.keys[0]
    above, below = max(winners.keys), -min(winners.keys)
    up = (winners.keys[above] - kth) / max(1, above) * spare
    down = (kth - winners.keys[-below]) / max(1, below) * spare
    up, down = up or down or kth >> 14, down or up or kth >> 14
    low = 0 if winners.everything else max(0, kth - ceil(down))
    return Bounds(low, kth + 1 + int(up), number, levels, max(1.0, 0.9 * bounds.doubt))


def margin(kept: int) -> int:
    """Return by how many sums the number of those that reach a key may change from call to call."""
    return kept // 64 + 3 * isqrt(kept)


def shown_numbers(nnz: int, kept: int, size: int) -> list[int]:
    """Return the numbers, from 1 in the order of selection, of the sums whose keys an owner of ``nnz`` shows.

    Between two of them is a part of what is above them, small enough that what all owners then send too much takes no
    more bytes than what they show.
    """
    if not nnz:
        return []
    ratio = 1 + min(0.5, max(1 / 64, sqrt(2 * size / kept)))
    found, number = [], 1
    while number < nnz:
        found.append(number)
        number = max(number + 1, int(ratio * number))
    return [*found, nnz]


def bracket(comm: Communicator, sums: SparseVector, parcels: Sequence[Parcel], kept: int) -> tuple[int, int]:
    """Return a key that at least ``kept`` of all sums reach, or all of them, and one that is reached by fewer.

    Args:
        comm: the ranks.
        sums: of this rank.
        parcels: of each owner 0, how many sums it has, and the keys at their `shown_numbers`.
        kept: how many sums win.
    """
    steps, total = [], 0  # key, how many more sums reach it at least, and how many more may reach it as well
    for owner, (_, (_, *counted)) in enumerate(parcels):
        nnz, *keys = counted or (comm.num_elements + 1,)
        numbers = shown_numbers(min(nnz, comm.num_elements), kept, comm.size)
        if nnz > comm.num_elements or len(keys) != len(numbers):
            raise comm.broken(owner, f"{len(keys)} keys of {nnz} sums")
        check_keys(comm, owner, keys, sums)
        total += nnz
        steps += [
            (key, number - before, after - number)
            for key, before, number, after in zip(keys, [0, *numbers], numbers, [*numbers[1:], nnz + 1], strict=False)
        ]
    steps.sort(key=itemgetter(0), reverse=True)  # steps of equal keys stay as they are: each owner's by number
    low, high, reached, may_reach = 0, 0, 0, 0
    for key, at_least, also in steps:
        if not high and may_reach + also > min(kept, total) - margin(kept):
            high = key + 1
        reached, may_reach = reached + at_least, may_reach + also
        if reached >= kept:
            low = key if total > kept else 0
            break
    return low, high


# -- costs ------------------------------------------------------------------------------------------------------------


def predicted_time(problem: Problem, costs: Costs, ratio: int = 1) -> float:
    """Return the seconds of a call, as predicted, where what was kept from the one before fits."""
    P, k = problem.P, problem.k
    kept = min(ratio, P) * k
    if P == 1:
        return costs.select * problem.n
    keys = _NEAR * problem.element_bytes if problem.hidden else 0.0
    sent = (kept + margin(kept)) * problem.entry_bytes + kept * keys + 24 * num_owners(P, k)
    gathered = problem.link(costs).trip(P - 1, (P - 1) / num_owners(P, k) * sent)
    work = k * (log2_ceil(P) * costs.merge + problem.codec(costs)) + kept * (4 * costs.merge + problem.codec(costs))
    return costs.select * problem.n + scatter_time(problem, costs) + gathered + work


def scatter_time(problem: Problem, costs: Costs) -> float:
    """Return the predicted seconds until an owner has its part of what other ranks have, in ranges that are known."""
    P, k = problem.P, problem.k
    return problem.link(costs).trip(P - 1, (P - 1) * (24 + k / num_owners(P, k) * problem.entry_bytes))


ALGORITHM = Algorithm(
    name="split",
    summary="the exact top-k of the sum of all top-k: each rank adds up a range of indices",
    cost="2 alpha + 2 (P - 2) gap + 2 (P - 1)/P k b beta",
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
        cost=f"2 alpha + 2 (P - 2) gap + {ratio + 1} (P - 1)/P k b beta",
        result=f"at most {ratio} k entries, the exact top-({ratio} k) of the sum of the local top-k",
        run=partial(split, ratio=ratio),
        predicted_time=partial(predicted_time, ratio=ratio),
        automatic=False,
    )
