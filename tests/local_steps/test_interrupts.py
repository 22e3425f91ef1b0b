"""Interrupted local steps: what a rank has moved is in the global parameters or in the residuals, once."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.calls.agreement import WordsGather
from sparsecomm.reducer.bucket import Bucket
from sparsecomm.transport import simulated
from tests import interrupts
from tests.interrupts import InterruptError, interrupted
from tests.local_steps.programs import PLAIN, bits
from tests.reducer.programs import run

SHAPES = {"a": (30,), "b": (7, 3)}
SETTINGS = PLAIN | {"sync_every": 2, "fragment_sync_delay": 1, "fragment_update_alpha": 0.5}


@pytest.fixture(autouse=True)
def contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupts come in the contexts of `contextlib`, too, in which compiled code does its work."""
    monkeypatch.setattr(interrupts.Points, "roots", (*interrupts.Points.roots, contextlib.__file__))


@pytest.mark.parametrize("stopped", [3, 4])  # local step 3 begins an exchange, and step 4 applies it
def test_a_step_interrupted_anywhere_goes_on_where_it_stopped(stopped: int) -> None:
    passed: list[int] = []

    def program(transport: simulated.SimulatedTransport, *at: int) -> Any:
        parameters = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        local, random = (
            sc.LocalSteps(parameters, 0.2, comm=transport, **SETTINGS),
            np.random.default_rng(transport.rank),
        )
        for step in range(1, 7):
            if step == 4:
                local.state_dict()  # its calls are made here
            for name, shape in SHAPES.items():
                parameters[name] += random.normal(size=shape).astype(np.float32)
            within = interrupted(*at) if (step, transport.rank) == (stopped, 0) else contextlib.nullcontext()
            with within as points, contextlib.suppress(InterruptError):
                local.step(parameters)
            if 2 * local.round + local.local_step < step:  # it came before the step was counted
                local.step(parameters)
            if points is not None:
                passed.append(points.passed)
                if points.interrupts and local._due:
                    with pytest.raises(sc.InvalidInputError, match="after an interrupted step; call finish first"):
                        local.state_dict()
                if step == 3 and local._due:  # as the next step does, but with these parameters
                    local._ended(local._perform(parameters))
                elif step == 4:
                    local.finish(parameters)
        residuals = {name: local.reducers[0].residual(name) for name in SHAPES}
        return bits(parameters), bits(local.global_parameters()), bits(residuals)

    expected = run(2, program)
    assert passed[0] > 10
    for at in range(passed[0]):
        assert run(2, lambda transport, at=at: program(transport, at)) == expected
    assert len(passed) > 10


@pytest.mark.parametrize(
    "options",
    [
        {"fragments": 2},
        {"fragment_sync_delay": 1},
        {"sync_every": 4, "fragments": 2, "fragment_sync_delay": 3},
        {"sync_every": 4, "fragments": 2, "fragment_sync_delay": 3, "by_speed": True},
    ],
    ids=str,
)
def test_calls_keep_their_order_when_an_interrupt_comes_before_one(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled code has no places, but asks for signals: here before the call of a gradient that was taken."""
    plan, armed, passed = Bucket.plan, list[int](), list[int]()

    def interrupts(bucket: Bucket, transport: simulated.SimulatedTransport, *arguments: Any) -> Any:
        if transport.rank == 0:
            passed.append(1)
            if armed == [len(passed)]:
                armed.clear()
                raise InterruptError
        return plan(bucket, transport, *arguments)

    monkeypatch.setattr(Bucket, "plan", interrupts)

    def program(transport: simulated.SimulatedTransport) -> Any:
        shapes = SHAPES | {"c": (64,)}
        parameters = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        settings = PLAIN | {"sync_every": 2, "bucket_bytes": 1} | options
        local, random = (
            sc.LocalSteps(parameters, 0.2, comm=transport, **settings),
            np.random.default_rng(transport.rank),
        )
        local._timer.clock = lambda: 0.0  # all take the same time
        for _ in range(9):
            for name, shape in shapes.items():
                parameters[name] += random.normal(size=shape).astype(np.float32)
            try:
                local.step(parameters)
            except InterruptError:
                local._ended(local._perform(parameters))
        local.finish(parameters)
        return bits(parameters), bits(local.global_parameters())

    expected = run(2, program)
    count = len(passed)
    assert count > 8
    for at in range(1, count + 1):
        passed.clear()
        armed[:] = [at]
        assert run(2, program) == expected
        assert not armed


def test_an_interrupt_of_the_comparison_is_raised_and_the_sums_count(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = WordsGather._exchange_words

    def program(transport: simulated.SimulatedTransport, interrupts: bool) -> Any:
        parameters = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        local = sc.LocalSteps(parameters, 0.2, comm=transport, **(PLAIN | {"sync_every": 1}))
        for step in range(4):
            for name in SHAPES:
                parameters[name] += transport.rank + step
            if interrupts and (step, transport.rank) == (1, 0):
                armed.append(transport)
                with pytest.raises(InterruptError):
                    local.step(parameters)
                assert not armed
                local.finish(parameters)
            else:
                local.step(parameters)
        return bits(parameters), bits(local.global_parameters())

    armed: list[simulated.SimulatedTransport] = []
    expected = run(2, lambda transport: program(transport, False))

    def interrupted_once(call: WordsGather, comm: Any) -> list[int]:
        words = exchange(call, comm)
        if comm.rank == 0 and armed:
            armed.clear()
            raise InterruptError
        return words

    monkeypatch.setattr(WordsGather, "_exchange_words", interrupted_once)
    assert run(2, lambda transport: program(transport, True)) == expected


@pytest.mark.parametrize("finish", [False, True])
def test_an_interrupted_step_ends_before_the_next_one_begins(finish: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where each local step exchanges all, and the interrupt comes when a step of the reducer ends."""
    begin, armed = sc.Reducer._begin, list[sc.Reducer]()

    def interrupts(reducer: sc.Reducer, *arguments: Any) -> Any:
        if reducer in armed:
            armed.remove(reducer)
            raise InterruptError
        return begin(reducer, *arguments)

    monkeypatch.setattr(sc.Reducer, "_begin", interrupts)

    def program(transport: simulated.SimulatedTransport) -> Any:
        parameters = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        outer = sc.NesterovSGD(0.5, 0.5)
        local = sc.LocalSteps(parameters, 0.2, comm=transport, outer=outer, **(PLAIN | {"sync_every": 1}))
        for step in range(4):
            for name in SHAPES:
                parameters[name] += transport.rank + 1
            if (step, transport.rank) == (1, 1):
                armed.append(local.reducers[0])
                with pytest.raises(InterruptError):
                    local.step(parameters)
                if finish:
                    local.finish(parameters)
            else:
                local.step(parameters)
        return local.round, local.reducers[0].step, bits(local.global_parameters())

    first, second = run(2, program)
    assert first == second
    assert first[:2] == (4, 4)


def test_a_state_with_an_exchange_under_way_is_loaded_again() -> None:
    """As after an interrupt, which may come when it was loaded."""

    def program(transport: simulated.SimulatedTransport) -> list[float]:
        def train(steps: int) -> None:
            for _ in range(steps):
                x["x"] += 1
                local.step(x)

        x = {"x": np.zeros(4, np.float32)}
        local = sc.LocalSteps(x, 1.0, comm=transport, sync_every=3, fragment_sync_delay=2)
        train(7)
        state, saved = local.state_dict(), x["x"].copy()
        assert state["exchanges"]
        train(1)
        right = x["x"].tolist()
        for _ in range(2):
            local.load_state_dict(state)
        x["x"][:] = saved
        train(1)
        assert x["x"].tolist() == right
        return right

    assert all(result.error is None for result in simulated.run(2, program))
