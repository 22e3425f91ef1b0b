"""Damaged states: a table of objects and damages. All ranks refuse, nothing changes, and the good state still loads.

For random damages see `test_damage.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests.ranks import run
from tests.states.subjects import KINDS, digest, diloco, local_steps, reducer


class Damage(NamedTuple):
    """A change of a state, in place or as a copy, and a pattern for every rank's error."""

    change: Callable[[Any], Any]
    message: str
    ranks: tuple[int, ...] = (1,)  # whose states are damaged


def with_(**entries: Any) -> Callable[[Any], Any]:
    return lambda state: state | entries


def nested(key: str, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Change an entry of a state."""
    return lambda state: state | {key: change(state[key])}


# -- damages ----------------------------------------------------------------------------------------------------------


def first_tensor(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Change the first tensor in the state of an optimizer's first parameter."""

    def apply(state: Any) -> Any:
        entries = state["state"][0]
        key = next(key for key in entries if entries[key].ndim)
        entries[key] = change(entries[key])
        return state

    return apply


def replaced(values: Any) -> Callable[[Any], Any]:
    return first_tensor(lambda tensor: values)


def moment(name: str, **entries: Any) -> Callable[[Any], Any]:
    return nested("moments", lambda moments: moments | {name: moments[name] | entries})


def filled(*path: Any, value: float, at: Any = ...) -> Callable[[Any], Any]:
    """Write a value into an array or tensor of a state."""

    def apply(state: Any) -> Any:
        array = state
        for key in path:
            array = array[key]
        array.reshape(-1)[at] = value
        return state

    return apply


def removed(*path: Any) -> Callable[[Any], Any]:
    def apply(state: Any) -> Any:
        inner = state
        for key in path[:-1]:
            inner = inner[key]
        del inner[path[-1]]
        return state

    return apply


COSTS = {"link": [1.0, 1.0, 1.0], "node": None}
ONE = np.zeros(3)
REDUCER = {
    "no state": Damage(lambda s: [1, 2], r"got list; expected the dictionary that Reducer\.state_dict"),
    "another version": Damage(with_(format="Reducer 9"), "got format 'Reducer 9'; .*saved it, or begin without it"),
    "another class": Damage(with_(format="LocalSteps 1"), "version that saved it, or begin without it"),
    "world size": Damage(with_(world_size=7), r"world_size'. is 7, .*reshard"),
    "rank": Damage(with_(rank=0), "pass the state of rank 1"),
    "missing name": Damage(nested("residuals", lambda r: {n: a for n, a in r.items() if n != "c"}), "lacks 'c'"),
    "unexpected name": Damage(nested("residuals", lambda r: r | {"z": ONE}), "unexpected: 'z'"),
    "shape": Damage(nested("residuals", lambda r: r | {"c": ONE}), r"residuals\['c'\] has shape \(3,\)"),
    "no velocities": Damage(with_(velocities={}), "velocities lacks"),
    "no link": Damage(with_(costs={"link": None, "node": None}), "'costs'. is "),
    "zero costs": Damage(with_(costs={"link": [1.0, 0.0, 1.0], "node": None}), "'costs'. is "),
    "costs of one rank": Damage(with_(costs=COSTS), "rank 0 and rank 1 differ in costs"),
}


def exchanges(**entries: Any) -> Callable[[Any], Any]:
    return nested("exchanges", lambda saved: [exchange | entries for exchange in saved])


def reducers(**entries: Any) -> Callable[[Any], Any]:
    return nested("reducers", lambda states: [state | entries for state in states])


def plus_one(arrays: dict[str, Any]) -> dict[str, Any]:
    return {name: array + 1 for name, array in arrays.items()}


DIFFER = "rank 0 and rank 1 differ in .*{}.*saved together"
LOCAL_STEPS = {
    "local step": Damage(with_(local_step=4), "'local_step'. is "),
    "steps of the schedule": Damage(with_(passed=1), "'passed'. is "),
    "fragments": Damage(with_(fragments=[["f"], ["a"]]), "'reducers'. is "),
    "other fragments": Damage(
        lambda s: s | {"fragments": s["fragments"][::-1], "exchanges": []}, "or their names differ"
    ),
    "sync_every": Damage(with_(sync_every=5, exchanges=[]), "in the middle of a round, with sync_every=5"),
    "shape": Damage(nested("global_parameters", lambda p: p | {"b": ONE}), r"'b'\] has shape \(3,\); expected \(7,\)"),
    "no outer state": Damage(with_(outer=None), "saved without an outer optimizer"),
    "outer state": Damage(with_(outer={"x": 1}), "outer state"),
    "outer shape": Damage(with_(outer={"velocities": {"a": ONE}}), r"shape \(3,\); expected \(600,\)"),
    "outer name": Damage(with_(outer={"velocities": {"z": ONE}}), "a velocity of 'z'"),
    "reducer": Damage(nested("reducers", lambda r: [r[0], r[1], {}]), r"Reducer\.state_dict"),
    "world size of reducers": Damage(reducers(world_size=9), r"world_size'. is 9, .*reshard"),
    "world size": Damage(with_(world_size=5, rank=4, exchanges=[]), r"world_size'. is 5, .*reshard"),
    "means": Damage(exchanges(means={}), "means.. lacks"),
    "not under way": Damage(exchanges(round=77), "'exchanges'. is "),
    "exchange": Damage(with_(exchanges=[{"fragment": 7, "round": 0, "means": None}]), "'exchanges'. is "),
    "another local step": Damage(with_(local_step=1, passed=1, exchanges=[]), DIFFER.format("local_step")),
    "other parameters": Damage(nested("global_parameters", plus_one), DIFFER.format("global_parameters")),
    "other velocities": Damage(
        nested("outer", lambda outer: {"velocities": plus_one(outer["velocities"])}), DIFFER.format("outer")
    ),
    "fewer exchanges": Damage(nested("exchanges", lambda saved: saved[1:]), DIFFER.format("exchanges")),
    "other means": Damage(
        nested("exchanges", lambda saved: [e | {"means": plus_one(e["means"])} for e in saved]),
        DIFFER.format("exchanges"),
    ),
    "another step": Damage(
        nested("reducers", lambda r: [s | {"step": s["step"] + 1} for s in r]), DIFFER.format("step")
    ),
    "other buckets": Damage(reducers(bucket_bytes=64), DIFFER.format("bucket_bytes")),
}
ADAMW = {
    "no moments": Damage(removed("moments"), "'moments' is missing"),
    "step": Damage(moment("bias", step=-1), "step of bias is -1"),
    "fewer": Damage(removed("moments", "bias"), "lack 'bias'"),
    "shape": Damage(moment("bias", mean=np.zeros(3, np.float32)), "has shape"),
    "no field": Damage(removed("moments", "bias", "last"), "reading moments of bias raised KeyError"),
    "NaN": Damage(filled("moments", "bias", "mean", value=np.nan, at=-1), "expected finite numbers"),
    "infinity": Damage(filled("moments", "bias", "squares", value=np.inf, at=2), "squares of bias: expected finite"),
    "below 0": Damage(filled("moments", "bias", "squares", value=-1, at=2), "squares of bias: expected"),
    "the past": Damage(filled("moments", "bias", "last", value=-1, at=3), "last of bias: expected finite numbers"),
    "the future": Damage(filled("moments", "bias", "last", value=99), "last of bias: expected finite numbers"),
    "floats": Damage(moment("bias", last=np.zeros(5)), "whole numbers of shape"),
    "another part": Damage(
        moment("bias", part=[1, 5]), r"elements 1 to 5 of bias, and this rank keeps 0 to 5; .*reshard"
    ),
    "no part": Damage(moment("bias", part=None, mean=np.zeros(6)), r"mean of bias has shape \(6,\)"),
    "compensation": Damage(
        filled("moments", "bias", "compensation", value=np.inf, at=0), "compensation of bias: expected"
    ),
    "units of one rank": Damage(filled("units", "bias", value=9, at=1), "rank 0 and rank 1 differ in units"),
    "units of zero": Damage(
        filled("units", "bias", value=0, at=1), r"units\['bias'\]: expected exponents from 1 to 254"
    ),
    "fewer units": Damage(removed("units", "bias"), "it has moments of bias and no units"),
    "no units": Damage(with_(units={}), "it has moments of .* and no units"),
    "lag of one rank": Damage(with_(units_lag=True), "rank 0 and rank 1 differ in units_lag"),
}
ADAMW = {name: damage._replace(ranks=(0,)) for name, damage in ADAMW.items()}  # the only owner of so few weights
TORCH_ADAMW = {
    "shape": Damage(lambda s: s["state"][1].update(exp_avg=_torch().zeros(3)) or s, "(mean|exp_avg) of bias has shape"),
    "no field": Damage(removed("state", 1, "exp_avg_sq"), "squares of bias is missing"),
    "NaN": Damage(filled("state", 0, "exp_avg_sq", value=np.nan, at=-2), "squares of weight: expected finite numbers"),
    "the future": Damage(filled("state", 0, "last_step", value=99), "numbers from 0 to 3"),
    "step": Damage(lambda s: s["state"][0].update(step=_torch().tensor(3.5)) or s, "step of weight is 3.5"),
    "none of one": Damage(removed("state", 2), "differ in optimizer"),
    "no units": Damage(nested("sparsecomm", with_(units={})), "it has moments of weight and no units"),
    "no residuals": Damage(removed("sparsecomm"), "a plain optimizer saved it"),
}
TORCH_ADAMW = {name: damage._replace(ranks=(0,)) for name, damage in TORCH_ADAMW.items()}


def _torch() -> Any:
    return pytest.importorskip("torch")


def rate(state: Any) -> Any:
    state["param_groups"][0]["lr"] = 9.0
    return state


OPTIMIZER = {
    "group": with_(param_groups=[]),
    "rate": rate,
    "value": first_tensor(lambda tensor: tensor + 1),
    "text": replaced("x"),
}
DISTRIBUTED = {
    "plain": Damage(removed("sparsecomm"), "it has no residuals"),
    "world size": Damage(nested("sparsecomm", with_(world_size=7)), r"world_size'. is 7"),
    "step": Damage(nested("sparsecomm", with_(step=7)), r"rank 0 and rank 1 differ in step \(3 and 7\)"),
    "foreign": Damage(nested("state", lambda state: {99: {"x": 1}, **state}), "rank 1"),
    **{name: Damage(change, "rank 1") for name, change in OPTIMIZER.items()},
}
SHAPE = first_tensor(lambda tensor: tensor.new_zeros(2))
DILOCO = {
    **{
        name: Damage(nested("outer", change), "rank 1|outer") for name, change in (OPTIMIZER | {"shape": SHAPE}).items()
    },
    "group of both": Damage(nested("outer", OPTIMIZER["group"]), "outer", (0, 1)),
    "text of both": Damage(nested("outer", OPTIMIZER["text"]), "outer", (0, 1)),
    "shape of both": Damage(nested("outer", SHAPE), "outer", (0, 1)),
}


def leaves(change: Callable[[str, list[Any]], dict[str, Any]]) -> Callable[[Any], Any]:
    """Change the first leaf of optax's state."""
    return nested("outer", nested("leaves", lambda tree: tree | change(*next(iter(tree.items())))))


OPTAX: dict[str, Callable[[str, list[Any]], dict[str, Any]]] = {
    "shape": lambda name, many: {name: [ONE for _ in many]},
    "type": lambda name, many: {name: [np.asarray(leaf).astype("f2") for leaf in many]},
    "none": lambda name, many: {name: []},
    "another name": lambda name, many: {"z": many},
    "no list": lambda name, many: {name: 3},
    "strings": lambda name, many: {name: [np.array("x") for _ in many]},
}
JAX = {name: Damage(leaves(change), "outer", (0, 1)) for name, change in OPTAX.items()}
SCALES = {
    "differ": Damage(with_(loss_scale=16.0), r"rank 0 and rank 1 differ in loss_scale \(8.0 and 16.0\)"),
    "text": Damage(with_(loss_scale="x"), "loss_scale"),
}
TABLE: dict[str, dict[str, Damage]] = {
    "Reducer": REDUCER,
    "LocalSteps": LOCAL_STEPS,
    "SparseAdamW": ADAMW,
    "torch SparseAdamW": TORCH_ADAMW,
    "DistributedOptimizer of SGD": DISTRIBUTED,
    "DistributedOptimizer of Adam": DISTRIBUTED,
    "DiLoCo with SGD": DILOCO,
    "DiLoCo with Adam": DILOCO,
    "jax LocalSteps": JAX,
    "SparseState": SCALES,
}
SAVED = {"LocalSteps": 6, "DiLoCo with SGD": 4, "DiLoCo with Adam": 4}  # steps before the state is saved


@pytest.mark.filterwarnings("ignore:.* divides gradients by the size")
@pytest.mark.parametrize("kind", TABLE)
def test_all_ranks_refuse_a_damaged_state_and_nothing_changes(kind: str) -> None:

    def program(transport: simulated.SimulatedTransport) -> str:
        obj, step, weights, _ = KINDS[kind](transport)
        steps = SAVED.get(kind, 3)
        for number in range(1, steps + 1):
            step(number)
        state = copy.deepcopy(obj.state_dict())
        for number in range(steps + 1, steps + 3):
            step(number)
        before = digest(obj.state_dict())
        assert before != digest(state)
        for name, damage in TABLE[kind].items():
            mine = damage.change(copy.deepcopy(state)) if transport.rank in damage.ranks else state
            with pytest.raises(sc.InvalidInputError, match=damage.message) as error:
                obj.load_state_dict(mine)
            assert f"rank {transport.rank}: " in str(error.value), name
            assert digest(obj.state_dict()) == before, name
        obj.load_state_dict(state)
        assert digest(obj.state_dict()) == digest(state)
        for number in range(steps + 1, steps + 3):
            step(number)
        return digest(obj.state_dict().get("global_parameters", weights))

    first, second = run(2, program)
    assert first == second


def test_velocities_are_refused_without_momentum() -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        with_momentum, without = reducer(transport).obj, reducer(transport, momentum=0.0).obj
        with pytest.raises(sc.InvalidInputError, match="velocities lacks nothing; unexpected"):
            without.load_state_dict(with_momentum.state_dict())

    run(2, program)


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_an_outer_optimizer_loads_a_rate_and_values_that_are_equal_on_all_ranks(kind: str) -> None:
    def program(transport: simulated.SimulatedTransport) -> str:
        obj, step, *_ = diloco(kind)(transport)
        for number in range(4):
            step(number)
        for name in ("rate", "value"):
            obj.load_state_dict(obj.state_dict() | {"outer": OPTIMIZER[name](copy.deepcopy(obj.state_dict()["outer"]))})
        for number in range(4, 6):
            step(number)
        return digest(obj.state_dict()["global_parameters"])

    first, second = run(2, program)
    assert first == second


# -- reshard ----------------------------------------------------------------------------------------------------------


def test_reshard_refuses_states_that_do_not_belong_together() -> None:
    def program(transport: simulated.SimulatedTransport) -> Any:
        one = reducer(transport)
        one.step(1)
        return one.obj.state_dict(), local_steps(transport).obj.state_dict()

    states, others = zip(*run(3, program), strict=True)
    renumbered = [others[0] | {"world_size": 2, "rank": rank} for rank in range(2)]
    table: list[tuple[Any, int, str]] = [
        (states[:2], 0, "got 2 of 3; rank 2 is missing"),
        ([*states, states[1]], 0, "rank 1 appears twice"),
        ([], 0, "got none"),
        (states, 2, "expected a rank from 0 to size - 1"),
        ([1], 0, "got 1; expected the values that state_dict"),
        ([states[0], others[1], others[2]], 0, "got format 'LocalSteps 1'"),
        ([states[0] | {"step": 9}, *states[1:]], 0, r"rank 0 and rank 1 differ in step \(9 and 1\)"),
        ([states[0] | {"velocities": {}}, *states[1:]], 0, "names or shapes"),
        ([states[0] | {"world_size": 2**60}], 0, "got 1 of"),  # without a loop over all ranks
        ([states[0], states[1] | {"world_size": 4}], 0, "world sizes 3 and 4"),
        ([renumbered[0], renumbered[1] | {"round": 1}], 0, r"differ in round \(0 and 1\)"),
        ([renumbered[0], renumbered[1] | {"local_step": 1, "passed": 1}], 0, r"differ in local_step \(0 and 1\)"),
    ]
    for wrong, rank, message in table:
        with pytest.raises(sc.InvalidInputError, match=message):
            sc.reshard(wrong, rank, 2)
