"""The schedule of fragments, and the division of rounds among ranks of different speeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsecomm as sc
from sparsecomm.local_steps.schedule import Pace, SyncSchedule, split_by_size
from sparsecomm.transport import simulated
from tests.local_steps.programs import Arrays, Oracle, initial, made, move
from tests.ranks import run
from tests.reducer.programs import bits

CHECK = settings(max_examples=200)
FEW = settings(max_examples=15)
SPEEDS = (1, 1, 2, 2, 2, 4, 4, 4)  # duration of a local step on each rank
TIMES = st.lists(st.sampled_from([1.0, 1.5, 2.0, 3.7, 8.0]), min_size=1, max_size=4)


@st.composite
def sync_schedules(draw: st.DrawFn) -> SyncSchedule:
    sync_every = draw(st.integers(1, 40))
    return SyncSchedule(sync_every, draw(st.integers(1, sync_every)), draw(st.integers(0, sync_every - 1)))


@CHECK
@given(sync_schedules())
def test_each_fragment_is_exchanged_once_in_a_round_and_never_twice_at_a_time(schedule: SyncSchedule) -> None:
    H, F, d = schedule.sync_every, schedule.fragments, schedule.delay
    under_way: dict[int, tuple[int, int]] = {}  # fragment -> (round, step of its begin)
    last = dict.fromkeys(range(F), 0)
    applied = []
    for step in range(1, 4 * H + 1):
        for fragment, round_no, _ in schedule.begins(step):
            assert fragment not in under_way
            assert schedule.steps_between(fragment, round_no) == step - last[fragment] > 0
            under_way[fragment], last[fragment] = (round_no, step), step
        for fragment, due, _ in schedule.applies(step):
            round_no, begun = under_way.pop(fragment)
            assert round_no == due
            assert step == round_no * H + (fragment + 1) * H // F
            assert begun == max(1, step - d)
            applied.append((round_no, fragment))
    assert applied == [(round_no, fragment) for round_no in range(4) for fragment in range(F)]


@CHECK
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=12), st.data())
def test_a_model_is_split_into_neighbours_of_about_one_size(sizes: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(sizes)))
    named = {f"p{i}": size for i, size in enumerate(sizes)}
    parts = split_by_size(named, count)
    assert [name for part in parts for name in part] == list(named)
    assert len(parts) == count
    assert all(parts)
    largest = max(sum(named[name] for name in part) for part in parts)
    assert largest <= sum(sizes) / count + 2 * max(sizes)


def test_equal_tensors_are_split_equally() -> None:
    assert [len(part) for part in split_by_size({f"p{i}": 10 for i in range(12)}, 4)] == [3, 3, 3, 3]


@CHECK
@given(st.integers(1, 4), TIMES)
def test_local_steps_are_divided_so_that_ranks_wait_least(sync_every: int, seconds: list[float]) -> None:
    def waits(steps: Sequence[int]) -> float:
        busy = [n * t for n, t in zip(steps, seconds, strict=True)]
        return 1 - sum(busy) / max(busy) / P

    P = len(seconds)
    total = sync_every * P
    pace = SyncSchedule(sync_every, by_speed=True).pace_after(Pace(), 1, seconds)
    within = [int(pace.seconds / t + 1e-6) for t in seconds]
    ends = {n * t for t in seconds for n in range(1, 8 * (total + P))}
    ways = [way for end in ends if abs(sum(way := [int(end / t + 1e-6) for t in seconds]) - total) < P]
    best = min(map(waits, ways))
    if pace.steps == (sync_every,) * P:
        assert 0 in min(ways, key=waits) or waits(pace.steps) <= best + 0.03
    else:
        assert waits(within) == pytest.approx(best, abs=1e-6)
        closest = min(abs(sum(way) - total) for way in ways if waits(way) < best + 1e-9)
        assert abs(sum(within) - total) == closest
        assert pace.steps == tuple(max(1, n) for n in within)


@CHECK
@given(st.integers(4, 50), st.lists(st.sampled_from([1.0, 2.0, 4.0]), min_size=1, max_size=8), st.integers(0, 99))
def test_noise_hardly_changes_the_numbers(sync_every: int, speeds: list[float], seed: int) -> None:
    """Noise may improve the numbers, but must not make them oscillate."""
    rule, random = SyncSchedule(sync_every, by_speed=True), np.random.default_rng(seed)
    paces = [rule.pace_after(Pace(), 1, speeds)]
    for round_no in range(2, 30):
        paces.append(rule.pace_after(paces[-1], round_no, list(speeds * random.uniform(0.99, 1.01, len(speeds)))))
    assert sum(a.steps != b.steps for a, b in pairwise(paces)) <= 2
    assert rule.pace_after(paces[-1], 30, [0.0, *speeds[1:]]).steps == paces[-1].steps  # one rank has no measurement
    if len(set(speeds)) == 1:
        assert paces[-1].steps == (sync_every,) * len(speeds)


@pytest.mark.parametrize("by_speed", [True, False])
@pytest.mark.parametrize("others", [1, 2, 5])
def test_a_rank_that_never_comes_does_not_stretch_the_rounds(by_speed: bool, others: int) -> None:
    """Deadlines depend on the duration of a round, and a late rank reports how long the others waited."""
    rule = SyncSchedule(4, by_speed=by_speed, deadline=1.5)
    pace = rule.pace_after(Pace(), 1, [1.0] + [3.0] * others)
    for round_no in range(2, 12):
        waited = 1.5 * pace.seconds
        pace = rule.pace_after(pace, round_no, [waited] + [3.0] * others, late=(0,))
        assert pace.seconds <= 2 * 4 * 3.0


def trained(
    transport: simulated.SimulatedTransport, times: Any, rounds: int, density: float = 0.1, **options: Any
) -> tuple[sc.LocalSteps, Arrays, list[tuple[int, ...]]]:
    """Train for some rounds with this rank's step time. Also return the division of each round."""
    parameters, divisions, step = initial(), [], 0
    local = made(transport, parameters, density, **options)
    while local.round < rounds:
        if local.local_step == 0:
            divisions.append(local.steps)
        transport.compute(times[transport.rank])
        step += 1
        move(parameters, transport.rank, step)
        local.step(parameters)
    return local, parameters, divisions


@st.composite
def schedules(draw: st.DrawFn) -> dict[str, Any]:
    sync_every = draw(st.integers(1, 8))
    return {
        "sync_every": sync_every,
        "fragments": draw(st.integers(1, min(3, sync_every))),
        "fragment_sync_delay": draw(st.integers(0, sync_every - 1)),
        "fragment_update_alpha": draw(st.sampled_from([0.0, 0.25])),
    }


@FEW
@given(TIMES, schedules())
def test_the_whole_algorithm(times: list[float], schedule: dict[str, Any]) -> None:
    rounds, P = 4, len(times)
    options = schedule | {"by_speed": True}
    results = run(P, lambda transport: trained(transport, times, rounds, **options))
    divisions = results[0][2]
    assert divisions[0] == (schedule["sync_every"],) * P
    oracle = Oracle(
        P,
        results[0][0].fragments,
        schedule["sync_every"],
        schedule["fragment_sync_delay"],
        alpha=options["fragment_update_alpha"],
    )
    oracle.train(rounds * schedule["sync_every"], divisions)
    for rank, (local, parameters, own_divisions) in enumerate(results):
        globals_ = local.global_parameters()
        assert own_divisions == divisions
        assert bits(globals_) == bits(results[0][0].global_parameters())
        for name, values in parameters.items():
            for mine, expected in ((values, oracle.local[rank][name]), (globals_[name], oracle.globals[name])):
                np.testing.assert_allclose(mine, expected.reshape(values.shape), rtol=2e-6, atol=2e-6, err_msg=name)


def test_nobody_waits_for_the_slowest() -> None:
    """With equal numbers of steps, the mean worker would compute 62.5 % of the time."""
    P, rounds = len(SPEEDS), 20

    def program(transport: simulated.SimulatedTransport) -> Any:
        divisions = trained(transport, SPEEDS, rounds, sync_every=10, by_speed=True)[2]
        return SPEEDS[transport.rank] * sum(steps[transport.rank] for steps in divisions[1:]), divisions[1:]

    results = simulated.run(P, program, alpha=0.01)
    wall = max(result.seconds for result in results) - max(SPEEDS) * 10
    assert np.mean([result.value[0] for result in results]) / wall > 0.95
    assert results[0].value[1] == [(20, 20, 10, 10, 10, 5, 5, 5)] * (rounds - 1)


def test_a_rank_whose_speed_changes_is_followed() -> None:
    def program(transport: simulated.SimulatedTransport) -> Any:
        parameters, divisions = initial(), []
        local = made(transport, parameters, sync_every=8, by_speed=True)
        while local.round < 8:
            if local.local_step == 0:
                divisions.append(local.steps)
            transport.compute(10.0 if transport.rank == 1 and 2 <= local.round < 5 else 1.0)
            local.step(parameters)
        return divisions

    for divisions in run(2, program):
        assert divisions[:3] == [(8, 8)] * 3
        assert divisions[3:6] == [(14, 1)] * 3
        assert divisions[7][1] > 5


def test_states_for_another_number_of_ranks_and_rules() -> None:
    options = {"sync_every": 4, "by_speed": True}
    states = run(2, lambda transport: trained(transport, [1, 3], 3, **options)[0].state_dict())
    assert states[0]["steps"] == states[1]["steps"] != []

    def load(transport: simulated.SimulatedTransport, **others: Any) -> Any:
        local = made(transport, initial(), **(options | others))
        local.load_state_dict(
            sc.reshard(states, transport.rank, transport.size) if transport.size == 3 else states[transport.rank]
        )
        return local.round, local.steps

    assert run(3, load) == [(3, (4, 4, 4))] * 3
    assert run(2, load) == [(3, (6, 2))] * 2
    assert run(2, lambda transport: load(transport, by_speed=False)) == [(3, (4, 4))] * 2


def test_a_rank_that_divides_rounds_differently_is_told() -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        parameters = initial()
        local = made(transport, parameters, sync_every=2, by_speed=True)
        local.step(parameters)
        local._rules = local._rules._replace(schedule=replace(local._schedule, deadline=2.0 + transport.rank))
        with pytest.raises(
            sc.CollectiveMismatchError, match=r"deadline is 2\.0 on rank 0 and 3\.0 on rank 1.*same sync_"
        ):
            local.step(parameters)

    run(2, program)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deadline": 1.0}, "deadline=1.0: must be a factor above 1"),
        ({"deadline": True}, "deadline=True"),
        ({"deadline": 2.0}, "simulated .*does not support calls from a thread"),
    ],
)
def test_what_cannot_be_used(options: dict[str, Any], message: str) -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        with pytest.raises(sc.InvalidInputError, match=message):
            made(transport, initial(), sync_every=4, **options)

    run(1, program)


def test_a_new_communicator_gets_numbers_of_its_own() -> None:
    times = [1.0, 1.0, 3.0]
    old = run(3, lambda transport: trained(transport, times, 2, sync_every=4, by_speed=True))

    def program(transport: simulated.SimulatedTransport) -> Any:
        local, parameters, _ = old[transport.rank + 1]
        local.rebuild(transport, parameters)
        return local.round, local.local_step, local.steps

    assert run(2, program) == [(2, 0, (6, 2))] * 2
