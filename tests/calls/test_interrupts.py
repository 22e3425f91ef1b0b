"""Interrupted calls: after an interrupt anywhere, the queue works, and no gradient is lost or counted twice.

For other objects see `tests/test_interrupts.py`, for several ranks `tests/stress/calls.py`.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.backends import CpuBackend
from sparsecomm.contribution import Contribution
from sparsecomm.transport import simulated
from tests.calls.test_queue import SECONDS, Call, new_queue
from tests.interrupts import InterruptError, interrupted
from tests.processes import interrupt_a_wait

N, K = 40, 5
CALLS: list[dict[str, Any]] = [
    {"algorithm": "butterfly"},
    {"algorithm": "split", "op": "mean"},
    {"algorithm": "tree", "wire": "packed_int8"},
    {"algorithm": "dense"},
    {"algorithm": "allgather", "chunk": 8, "decay": 0.5},
]


class Rank:
    """A rank that repeats one call, whose residual and result it knows."""

    def __init__(self, transport: simulated.SimulatedTransport, background: bool, options: dict[str, Any]) -> None:
        self.transport, self.background, self.options = transport, background, options
        self.x = np.arange(N, dtype=np.float32) - 17 - transport.rank
        self.kept = np.full(N, 1 + transport.rank, np.float32)
        self.call()
        self.right = self.residual, self.out

    def call(self) -> None:
        self.residual, self.out = self.kept.copy(), np.full(N, 7, np.float32)
        arguments = {"comm": self.transport, "residual": self.residual, "out": self.out, **self.options}
        if self.background:
            sc.isparse_allreduce(self.x, K, **arguments).wait()
        else:
            sc.sparse_allreduce(self.x, K, **arguments)

    def interrupted_at(self, *points: int) -> str:
        """Interrupt a call, and return "committed", "rolled back" or "not begun"."""
        before = sc.last_call(self.transport).number
        with interrupted(*points) as passed, contextlib.suppress(InterruptError, sc.TransportError):
            self.call()
        assert passed.outside == 0, "a handler could run between two instructions of a call"
        self.points, self.interrupts = passed.passed, passed.interrupts
        last = sc.last_call(self.transport)
        self.begun = last.number > before
        state = self.state()
        outcome = "not begun" if not self.begun else "committed" if last.succeeded else "rolled back"
        assert outcome == state, "the last call does not say what became of the residual"
        return state

    def state(self) -> str:
        if same(self.residual, self.right[0]) and same(self.out, self.right[1]):
            return "committed"
        if same(self.residual, self.x + np.float32(self.options.get("decay", 1)) * self.kept):
            return "rolled back"
        assert not self.begun, "a call that has begun lost its gradient"
        assert same(self.residual, self.kept), "a call that has not begun changed the residual"
        return "not begun"

    def check(self) -> None:
        self.call()
        assert self.state() == "committed"


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.tobytes() == b.tobytes()


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("options", CALLS, ids=lambda options: options["algorithm"])
def test_an_interrupted_call_is_committed_or_rolled_back(options: dict[str, Any], background: bool) -> None:
    """Also if the rollback is interrupted again."""

    def program(transport: simulated.SimulatedTransport) -> None:
        rank = Rank(transport, background, options)
        rank.interrupted_at()
        outcomes: Counter[str] = Counter()
        for place in range(rank.points):
            for more in ((), (place + 1,), (place + 4, place + 5)):
                outcomes[rank.interrupted_at(place, *more)] += 1
                assert rank.interrupts > 0
                rank.check()
        assert outcomes["rolled back"] > 0

    simulated.run(1, program)


# -- real errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["commit", "densify", "end"])
@pytest.mark.parametrize("times", [1, 2])
def test_memory_errors_after_the_decision_lose_nothing(step: str, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After one error, the result is committed. After two, the gradient is in the residual, if it was not committed."""

    def program(transport: simulated.SimulatedTransport) -> None:
        rank = Rank(transport, False, {"algorithm": "butterfly"})
        owner: Any = {"commit": Contribution, "densify": CpuBackend, "end": simulated.SimulatedTransport}[step]
        method, failed = getattr(owner, step), []

        def fails(*arguments: Any, **named: Any) -> Any:
            if len(failed) < times:
                failed.append(step)
                raise MemoryError
            return method(*arguments, **named)

        monkeypatch.setattr(owner, step, fails)
        with pytest.raises(MemoryError):
            rank.call()
        if times == 1 or step == "densify":
            assert same(rank.residual, rank.right[0])
            assert times > 1 or same(rank.out, rank.right[1])
        else:
            assert same(rank.residual, rank.x + rank.kept)
        rank.check()

    simulated.run(1, program)


# -- the queue --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("threaded", [True, False])
def test_a_call_within_a_call_of_the_same_thread_is_refused(threaded: bool, background: bool) -> None:
    queue_ = new_queue(threaded)

    class Outer(Call):
        def run(self) -> sc.SparseVector:
            with pytest.raises(sc.InvalidInputError, match=r"rank 3: .*while the same thread makes another call"):
                queue_.call(Call([]))
            return super().run()

    outer = Outer([])
    assert (queue_.submit(outer).wait(SECONDS) if background else queue_.call(outer)).nnz == 1
    assert queue_.call(Call([])).nnz == 1


def test_an_interrupt_leaves_a_blocking_call_that_waits_its_turn() -> None:
    """The program may use x, residual and out again when the call raises."""
    queue_, log, gate = new_queue(True), [], threading.Event()
    first = queue_.submit(Call(log, "first", gate=gate))

    def handle(*_: Any) -> None:
        gate.set()
        raise InterruptError

    before = signal.signal(signal.SIGINT, handle)
    try:
        interrupt_a_wait()
        with pytest.raises(InterruptError):
            queue_.call(Call(log, "second"))
    finally:
        signal.signal(signal.SIGINT, before)
    assert log[0] == "first"
    assert [entry for entry in log if entry != "first"] in ([("left", "second", "")], ["second"])
    assert first.wait(SECONDS).nnz == 1


def test_keyboard_interrupt_names_the_rank_and_the_call() -> None:
    """During the call, and during a wait for a call in the background."""

    def program(transport: simulated.SimulatedTransport) -> str:
        def receive(*_: Any) -> None:
            raise KeyboardInterrupt

        sc.sparse_allreduce(np.ones(9, np.float32), 2, comm=transport, algorithm="tree")
        if transport.rank == 0:
            vars(transport)["receive"] = receive
        try:
            sc.sparse_allreduce(np.ones(9, np.float32), 2, comm=transport, algorithm="tree")
        except (KeyboardInterrupt, sc.TransportError) as error:
            return str(error)
        return ""

    texts = [outcome.value for outcome in simulated.run(2, program, node_of_rank=[0, 0])]
    assert texts[0].startswith("rank 0 of 2 was interrupted in call 2, tree sum of n=9 float32, k=2")
    assert texts[0] in texts[1]  # the other rank's error quotes it

    queue_, gate = new_queue(True), threading.Event()

    class Described(Call):
        def describe(self) -> str:
            return "tree sum of n=9"

    handle = queue_.submit(Described([], gate=gate))
    interrupt_a_wait()
    said = f"^rank {queue_.rank} was interrupted while it waited for a call, tree sum of n=9"
    with pytest.raises(KeyboardInterrupt, match=said):
        handle.wait(SECONDS)
    gate.set()
    assert handle.wait(SECONDS).nnz == 1


def test_closing_within_a_call_happens_after_it() -> None:
    """The garbage collector may close a transport at any time, even during a call on it."""
    queue_, log = new_queue(True), []

    class Closing(Call):
        def run(self) -> sc.SparseVector:
            queue_.finish(lambda: log.append("closed"))
            return super().run()

    queue_.call(Closing(log, "blocking"))
    queue_.submit(Closing(log, "not")).wait(SECONDS)
    while len(log) < 4:
        time.sleep(1e-3)
    assert log == ["blocking", "closed", "not", "closed"]
