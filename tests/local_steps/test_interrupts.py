"""Interrupted local steps: what a rank has moved is in the global parameters or in the residuals, once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from greenlet import getcurrent

import sparsecomm as sc
from sparsecomm.calls.collectives import WordsGather
from sparsecomm.local_steps.local_steps import Phase
from sparsecomm.reducer.step import Bucket
from sparsecomm.transport import simulated
from tests import interrupts
from tests.interrupts import InterruptError, interrupted
from tests.local_steps.programs import PLAIN, bits, left_out
from tests.reducer.programs import run

SHAPES = {"a": (30,), "b": (7, 3), "c": (64,)}
SETTINGS = PLAIN | {"sync_every": 2, "fragment_sync_delay": 1, "fragment_update_alpha": 0.5}


@pytest.fixture(autouse=True)
def contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupts come in the contexts of `contextlib`, too, in which compiled code does its work."""
    monkeypatch.setattr(interrupts.Points, "roots", (*interrupts.Points.roots, contextlib.__file__))


def trained(
    transport: simulated.SimulatedTransport, steps: int, within: Any, late: tuple[int, int] = (-1, -1), **options: Any
) -> Any:
    """Train, with each step in a context of its own; after an interrupt go on with the same parameters.

    ``late``: the rank that is left out of an exchange, and does not train one parameter; and its step.
    """
    parameters = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    local = sc.LocalSteps(parameters, 0.2, comm=transport, **(SETTINGS | options))
    local._timer.clock = lambda: 0.0  # all take the same time
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
        if local._phase is Phase.LEFT_OUT or not (counted or was_late):  # it came before the step was counted
            local.step(parameters)
        if local._due_events:
            with pytest.raises(sc.InvalidInputError, match="after an interrupted step; call finish first"):
                local.state_dict()
            local._end_call(local._perform(parameters))  # as the next step does
    local.finish(parameters)
    residuals = {name: reducer.residual(name) for reducer in local.reducers for name in reducer.names}
    return bits(parameters), bits(local.global_parameters()), bits(residuals)


@pytest.mark.parametrize(
    ("stopped", "late"),  # local step 3 begins an exchange, and step 4 applies it
    [(3, (-1, -1)), (4, (-1, -1)), (4, (0, 3))],
)
def test_a_step_interrupted_anywhere_goes_on_where_it_stopped(stopped: int, late: tuple[int, int]) -> None:
    passed: list[int] = []

    def program(transport: simulated.SimulatedTransport, *at: int) -> Any:
        @contextlib.contextmanager
        def within(local: sc.LocalSteps, step: int) -> Iterator[None]:
            if step == 4 and local._phase is not Phase.LEFT_OUT:
                local.state_dict()  # its calls are made here
            if (step, transport.rank) != (stopped, 0):
                yield
                return
            with interrupted(*at) as points:
                yield
            passed.append(points.passed)

        return trained(transport, 6, within, late, outer=sc.NesterovSGD(0.5, 0.5))

    expected = run(2, program)
    assert passed[0] >= 1
    for at in range(passed[0]):
        assert run(2, lambda transport, at=at: program(transport, at)) == expected


# Where a wait polls: before a gradient's call, after a comparison, when a step ends.
POINTS: dict[str, tuple[Any, str, bool]] = {
    "plan": (Bucket, "plan", True),
    "words": (WordsGather, "_exchange_words", False),
    "end": (sc.Reducer, "_begin", True),
}


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize(
    "options",
    [
        {"sync_every": 1, "fragment_sync_delay": 0},
        {"fragments": 2, "fragment_sync_delay": 0},
        {"sync_every": 4, "fragments": 2, "fragment_sync_delay": 3, "by_speed": True},
    ],
    ids=str,
)
def test_calls_keep_their_order_whenever_compiled_code_is_interrupted(
    point: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, name, before = POINTS[point]
    original, armed, passed, ranks = getattr(holder, name), list[int](), list[int](), dict[int, int]()

    def interrupts(each: Any, *arguments: Any) -> Any:
        result = None if before else original(each, *arguments)
        if ranks.get(id(getcurrent())) == 0:
            passed.append(1)
            if armed == [len(passed)]:
                armed.clear()
                raise InterruptError
        return original(each, *arguments) if before else result

    monkeypatch.setattr(holder, name, interrupts)

    def program(transport: simulated.SimulatedTransport) -> Any:
        @contextlib.contextmanager
        def within(local: sc.LocalSteps, step: int) -> Iterator[None]:
            ranks[id(getcurrent())] = transport.rank
            yield
            del ranks[id(getcurrent())]

        return trained(transport, 9, within, bucket_bytes=1, **options)

    expected = run(2, program)
    count = len(passed)
    assert count >= 4
    for at in range(1, count + 1):
        passed.clear()
        ranks.clear()
        armed[:] = [at]
        assert run(2, program) == expected
        assert not armed
