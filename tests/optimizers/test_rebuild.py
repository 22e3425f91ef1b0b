"""`rebuild` of `sparsecomm.SparseAdamW` on simulated ranks: nodes that change, and ranks that are not equally far."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests.optimizers.adapters import part_of, run_on
from tests.optimizers.oracle import (
    SHAPES,
    Arrays,
    check_equal,
    gradients,
    moments_and_units,
    units_of,
    waiting,
    weights,
)
from tests.ranks import run

CHANGES = [  # old layout, old rank of each new rank (None: it joins), new layout
    ("001122", [0, 1, 4, 5], "0011"),
    ("0011", [0, 1, 2], "001"),
    ("000111", [0, 2, 3, 5], "0011"),
    ("0011", [0, 2], "00"),  # one slice is lost
    ("0011", [3, 0, 2, 1], "0011"),
    ("0011", [0, 1, 2, 3], "0123"),
    ("01", [0, None, 1, None], "0011"),
    ("0011", [None, 0, 1, 2, None, 3], "010110"),
    ("0011", [0, None, 1, None], "0011"),
    ("0", [None, 0, None, None], "0011"),
]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("layout", "stay", "other"), CHANGES, ids=str)
@pytest.mark.parametrize("dense_steps", [0, 3, 4])
@pytest.mark.parametrize("times", [1, 2])
def test_nodes_change(layout: str, stay: list[int | None], other: str, dense_steps: int, times: int) -> None:
    """`rebuild` runs once, or twice after a failed step. With 4 dense steps, units lag.

    Residuals and moments that joining ranks had before are dropped.
    """
    steps, schedule = 4, lambda step: 1.0 if step < dense_steps else 0.3
    fails = times == 2 and len(layout) > 1

    def made(transport: simulated.SimulatedTransport) -> sc.SparseAdamW:
        return sc.SparseAdamW(weights(), 0.01, comm=transport, density=schedule)

    def begin(transport: simulated.SimulatedTransport) -> Any:
        optimizer = made(transport)
        for step in range(steps):
            optimizer.step(gradients(step, transport.rank))
        if fails:
            optimizer.lr = 0.02 if transport.rank == 0 else 0.01
            with pytest.raises(sc.CollectiveMismatchError):
                optimizer.step(gradients(steps, transport.rank))
            optimizer.lr = 0.01
        return optimizer, copy.deepcopy(optimizer.state_dict())

    def begin_elsewhere(transport: simulated.SimulatedTransport) -> sc.SparseAdamW:
        optimizer = made(transport)
        optimizer.step({name: np.asarray(100 * gradient) for name, gradient in gradients(0, 0).items()})
        return optimizer

    old, stale = run_on(layout, begin), [*run(1, begin_elsewhere), *run(1, begin_elsewhere), *run(1, begin_elsewhere)]
    stayed = [old[rank][1] for rank in stay if rank is not None]
    (moments, units), before = moments_and_units([state for _, state in old]), waiting(stayed)
    lost, elements = len(layout) - len(stayed), sum(residual.size for residual in stayed[0]["residuals"].values())

    def program(transport: simulated.SimulatedTransport) -> Any:
        rank = stay[transport.rank]
        optimizer = stale[stay[: transport.rank].count(None)] if rank is None else old[rank][0]
        for name, w in old[0][0].weights.items():
            optimizer.weights[name][...] = w
        for time in range(times):
            rebuilt = optimizer.rebuild(transport, joining=rank is None and not time)
            assert len(rebuilt.ranks_lost) == (0 if time else lost)
            assert rebuilt.elements_lost == len(rebuilt.ranks_lost) * elements
            assert rebuilt.step == steps + fails
        state = copy.deepcopy(optimizer.state_dict())
        for step in range(steps, steps + 3):
            assert optimizer.step(gradients(step, transport.rank)).usable
        assert not optimizer.state_dict()["unsummed"]
        return optimizer.weights, optimizer.state_dict(), state

    results = run_on(other, program)
    check_equal([result[:2] for result in results])
    states = [state for *_, state in results]
    after, others = moments_and_units(states)
    waits = waiting(states)
    for name, moment in moments.items():
        has_unit, has_moments = (np.zeros(moment["last"].size, bool) for _ in range(2))
        for state in stayed:
            has_unit[slice(*part_of(state, name))] = True
            has_moments[slice(*state["moments"][name]["part"])] = True
        np.testing.assert_array_equal(others[name][has_unit], units[name][has_unit])
        np.testing.assert_allclose(
            waits[name], before[name], rtol=1e-6, atol=1e-6 * (1 + np.abs(before[name]).max(initial=0))
        )
        for key in ("mean", "squares", "last"):
            np.testing.assert_array_equal(after[name][key][has_moments], moment[key][has_moments])
        assert not after[name]["mean"][~has_moments].any()
        assert (after[name]["last"][~has_moments] == steps).all()
        if dense_steps < 4 or not has_moments.any():
            np.testing.assert_allclose(
                after[name]["squares"][~has_moments], 2 * others[name][~has_moments] ** 2, rtol=1e-6
            )


@pytest.mark.parametrize("behind", [0, 1])
@pytest.mark.parametrize("layout", ["00", "0011"])
def test_ranks_that_are_a_step_apart_go_on_together(behind: int, layout: str) -> None:
    def waits(state: Any) -> Arrays:
        units = {name: np.exp2(units_of(state, name) - 127.0) for name in SHAPES}
        return {name: w.ravel() * units[name] for name, w in state["residuals"].items()}

    def begin(transport: simulated.SimulatedTransport) -> Any:
        mine = weights()
        optimizer, adamw = sc.SparseAdamW(mine, 0.01, comm=transport, density=0.3), None
        for step in range(5):
            if step == 4 and transport.rank == behind:
                adamw, bucket = optimizer._adamw, optimizer.reducer.buckets[0]
                saved = copy.deepcopy((mine, adamw.moments, adamw.steps, bucket.exponents, bucket.residual))
            optimizer.step(gradients(step, transport.rank))
        if adamw is not None:  # undo the step, as if the last call had failed on this rank
            adamw.adopt(saved[1], saved[2])
            bucket.exponents[:], bucket.residual[:] = saved[3:]
            optimizer.reducer._open.number = 4
            for name, w in saved[0].items():
                mine[name][...] = w
        return optimizer, waits(optimizer.state_dict())

    old = run_on(layout, begin)

    def program(transport: simulated.SimulatedTransport) -> Any:
        optimizer, waiting = old[transport.rank]
        assert optimizer.rebuild(transport).steps_apart == 1
        for name, w in old[0][0].weights.items():
            optimizer.weights[name][...] = w
        state = copy.deepcopy(optimizer.state_dict())
        for name, w in waits(state).items():
            np.testing.assert_allclose(w, waiting[name], rtol=1e-6)
        optimizer.load_state_dict(state)
        for step in range(6, 9):
            optimizer.step(gradients(step, transport.rank))
        return optimizer.weights, optimizer.state_dict()

    check_equal(run_on(layout, program))
