"""States of local steps: going on from any local step, bit for bit; states that do not fit; another number of ranks."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests.local_steps.programs import Arrays, bits, initial, made, some_frozen, train
from tests.reducer.programs import run, total

SETTINGS: dict[str, Any] = {
    "sync_every": 4,
    "fragments": [["f", "a"], ["b", "c"], ["d", "e"]],
    "fragment_sync_delay": 2,
    "fragment_update_alpha": 0.25,
}


def nesterov(transport: simulated.SimulatedTransport, parameters: Arrays, **options: Any) -> sc.LocalSteps:
    return made(transport, parameters, outer=sc.NesterovSGD(), **(SETTINGS | options))


@pytest.mark.parametrize("P", [1, 3])
@pytest.mark.parametrize(
    "options", [{}, {"fragments": 1, "fragment_sync_delay": 3, "scope": "chunk", "chunk": 16, "algorithm": "split"}]
)
def test_going_on_from_any_local_step_is_as_if_one_had_not_stopped(P: int, options: dict[str, Any]) -> None:
    steps = 13

    def program(transport: simulated.SimulatedTransport, stop: int | None) -> Any:
        parameters = initial()
        local = nesterov(transport, parameters, **options)
        if stop is not None:
            train(local, parameters, transport.rank, 1, stop, some_frozen)
            state = pickle.loads(pickle.dumps(local.state_dict()))
            parameters = {name: values.copy() for name, values in parameters.items()}
            local.finish({name: values.copy() for name, values in parameters.items()})  # which the state must not see
            transport.queue.users = 0  # as in a new process
            local = nesterov(transport, initial(), **options)
            local.load_state_dict(state)
            again = local.state_dict()
            assert bits(flat(again)) == bits(flat(state))
        replaced = train(local, parameters, transport.rank, 1 + (stop or 0), steps, some_frozen)
        return replaced[-3:], local.round, local.local_step, bits(parameters), bits(flat(local.state_dict()))

    expected = run(P, lambda transport: program(transport, None))
    for stop in range(3, 11):  # two rounds
        assert run(P, lambda transport, stop=stop: program(transport, stop)) == expected


def flat(state: Any, name: str = "") -> Arrays:
    """All arrays and numbers of a state by their places."""
    if isinstance(state, dict):
        return {key: a for part in state for key, a in flat(state[part], f"{name}.{part}").items()}
    if isinstance(state, (list, tuple)):
        return {key: a for i, part in enumerate(state) for key, a in flat(part, f"{name}[{i}]").items()}
    assert state is None or isinstance(state, (int, float, str, np.ndarray)), (name, type(state))
    return {name: np.asarray("None" if state is None else state)}


WRONG: dict[str, Any] = {
    "no state": (lambda s: [1], "got list; expected the dictionary that LocalSteps.state_dict"),
    "keys": (lambda s: {"round": 1}, "expected the dictionary that LocalSteps.state_dict"),
    "format": (lambda s: s | {"format": 9}, "format 9"),
    "round": (lambda s: s | {"round": -1}, "'round'. is "),
    "local step": (lambda s: s | {"local_step": 4}, "'local_step'. is "),
    "steps of the schedule": (lambda s: s | {"passed": 1}, "'passed'. is "),
    "fragments": (lambda s: s | {"fragments": [["f"], ["a"]]}, "'reducers'. is "),
    "other fragments": (lambda s: s | {"fragments": s["fragments"][::-1], "exchanges": []}, "or other names in them"),
    "sync_every": (lambda s: s | {"sync_every": 5}, "in the middle of a round, with sync_every=5"),
    "shape": (lambda s: changed(s, "global_parameters", "b", np.zeros(3)), r"'b'\] has shape \(3,\); expected \(7,\)"),
    "outer": (lambda s: s | {"outer": None}, "saved without an outer optimizer"),
    "outer's": (lambda s: s | {"outer": {"x": 1}}, "outer state"),
    "reducer": (lambda s: s | {"reducers": [s["reducers"][0], s["reducers"][1], {}]}, "Reducer.state_dict"),
    "world size": (lambda s: s | {"reducers": [r | {"world_size": 9} for r in s["reducers"]]}, "size 9, .*reshard"),
    "outer's shape": (
        lambda s: changed(s, "outer", "velocities", {"a": np.zeros(3)}),
        r"shape \(3,\); expected \(600,\)",
    ),
    "outer's name": (lambda s: changed(s, "outer", "velocities", {"z": np.zeros(3)}), "a velocity of 'z'"),
    "outer's type": (lambda s: changed(s, "outer", "velocities", {"a": np.full(600, "x")}), "outer state"),
    "ranks": (lambda s: s | {"world_size": 5, "rank": 4}, "world size 5, .*reshard"),
    "strings": (lambda s: changed(s, "global_parameters", "b", np.full(7, "x")), "of type <U1; expected floats"),
    "means": (lambda s: s | {"exchanges": [e | {"means": {}} for e in s["exchanges"]]}, "means.. lacks"),
    "not under way": (lambda s: s | {"exchanges": [e | {"round": 77} for e in s["exchanges"]]}, "not under way here"),
    "exchange": (lambda s: s | {"exchanges": [{"fragment": 7, "round": 0, "means": None}]}, "impossible exchange"),
}


def changed(state: Any, part: str, name: str, value: object) -> Any:
    return state | {part: state[part] | {name: value}}


@pytest.mark.parametrize("what", WRONG)
def test_a_state_that_does_not_fit_one_rank_is_loaded_by_none(what: str) -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        parameters = initial()
        local = nesterov(transport, parameters)
        train(local, parameters, transport.rank, 1, 6)
        state = local.state_dict()
        change, message = WRONG[what]
        local.finish(parameters)
        before = bits(flat(local.state_dict()))
        mine = change(copy.deepcopy(state)) if transport.rank == 0 else state
        with pytest.raises(
            sc.InvalidInputError, match=message if transport.rank == 0 else "rank 0 cannot load a state"
        ):
            local.load_state_dict(mine)
        assert bits(flat(local.state_dict())) == before

    run(2, program)


APART: dict[str, Any] = {
    "local_step": lambda s: s | {"local_step": 1, "passed": 1, "exchanges": []},
    "global_parameters": lambda s: changed(s, "global_parameters", "a", s["global_parameters"]["a"] + 1),
    "outer": lambda s: s | {"outer": {"velocities": {n: v + 1 for n, v in s["outer"]["velocities"].items()}}},
    "exchanges": lambda s: s | {"exchanges": s["exchanges"][1:]},
    "means": lambda s: (
        s | {"exchanges": [e | {"means": {n: a + 1 for n, a in e["means"].items()}} for e in s["exchanges"]]}
    ),
    "step": lambda s: s | {"reducers": [r | {"step": r["step"] + 1} for r in s["reducers"]]},
    "bucket_bytes": lambda s: s | {"reducers": [r | {"bucket_bytes": 64} for r in s["reducers"]]},
}


@pytest.mark.parametrize("apart", APART)
def test_states_that_were_not_saved_together_are_loaded_by_none(apart: str) -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        parameters = initial()
        local = nesterov(transport, parameters)
        train(local, parameters, transport.rank, 1, 6)
        state = local.state_dict()
        assert state["exchanges"]
        local.finish(parameters)
        before = bits(flat(local.state_dict()))
        key = "exchanges" if apart == "means" else apart
        with pytest.raises(sc.InvalidInputError, match=f"the state of rank 1 .*{key}.*saved together"):
            local.load_state_dict(APART[apart](copy.deepcopy(state)) if transport.rank == 1 else state)
        assert bits(flat(local.state_dict())) == before
        local.load_state_dict(state)

    run(2, program)


def test_the_schedule_may_change_between_rounds() -> None:
    def program(transport: simulated.SimulatedTransport) -> Any:
        parameters = initial()
        local = made(transport, parameters, sync_every=2)
        train(local, parameters, transport.rank, 1, 4)
        state = local.state_dict()
        transport.queue.users = 0
        longer = made(transport, parameters, sync_every=3)
        longer.load_state_dict(state)
        return [bool(names) for names in train(longer, parameters, transport.rank, 5, 10)], longer.round

    assert run(2, program) == [([False, False, True] * 2, 4)] * 2


@pytest.mark.parametrize(("old", "new"), [(1, 2), (3, 2)])
def test_states_for_another_number_of_ranks(old: int, new: int) -> None:
    def save(transport: simulated.SimulatedTransport) -> Any:
        parameters = initial()
        local = nesterov(transport, parameters)
        train(local, parameters, transport.rank, 1, 8)
        return local.state_dict()

    states = run(old, save)

    def load(transport: simulated.SimulatedTransport) -> Any:
        parameters = initial()
        local = nesterov(transport, parameters)
        local.load_state_dict(sc.reshard(states, transport.rank, transport.size))
        for name, array in local.global_parameters().items():
            parameters[name][...] = array
        return local.state_dict(), train(local, parameters, transport.rank, 9, 12)

    loaded = [state for state, _ in run(new, load)]
    for state in loaded:
        assert (state["round"], state["local_step"]) == (2, 0)
        assert bits(state["global_parameters"]) == bits(states[0]["global_parameters"])
    for (name, now), before in zip(kept(loaded).items(), kept(states).values(), strict=True):
        np.testing.assert_allclose(now, before, rtol=1e-5, atol=1e-6, err_msg=name)
    with pytest.raises(sc.InvalidInputError, match="differ in round"):
        sc.reshard([states[0] | {"world_size": 2, "rank": rank, "round": rank} for rank in range(2)], 0, 1)


def kept(states: list[Any]) -> Arrays:
    return {name: a for i in range(3) for name, a in total(s["reducers"][i]["residuals"] for s in states).items()}
