"""Interrupted pushes: a gradient that was counted as pushed is in the residuals or in the sum, once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests import interrupts
from tests.interrupts import InterruptError, interrupted

SHAPES = {"a": (30,), "b": (7, 3), "c": (2,)}


@pytest.fixture(autouse=True)
def contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupts come in the contexts of `contextlib`, too, in which compiled code does its work."""
    monkeypatch.setattr(interrupts.Points, "roots", (*interrupts.Points.roots, contextlib.__file__))


def again_until(done: Callable[[], bool], act: Callable[[], object]) -> None:
    """Repeat an action until it is done, as a program does that continues after interrupts."""
    while True:
        with contextlib.suppress(InterruptError):
            if done():
                return
            act()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scope": "tensor"},
        {"momentum": 0.5},
        {"decay": 0.5},
        {"clip": 5.0, "momentum": 0.5},
        {"scope": "chunk", "chunk": 10, "decay": 0.5},
        {"scope": "chunk", "chunk": 10, "decay": 0.5, "clip": 5.0},
    ],
    ids=str,
)
def test_a_push_interrupted_anywhere_loses_no_gradient(options: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    pushed = [{name: rng.integers(-9, 9, shape).astype(np.float32) for name, shape in SHAPES.items()} for _ in "123"]

    def program(transport: simulated.SimulatedTransport) -> None:
        def train(*at: int) -> tuple[int, list[np.ndarray]]:
            settings = {"dense_below": 3, "masking": False, "op": "sum"}
            reducer = sc.Reducer(pushed[0], sc.Warmup(0.1, 0), comm=transport, **settings, **options)
            applied = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
            passed = []
            for number, gradients in enumerate(pushed):
                outs = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
                with interrupted(*(at if number == 1 else ())) as points:
                    for name, gradient in gradients.items():
                        again_until(
                            lambda name=name: reducer.pushed(name),
                            lambda name=name, gradient=gradient, out=outs[name]: reducer.push(name, gradient, out=out),
                        )
                passed.append(points.passed)
                again_until(lambda number=number: reducer.step > number, reducer.wait)
                for name in SHAPES:
                    applied[name] += outs[name]
            return passed[1], [applied[name] + reducer.residual(name) for name in SHAPES]

        points, right = train()
        assert points >= 5
        for place in range(points):
            for left, expected in zip(train(place)[1], right, strict=True):
                np.testing.assert_allclose(left, expected, rtol=1e-5, atol=1e-5, err_msg=f"{place}")

    simulated.run(1, program)  # the others wait for nobody before `wait`


def test_a_reducer_that_was_interrupted_when_it_connected_goes_on() -> None:
    """It has all its buckets then, and talks to reducers that were not interrupted."""
    gradients = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}

    def program(transport: simulated.SimulatedTransport) -> int:
        came = 0
        for place in range(150):
            reducer = sc.Reducer(gradients, 1.0, comm=transport, dense_below=3, op="sum")
            sums = {name: gradient.copy() for name, gradient in gradients.items()}
            with contextlib.suppress(InterruptError), interrupted(place) as points:
                assert transport.rank == 1 or reducer.groups
            came += points.interrupts
            reducer.reduce(sums)
            assert all((total == 2).all() for total in sums.values())
        return came

    assert simulated.run(2, program)[0].value > 20


@pytest.mark.parametrize("options", [{}, {"scope": "tensor"}, {"skip_nonfinite": True}], ids=str)
def test_a_wait_interrupted_anywhere_ends_the_step_or_goes_on(options: dict[str, Any]) -> None:
    """The number of the step says which; nothing of it is lost, and the next step may be made. One tensor has no
    gradient in the step: what waits in its residual stays there.
    """
    gradients = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}

    def program(transport: simulated.SimulatedTransport) -> None:
        place, came = 0, 1
        while came:
            reducer = sc.Reducer(gradients, 1.0, comm=transport, dense_below=3, op="sum", **options)
            for number in range(3):
                sums = {name: gradient.copy() for name, gradient in gradients.items()}
                reducer.residual("b")[...] = waits = 5.0 * (number == 1)
                for name, gradient in sums.items():
                    if not waits or name != "b":
                        reducer.push(name, gradient)
                with contextlib.suppress(InterruptError), interrupted(*([place] if number == 1 else [])) as points:
                    reducer.wait()
                if reducer.step == number:
                    with contextlib.suppress(InterruptError):  # again, where a call was interrupted
                        reducer.wait()
                assert reducer.step == number + 1
                came = points.interrupts if number == 1 else came
                kept = {name: np.asarray(reducer.residual(name)) for name in SHAPES}
                assert (kept["b"] == 5).all() or not waits
                if reducer.last is not None:
                    assert all((total == 1).all() for total in sums.values())
                    assert reducer.last.without_gradient == ({"b"} if waits else set())
                else:
                    unsummed = set(reducer.unsummed)
                    assert all((kept[name] == 1).all() for name in unsummed - {"b"}), place
                    reducer.discard()
            place += 1
        assert place >= 2

    simulated.run(1, program)
