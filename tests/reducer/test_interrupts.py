"""Interrupts that end the calls of reducers. For calls that continue, see `tests/test_interrupts.py`."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests import interrupts
from tests.interrupts import InterruptError, interrupted

SHAPES = {"a": (30,), "b": (7, 3), "c": (2,)}


@pytest.fixture(autouse=True)
def contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt inside `contextlib`, too, since compiled code runs in its contexts."""
    monkeypatch.setattr(interrupts.Points, "roots", (*interrupts.Points.roots, contextlib.__file__))


def test_a_reducer_that_was_interrupted_when_it_connected_goes_on() -> None:
    """It has all its buckets, and works with reducers that were not interrupted."""
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
