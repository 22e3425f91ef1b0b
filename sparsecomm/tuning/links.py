"""Measures the links between ranks: pairs of ranks time messages, and all ranks gather the times.

A group is the ranks of a node, or the first ranks of all nodes. Without a time budget, each rank exchanges messages
only with the rank half a group away. For distant nodes, this takes 1.5 round trips, or 2.5 if their number is odd; for
near nodes, less than a millisecond. With a budget, all pairs of a group exchange short messages, and long messages
become as long as the budget allows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, median
from typing import TypeAlias

import numpy as np

from sparsecomm.backends import CpuBackend
from sparsecomm.primitives.communicator import ROUNDS, Communicator, gather_words
from sparsecomm.primitives.costs import Link
from sparsecomm.tensors.arrays import Array
from sparsecomm.tensors.dtypes import FLOAT32
from sparsecomm.transport import Transport
from sparsecomm.transport.base import HOST
from sparsecomm.tuning.profile import DEFAULT
from sparsecomm.wire import HEADER_BYTES, MEASUREMENT, PLAIN, CallSignature, Messages

Pair: TypeAlias = tuple[int, int]  # of ranks, the lower one first
Turns: TypeAlias = Sequence[Sequence[Pair]]  # in one turn, a rank is in at most one pair
Times: TypeAlias = tuple[float, float, float]  # seconds: of a trip, between messages of a burst, and of a long message
PairTimes: TypeAlias = tuple[Times, Times]  # the times that the two ranks of a pair measured

_FAR = 5e-3  # seconds: with a longer round trip, messages are timed only once
_TRAIN = 6_144  # bytes of a message that still fits into the ten packets that TCP sends before an acknowledgement
_TRIPS, _BURST = 5, 8  # round trips timed between near ranks, and messages sent at once
_LONG, _MIN_LONG, _MAX_LONG = 0.5e-3, 1 << 14, 1 << 17  # approximate seconds of a long message, and its bytes
_MAX_TRIPS, _MAX_TURNS = 200, 15  # with a time budget; 15 turns are all pairs of 16 ranks
_STREAMS = 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24  # bytes of a message
_STEPS = 1.0, 1.25, 1.6, 2.0, 2.5, 3.15, 4.0, 5.0, 6.3, 8.0, 10.0
_MIN = 1e-7, 1e-11, 1e-8  # alpha, beta and gap: the smallest measurable values
_ZERO = 1 << 62  # the word for 0 seconds; times between two clocks may be negative


@dataclass(frozen=True)
class Links:
    """Measured links, the same on all ranks. Without a time budget, `farthest` is ``None`` and `fastest` is empty."""

    between: Link | None  # the slowest link between nodes, measured by one rank of each; None if there is one node
    inside: Link | None  # the slowest link between ranks of a node; None if no node has two ranks
    farthest: Pair | None = None  # the pair with the longest trip: between nodes, or between ranks of the only node
    fastest: Mapping[tuple[int, int], float] = field(default_factory=dict)  # see `sparsecomm.tuning.clocks.offsets`

    @property
    def slowest(self) -> Link:
        """The link that calls of all ranks wait for; the link of `DEFAULT` for one rank."""
        return self.between or self.inside or DEFAULT.link

    @property
    def round_trip(self) -> float:
        """Seconds of the fastest round trip of `farthest`; without a time budget, twice the trip of `slowest`."""
        if self.farthest is None:
            return 2 * self.slowest.alpha
        a, b = self.farthest
        return max(self.fastest[a, b] + self.fastest[b, a], 2 * _MIN[0])


class Probe:
    """Times messages within one collective call, which the caller begins and ends on ``comm``."""

    def __init__(self, transport: Transport) -> None:
        host = CpuBackend()
        signature = CallSignature(MEASUREMENT, FLOAT32.code, 0, PLAIN.code, 0, 0)
        self._transport = transport
        self._messages = Messages(signature, transport.rank, FLOAT32.accumulator, (0,), host)
        self.comm = Communicator(transport, host, self._messages, PLAIN)
        by_node: dict[int, list[int]] = {}
        for rank, node in enumerate(transport.node_of_rank):
            by_node.setdefault(node, []).append(rank)
        self._nodes = list(by_node.values())
        self._leaders = [[members[0] for members in self._nodes]]
        self._round = 0

    def measure(self, seconds: float = 0.0) -> Links:
        """Measure the links. Collective.

        ``seconds``: the time budget of each of the two links. With 0, the measurement is as short as possible, and
        values are rounded, so that choices do not change from run to run.
        """
        self._round = 0
        if seconds:
            inside, farthest, fastest = self._thorough(self._nodes, seconds)
            between, farthest_nodes, fastest_between = self._thorough(self._leaders, seconds)
            return Links(between, inside, farthest_nodes or farthest, {**fastest, **fastest_between})
        inside_turns, turns = _half_apart(self._nodes), _half_apart(self._leaders)
        near, far_apart = self._timed((inside_turns, partial(self._near, _MAX_LONG)), (turns, self._far))
        # A rank that reads the beginning of a train late measures a shorter time: take the mean of both ranks.
        inside, between = _link(near, _MAX_LONG), _link(far_apart, _TRAIN, fmean)
        if between is not None and 2 * between.alpha < _FAR:
            nbytes = min(_MAX_LONG, max(_MIN_LONG, int(_LONG / between.beta))) // 4 * 4
            (near,) = self._timed((turns, partial(self._near, nbytes)))
            between = _link(near, nbytes)
        return Links(between and _rounded(between), inside and _rounded(inside))

    def _thorough(
        self, groups: Sequence[Sequence[int]], seconds: float
    ) -> tuple[Link | None, Pair | None, dict[tuple[int, int], float]]:
        """Return the slowest link within groups, the pair with the longest trip, and `Links.fastest`."""
        all_turns, turns = _all_pairs(groups), _half_apart(groups)
        if not all_turns:
            return None, None, {}
        (times,) = self._timed((all_turns[:1], partial(self._trips, _TRIPS)))
        count = seconds / 4 / len(all_turns) / max(2 * _slowest(times, 0), 1e-7)
        (times,) = self._timed((all_turns, partial(self._trips, int(min(max(_TRIPS, count), _MAX_TRIPS)))))
        trips = {pair: min(at_a[0], at_b[0]) for pair, (at_a, at_b) in times.items()}
        farthest = max(trips, key=lambda pair: trips[pair])
        fastest = {(a, b): at_b[1] for (a, b), (_, at_b) in times.items()}
        fastest |= {(b, a): at_a[1] for (a, b), (at_a, _) in times.items()}
        (bursts,) = self._timed((turns, self._burst))
        alpha, nbytes, took = trips[farthest], 0, 0.0
        for nbytes in _STREAMS:
            (times,) = self._timed((turns, partial(self._stream, nbytes, 1)))
            took = _slowest(times, 2, fmean)
            if took > seconds / 4:
                break
        count = max(1, math.ceil(seconds / 2 / max(took, 1e-6)))
        (times,) = self._timed((turns, partial(self._stream, nbytes, min(count, _MAX_TRIPS))))
        gap = median(min(a[2], b[2]) for a, b in bursts.values()) / (_BURST - 1)
        return _measurable(alpha, (_slowest(times, 2, fmean) - alpha) / nbytes, gap), farthest, fastest

    def _timed(self, *jobs: tuple[Turns, Callable[[int], Times]]) -> list[dict[Pair, PairTimes]]:
        """Time messages between pairs, and return each job's times by pair. Collective.

        A job consists of turns and of a function that times messages with a peer.
        """
        own: list[int] = []
        for turns, times in jobs:
            for pairs in turns:
                peer = next((a + b - self._transport.rank for a, b in pairs if self._transport.rank in (a, b)), -1)
                self._round += ROUNDS
                own += [0, 0, 0] if peer < 0 else map(_word, times(peer))
        self._round += ROUNDS
        words_by_rank = gather_words(self.comm, own, self._round)
        times_by_job, position = [], 0
        for turns, _ in jobs:
            times_by_pair: dict[Pair, PairTimes] = {}
            for pairs in turns:
                for a, b in pairs:
                    times_a, times_b = (map(_seconds, words_by_rank[r][position : position + 3]) for r in (a, b))
                    times_by_pair[a, b] = tuple(times_a), tuple(times_b)  # type: ignore[assignment]
                position += 3
            times_by_job.append(times_by_pair)
        return times_by_job

    # -- times between two ranks --------------------------------------------------------------------------------------
    #
    # A mark is a short message that contains the time at which it was sent. One rank of a pair begins first, so its
    # time includes the wait for its peer. The peer does not wait, so the shorter of the two times is the network's.

    def _far(self, peer: int) -> Times:
        """Time a round trip, and then the arrival of a train of `_TRAIN` bytes.

        Both ranks send first, so neither may wait for its sends before it has received.
        """
        isend, messages, clock = self._transport.isend, self._messages, self._transport.clock
        train = _bytes(_TRAIN)
        began = clock()
        requests = [isend(messages.parcel((), (), PLAIN, self._round), peer)]
        self.comm.receive_words(peer, 0, self._round)
        requests += [isend(messages.parcel((), (), PLAIN, self._round), peer)]
        requests += [isend(messages.dense(train, self._round), peer)]
        self.comm.receive_words(peer, 0, self._round)
        answered = clock()
        self._receive_long(peer, len(train))
        done = clock()
        for request in requests:
            request.wait()
        return (answered - began) / 2, DEFAULT.link.gap, done - answered

    def _near(self, nbytes: int, peer: int) -> Times:
        """Time several round trips, a burst, and messages of ``nbytes`` in both directions."""
        trip, _, _ = self._trips(_TRIPS, peer)
        _, burst, _ = self._burst(peer)
        clock, first, data, longs = self._transport.clock, self._transport.rank < peer, _bytes(nbytes), []
        if first:
            self._receive_long(peer, len(data))
        for i in range(2):
            began = clock()
            request = self._transport.isend(self._messages.dense(data, self._round), peer)
            if i == 0 or not first:
                self._receive_long(peer, len(data))
                longs.append(clock() - began)
            request.wait()
        return trip, burst / _BURST, min(longs) / 2 - trip

    def _trips(self, count: int, peer: int) -> Times:
        """Time round trips; return half of their median, and the smallest result of `_receive_mark`."""
        clock, first = self._transport.clock, self._transport.rank < peer
        times, fastest = [], math.inf if first else self._receive_mark(peer)
        for _ in range(count):
            began = clock()
            self._send_mark(peer)
            fastest = min(fastest, self._receive_mark(peer))
            times.append(clock() - began)
        if first:
            self._send_mark(peer)
        return median(times) / 2, fastest, 0.0

    def _burst(self, peer: int) -> Times:
        """Send several marks at once to the higher rank, which times all of them, and the ones after the first."""
        if self._transport.rank < peer:
            for _ in range(_BURST):
                self._send_mark(peer)
            return 0.0, math.inf, math.inf
        began = self._transport.clock()
        self._receive_mark(peer)
        first = self._transport.clock()
        for _ in range(_BURST - 1):
            self._receive_mark(peer)
        ended = self._transport.clock()
        return 0.0, ended - began, ended - first

    def _stream(self, nbytes: int, count: int, peer: int) -> Times:
        """Time ``count`` messages of ``nbytes`` in both directions at once; return the seconds of one.

        One of the two ranks begins a trip later, so its time is shorter by a trip. Use the mean of both times.
        """
        data = _bytes(nbytes)
        self._send_mark(peer)
        self._receive_mark(peer)
        began = self._transport.clock()
        for _ in range(count):
            request = self._transport.isend(self._messages.dense(data, self._round), peer)
            self._receive_long(peer, len(data))
            request.wait()
        return 0.0, 0.0, (self._transport.clock() - began) / count

    def _send_mark(self, to: int) -> None:
        self.comm.send_words([_word(self._transport.clock())], to, self._round)

    def _receive_mark(self, source: int) -> float:
        """Return the seconds from the mark's departure on the sender's clock to its arrival on this rank's clock."""
        (left,) = self.comm.receive_words(source, 1, self._round)
        return self._transport.clock() - _seconds(left)

    def _receive_long(self, source: int, elements: int) -> None:
        message = self._transport.receive(source, HOST, HEADER_BYTES + 4 * elements)
        self._messages.read_dense(message, source, self._round, elements)


# -- pairs ------------------------------------------------------------------------------------------------------------


def _half_apart(groups: Sequence[Sequence[int]]) -> Turns:
    """Return turns that pair the first half of each group with the second half.

    In an odd group, one member is left: the last turn pairs it with the first member.
    """
    turns: list[list[Pair]] = [[], []]
    for members in groups:
        half, odd = divmod(len(members), 2)
        turns[0] += zip(members[:half], members[half:], strict=False)
        if odd and half:
            turns[1].append((members[0], members[-1]))
    return [pairs for pairs in turns if pairs]


def _all_pairs(groups: Sequence[Sequence[int]]) -> Turns:
    """Return turns that pair all members of a group with each other, at most `_MAX_TURNS` (circle method)."""
    turns: list[list[Pair]] = []
    for members in groups:
        circle = [*members, *([-1] if len(members) % 2 else [])]
        for turn in range(min(len(circle) - 1, _MAX_TURNS)):
            if turn == len(turns):
                turns.append([])
            half = len(circle) // 2
            pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
            turns[turn] += [(min(pair), max(pair)) for pair in pairs if -1 not in pair]
            circle = [circle[0], circle[-1], *circle[1:-1]]
    return [pairs for pairs in turns if pairs]


# -- times ------------------------------------------------------------------------------------------------------------


def _link(
    times: Mapping[Pair, PairTimes], nbytes: int, combine: Callable[[Sequence[float]], float] = min
) -> Link | None:
    """Return the slowest link of pairs whose long messages have ``nbytes``; ``None`` without pairs."""
    if not times:
        return None
    gap = median(min(a[1], b[1]) for a, b in times.values())
    return _measurable(_slowest(times, 0), _slowest(times, 2, combine) / nbytes, gap)


def _measurable(alpha: float, beta: float, gap: float) -> Link:
    """Return a link with these values, at least `_MIN`; the gap is at most a trip."""
    return Link(*(max(value, limit) for value, limit in zip((alpha, beta, min(gap, alpha)), _MIN, strict=True)))


def _slowest(times: Mapping[Pair, PairTimes], index: int, combine: Callable[[Sequence[float]], float] = min) -> float:
    """Return the longest time at ``index`` over all pairs; ``combine`` combines the times of a pair's two ranks."""
    return max(combine((a[index], b[index])) for a, b in times.values())


def _bytes(nbytes: int) -> Array:
    """Return ``nbytes`` of float32 numbers that networks cannot compress."""
    words: Array = np.arange(nbytes // 4, dtype=np.uint32) * np.uint32(2654435761)
    return words.view(np.float32)


def _word(seconds: float) -> int:
    """Return seconds, which may be negative, as a word of nanoseconds."""
    return min(max(0, _ZERO + round(1e9 * seconds)), 2 * _ZERO) if math.isfinite(seconds) else 2 * _ZERO


def _seconds(word: int) -> float:
    return 1e-9 * (word - _ZERO)


def _rounded(link: Link) -> Link:
    """Round to a Renard series of ten values per decade (ISO 3), so that choices do not change between runs."""

    def nearest(value: float) -> float:
        scale = 10.0 ** math.floor(math.log10(value))
        return float(scale * min(_STEPS, key=lambda step: abs(math.log(value / scale / step))))

    return Link(nearest(link.alpha), 8 / nearest(8 / link.beta), nearest(link.gap))
