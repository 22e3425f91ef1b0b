"""`rebuild` of reducers with lost and new ranks."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests.ranks import run
from tests.reducer.programs import SHAPES, Arrays, as_float64, bits, gradients, reducer_of, residuals, same, total

ELEMENTS = sum(int(np.prod(shape)) for shape in SHAPES.values())


def step(reducer: sc.Reducer, seed: int) -> Arrays:
    """Make a step that pushes gradients in an order that depends on the seed; return the sums."""
    mine = gradients(seed)
    for name in sorted(mine, key=lambda name: np.prod(SHAPES[name])):
        reducer.push(name, mine[name])
    reducer.wait()
    return mine


def trained(P: int, steps: int, **options: Any) -> list[sc.Reducer]:
    """Return the reducers of P ranks after some steps."""

    def program(transport: simulated.SimulatedTransport) -> sc.Reducer:
        reducer = reducer_of(transport, **options)
        for number in range(steps):
            step(reducer, 100 * transport.rank + number)
        return reducer

    reducers: list[sc.Reducer] = run(P, program)
    return reducers


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_survivors_go_on_with_what_they_have(momentum: float, caplog: pytest.LogCaptureFixture) -> None:
    reducers = trained(4, 3, momentum=momentum)
    old = [reducer.state_dict() for reducer in reducers]
    stay = [reducers[rank] for rank in (0, 2, 3)]
    caplog.set_level(logging.WARNING, "sparsecomm")

    def program(transport: simulated.SimulatedTransport) -> tuple[sc.Rebuilt, Arrays]:
        reducer = stay[transport.rank]
        rebuilt = reducer.rebuild(transport)
        mine = old[(0, 2, 3)[transport.rank]]
        now = reducer.state_dict()
        for kind in ("residuals", "velocities"):
            assert bits(now[kind]) == bits(mine[kind])
        assert (now["bucket_bytes"], now["world_size"]) == (mine["bucket_bytes"], 3)
        assert (reducer.counters.ranks_lost, reducer.counters.elements_lost) == (1, ELEMENTS)
        return rebuilt, step(reducer, 7 + transport.rank)

    results = run(3, program)
    assert {rebuilt for rebuilt, _ in results} == {sc.Rebuilt(3, (1,), ELEMENTS, (), 3)}
    assert "lost: rank 1, with residuals" in caplog.text
    for _, sums in results[1:]:
        same(sums, results[0][1])
    if not momentum:
        before = [as_float64(old[rank]["residuals"]) for rank in (0, 2, 3)]
        added = [gradients(7 + rank) for rank in range(3)]
        same(total([results[0][1], *(residuals(reducer) for reducer in stay)]), total(before + added))


def test_a_new_rank_gets_step_and_buckets_and_begins_with_zeros() -> None:
    reducers = trained(3, 2)
    before = total(residuals(reducer) for reducer in reducers)

    def program(transport: simulated.SimulatedTransport) -> tuple[sc.Reducer, sc.Rebuilt, Arrays]:
        new = transport.rank == 1  # a new rank need not be the last
        reducer = reducer_of(transport, bucket_bytes=10**6) if new else reducers[transport.rank - (transport.rank > 1)]
        rebuilt = reducer.rebuild(transport, joining=new)
        if new:
            assert not any(residual.any() for residual in residuals(reducer).values())
        return reducer, rebuilt, step(reducer, 50 + transport.rank)

    results = run(4, program)
    assert {rebuilt for _, rebuilt, _ in results} == {sc.Rebuilt(4, (), 0, (1,), 2)}
    states = [reducer.state_dict() for reducer, _, _ in results]
    for state in states:
        assert [state[key] for key in ("step", "bucket_bytes")] == [3, 1500]
    assert len({repr(reducer.groups) for reducer, _, _ in results}) == 1
    added = total(gradients(50 + rank) for rank in range(4))
    same(total([results[0][2], *(state["residuals"] for state in states)]), total([before, added]))


@pytest.mark.parametrize("options", [{}, {"clip": 1e9}, {"skip_nonfinite": True}])
def test_a_step_that_has_begun_is_left_and_its_gradients_are_kept(options: dict[str, Any]) -> None:
    """One rank has finished the step, one has pushed a part of it, and the third has not begun."""
    reducers = trained(4, 2, **options)
    reducers[0]._open.number += 1
    before = [residuals(reducer) for reducer in reducers]
    pushed = gradients(9)

    def program(transport: simulated.SimulatedTransport) -> sc.Rebuilt:
        if transport.rank == 1:
            for name in ("a", "b"):
                reducers[1].push(name, pushed[name])
        return reducers[transport.rank].rebuild(transport)

    results = run(3, program)
    assert {(result.step, result.steps_apart, result.ranks_lost) for result in results} == {(3, 1, (3,))}
    for rank in (0, 2):
        assert bits(residuals(reducers[rank])) == bits(before[rank])
    partly = {name: pushed[name] if name in ("a", "b") else np.zeros(SHAPES[name], np.float32) for name in SHAPES}
    same(residuals(reducers[1]), {name: before[1][name] + partly[name] for name in SHAPES})


def test_what_cannot_be_rebuilt() -> None:
    def all_join(transport: simulated.SimulatedTransport) -> None:
        with pytest.raises(sc.InvalidInputError, match="all 2 ranks join"):
            reducer_of(transport).rebuild(transport, joining=True)

    run(2, all_join)

    def others(transport: simulated.SimulatedTransport) -> None:
        reducer = sc.Reducer({"a": np.zeros(10 + transport.rank, np.float32)}, 0.1, comm=transport)
        with pytest.raises(sc.CollectiveMismatchError):
            reducer.rebuild(transport)

    run(2, others)
