"""The call queue: order, results and errors of calls, with and without a thread."""

from __future__ import annotations

import gc
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsecomm as sc
from sparsecomm.calls.queue import CallQueue

SECONDS = 60  # timeout of waits that should end at once


class Call:
    """A call that logs whether it was made or left."""

    def __init__(
        self, log: list[Any], name: Any = 0, *, error: BaseException | None = None, gate: threading.Event | None = None
    ) -> None:
        self.log, self.name, self.error, self.gate = log, name, error, gate

    def run(self) -> sc.SparseVector:
        if self.gate is not None:
            assert self.gate.wait(SECONDS)
        self.log.append(self.name)
        if self.error is not None:
            raise self.error
        return sc.SparseVector([0], np.array([1.0], np.float32), 1)

    def leave(self, error: BaseException) -> None:
        self.log.append(("left", self.name, str(error)))


def new_queue(threaded: bool) -> CallQueue:
    return CallQueue(SimpleNamespace(rank=3, threaded=threaded))  # type: ignore[arg-type]


@pytest.fixture(params=[True, False], ids=["with a thread", "without"])
def queue_(request: pytest.FixtureRequest) -> CallQueue:
    return new_queue(request.param)


@pytest.fixture
def threaded() -> CallQueue:
    return new_queue(True)


# -- order ------------------------------------------------------------------------------------------------------------


def test_blocking_and_other_calls_are_made_in_program_order() -> None:
    @settings(max_examples=30)
    @given(st.lists(st.sampled_from(["submit", "call", "wait", "test"]), max_size=30), st.booleans())
    def check(steps: list[str], threaded: bool) -> None:
        queue_, log, under_way, expected = new_queue(threaded), [], [], []
        for number, step in enumerate(steps):
            if step == "submit":
                under_way.append(queue_.submit(Call(log, number)))
                expected.append(number)
            elif step == "call":
                queue_.call(Call(log, number))
                expected.append(number)
                assert log == expected
            elif under_way:
                under_way[number % len(under_way)].wait() if step == "wait" else under_way[-1].test()
        for handle in under_way:
            assert handle.wait() is handle.result
            assert handle.test()
        assert log == expected

    check()


def test_calls_of_several_threads_keep_their_order_and_never_overlap(queue_: CallQueue) -> None:
    log: list[Any] = []
    inside = threading.Lock()

    class Alone(Call):
        def run(self) -> sc.SparseVector:
            assert inside.acquire(blocking=False), "two calls at once"
            time.sleep(1e-5)
            try:
                return super().run()
            finally:
                inside.release()

    def program(thread: int) -> None:
        under_way = []
        for number in range(40):
            call = Alone(log, (thread, number))
            if (thread + number) % 3:
                under_way.append(queue_.submit(call))
            else:
                queue_.call(call)
        for handle in under_way:
            handle.wait(SECONDS)

    threads = [threading.Thread(target=program, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert len(log) == 160
    for i in range(4):
        assert [number for thread, number in log if thread == i] == list(range(40))


def test_submit_returns_before_the_call_is_made(threaded: CallQueue) -> None:
    gate, log = threading.Event(), []
    handle = threaded.submit(Call(log, gate=gate))
    assert not handle.test()
    assert "in flight" in repr(handle)
    with pytest.raises(sc.InvalidInputError, match="rank 3: the call is not done yet"):
        _ = handle.result
    with pytest.raises(sc.TimeoutError, match=r"rank 3: .* within 0\.01 s; it continues"):
        handle.wait(0.01)
    assert log == []
    gate.set()
    assert handle.wait(SECONDS) is handle.wait() is handle.result
    assert repr(handle) == "Handle(done)"
    assert log == [0]


# -- errors -----------------------------------------------------------------------------------------------------------


def test_an_error_is_raised_by_every_wait_and_later_calls_are_made(queue_: CallQueue) -> None:
    log: list[Any] = []
    wrong = queue_.submit(Call(log, "wrong", error=sc.CollectiveMismatchError("calls differ")))
    right = queue_.submit(Call(log, "right"))
    for ask in (wrong.wait, wrong.wait, lambda: wrong.result):
        with pytest.raises(sc.CollectiveMismatchError, match="calls differ"):
            ask()
    assert wrong.test()
    assert "calls differ" in repr(wrong)
    assert right.wait(SECONDS).nnz == 1
    assert log == ["wrong", "right"]


def test_an_error_without_a_wait_is_logged_once(queue_: CallQueue, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged when the handle is freed, without the garbage collector."""
    gc.collect()  # handles of other tests
    caplog.clear()
    gc.disable()
    try:
        seen = queue_.submit(Call([], error=sc.CollectiveMismatchError("seen")))
        with pytest.raises(sc.CollectiveMismatchError):
            seen.wait()
        unseen = queue_.submit(Call([], error=sc.CollectiveMismatchError("the sixth layer differs")))
        queue_.submit(Call([])).wait()
        assert not caplog.records
        del seen, unseen
    finally:
        gc.enable()
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("sparsecomm", "ERROR")
    assert "rank 3" in record.getMessage()
    assert "the sixth layer differs" in record.getMessage()
