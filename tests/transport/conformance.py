"""`CASES`, by name, that ranks run to test the promises of every transport.

They run over MPI in `tests/mpi/cases/test_transport.py`, over TCP in `process_group/transport_cases.py`, and in
`test_simulated.py` if they need no real time.
"""

# ruff: noqa: PT012 - what a call raises, it raises on its way out

from __future__ import annotations

import re
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest

from sparsecomm.errors import CollectiveMismatchError, InvalidInputError, TimeoutError, TransportError
from sparsecomm.transport import Transport, control, transport_of
from sparsecomm.transport.base import MAX_CONTENTS_BYTES, Bytes, MessageMemory
from tests import threads
from tests.waiting import SOON, until

ODD = 1  # the rank that deviates


class Ranks(ABC):
    """The ranks of a case, as seen by one of them. ``rank`` and ``size`` are as in MPI."""

    rank: int
    size: int

    @abstractmethod
    def comm(self) -> Any:
        """Return a new communicator of all ranks, for `sparsecomm.transport.transport_of`. Collective."""

    @abstractmethod
    def half(self) -> Any:
        """Return a new communicator of the ranks with even, or odd, numbers, like this rank's."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks, without the transport."""

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def timeout(self, seconds: float) -> Any:
        return setting("SPARSECOMM_TIMEOUT", seconds)

    def new(self) -> Transport:
        return transport_of(self.comm())


@contextmanager
def call(transport: Transport, name: bytes = b"call") -> Iterator[None]:
    """Make a collective call as the library does."""
    said = f"{transport.rank}:{name!r}"
    transport.begin(name, lambda content, rank: CollectiveMismatchError(f"{said} {rank}:{content!r}"))
    try:
        yield
    except BaseException as error:
        transport.abort(error)
        raise
    transport.end()


@contextmanager
def setting(name: str, value: object) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, str(value))
        yield


@contextmanager
def soon() -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < SOON


def noise(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([size, seed]).integers(0, 256, size, np.uint8)


def neighbours(transport: Transport) -> tuple[int, int]:
    return (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size


def ring(transport: Transport, size: int = 10) -> None:
    """Make a call in which each rank sends to the next, and check the contents."""
    after, before = neighbours(transport)
    with call(transport):
        got = transport.exchange(noise(size, transport.rank), after, before)
    assert np.array_equal(got, noise(size, before))


Case = Callable[[Ranks], None]
CASES: dict[str, Case] = {}
VIRTUAL: list[str] = []  # names of cases that need no real time


def case(*, ranks: int = 1, real: bool = False) -> Callable[[Case], Case]:
    """Register a case that needs at least ``ranks`` ranks."""

    def register(function: Case) -> Case:
        def run(comm: Ranks) -> None:
            if comm.size >= ranks:
                function(comm)

        CASES[function.__name__] = run
        if not real:
            VIRTUAL.append(function.__name__)
        return function

    return register


# -- bytes ------------------------------------------------------------------------------------------------------------


@case()
def bytes_travel(comm: Ranks) -> None:
    transport = comm.new()
    before = transport.counters.bytes_received
    sizes = [0, 1, 2, 63, 64, 65, 1000, 4096, 16_384, 16_385, 65_535, 65_536, 65_537, 131_073, 1_000_000, 5_000_000]
    for size in sizes:
        ring(transport, size)
    assert transport.counters.bytes_received - before == sum(sizes)
    assert transport.counters.messages_sent == transport.counters.messages_received >= len(sizes)
    after, _ = neighbours(transport)
    for peer in transport.peers():  # if the transport reports traffic, which includes framing
        assert peer.rank != comm.rank
        sent = sum(sizes) if peer.rank == after else 0
        assert sent <= peer.bytes_sent <= sent + 100_000
        assert peer.seconds >= 0
        assert peer.rate >= 0


@case()
def messages_keep_their_order(comm: Ranks) -> None:
    transport = comm.new()
    sizes = [0, 20_000, 1, 1_000_000, 0, 16_384, 16_385, 3] + [100 * i for i in range(100)]
    with call(transport):
        requests = [transport.isend(noise(size, comm.rank), to) for size in sizes for to in range(comm.size)]
        for source in reversed(range(comm.size)):
            for size in sizes:
                got = transport.receive(source)
                assert np.array_equal(got, noise(size, source))
                got[...] = 0  # the receiver owns the memory
        for request in requests:
            request.wait()
            request.wait()


@case()
def a_slow_rank_is_waited_for(comm: Ranks) -> None:
    transport = comm.new()
    after, before = neighbours(transport)
    with call(transport):
        if comm.rank == comm.size - 1:
            comm.sleep(0.6)  # long enough for all stages of waiting, and some pings
        assert transport.exchange(noise(100_000, comm.rank), after, before).size == 100_000
    ring(transport)


@case(ranks=2, real=True)
def a_rank_knows_that_another_one_waits_for_it(comm: Ranks) -> None:
    transport = comm.new()
    ring(transport)
    if comm.rank == ODD:
        until(lambda: transport.awaited(b"call"), "a rank that waits in the next call")
        assert not transport.awaited(b"another")
    ring(transport)


@case(real=True)
def messages_in_pieces(comm: Ranks) -> None:
    """Limits differ: a message of the receiver's limit must not look like the first piece of a longer one."""
    for limit in (64, 1000):
        with setting("SPARSECOMM_MAX_MESSAGE_BYTES", limit if comm.rank == 0 else 3 * limit):
            transport = comm.new()
        after, before = neighbours(transport)
        sizes = [0, 1, limit - 1, limit, limit + 1, 3 * limit - 1, 3 * limit, 3 * limit + 1, 9 * limit, 100_000]
        for size in sizes:
            ring(transport, size)
        counters = transport.counters
        assert (counters.bytes_sent, counters.messages_sent) == (sum(sizes), len(sizes))
        assert (counters.bytes_received, counters.messages_received) == (sum(sizes), len(sizes))
        frozen = noise(5000, comm.rank)
        frozen.flags.writeable = False
        with call(transport):
            assert np.array_equal(transport.exchange(frozen, after, before), noise(5000, before))
            requests = [transport.isend(noise(size, 0), after) for size in (2 * limit, limit, 0, 1)]
            assert [transport.receive(before).size for _ in range(4)] == [2 * limit, limit, 0, 1]
            for request in requests:
                request.wait()


class Staged(MessageMemory):
    """Host memory of a message. A device copies pieces to it before they are sent, or from it after they arrive.

    The sender calls ``barrier`` before the third piece is copied, and the receiver after the first piece has arrived.
    The first pieces must therefore arrive before the third one can be sent.
    """

    def __init__(self, source: np.ndarray, barrier: Callable[[], None]) -> None:
        self.source, self.barrier = source, barrier
        self.copied = np.full(3 * len(source), 77, np.uint8)
        self.landings: list[int] = []
        self.readied: list[int] = []

    def ready(self, message: Bytes, nbytes: int) -> None:
        self.readied.append(nbytes)
        if len(self.readied) == 3:
            self.barrier()
        message[:nbytes] = self.source[:nbytes]

    def landed(self, message: Bytes, begin: int, end: int) -> None:
        self.copied[begin:end] = message[begin:end]
        self.landings.append(end - begin)
        if len(self.landings) == 1:
            self.barrier()


@case(ranks=2, real=True)
def messages_of_devices_travel_piece_by_piece(comm: Ranks) -> None:
    """Copies to the host overlap with sends, and copies to the device with receives."""
    limit, nbytes = 1000, 4500
    with setting("SPARSECOMM_MAX_MESSAGE_BYTES", limit):
        transport = comm.new()
    staged, sent = Staged(noise(nbytes), comm.barrier), np.full(nbytes, 99, np.uint8)
    for expected in (nbytes, 0):
        staged.readied, staged.landings = [], []
        with call(transport):
            if transport.rank == 0:
                transport.isend(sent, 1, staged).wait()
                assert staged.readied[:4] == [1000, 2000, 3000, 4000]
            elif transport.rank == 1:
                got = transport.receive(0, staged, expected)
                assert np.array_equal(got, noise(nbytes))
                assert np.array_equal(staged.copied[:nbytes], noise(nbytes))
                assert max(staged.landings) <= limit
            else:
                comm.barrier()
        counted = transport.counters.bytes_received, transport.counters.messages_received
        sent[:] = 99
    assert counted == ((2 * nbytes, 2) if transport.rank == 1 else (0, 0))


@case()
def to_all_and_from_all_at_once(comm: Ranks) -> None:
    """Messages have different lengths and one or several pieces. Some ranks get the same bytes."""
    transport = comm.new()
    rank, size = transport.rank, transport.size
    others = [other for other in range(size) if other != rank]
    for lengths in ([0, 3], [65_535, 65_536, 70_000], [200_000, 10]):
        for expected in (0, 100, 300_000):
            with call(transport):
                sends = [(to, noise(lengths[(rank + to) % len(lengths)], 7 * rank + to)) for to in others]
                arrays = transport.exchange_all(sends, others, expected=expected)
            for source, got in zip(others, arrays, strict=True):
                assert np.array_equal(got, noise(lengths[(source + rank) % len(lengths)], 7 * source + rank))
    with call(transport):
        mine = noise(1000, rank)
        arrays = transport.exchange_all([(to, mine) for to in others if rank == 0], [0] if rank else [])
    assert all(np.array_equal(got, noise(1000, 0)) for got in arrays)


@case()
def a_broadcast_gives_all_the_bytes_of_one(comm: Ranks) -> None:
    transport = comm.new()
    ring(transport)
    for root in range(comm.size):
        for size in (0, 1, 100_000):
            data = noise(size, comm.rank)
            transport.broadcast(data, root)
            assert np.array_equal(data, noise(size, root))


@case()
def what_is_refused_begins_nothing(comm: Ranks) -> None:
    transport = comm.new()
    number = transport.number
    with pytest.raises(InvalidInputError, match="257 bytes"):
        transport.begin(bytes(257), lambda theirs, rank: CollectiveMismatchError())
    with setting("SPARSECOMM_TIMEOUT", "soon"), pytest.raises(InvalidInputError, match="SPARSECOMM_TIMEOUT"):
        transport.begin(b"call", lambda theirs, rank: CollectiveMismatchError())
    transport.abort(KeyError())  # no call has begun
    assert transport.number == number
    with call(transport, bytes(256)):
        for refused in (lambda: transport.isend(noise(1, 0), comm.size), lambda: transport.receive(comm.size)):
            with pytest.raises(TransportError):
                refused()
    ring(transport)


# -- calls that fail --------------------------------------------------------------------------------------------------


@case(ranks=2)
def a_rank_that_leaves_its_call(comm: Ranks) -> None:
    """The others leave the call at once, and its remaining messages do not disturb later calls."""
    transport = comm.new()
    after, _ = neighbours(transport)
    for kind in (KeyError, KeyboardInterrupt, ZeroDivisionError):
        number = transport.number + 1
        with soon(), pytest.raises((kind, TransportError)) as caught, call(transport):
            requests = [transport.isend(noise(size, 77), after) for size in (100, 3_000_000)]
            if comm.rank == ODD:
                raise kind("on purpose")
            for request in requests:
                request.wait()
            while True:
                transport.receive(ODD)
        if comm.rank != ODD:
            assert type(caught.value) is TransportError
            said = str(caught.value)
            assert f"rank {ODD} left call {number}, which rank {comm.rank} is in. {kind.__name__}: " in said
            assert "on purpose" in said
        ring(transport, 100)


@case(ranks=2)
def a_mismatch_found_by_one_is_a_mismatch_for_all(comm: Ranks) -> None:
    transport = comm.new()
    with soon(), pytest.raises(CollectiveMismatchError, match="k = 1 here, k = 2 there"), call(transport):
        if comm.rank == 0:
            raise CollectiveMismatchError("k = 1 here, k = 2 there")
        transport.receive(neighbours(transport)[1])
    ring(transport)


@case(ranks=2)
def ranks_whose_calls_differ_exchange_their_contents(comm: Ranks) -> None:
    """One rank notices, the other one answers, and all other ranks are informed."""
    transport = comm.new()
    for size in (1, 998, 999, MAX_CONTENTS_BYTES):
        ours, theirs = (noise(size, rank).tobytes() for rank in ((ODD, 0) if comm.rank == ODD else (0, ODD)))
        patient = mock.patch.object(control, "_CONTENTS_TIME", 60.0)  # the machine may be busy
        received: bytes | None = theirs  # a late rank hears at once that the others have left
        with patient, soon(), pytest.raises(CollectiveMismatchError) as caught, call(transport):
            try:
                if comm.rank == 0:
                    error = CollectiveMismatchError("they differ")
                    error.peer = ODD
                    raise error
                transport.receive(0)
            except CollectiveMismatchError as error:
                received = theirs if error.peer is None else transport.exchange_contents(error.peer, ours)
                raise
        assert received == theirs
        assert caught.value.peer == {0: ODD, ODD: 0}.get(comm.rank), caught.value
        ring(transport)


@case(ranks=2)
def a_rank_that_does_not_answer_with_contents(comm: Ranks) -> None:
    """It leaves the call with an exception, or does nothing. The other rank does not wait long."""
    transport = comm.new()
    for kind in (KeyError, KeyboardInterrupt, None):
        short = mock.patch.object(control, "_CONTENTS_TIME", 60.0 if kind else 0.6)  # any rank may be late
        with short, soon(), pytest.raises((CollectiveMismatchError, TransportError)), call(transport):
            if comm.rank == 0:
                if kind is None:
                    assert transport.exchange_contents(ODD, b"contents") is None
                else:
                    with pytest.raises(TransportError, match=f"rank {ODD} left call .* {kind.__name__}"):
                        transport.exchange_contents(ODD, b"contents")
                raise CollectiveMismatchError("they differ")
            try:
                transport.receive(0)
            except CollectiveMismatchError:
                if comm.rank == ODD and kind is not None:
                    transport.abort(kind("on purpose"))
                if comm.rank == ODD:
                    transport.receive(0)
                raise
        comm.barrier()
        ring(transport)


@case(ranks=2)
def ranks_that_wait_in_a_cycle(comm: Ranks) -> None:
    """In different calls the ranks notice the mismatch; in the same call they time out."""
    transport = comm.new()
    after, _ = neighbours(transport)
    with soon(), pytest.raises(CollectiveMismatchError) as caught, call(transport, b"one" if comm.rank else b"other"):
        transport.receive(after)
    assert "'one'" in str(caught.value)
    assert "'other'" in str(caught.value)
    ring(transport)
    with comm.timeout(0.6), soon(), pytest.raises(TransportError, match=r"waited \S+ s for rank"), call(transport):
        transport.receive(after)  # long enough for pings
    ring(transport)


@case(ranks=2)
def a_rank_that_never_calls_is_named(comm: Ranks) -> None:
    """Messages that the others sent to it are not delivered to the next call."""
    transport = comm.new()
    number = transport.number + 1
    if comm.rank != ODD:
        named = pytest.raises(TransportError, match=rf"waited \S+ s for rank {ODD} in call {number}")
        with comm.timeout(0.3), soon(), named, call(transport):
            transport.isend(noise(9, 9), ODD)
            transport.receive(ODD)
    comm.barrier()
    if comm.rank == ODD:  # calls after the others have given up
        with soon(), pytest.raises(TransportError, match=rf"rank \d+ left call {number}"), call(transport):
            while True:
                transport.receive(0)
    ring(transport)


@case(ranks=2, real=True)
def large_sends_that_nobody_takes(comm: Ranks) -> None:
    """Sends wait for the receiver, which discards the messages at its next call."""
    transport = comm.new()
    after, _ = neighbours(transport)
    with comm.timeout(0.2), pytest.raises(TransportError), call(transport):
        transport.isend(noise(3_000_000, 0), after).wait()
        while True:  # only if the sender need not wait
            transport.receive(after)
    comm.barrier()
    for _ in range(5):
        ring(transport)
    if hasattr(transport, "reap"):
        until(lambda: transport.reap() == 0, "the end of all sends")
    comm.barrier()  # the receiver may have to make progress


@case(ranks=2, real=True)
def ctrl_c_anywhere(comm: Ranks) -> None:
    """Ctrl-C on one rank, in a wait or within a message, ends the call on all ranks."""
    with setting("SPARSECOMM_MAX_MESSAGE_BYTES", 64):
        transport = comm.new()
    after, before = neighbours(transport)
    mine, theirs = noise(2000, comm.rank), noise(2000, before)
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    for seconds in [0.2, *(5e-4 * (i + 1) for i in range(25))]:
        with soon(), pytest.raises((KeyboardInterrupt, TransportError)) as caught, call(transport):
            if comm.rank == ODD:
                signal.setitimer(signal.ITIMER_REAL, seconds)
            if seconds == 0.2:
                transport.receive(after)
            while True:
                assert np.array_equal(transport.exchange(mine, after, before), theirs)
        if comm.rank != ODD:
            assert re.search(rf"rank {ODD} left call .*KeyboardInterrupt", str(caught.value))
        ring(transport, 2000)
    signal.signal(signal.SIGALRM, handler)


# -- communicators ----------------------------------------------------------------------------------------------------


@case(ranks=2, real=True)
def a_rank_that_does_not_come_at_first(transport: Ranks) -> None:
    comm = transport.comm()
    for _ in range(2):
        if transport.rank != ODD:
            with transport.timeout(0.3), pytest.raises(TimeoutError) as caught:
                transport_of(comm)
            assert f"rank {transport.rank} waited 0.3 s" in str(caught.value)
            assert str(ODD) in str(caught.value).partition("make: ")[2]
            assert f"rank {ODD} has not called" in str(caught.value) or transport.size > 2
        transport.barrier()
    ring(transport_of(comm))  # messages of the attempt that timed out are discarded


@case(real=True)
def parts_of_the_world(transport: Ranks) -> None:
    world, half = transport.new(), transport_of(transport.half())
    assert half is not world
    assert (half.rank, half.size) == (transport.rank // 2, len(range(transport.rank % 2, transport.size, 2)))
    for size in (10, 300_000):
        ring(half, size)
        ring(world, size)


@case(real=True)
def threads_on_communicators_of_their_own(ranks: Ranks) -> None:
    """Threads call in different orders on different ranks, and no communicator waits for another."""
    comms = [ranks.comm() for _ in range(3)]
    if not ranks.new().threaded:
        return
    works = [partial(threads.calls, comm, ranks.rank, seed) for seed, comm in enumerate(comms)]
    together = {}
    with ranks.timeout(SOON / 2), ThreadPoolExecutor(2 * len(comms)) as pool:
        for i in range(len(comms))[:: (-1) ** ranks.rank]:
            together[i] = pool.submit(works[i]), pool.submit(transport_of, comms[i])
            time.sleep(0.3)
    for i, work in enumerate(works):
        assert together[i][0].result() == work()
        assert together[i][1].result() is transport_of(comms[i])
