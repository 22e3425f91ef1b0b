"""Interrupted local steps: each change of a parameter ends up once, in the global parameters or the residuals."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.local_steps.local_steps import Phase
from sparsecomm.transport import simulated
from tests import interrupts
from tests.interrupts import InterruptError, interrupted
from tests.local_steps.programs import PLAIN, left_out
from tests.ranks import run
from tests.reducer.programs import bits

SHAPES = {"a": (30,), "b": (7, 3), "c": (64,)}
SETTINGS = PLAIN | {"sync_every": 2, "fragment_sync_delay": 1, "fragment_update_alpha": 0.5}


@pytest.fixture(autouse=True)
def contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt inside `contextlib`, too, since compiled code runs in its contexts."""
    monkeypatch.setattr(interrupts.Points, "roots", (*interrupts.Points.roots, contextlib.__file__))


def trained(
    transport: simulated.SimulatedTransport, steps: int, within: Any, late: tuple[int, int] = (-1, -1), **options: Any
) -> Any:
    """Train with each step in its own context; after an interrupt, continue with the same parameters.

    ``late``: a rank and a step. The rank is left out of that exchange, and does not train one parameter.
    """
    parameters = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    local = sc.LocalSteps(parameters, 0.2, comm=transport, **(SETTINGS | options))
    local._timer.clock = lambda: 0.0  # all steps take the same time
    random = np.random.default_rng(transport.rank)
    for step in range(1, steps + 1):
        for name, shape in SHAPES.items():
            if (name, transport.rank) != ("c", late[0]):
                parameters[name] += random.normal(size=shape).astype(np.float32)
        if late == (transport.rank, step):
            left_out(local)
        place, was_late = (local.round, local.local_step), local._phase is Phase.LEFT_OUT
        with contextlib.suppress(InterruptError), within(local, step):
            local.step(parameters)
        counted = (local.round, local.local_step) != place
        if local._phase is Phase.LEFT_OUT or not (counted or was_late):  # the step was not counted
            local.step(parameters)
        if local._due_events:
            with pytest.raises(sc.InvalidInputError, match="after an interrupted step; call finish first"):
                local.state_dict()
            local._end_call(local._perform(parameters))  # as the next step does
    local.finish(parameters)
    residuals = {name: reducer.residual(name) for reducer in local.reducers for name in reducer.names}
    return bits(parameters), bits(local.global_parameters()), bits(residuals)


@pytest.mark.parametrize(
    ("stopped", "late", "options"),  # with a delay of 1, local step 3 begins an exchange, and step 4 applies it
    [
        (3, (-1, -1), {}),
        (4, (-1, -1), {}),
        (4, (0, 3), {}),
        (3, (-1, -1), {"bucket_bytes": 1, "sync_every": 4, "fragments": 2, "fragment_sync_delay": 3, "by_speed": True}),
    ],
)
def test_a_step_interrupted_anywhere_goes_on_where_it_stopped(
    stopped: int, late: tuple[int, int], options: dict[str, Any]
) -> None:
    passed: list[int] = []

    def program(transport: simulated.SimulatedTransport, *at: int) -> Any:
        @contextlib.contextmanager
        def within(local: sc.LocalSteps, step: int) -> Iterator[None]:
            if step == 4 and local._phase is not Phase.LEFT_OUT:
                local.state_dict()  # finishes calls under way
            if (step, transport.rank) != (stopped, 0):
                yield
                return
            with interrupted(*at) as points:
                yield
            passed.append(points.passed)

        return trained(transport, 6, within, late, outer=sc.NesterovSGD(0.5, 0.5), **options)

    expected = run(2, program)
    assert passed[0] >= 1
    for at in range(passed[0]):
        assert run(2, lambda transport, at=at: program(transport, at)) == expected
