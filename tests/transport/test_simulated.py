"""The simulated transport: its clock, determinism, and detection of deadlocks."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from functools import partial
from threading import Event, Thread

import numpy as np
import pytest

from sparsecomm.errors import InvalidInputError, TimeoutError, TransportError
from sparsecomm.transport.simulated import SimulatedTransport, run
from tests import threads
from tests.transport import conformance

ALPHA, BETA, GAP = 1e-3, 1e-6, 1e-4
SIZES = (1, 2, 3, 4, 5, 7, 8, 12)


def text(*values: int) -> np.ndarray:
    return np.array(values, np.uint8)


def in_a_call(body):
    """Return a program that runs ``body`` in one call and aborts the call on an error, as the library does."""

    def program(t):
        with conformance.call(t):
            return body(t)

    return program


def times(size, body, **costs):
    return [result.seconds for result in run(size, in_a_call(body), **({"alpha": ALPHA, "beta": BETA} | costs))]


class SimulatedRanks(conformance.Ranks):
    """A simulated rank for the conformance cases. Time is virtual, so the timeout need not be short."""

    def __init__(self, transport: SimulatedTransport, here: list[SimulatedTransport]) -> None:
        self.transport, self._here = transport, here
        self.rank, self.size = transport.rank, transport.size

    def comm(self) -> SimulatedTransport:
        return self.transport

    def half(self) -> SimulatedTransport:
        raise NotImplementedError

    def barrier(self) -> None:
        self._here.append(self.transport)
        if len(self._here) < self.size:
            self.transport._world.scheduler.sleep(self.transport.rank)
        else:
            for other in self._here[:-1]:
                self.transport._world.scheduler.wake(other.rank, self.transport.seconds)
            self._here.clear()

    def sleep(self, seconds: float) -> None:
        self.transport.compute(seconds)

    def timeout(self, seconds: float) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("case", conformance.VIRTUAL)
def test_what_every_transport_promises(case: str, size: int) -> None:
    here: list[SimulatedTransport] = []
    run(size, lambda transport: conformance.CASES[case](SimulatedRanks(transport, here)))


def zeros(nbytes):
    return np.zeros(nbytes, np.uint8)


ONE, LINK = ALPHA + 500 * BETA, 500 * BETA  # seconds of a message of 500 bytes, and of these on a node's link


class TestClock:
    def test_an_exchange_takes_the_time_of_one_message(self):
        for data, weigh in ((zeros(500), None), (zeros(5), lambda data: 100 * len(data))):
            swap = in_a_call(lambda t, data=data: t.exchange(data, 1 - t.rank, 1 - t.rank))
            results = run(2, swap, alpha=ALPHA, beta=BETA, weigh=weigh)
            assert [r.seconds for r in results] == pytest.approx([ONE] * 2)
            assert [(r.counters.bytes_sent, r.counters.bytes_received) for r in results] == [(500, 500)] * 2
        assert [result.seconds for result in run(2, swap)] == [0.0, 0.0]

    @pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2)])
    def test_one_send_and_one_receive_at_a_time(self, order):
        def from_0(t):
            if t.rank == 0:
                for request in [t.isend(zeros(100), to) for to in order]:
                    request.wait()
            else:
                t.receive(0)

        def to_0(t):
            if t.rank:
                t.isend(zeros(100), 0).wait()
            else:
                for source in order:
                    t.receive(source)

        interval, trip = GAP + 100 * BETA, ALPHA + 100 * BETA
        came = [trip + order.index(rank) * interval for rank in (1, 2, 3)]
        assert times(4, from_0, gap=GAP) == pytest.approx([3 * interval, *came])
        assert times(4, to_0, gap=GAP) == pytest.approx([trip + 2 * interval, interval, interval, interval])

    @pytest.mark.parametrize("size", SIZES)
    def test_to_all_at_once_takes_one_trip(self, size):
        def body(t):
            requests = [t.isend(text(1), (t.rank + distance) % size) for distance in range(1, size)]
            for distance in range(1, size):
                t.receive((t.rank - distance) % size)
            for request in requests:
                request.wait()

        gaps = GAP * (size - 1)
        assert times(size, body, beta=0.0) == pytest.approx([ALPHA * (size > 1)] * size)
        assert max(times(size, body, beta=0.0, gap=GAP)) == pytest.approx(max(gaps, ALPHA + gaps - GAP) * (size > 1))


class TestNodes:
    """Ranks of one node share its links."""

    @pytest.mark.parametrize("m", [1, 2, 3, 8])
    def test_as_many_times_as_long_as_ranks_share(self, m):
        def body(t):
            t.exchange(zeros(500), (t.rank + m) % (2 * m), (t.rank + m) % (2 * m))

        shared = pytest.approx([ALPHA + i * LINK for i in range(1, m + 1)] * 2)
        assert times(2 * m, body, node_of_rank=[r // m for r in range(2 * m)]) == shared
        assert times(2 * m, body, node_of_rank=[0] * m + list(range(1, m + 1))) == shared
        assert times(2 * m, body) == pytest.approx([ONE] * 2 * m)

    def test_inside_a_node_the_link_is_free(self):
        def body(t):  # 0 -> 1 is inside a node, 2 -> 3 between nodes
            if t.rank % 2:
                t.receive(t.rank - 1)
            else:
                t.isend(zeros(500), t.rank + 1).wait()

        inside = 1e-5 + 500 * 1e-8
        costs = {"node_of_rank": [0, 0, 0, 1], "node_alpha": 1e-5, "node_beta": 1e-8}
        assert times(4, body, **costs) == pytest.approx([500 * 1e-8, inside, LINK, ONE])
        assert times(4, body, node_of_rank=[0, 0, 0, 1]) == pytest.approx([LINK, ONE] * 2)

    def test_the_first_to_ask_is_first(self):
        """The order of running ranks does not matter: rank 0 runs first."""
        late = LINK / 4

        def body(t):
            if t.rank < 2:
                t.compute(0.0 if t.rank else late)
                t.isend(zeros(500), t.rank + 2).wait()
            else:
                t.receive(t.rank - 2)

        seconds = times(4, body, node_of_rank=[0, 0, 1, 2])
        assert seconds == pytest.approx([2 * LINK, LINK, ONE + LINK, ONE])

    def test_a_gap_before_is_used(self):
        def body(t):
            if t.rank == 0:  # its message arrives while rank 1 works, although rank 0 asks for it late
                t.compute(0.5 + ONE / 2)
                t.receive(2)
            elif t.rank == 1:
                t.compute(0.5)
                t.receive(3)
            else:
                t.compute(0.5 if t.rank == 3 else 0.0)
                t.isend(zeros(500), t.rank - 2).wait()

        assert times(4, body, node_of_rank=[0, 0, 1, 2]) == pytest.approx([0.5 + ONE / 2, 0.5 + ONE, LINK, 0.5 + LINK])

    @pytest.mark.parametrize("seed", range(5))
    def test_no_link_carries_more_than_it_can(self, seed):
        """Random traffic is never faster than without sharing, or than the busiest link allows."""

        def body(t):
            mine = np.random.default_rng([seed, t.rank])
            common = np.random.default_rng(seed)
            for _ in range(10):
                t.compute(float(mine.random()) * LINK)
                distance = int(common.integers(1, 12))
                t.exchange(zeros(500), (t.rank + distance) % 12, (t.rank - distance) % 12)
                crossed.append((t.rank // 4, (t.rank + distance) % 12 // 4))

        crossed: list[tuple[int, int]] = []
        alone = times(12, body)
        crossed.clear()
        shared = times(12, body, node_of_rank=[r // 4 for r in range(12)])
        assert all(a <= b + 1e-12 for a, b in zip(alone, shared, strict=True))
        leaving = max(sum(a == node != b for a, b in crossed) for node in range(3))
        assert max(shared) > leaving * LINK
        assert shared == times(12, body, node_of_rank=[r // 4 for r in range(12)])


class TestMessages:
    def test_bytes_changed_under_way_are_noticed(self):
        def body(t):
            data = text(1, 2, 3)
            request = t.isend(data, 1 - t.rank)
            t.receive(1 - t.rank)
            if t.rank == 1:
                data[2] = 0
            request.wait()

        with pytest.raises(TransportError, match="rank 1 changed the bytes of a message in flight to rank 0"):
            run(2, in_a_call(body))

    def test_a_request_never_waited_for_is_noticed(self):
        def body(t):
            t.isend(text(1), 1 - t.rank)
            t.receive(1 - t.rank)

        with pytest.raises(TransportError, match="never waited"):
            run(2, in_a_call(body))

    def test_other_arrays_than_bytes_are_refused(self):
        for data in (np.zeros(3, np.float32), np.zeros((2, 2), np.uint8), np.zeros(8, np.uint8)[::2]):
            with pytest.raises(InvalidInputError, match="contiguous bytes"):
                run(1, in_a_call(lambda t, data=data: t.isend(data, 0)))


class TestFailure:
    def test_results_and_the_lowest_ranks_error(self):
        def program(t):
            if t.rank % 2:
                raise ValueError(f"rank {t.rank}")
            return t.rank

        with pytest.raises(ValueError, match="rank 1"):
            run(4, program)
        results = run(4, program, catch=True)
        assert [r.value for r in results] == [0, None, 2, None]
        assert [str(r.error) for r in results] == ["None", "rank 1", "None", "rank 3"]

    def test_a_rank_that_finished_without_sending_is_named(self, monkeypatch):
        monkeypatch.setenv("SPARSECOMM_TIMEOUT", "7")
        body = in_a_call(lambda t: t.receive((t.rank + 1) % 3) if t.rank != 2 else None)
        zero, one, two = run(3, body, catch=True)
        assert two.error is None
        assert isinstance(one.error, TimeoutError)
        assert "rank 1 waited 7 s for rank 2 in call 1; rank 2 has finished. " in str(one.error)
        assert one.seconds == 7.0
        assert isinstance(zero.error, TransportError)
        assert "rank 1 left call 1" in str(zero.error)

    def test_arguments(self):
        costs = ({"size": 0}, {"alpha": -1.0}, {"beta": -1.0}, {"node_alpha": -1.0})
        for arguments in (*costs, {"delays": [0.0]}, {"delays": [0.0, -1.0]}, {"node_of_rank": [0]}):
            with pytest.raises(InvalidInputError):
                run(program=print, **({"size": 2} | arguments))

    def test_without_greenlet(self):
        code = (
            "import sys; sys.modules['greenlet'] = None\nfrom sparsecomm.transport.simulated import run\nrun(1, print)"
        )
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert re.search(r"pip install .*\[simulated\]'", out.stderr)


@pytest.mark.skipif(not getattr(sys, "_is_gil_enabled", lambda: True)(), reason="greenlet needs the GIL in threads")
def test_worlds_in_threads_get_what_they_get_one_after_another() -> None:
    """Another thread changes environment variables meanwhile."""

    def world(size: int) -> list[list[bytes] | None]:
        return [result.value for result in run(size, lambda t: threads.calls(t, t.rank, size))]

    works = [partial(world, size) for size in (1, 2, 3, 5)]
    alone = [work() for work in works]
    ended = Event()

    def change_settings() -> None:
        number = 0
        while not ended.wait(1e-4):
            number += 1
            os.environ["SPARSECOMM_TIMEOUT"] = str(100 + number % 50)
            os.environ[f"SPARSECOMM_TEST_{number % 99}"] = "x" * number  # moves the C library's environment

    before = dict(os.environ)
    changing = Thread(target=change_settings)
    changing.start()
    try:
        together = threads.at_once(works)
    finally:
        ended.set()
        changing.join()
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)
    assert together == alone
