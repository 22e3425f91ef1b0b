"""Calls that go on beside the program: their order, their results, their errors, and the ends of processes."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsecomm as sc
from sparsecomm.calls import queue
from sparsecomm.calls.queue import CallQueue, Handle
from sparsecomm.transport import simulated
from tests import data
from tests.processes import ROOT, interrupt_a_wait, mpirun

ALGORITHMS = list(sc.algorithms())
SECONDS = 60  # after which a test that should not wait has failed


class Call:
    """`sparsecomm.calls.queue.Work` that says what became of it."""

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


def made(threaded: bool) -> CallQueue:
    return CallQueue(SimpleNamespace(rank=3, threaded=threaded))  # type: ignore[arg-type]


@pytest.fixture(params=[True, False], ids=["with a thread", "without"])
def queue_(request: pytest.FixtureRequest) -> CallQueue:
    return made(request.param)


@pytest.fixture
def threaded() -> CallQueue:
    return made(True)


# -- order ------------------------------------------------------------------------------------------------------------


def test_calls_of_both_kinds_are_made_in_the_order_of_the_program() -> None:
    @settings(max_examples=30, deadline=None, derandomize=True)
    @given(st.lists(st.sampled_from(["submit", "call", "wait", "test"]), max_size=30), st.booleans())
    def check(steps: list[str], threaded: bool) -> None:
        queue_, log, under_way, expected = made(threaded), [], [], []
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


def test_calls_of_several_threads_each_keep_their_order_and_never_overlap(queue_: CallQueue) -> None:
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


def test_a_call_that_does_not_block_returns_before_it_is_made(threaded: CallQueue) -> None:
    gate, log = threading.Event(), []
    handle = threaded.submit(Call(log, gate=gate))
    assert not handle.test()
    assert "in flight" in repr(handle)
    with pytest.raises(sc.InvalidInputError, match="rank 3: the call is not done yet"):
        _ = handle.result
    with pytest.raises(sc.TimeoutError, match=r"rank 3: .* within 0\.01 s; it goes on"):
        handle.wait(0.01)
    assert log == []
    gate.set()
    assert handle.wait(SECONDS) is handle.wait() is handle.result
    assert repr(handle) == "Handle(done)"
    assert log == [0]


def test_without_a_thread_calls_are_made_when_they_are_waited_for() -> None:
    queue_, log = made(False), []
    first, second, third = (queue_.submit(Call(log, i)) for i in range(3))
    assert log == []
    assert second.test()
    assert log == [0, 1]
    assert first.result.nnz == 1
    third.wait()
    assert log == [0, 1, 2]
    assert threading.active_count() == len(threading.enumerate())


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


@pytest.mark.parametrize("error", [sc.TransportError, sc.TimeoutError, sc.RankFailedError])
@pytest.mark.parametrize("blocking", [False, True])
def test_after_an_error_of_the_transport_calls_under_way_are_left_and_later_ones_made(
    queue_: CallQueue, error: type[Exception], blocking: bool
) -> None:
    log: list[Any] = []
    gate = threading.Event()
    wrong = Call(log, "wrong", error=error("rank 2 is gone"), gate=gate)

    def call() -> None:
        with pytest.raises(error, match="rank 2 is gone"):
            queue_.call(wrong)

    if blocking:
        thread = threading.Thread(target=call)
        thread.start()
        while not queue_._claims:
            time.sleep(1e-4)
    else:
        first = queue_.submit(wrong)
    left = [queue_.submit(Call(log, i)) for i in range(3)]
    gate.set()
    if blocking:
        thread.join(SECONDS)
    else:
        with pytest.raises(error, match="rank 2 is gone"):
            first.wait(SECONDS)
    for handle in left:
        with pytest.raises(sc.TransportError, match=r"rank 3 did not make this call, .* rank 2 is gone"):
            handle.wait(SECONDS)
    assert [entry[:2] for entry in log[1:]] == [("left", 0), ("left", 1), ("left", 2)]
    assert queue_.call(Call(log, "later")).nnz == 1
    assert queue_.submit(Call(log, "latest")).wait(SECONDS).nnz == 1
    assert log[4:] == ["later", "latest"]


def test_a_call_that_cannot_be_left_says_why_it_was(queue_: CallQueue) -> None:
    class Stuck(Call):
        def leave(self, error: BaseException) -> None:
            raise sc.TransportError("another rank left it, too")

    gate = threading.Event()
    first = queue_.submit(Call([], error=sc.TransportError("rank 2 is gone"), gate=gate))
    second = queue_.submit(Stuck([]))
    gate.set()
    for handle in (first, second):
        with pytest.raises(sc.TransportError, match="rank 2 is gone"):
            handle.wait(SECONDS)


def test_an_error_that_nobody_waits_for_is_logged_once(queue_: CallQueue, caplog: pytest.LogCaptureFixture) -> None:
    gc.collect()  # handles of other tests
    with caplog.at_level(logging.ERROR, "sparsecomm"):
        seen = queue_.submit(Call([], error=sc.CollectiveMismatchError("seen")))
        with pytest.raises(sc.CollectiveMismatchError):
            seen.wait()
        unseen = queue_.submit(Call([], error=sc.CollectiveMismatchError("the sixth layer differs")))
        queue_.submit(Call([])).wait()
        assert not caplog.records
        del seen, unseen
        gc.collect()
    (record,) = caplog.records
    assert record.name == "sparsecomm"
    assert "rank 3" in record.getMessage()
    assert "the sixth layer differs" in record.getMessage()


def test_a_failed_call_is_forgotten_with_its_handle(threaded: CallQueue, caplog: pytest.LogCaptureFixture) -> None:
    """Without waiting for the garbage collector."""
    with caplog.at_level(logging.ERROR, "sparsecomm"):
        gc.disable()
        try:
            handle = threaded.submit(Call([], error=sc.CollectiveMismatchError("differs")))
            threaded.submit(Call([])).wait()
            del handle
            assert len(caplog.records) == 1
        finally:
            gc.enable()


def test_an_interrupt_ends_the_wait_and_not_the_call(threaded: CallQueue) -> None:
    gate, log = threading.Event(), []
    handle = threaded.submit(Call(log, gate=gate))
    interrupt_a_wait()
    with pytest.raises(KeyboardInterrupt):
        handle.wait(SECONDS)
    assert not handle.test()
    gate.set()
    assert handle.wait(SECONDS).nnz == 1
    assert log == [0]


def test_an_interrupt_in_a_call_of_this_thread_is_its_error() -> None:
    queue_, log = made(False), []
    handle = queue_.submit(Call(log, error=KeyboardInterrupt()))
    after = queue_.submit(Call(log, 1))
    with pytest.raises(KeyboardInterrupt):
        handle.wait()
    assert handle.test()
    assert after.wait().nnz == 1


# -- processes --------------------------------------------------------------------------------------------------------


def python(program: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program],
        cwd=ROOT,
        timeout=60,
        text=True,
        capture_output=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | env,
    )


HEAD = """
import os, sys, threading, time
import numpy as np
import sparsecomm as sc
from sparsecomm.calls.queue import CallQueue
from types import SimpleNamespace
class Call:
    def __init__(self, name, seconds=0.0): self.name, self.seconds = name, seconds
    def run(self):
        time.sleep(self.seconds)
        print("made", self.name, flush=True)
        if self.name == "wrong": raise sc.CollectiveMismatchError("calls differ")
        return sc.SparseVector([0], [1.0], 1)
    def leave(self, error): print("left", self.name, flush=True)
"""


@pytest.mark.parametrize("threaded", [True, False])
@pytest.mark.parametrize("end", ["", "sys.exit(0)", "raise SystemExit"])
def test_what_was_not_waited_for_is_made_when_the_interpreter_ends(threaded: bool, end: str) -> None:
    done = python(f"""{HEAD}
queue_ = CallQueue(SimpleNamespace(rank=0, threaded={threaded}))
for name in ("a", "b", "wrong", "c"):
    queue_.submit(Call(name, 0.05))
{end}
""")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["made a", "made b", "made wrong", "made c"]
    assert done.stderr.count("nobody waited for it: calls differ") == 1, done.stderr


def test_at_the_end_lines_are_finished_in_the_order_in_which_they_were_made() -> None:
    """All ranks in one order: without threads, each call waits for the other ranks'."""
    done = python(f"""{HEAD}
queues = [CallQueue(SimpleNamespace(rank=0, threaded=False)) for _ in range(20)]
for number, queue_ in reversed(list(enumerate(queues))):
    queue_.submit(Call(number))
""")
    assert done.stdout.split("made")[1:] == [f" {i}\n" for i in range(20)], done.stderr


@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit(0)"])
def test_a_fork_makes_no_calls_and_its_parent_goes_on(end: str) -> None:
    done = python(f"""{HEAD}
queue_ = CallQueue(SimpleNamespace(rank=0, threaded=True))
handles = [queue_.submit(Call(i, 0.02)) for i in range(10)]
child = os.fork()
if child == 0:
    for make in (queue_.submit, queue_.call):
        try:
            make(Call("child"))
        except sc.InvalidInputError as error:
            assert f"belongs to process {{os.getppid()}}" in str(error), error
        else:
            print("the child made a call", flush=True)
    {end}
assert os.waitpid(child, 0)[1] == 0
for handle in handles:
    handle.wait()
queue_.call(Call("last"))
""")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [*(f"made {i}" for i in range(10)), "made last"]


# -- the call itself --------------------------------------------------------------------------------------------------


def run(P: int, program: Callable[[simulated.SimulatedTransport], Any], **options: Any) -> list[Any]:
    found = simulated.run(P, program, node_of_rank=[rank // 3 for rank in range(P)], **options)
    return found if options.get("catch") else [result.value for result in found]


def bits(*arrays: np.ndarray) -> list[bytes]:
    return [array.tobytes() for array in arrays]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("P", [1, 2, 5])
@pytest.mark.parametrize(
    ("dtype", "wire", "op", "complete"),
    [
        ("float32", "plain", "sum", True),
        ("float32", "packed_int8", "mean", False),
        ("float16", "packed_float16", "sum", False),
        ("bfloat16", "auto", "mean", True),
        ("float64", "packed", "sum", False),
    ],
)
def test_results_are_those_of_sparse_allreduce(
    algorithm: str, P: int, dtype: str, wire: str, op: str, complete: bool
) -> None:
    complete = complete and sc.algorithms()[algorithm].reselects
    options = {"algorithm": algorithm, "wire": wire, "op": op, "complete": complete, "label": "a layer"}

    def program(blocking: bool) -> Callable[[simulated.SimulatedTransport], list[bytes]]:
        def on_rank(ranks: simulated.SimulatedTransport) -> list[bytes]:
            found, under_way = [], []
            for layer, n in enumerate((300, 77)):
                x = data.gradient("normal", n, dtype, 10 * layer + ranks.rank)
                residual, out = data.gradient("normal", n, dtype, 99 + ranks.rank), np.empty_like(x)
                found += [x, residual, out]
                arguments = {"comm": ranks, "residual": residual, "out": out, **options}
                under_way.append((sc.sparse_allreduce if blocking else sc.isparse_allreduce)(x, 20, **arguments))
                assert isinstance(under_way[-1], sc.SparseVector if blocking else Handle)
            for one in reversed(under_way):
                result = one if blocking else one.wait()
                found += [result.indices, result.values]
            return bits(*found)

        return on_rank

    assert run(P, program(blocking=False)) == run(P, program(blocking=True))


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("P", [2, 3, 8])
def test_other_labels_do_not_match_and_lose_nothing(blocking: bool, P: int) -> None:
    def call(*arguments: Any, **options: Any) -> sc.SparseVector:
        if blocking:
            return sc.sparse_allreduce(*arguments, **options)
        return sc.isparse_allreduce(*arguments, **options).wait()

    def program(ranks: simulated.SimulatedTransport) -> str:
        x, residual = np.arange(50, dtype=np.float32), np.ones(50, np.float32)
        for labels in (("conv1", "conv2"), ("", "conv1")):
            residual[:] = 1
            with pytest.raises(sc.CollectiveMismatchError) as caught:
                call(x, 5, comm=ranks, residual=residual, label=labels[ranks.rank == 1])
            np.testing.assert_array_equal(residual, x + 1)
        assert call(x, 5, comm=ranks, label="conv1").nnz == 5
        return str(caught.value)

    assert any("calls differ in label" in text for text in run(P, program))


@pytest.mark.parametrize("wrong", [{"k": 0}, {"x": [1.0]}, {"label": 3}, {"algorithm": "best"}])
def test_bad_arguments_are_refused_at_once(wrong: dict[str, Any]) -> None:
    def program(ranks: simulated.SimulatedTransport) -> None:
        for call in (sc.sparse_allreduce, sc.isparse_allreduce):
            with pytest.raises(sc.InvalidInputError, match=f"^rank {ranks.rank}: "):
                call(**{"x": np.ones(9, np.float32), "k": 3, "comm": ranks} | wrong)
        assert sc.isparse_allreduce(np.ones(9, np.float32), 3, comm=ranks).wait().nnz == 3

    run(2, program)


@pytest.mark.parametrize("P", [2, 3, 8])
@pytest.mark.parametrize("algorithm", ["dense", "butterfly", "split", "tree"])
def test_after_an_error_of_the_transport_queued_gradients_are_kept_on_all_ranks(P: int, algorithm: str) -> None:
    def program(ranks: simulated.SimulatedTransport) -> list[str]:
        if ranks.rank == 1:  # never comes
            return []
        xs = [data.integers(40, "float32", 10 * i + ranks.rank) for i in range(3)]
        residuals = [data.integers(40, "float32", 100 + i) for i in range(3)]
        expected = [x + r for x, r in zip(xs, residuals, strict=True)]
        under_way = [
            sc.isparse_allreduce(x, 4, comm=ranks, residual=r, algorithm=algorithm)
            for x, r in zip(xs, residuals, strict=True)
        ]
        said = []
        for handle in under_way:
            with pytest.raises(sc.TransportError) as caught:
                handle.wait()
            said.append(str(caught.value))
        for residual, total in zip(residuals, expected, strict=True):
            np.testing.assert_array_equal(residual, total)
        return said

    for said in [result for result in run(P, program) if result]:
        assert all("rank 1" in text or "left" in text for text in said)
        assert "did not make this call, since one before it failed" in said[-1]


@pytest.mark.parametrize("P", [2, 3, 5])
def test_after_a_mismatch_queued_calls_are_made(P: int) -> None:
    def program(ranks: simulated.SimulatedTransport) -> sc.SparseVector:
        first = sc.isparse_allreduce(np.ones(10, np.float32), 2 + (ranks.rank == 1), comm=ranks)
        second = sc.isparse_allreduce(np.ones(10, np.float32), 2, comm=ranks)
        with pytest.raises(sc.CollectiveMismatchError, match=r"calls differ in k|left call 1"):
            first.wait()
        return second.wait()

    for result in run(P, program):
        np.testing.assert_array_equal(result.values, [P, P])


@pytest.mark.parametrize("P", [2, 3, 5])
def test_a_signal_just_after_a_call_has_begun_leaves_it_on_all_ranks(P: int) -> None:
    def program(ranks: simulated.SimulatedTransport) -> sc.SparseVector:
        x, held = data.integers(40, "float32", ranks.rank), data.integers(40, "float32", 100 + ranks.rank)
        residual, begin = held.copy(), ranks.begin

        def interrupted(*call: Any) -> int:
            ranks.begin = begin  # type: ignore[method-assign]
            begin(*call)
            raise KeyboardInterrupt

        if ranks.rank == 1:
            ranks.begin = interrupted  # type: ignore[method-assign]
        with pytest.raises((KeyboardInterrupt, sc.TransportError)) as caught:
            sc.sparse_allreduce(x, 4, comm=ranks, residual=residual, algorithm="butterfly")
        assert (caught.type is KeyboardInterrupt) == (ranks.rank == 1)
        assert ranks.rank == 1 or "KeyboardInterrupt" in str(caught.value)
        np.testing.assert_array_equal(residual, x + held)
        return sc.sparse_allreduce(np.ones(10, np.float32), 2, comm=ranks, algorithm="butterfly")

    for result in run(P, program):
        np.testing.assert_array_equal(result.values, [P, P])


def test_one_line_per_transport_from_many_threads() -> None:
    transport = SimpleNamespace(rank=0, threaded=True, queue=None)
    found: list[CallQueue] = []
    threads = [threading.Thread(target=lambda: found.append(queue.queue_of(transport))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(queue_) for queue_ in found}) == 1


# -- over MPI ---------------------------------------------------------------------------------------------------------

ON_RANKS = """
import os, sys, time
import numpy as np
import mpi4py
mpi4py.rc.thread_level = "{level}"
from mpi4py import MPI
import sparsecomm as sc
from sparsecomm import transport
rank, P = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
def start(n=100, comm=None):
    return sc.isparse_allreduce(np.ones(n, np.float32), 3, comm=comm)
"""


@pytest.mark.mpi
@pytest.mark.parametrize("level", ["serialized", "funneled", "single"])
def test_an_mpi_without_threads(level: str) -> None:
    status, said = mpirun(
        3,
        "-c",
        ON_RANKS.format(level=level)
        + """
assert not transport.of().threaded
handles = [start(100 + i) for i in range(5)]
sc.sparse_allreduce(np.ones(7, np.float32), 2)
assert all(handle.test() for handle in handles)
assert handles[-1].wait().values.tolist() == [P] * 3
reducer = sc.Reducer({"x": np.zeros(5000, np.float32), "y": np.zeros(3, np.float32)}, 0.1)
for step in range(3):
    reducer.reduce({"x": np.ones(5000, np.float32), "y": np.ones(3, np.float32)})
other = MPI.COMM_WORLD.Dup()
transport.of(other)
unseen = [start(50, other), start(60)] if rank else [start(60), start(50, other)]  # made at the end
print("fine", flush=True)
""",
    )
    assert status == 0, said
    assert said.count("fine") == 3, said


@pytest.mark.mpi
def test_a_rank_that_ends_without_waiting_still_makes_its_calls() -> None:
    status, said = mpirun(
        3,
        "-c",
        ON_RANKS.format(level="multiple")
        + """
handles = [start(100 + i) for i in range(5)]
if rank != 1:
    time.sleep(0.3)
    for handle in handles:
        assert handle.wait(20).values.tolist() == [P] * 3
    print("fine", flush=True)
""",
    )
    assert status == 0, said
    assert said.count("fine") == 2, said


def test_finishing_from_within_a_call_does_nothing() -> None:
    """The garbage collector may close a transport at any time, also in the middle of a call on it."""
    transport = simulated.SimulatedTransport.__new__(simulated.SimulatedTransport)
    transport.rank = 0
    queue_ = CallQueue(transport)

    class Closing:
        def run(self) -> sc.SparseVector:
            queue_.finish()
            return sc.SparseVector([], [], 0)

        def leave(self, error: BaseException) -> None:
            raise AssertionError

    assert queue_.call(Closing()).size == 0
    assert queue_.submit(Closing()).wait().size == 0
