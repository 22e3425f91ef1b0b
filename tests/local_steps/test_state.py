"""Local steps give the same bits after a resume from any local step, and on a CUDA device."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from typing import Any

import pytest

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests import data
from tests.emulator.deferred import DeferredRuntime
from tests.local_steps.programs import Arrays, initial, made, move, some_frozen, train
from tests.ranks import number_reducers_from_0, run
from tests.reducer.programs import bits
from tests.states.subjects import digest

SETTINGS: dict[str, Any] = {
    "sync_every": 4,
    "fragments": [["f", "a"], ["b", "c"], ["d", "e"]],
    "fragment_sync_delay": 2,
    "fragment_update_alpha": 0.25,
}


def nesterov(transport: simulated.SimulatedTransport, parameters: Arrays, **options: Any) -> sc.LocalSteps:
    return made(transport, parameters, outer=sc.NesterovSGD(), **(SETTINGS | options))


@pytest.mark.parametrize(
    ("P", "options", "stops"),
    [
        (1, {}, range(3, 11)),  # two rounds
        (3, {}, range(3, 11)),
        (3, {"fragments": 1, "fragment_sync_delay": 3, "scope": "chunk", "chunk": 16, "algorithm": "split"}, (6, 7)),
        (2, {"fragments": 1, "sync_every": 6, "by_speed": True}, (4, 6, 10, 12)),  # all ranks load at the same step
    ],
)
def test_a_run_that_resumes_from_any_local_step_is_bit_identical(P: int, options: dict[str, Any], stops: Any) -> None:
    def program(transport: simulated.SimulatedTransport, stop: int | None) -> Any:
        parameters, step = initial(), 0
        local = nesterov(transport, parameters, **options)
        while local.round < 4:
            if stop is not None and local._passed() >= stop:
                state, stop = pickle.loads(pickle.dumps(local.state_dict())), None
                parameters = {name: values.copy() for name, values in parameters.items()}
                local.finish({name: values.copy() for name, values in parameters.items()})  # must not change the state
                number_reducers_from_0(transport)  # as in a new process
                local = nesterov(transport, initial(), **options)
                local.load_state_dict(state)
                assert digest(local.state_dict()) == digest(state)
            transport.compute(1.0 + transport.rank)
            step += 1
            replaced = train(local, parameters, transport.rank, step, step, some_frozen)
        return replaced, local.round, local.steps, digest([parameters, local.state_dict()])

    expected = run(P, lambda transport: program(transport, None))
    for stop in stops:
        assert run(P, lambda transport, stop=stop: program(transport, stop)) == expected


def test_the_schedule_may_change_between_rounds() -> None:
    def program(transport: simulated.SimulatedTransport) -> Any:
        parameters = initial()
        local = made(transport, parameters, sync_every=2)
        train(local, parameters, transport.rank, 1, 4)
        state = local.state_dict()
        number_reducers_from_0(transport)
        longer = made(transport, parameters, sync_every=3)
        longer.load_state_dict(state)
        return [bool(names) for names in train(longer, parameters, transport.rank, 5, 10)], longer.round

    assert run(2, program) == [([False, False, True] * 2, 4)] * 2


# -- devices ----------------------------------------------------------------------------------------------------------


def trained(P: int, cuda: DeferredRuntime | None) -> list[Any]:
    """Train for two rounds, on the device if there is one. Each rank uses its own stream."""

    def program(transport: simulated.SimulatedTransport) -> Any:
        with cuda.on_stream(cuda.new_stream()) if cuda else nullcontext():
            return steps(transport)

    def steps(transport: simulated.SimulatedTransport) -> Any:
        mine = initial()
        put, wait = (cuda.put, cuda.synchronize) if cuda else (lambda array: array, lambda: None)
        options = {"sync_every": 3, "fragments": 2, "fragment_sync_delay": 1, "fragment_update_alpha": 0.25}
        local = made(transport, {name: put(values) for name, values in mine.items()}, outer=sc.NesterovSGD(), **options)
        for step in range(1, 8):
            wait()
            move(mine, transport.rank, step, some_frozen)
            local.step({name: put(values) for name, values in mine.items()})
            if step == 4:
                state = local.state_dict()
                local.finish({name: put(values.copy()) for name, values in mine.items()})
                local.load_state_dict(state)
        wait()
        return bits(mine), bits(local.state_dict()["global_parameters"])

    return run(P, program)


def test_the_same_bits_on_every_device(cuda: DeferredRuntime) -> None:
    on_device = trained(2, cuda)
    assert cuda.launches
    assert on_device == trained(2, None)


@pytest.mark.parametrize("outer", [type(None), sc.NesterovSGD])
def test_the_host_waits_as_often_for_many_tensors_as_for_few(cuda: DeferredRuntime, outer: Any) -> None:
    """The first round is not counted: it compares parameters."""

    def counted(number: int) -> list[int]:
        def program(transport: simulated.SimulatedTransport) -> list[int]:
            def put() -> Any:
                return {f"{i}": cuda.put(data.gradient("normal", 90, "float32", i)) for i in range(number)}

            local, waits = sc.LocalSteps(put(), sync_every=2, density=0.1, outer=outer(), comm=transport), []
            for _ in range(6):
                parameters = put()
                cuda.streams.run_all()
                with cuda.counted() as counts:
                    local.step(parameters)
                waits.append(counts[1])
            return waits[2:]

        return run(1, program)[0]

    assert counted(3) == counted(30)
