"""`load` of states: all ranks load or none does, whatever a rank raises, and none waits for the timeout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import get_ident
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.calls.queue import Handle, queue_of
from sparsecomm.states.loading import Prepared, Undo, load
from sparsecomm.transport import simulated
from tests.ranks import run

ERRORS = [OSError, MemoryError, RecursionError, StopIteration]


class Thing:
    """Two values that are loaded together."""

    def __init__(self, transport: simulated.SimulatedTransport) -> None:
        self.transport, self.a, self.b, self.tried = transport, 0, "old", False

    def load(self, a: int, b: str, fails: Callable[[], object] = lambda: None) -> None:
        def prepare(undo: Undo) -> Prepared:
            undo.append(lambda: setattr(self, "tried", False))
            self.tried = True
            fails()
            return Prepared({"a": a, "b": b}, commit)

        def commit() -> None:
            self.a = a
            self.b = b

        load(self.transport, "a thing", ["a", "b"], prepare)

    @property
    def values(self) -> Any:
        return self.a, self.b, self.tried


@pytest.mark.parametrize("error", [*ERRORS, sc.InvalidInputError, KeyboardInterrupt, SystemExit])
def test_no_rank_loads_if_one_raises(error: type[BaseException]) -> None:
    def program(transport: simulated.SimulatedTransport) -> Any:
        def fails() -> None:
            if transport.rank == 1:
                raise error("no \ud800 disk")

        thing = Thing(transport)
        expected = sc.InvalidInputError if issubclass(error, Exception) or transport.rank != 1 else error
        with pytest.raises(expected) as raised:
            thing.load(7, "new", fails)
        assert thing.values == (0, "old", False)
        if expected is sc.InvalidInputError:
            assert f"rank {transport.rank}: " in str(raised.value)
            assert error.__name__ in str(raised.value) or error is sc.InvalidInputError
            assert ("rank 1 cannot load a state" in str(raised.value)) == (transport.rank != 1)
        thing.load(8, "next")
        return thing.a

    assert run(3, program) == [8] * 3


def test_a_load_within_a_call_is_refused_before_anything_is_read() -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        queue_of(transport)._caller = get_ident()
        with pytest.raises(sc.InvalidInputError, match="made this call while the same thread makes another call"):
            Thing(transport).load(7, "new", lambda: pytest.fail("the state was read"))

    run(1, program)


def test_an_error_whose_message_cannot_be_read_is_named() -> None:
    class SilentError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def program(transport: simulated.SimulatedTransport) -> None:
        def fails() -> None:
            if transport.rank == 0:
                raise SilentError

        with pytest.raises(sc.InvalidInputError, match=r"raised SilentError: \(its message raised RuntimeError"):
            Thing(transport).load(7, "new", fails)

    run(2, program)


def test_a_difference_is_named_with_both_values() -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        thing = Thing(transport)
        differ, rank = "the states of rank 0 and rank {} differ in", transport.rank
        sums = r"\(checksum \w{16} and checksum \w{16}\)"
        for a, b, what in (
            (3 + (rank == 2), "new", differ.format(2) + r" a \(3 and 4\)"),
            (2**64 - 1 - (rank > 0), "new", differ.format(1) + rf" a \({2**64 - 1} and {2**64 - 2}\)"),
            (3, "new" * (1 + rank % 2), f"{differ.format(1)} b {sums}"),
        ):
            match = f"^rank {transport.rank}: .*{what}; load states .* saved together"
            with pytest.raises(sc.InvalidInputError, match=match):
                thing.load(a, b)
            assert thing.values == (0, "old", False)

    run(3, program)


def test_a_load_that_meets_another_call_is_undone() -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        thing = Thing(transport)
        x = np.ones(3, np.float32)
        with pytest.raises(sc.CollectiveMismatchError):
            _ = thing.load(7, "new") if transport.rank else sc.sparse_allreduce(x, 1, comm=transport)
        assert thing.values == (0, "old", False)

    run(3, program)


class InterruptError(BaseException):
    """Like KeyboardInterrupt, but pytest goes on."""


WORK: dict[str, Callable[[Any, Path], object]] = {
    "load_state_dict": lambda reducer, folder: reducer.load_state_dict({**reducer.state_dict(), "step": 5}),
    "save": lambda reducer, folder: sc.save(folder, 5, {"x": 5}, comm=reducer.transport),
    "load": lambda reducer, folder: sc.load(folder, {"reducer": reducer}, comm=reducer.transport),
}


@pytest.mark.parametrize("work", WORK)
def test_an_interrupt_while_ranks_agree_is_raised_after_the_work(
    work: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks have agreed, so the work is done on all of them."""
    wait = Handle.wait

    def interrupted(handle: Handle) -> sc.SparseVector:
        monkeypatch.setattr(Handle, "wait", wait)
        raise InterruptError

    def program(transport: simulated.SimulatedTransport) -> None:
        reducer = sc.Reducer({"x": np.zeros(3, np.float32)}, comm=transport)
        if work == "load":
            reducer.go_to(5)
            sc.save(tmp_path, 5, {"reducer": reducer}, comm=transport)
            reducer.go_to(0)
        monkeypatch.setattr(Handle, "wait", interrupted)
        with pytest.raises(InterruptError):
            WORK[work](reducer, tmp_path)
        if work == "save":
            assert sc.load(tmp_path, {"x": None}, comm=transport).step == 5
        else:
            assert reducer.step == 5

    run(1, program)
