"""Interrupts of reducers on simulated ranks, whose calls end then. Calls that go on: `tests/test_interrupts.py`."""

from __future__ import annotations

import contextlib
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
