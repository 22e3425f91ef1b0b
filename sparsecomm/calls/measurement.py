"""The costs that "auto" goes by on a communicator: those of a profile, or else delay and rate as measured in one call.

Without a profile that fits, the first call on a communicator that names no algorithm is preceded by a
`LinkMeasurement`.
Ranks time messages in pairs, and tell each other what they have found. All of them then make the same of the same
numbers. It takes one and a half round trips between nodes that are far from each other, and hardly a millisecond where
they are near. An odd number of nodes has one pair more, after the others, for a round trip more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean, median

import numpy as np

from sparsecomm.backends import CpuBackend
from sparsecomm.calls.call import Call, State
from sparsecomm.calls.options import Options
from sparsecomm.calls.queue import queue_of
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.primitives.costs import Link
from sparsecomm.primitives.gather import ROUNDS, gather_words
from sparsecomm.tensors.arrays import Array
from sparsecomm.tensors.dtypes import FLOAT32
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.transport import Transport
from sparsecomm.transport.memory import HOST
from sparsecomm.tuning import profile
from sparsecomm.tuning.profile import Used
from sparsecomm.wire import HEADER_BYTES, MEASUREMENT, PLAIN, CallSignature, Messages

__all__ = ["LinkMeasurement", "costs_for_steps", "costs_of", "measurement_needed", "plan_costs"]

_NOTHING = SparseVector.trusted(np.empty(0, np.int32), np.empty(0, np.float32), 0, (0,))
_INSIDE, _BETWEEN = 0, 1  # links: between ranks of a node, and between nodes
_TURNS = 2  # in which the members of a group are paired: the second is for the last one of an odd number
_FAR = 5e-3  # seconds of a round trip from which on nothing is timed twice
_TRAIN = 6_144  # bytes that a connection of TCP can still send before the first acknowledgement: ten packets in all
_REPEATS, _BURST = 5, 8  # round trips that are timed between ranks that are near, and messages sent at once
_LONG, _MIN_LONG, _MAX_LONG = 0.5e-3, 1 << 14, 1 << 17  # about how many seconds a long message takes, and its bytes
_STEPS = 1.0, 1.25, 1.6, 2.0, 2.5, 3.15, 4.0, 5.0, 6.3, 8.0, 10.0
_MIN = 1e-7, 1e-11, 1e-8  # of alpha, beta and gap: less than that nobody can measure


def costs_of(ranks: Transport, measurement: LinkMeasurement | None = None) -> Used:
    """Return the costs by which "auto" chooses, the same on all ranks.

    They are measured if there is no profile for these ranks, and they have not been measured. Then this is a call,
    which all ranks must make; it comes after those in the queue.

    Args:
        ranks: the ranks.
        measurement: what `measurement_needed` has returned, if the caller has asked, to know what becomes of it.

    Raises:
        CollectiveMismatchError, TimeoutError, RankFailedError, TransportError: that call has failed, as any other.
    """
    if measurement is None:
        measurement = measurement_needed(ranks)
    if measurement is not None:
        queue_of(ranks).call(measurement)
        assert measurement.found is not None
        return measurement.found
    used = profile.used(ranks.library, ranks.size, ranks.num_nodes) or queue_of(ranks).measured
    assert used is not None
    return used


def costs_for_steps(ranks: Transport) -> Used:
    """Do as `costs_of`. Where a thread makes calls, an interrupt ends the wait alone, and the next time waits on."""
    queue = queue_of(ranks)
    handle = queue.measuring
    if handle is None:
        measurement = measurement_needed(ranks)
        if measurement is None:
            return costs_of(ranks)
        queue.measuring = handle = queue.submit(measurement)
    try:
        handle.wait()
    except BaseException:
        if handle.error is not None:
            queue.measuring = None
        raise
    queue.measuring = None
    return costs_of(ranks)


def plan_costs(ranks: Transport, options: Options, measurement: LinkMeasurement | None = None) -> Used | None:
    """Return the costs by which a plan chooses; ``None``: its options leave nothing to choose.

    For a wire format alone nothing is measured; without a profile, what has been measured or is assumed will do.

    Args:
        ranks, measurement: as of `costs_of`.
        options: of the plan.

    Raises:
        CollectiveMismatchError, TimeoutError, RankFailedError, TransportError: as `costs_of`.
    """
    if options.decided:
        return None
    if options.chooses_algorithm:
        return costs_of(ranks, measurement)
    return profile.used(ranks.library, ranks.size, ranks.num_nodes) or queue_of(ranks).measured or profile.assumed()


def measurement_needed(ranks: Transport) -> LinkMeasurement | None:
    """Return the call that `costs_of` will make; ``None``: none, since costs are known."""
    if profile.used(ranks.library, ranks.size, ranks.num_nodes) is None and queue_of(ranks).measured is None:
        return LinkMeasurement(ranks)
    return None


class LinkMeasurement(Call):
    """A call after which the queue knows how long messages take, the same on all ranks.

    The members of a group, the ranks of a node or the first rank of every node, are paired: each with the one half the
    group away. Both ranks of a pair time a round trip. Who comes to the call first waits for the other, and attends to
    nobody else meanwhile. So the other one's ping is answered at once, and the shorter time is that of the network.

    Attributes:
        must_keep: whether the gradient of the sum that follows must be kept, whatever comes: the measurement has begun
            on the transport, if only to be left, or the transport has failed.
        found: the costs; ``None``: it has not come so far.
    """

    def __init__(self, ranks: Transport) -> None:
        """Prepare it."""
        super().__init__(ranks)
        self.found: Used | None = None
        host = CpuBackend()
        signature = CallSignature(MEASUREMENT, FLOAT32.code, 0, PLAIN.code, 0, 0)
        self._messages = Messages(signature, ranks.rank, FLOAT32.accumulator, (0,), host)
        self._comm, self._queue = Communicator(ranks, host, self._messages, PLAIN), queue_of(ranks)
        self._counted = ranks.counted
        self.must_keep = False
        nodes = ranks.node_of_rank
        by_node: dict[int, list[int]] = {}
        for rank, node in enumerate(nodes):
            by_node.setdefault(node, []).append(rank)
        self._groups = [list(by_node.values()), [[members[0] for members in by_node.values()]]]

    def _communicator(self) -> Communicator:
        return self._comm

    def _begin(self) -> None:
        self._comm.begin()
        self.must_keep = True

    def _keep(self) -> None:
        self.must_keep = True  # `_begin` may have failed

    @property
    def failed(self) -> bool:
        """Whether this rank has left it with an error, of which the others know."""
        return self.must_keep and self.state is State.FAILED

    def _finish(self, result: SparseVector) -> None:
        self._queue.measured = self.found
        self.ranks.counted = self._counted  # to the program, the sum that comes next is the call that may count

    def _exchange(self) -> SparseVector:
        own = [self._near(_INSIDE, turn, peer, _MAX_LONG) for turn, peer in self._peers(_INSIDE)]
        own += [self._far(turn, peer) for turn, peer in self._peers(_BETWEEN)]
        told = gather_words(self._comm, [word for words in own for word in words], 5 * ROUNDS)
        # A train is timed once, and seems shorter where a rank was late to read the beginning: no time counts alone.
        inside, between = self._of_pairs(_INSIDE, told, 0, min), self._of_pairs(_BETWEEN, told, 3 * _TURNS, fmean)
        node = link = None
        if inside:
            node = _link(inside, _MAX_LONG)
        if between:
            link = _link(between, _TRAIN)
            if 2 * link.alpha < _FAR:
                nbytes = min(_MAX_LONG, max(_MIN_LONG, int(_LONG / link.beta))) // 4 * 4
                own = [self._near(_BETWEEN, turn, peer, nbytes) for turn, peer in self._peers(_BETWEEN)]
                told = gather_words(self._comm, [word for words in own for word in words], 6 * ROUNDS)
                link = _link(self._of_pairs(_BETWEEN, told, 0, min), nbytes)
        self.found = profile.measured(link, node)
        return _NOTHING

    def _peers(self, link: int) -> list[tuple[int, int]]:
        """Return, by turn, the rank with which this one is paired on a link; -1: none."""
        return [
            (turn, next((a + b - rank for a, b in self._pairs(link, turn) if rank in (a, b)), -1))
            for rank in [self.ranks.rank]
            for turn in range(_TURNS)
        ]

    def _pairs(self, link: int, turn: int) -> list[tuple[int, int]]:
        """Return the pairs of a turn: lower rank, higher rank."""
        found = []
        for members in self._groups[link]:
            half, odd = divmod(len(members), 2)
            if turn == 0:
                found += list(zip(members[:half], members[half:], strict=False))
            elif odd and half:
                found.append((members[0], members[-1]))
        return found

    def _of_pairs(
        self, link: int, told: list[list[int]], begin: int, of_two: Callable[[tuple[int, int]], float]
    ) -> list[tuple[float, float, float]]:
        """Return the three times of each pair on a link, in seconds: the shorter of the ranks' two, but of the last."""
        found = []
        for turn in range(_TURNS):
            place = begin + 3 * turn
            for a, b in self._pairs(link, turn):
                trips, gaps, movings = zip(told[a][place : place + 3], told[b][place : place + 3], strict=True)
                found.append((1e-9 * min(trips), 1e-9 * min(gaps), 1e-9 * of_two(movings)))
        return found

    # -- times between two ranks, in nanoseconds: of a trip, of one more message at once, of the bytes of a long one --

    def _far(self, turn: int, peer: int) -> list[int]:
        """Time a round trip, and how long it takes until ``_TRAIN`` bytes are in that follow at once.

        Both ranks send at once, so that no message may be waited for until the other one's is here.
        """
        if peer < 0:
            return [0, 0, 0]
        isend, messages, clock = self.ranks.isend, self._messages, self.ranks.clock
        round_no, train = (2 + turn) * ROUNDS, _bytes(_TRAIN)
        began = clock()
        requests = [isend(messages.words([], round_no), peer)]
        self._receive_mark(peer, round_no)
        requests += [isend(messages.words([], round_no + 1), peer), isend(messages.dense(train, round_no + 2), peer)]
        self._receive_mark(peer, round_no + 1)
        answered = clock()
        self._receive_long(peer, len(train), round_no + 2)
        done = clock()
        for request in requests:
            request.wait()
        return _nanoseconds((answered - began) / 2, profile.DEFAULT.link.gap, done - answered)

    def _near(self, link: int, turn: int, peer: int, nbytes: int) -> list[int]:
        """Time several round trips, a burst, and messages of ``nbytes``."""
        if peer < 0:
            return [0, 0, 0]
        clock, first = self.ranks.clock, self.ranks.rank < peer
        data, round_no = _bytes(nbytes), (7 + _TURNS * link + turn) * ROUNDS
        trips, gap, longs = [], math.inf, []
        if not first:
            self._receive_mark(peer, round_no)
        for i in range(_REPEATS):
            began = clock()
            self._send_mark(peer, round_no + i)
            self._receive_mark(peer, round_no + i + (not first))
            trips.append(clock() - began)
        round_no += _REPEATS + 1
        if first:
            self._send_mark(peer, round_no - 1)
            for i in range(_BURST):
                self._send_mark(peer, round_no + i)
        else:
            began = clock()
            for i in range(_BURST):
                self._receive_mark(peer, round_no + i)
            gap = (clock() - began) / _BURST
        round_no += _BURST
        if first:
            self._receive_long(peer, len(data), round_no)
        for i in range(2):
            began = clock()
            request = self.ranks.isend(self._messages.dense(data, round_no + i), peer)
            if i == 0 or not first:
                self._receive_long(peer, len(data), round_no + i + first)
                longs.append(clock() - began)
            request.wait()
        trip = median(trips) / 2
        return _nanoseconds(trip, gap, min(longs) / 2 - trip)

    def _send_mark(self, to: int, round_no: int) -> None:
        self._comm.send_words([], to, round_no)

    def _receive_mark(self, source: int, round_no: int) -> None:
        self._comm.receive_words(source, 0, round_no)

    def _receive_long(self, source: int, elements: int, round_no: int) -> None:
        message = self.ranks.receive(source, HOST, HEADER_BYTES + 4 * elements)
        self._messages.read_dense(message, source, round_no, elements)


def _bytes(nbytes: int) -> Array:
    """Return so many bytes that no network can compress much, as numbers of float32."""
    words: Array = np.arange(nbytes // 4, dtype=np.uint32) * np.uint32(2654435761)
    return words.view(np.float32)


def _nanoseconds(*seconds: float) -> list[int]:
    return [min(max(0, round(1e9 * each)) if math.isfinite(each) else 1 << 62, 1 << 62) for each in seconds]


def _link(pairs: Sequence[tuple[float, float, float]], nbytes: int) -> Link:
    """Return the link of pairs, whose long messages have ``nbytes``: calls wait for the slowest pair.

    A busy machine does not tell more than ten values of each decade, to which these are rounded: choices should not
    change from run to run.
    """
    alpha, beta = max(alpha for alpha, _, _ in pairs), max(moving for _, _, moving in pairs) / nbytes
    gap = min(median(gap for _, gap, _ in pairs), alpha)
    alpha, beta, gap = (max(value, min_) for value, min_ in zip((alpha, beta, gap), _MIN, strict=True))
    return Link(_rounded(alpha), 8 / _rounded(8 / beta), _rounded(gap))


def _rounded(value: float) -> float:
    """Return the nearest of ten values of each decade, as people write them: a Renard series (ISO 3)."""
    scale = 10.0 ** math.floor(math.log10(value))
    return float(scale * min(_STEPS, key=lambda step: abs(math.log(value / scale / step))))
