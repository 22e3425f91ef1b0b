"""Interrupted local steps: what a rank has moved is in the global parameters or in the residuals, once."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
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
    monkeypatch.setattr(interrupts, "LIBRARY", (interrupts.LIBRARY, contextlib.__file__))


@pytest.mark.parametrize("stopped", [3, 4])  # local step 3 begins an exchange, and step 4 applies it
def test_a_step_interrupted_anywhere_goes_on_where_it_stopped(stopped: int) -> None:
    passed: list[int] = []

    def program(ranks: simulated.SimulatedTransport, *at: int) -> Any:
        parameters = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        local, random = sc.LocalSteps(parameters, 0.2, comm=ranks, **SETTINGS), np.random.default_rng(ranks.rank)
        for step in range(1, 7):
            if step == 4:
                local.state_dict()  # its calls are made here
            for name, shape in SHAPES.items():
                parameters[name] += random.normal(size=shape).astype(np.float32)
            within = interrupted(*at) if (step, ranks.rank) == (stopped, 0) else contextlib.nullcontext()
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
        assert run(2, lambda ranks, at=at: program(ranks, at)) == expected
    assert len(passed) > 10


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

    def program(ranks: simulated.SimulatedTransport) -> Any:
        parameters = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        outer = sc.NesterovSGD(0.5, 0.5)
        local = sc.LocalSteps(parameters, 0.2, comm=ranks, outer=outer, **(PLAIN | {"sync_every": 1}))
        for step in range(4):
            for name in SHAPES:
                parameters[name] += ranks.rank + 1
            if (step, ranks.rank) == (1, 1):
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

    def program(ranks: simulated.SimulatedTransport) -> list[float]:
        def train(steps: int) -> None:
            for _ in range(steps):
                x["x"] += 1
                local.step(x)

        x = {"x": np.zeros(4, np.float32)}
        local = sc.LocalSteps(x, 1.0, comm=ranks, sync_every=3, fragment_sync_delay=2)
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
