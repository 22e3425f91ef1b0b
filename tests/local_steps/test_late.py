"""The deadline, and ranks that miss it: their training is exchanged later, exactly once."""

from __future__ import annotations

import pickle
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsecomm as sc
from sparsecomm.local_steps import deadline
from sparsecomm.transport import simulated
from tests.local_steps.programs import PLAIN, left_out
from tests.ranks import number_reducers_from_0, run
from tests.reducer.programs import bits

SHAPES = {"a": (40,), "b": (6, 5), "c": (0,)}
EXACT = PLAIN | {"decay": 1.0}


@settings(max_examples=40)
@given(st.data(), st.sampled_from([2, 4]), st.integers(1, 2), st.booleans(), st.sampled_from(["plain", "packed_int2"]))
def test_nothing_is_lost_or_counted_twice(
    data: st.DataObject, P: int, fragments: int, by_speed: bool, wire: str
) -> None:
    """Each change is in global parameters, residuals or local parameters. All are integers, so sums are exact."""
    rounds = 4
    late = {
        (rank, step): data.draw(st.integers(1, 3), label=f"rank {rank} is late at step {step}")
        for rank in range(P)
        for step in data.draw(st.sets(st.integers(1, 9), max_size=3))
    }

    def program(transport: simulated.SimulatedTransport) -> Any:
        parameters = {name: np.zeros(shape, np.float64) for name, shape in SHAPES.items()}
        options = EXACT | {"wire": "plain", "sync_every": 3, "fragments": fragments, "by_speed": by_speed}
        if wire != "plain":
            options |= {"scope": "chunk", "chunk": 8, "algorithm": "split", "wire": "auto"}
        local = sc.LocalSteps(parameters, 0.25, comm=transport, **options)
        moved, step = {name: np.zeros(shape) for name, shape in SHAPES.items()}, 0
        while local.round < rounds:
            step += 1
            transport.compute(1.0 + transport.rank)
            for name, shape in SHAPES.items():
                change = np.random.default_rng((transport.rank, step)).integers(-8, 8, shape)
                if name == "b" and ((step + transport.rank) % 5 > 1 or 5 < local._passed() < 10):  # not trained
                    continue
                parameters[name] += change
                moved[name] += change
            for _ in range(late.get((transport.rank, step), 0)):
                if local.round < rounds:
                    left_out(local)
            local.step(parameters)
        local.finish(parameters)
        return moved, parameters, local.global_parameters(), [reducer.state_dict() for reducer in local.reducers]

    results = run(P, program)
    globals_ = results[0][2]
    for _, _, others, _ in results:
        assert bits(others) == bits(globals_)
    for name in SHAPES:
        waits = [state["residuals"][name] for *_, states in results for state in states if name in state["residuals"]]
        unsent = [parameters[name] - globals_[name] for _, parameters, _, _ in results]
        total = P * globals_[name] - sum(waits) + sum(unsent)
        np.testing.assert_array_equal(total, sum(moved[name] for moved, *_ in results), err_msg=name)


def test_a_state_with_an_exchange_for_which_the_rank_was_late() -> None:
    """Applying the exchange after loading must not undo the rank's training."""
    options = EXACT | {"sync_every": 4, "fragment_sync_delay": 3}

    def program(transport: simulated.SimulatedTransport, *, stops: bool) -> Any:
        x, random = {"x": np.zeros(40)}, np.random.default_rng(transport.rank)
        local, stopped = sc.LocalSteps(x, 0.5, comm=transport, **options), False
        while local.round < 4:
            x["x"] += random.integers(-8, 8, 40)
            if transport.rank == 1 and local._passed() in (4, 5):
                left_out(local)
                with pytest.raises(sc.InvalidInputError, match="that was left out of an exchange"):
                    local.state_dict()
            local.step(x)
            if stops and not stopped and local.round == 2 and local.local_step > 0:
                state, stopped = pickle.loads(pickle.dumps(local.state_dict())), True
                assert len(state["exchanges"]) == 1
                assert state["late"] == [[0, 2]] * transport.rank
                local.finish({"x": x["x"].copy()})
                number_reducers_from_0(transport)  # as in a new process
                local = sc.LocalSteps({"x": np.zeros(40)}, 0.5, comm=transport, **options)
                local.load_state_dict(state)
        return bits(x), bits(local.global_parameters())

    with_stop, without = (run(2, lambda transport, b=b: program(transport, stops=b)) for b in (True, False))
    assert with_stop == without


def test_an_exchange_that_fails_is_kept_by_all_also_by_a_late_rank() -> None:
    def program(transport: simulated.SimulatedTransport) -> Any:
        x = {"x": np.zeros(50)}
        local = sc.LocalSteps(x, 0.1, comm=transport, sync_every=1, **EXACT)
        for step in range(5):
            x["x"] += np.random.default_rng((transport.rank, step)).integers(-8, 8, 50)
            local.reducers[0]._open.number += 100 * (transport.rank == 0 and step == 2)
            if transport.rank == 1 and step == 2:
                left_out(local)
            if step == 2:
                with pytest.raises(sc.CollectiveMismatchError):
                    local.step(x)
                local.reducers[0]._open.number = 3
            else:
                local.step(x)
        return local.global_parameters()["x"], local.reducers[0].residual("x"), x["x"]

    (global_0, first, _), (global_1, second, mine) = run(2, program)
    np.testing.assert_array_equal(global_0, global_1)
    sums = sum(np.random.default_rng((r, s)).integers(-8, 8, 50) for r in range(2) for s in range(5))
    np.testing.assert_array_equal(2 * global_0 - first - second + (mine - global_0), sums)


@pytest.mark.parametrize("waits", [False, True])
def test_a_deadline_does_not_hold_up_steps(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe waits behind the calls in the queue, which may take long."""
    left, limit, took = list[int](), deadline.Deadline(2.0), list[bool]()
    program: Any = SimpleNamespace(expected_seconds=lambda step: 1.0, leave_out=lambda: left.append(1))
    transport: Any = SimpleNamespace(clock=lambda: 10.0)
    probe = SimpleNamespace(time=7.5, awaited=waits)

    def probed(_: object) -> SimpleNamespace:
        def take() -> None:
            with limit.lock:
                took.append(True)

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        thread.join(5)
        return probe

    monkeypatch.setattr(deadline, "_probe", probed)
    assert limit.check(program) is None  # no exchange has begun
    limit.exchange_begun(transport, 3)
    assert limit.check(program) == (0.0 if waits else deadline._MIN_PAUSE + 0.05)  # since 9.5
    assert left == [1] * waits
    assert took == [True] * 2
    probe.time = 9.0
    limit.exchange_begun(transport, 4)
    assert limit.check(program) == 1.0
    limit.reset()
    assert limit.check(program) is None
