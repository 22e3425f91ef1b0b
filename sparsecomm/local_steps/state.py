"""The state dict of `LocalSteps`: its fields, and the checks before it is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sparsecomm.checks import to_float
from sparsecomm.errors import InvalidInputError
from sparsecomm.local_steps.schedule import SyncSchedule
from sparsecomm.reducer.state import REDUCER, read_arrays
from sparsecomm.states.loading import reading
from sparsecomm.states.schema import Schema, StateDict, common, is_count, is_list, is_positive, per_rank
from sparsecomm.tensors.interop import TensorSpec

_ADVICE = "build the same model as the one with which LocalSteps was made"


def _is_below_sync_every(value: object, found: Mapping[str, Any]) -> bool:
    return is_count(value) and value < found["sync_every"]


def _is_seconds(value: object, _: object) -> bool:
    return 0 <= to_float(value) < math.inf


def _is_steps(value: Any, found: Mapping[str, Any]) -> bool:
    return is_list(value) and len(value) in (0, found["world_size"]) and all(map(is_positive, value))


def _is_local_step(value: Any, found: Mapping[str, Any]) -> bool:
    steps = found["steps"]
    return is_count(value) and value < (steps[found["rank"]] if steps else found["sync_every"])


def _is_passed(value: Any, found: Mapping[str, Any]) -> bool:
    # Without ``by_speed``, each local step is a step of the schedule.
    return _is_below_sync_every(value, found) and bool(found["steps"] or value == found["local_step"])


def _are_exchanges(value: Any, found: Mapping[str, Any]) -> bool:
    schedule = SyncSchedule(found["sync_every"], len(found["fragments"]), found["fragment_sync_delay"])
    step = found["round"] * schedule.sync_every + found["passed"]

    def is_exchange(each: Mapping[str, Any]) -> bool:
        fragment, round_no = each["fragment"], each["round"]
        in_flight = (
            is_count(fragment)
            and is_count(round_no)
            and fragment < schedule.fragments
            and schedule.begun_at(fragment, round_no) <= step < schedule.applied_at(fragment, round_no)
        )
        times = each["nanoseconds"] if in_flight else ()
        return in_flight and len(times) in (0, found["world_size"]) and all(map(is_count, times))

    return is_list(value) and all(map(is_exchange, value)) and len({each["fragment"] for each in value}) == len(value)


def _are_late(value: Any, found: Mapping[str, Any]) -> bool:
    in_flight = [[each["fragment"], each["round"]] for each in found["exchanges"]]
    return is_list(value) and all(list(each) in in_flight for each in value)


def _are_mixed(value: Any, _: object) -> bool:
    return isinstance(value, dict) and all(isinstance(each, int) and 0 <= each < 1 << 64 for each in value.values())


def _passed(old: list[StateDict], rank: int, size: int) -> int:
    passed = sorted({state["passed"] for state in old})
    if len(passed) > 1 and not old[0]["steps"]:
        raise InvalidInputError(
            f"states: they differ in local_step ({passed[0]} and {passed[1]}); pass states that were saved together"
        )
    return int(passed[-1])


def _reducers(old: list[StateDict], rank: int, size: int) -> list[StateDict]:
    by_fragment = zip(*(state["reducers"] for state in old), strict=True)
    return [REDUCER.reshard(states, rank, size) for states in by_fragment]


def _from_version_3(state: Mapping[str, Any]) -> StateDict:
    """Convert a state of version 3, whose "late" has another meaning, to version 4."""
    if state.get("late"):
        raise InvalidInputError(
            "state: an earlier version of sparsecomm saved it while this rank was late for an exchange; load it with "
            "that version, or start from the global parameters"
        )
    return {**state, "late": [], "unsent": [], "mixed": {}}


LOCAL_STEPS = Schema(
    "LocalSteps",
    4,
    {
        "sync_every": common("at least 1", is_positive),
        "fragment_sync_delay": common("a number below sync_every", _is_below_sync_every),
        "round": common("a number of rounds", is_count),
        "steps": common("the number of steps of each rank, or an empty list", _is_steps, lambda *_: []),
        "round_seconds": common("seconds", _is_seconds, lambda *_: 0.0),
        "local_step": per_rank("a number below the steps of a round", _is_local_step, _passed),
        "passed": per_rank("a number below sync_every", _is_passed, _passed),
        "step_seconds": per_rank("seconds", _is_seconds, lambda *_: 0.0),
        "fragments": common("a list of names for each fragment", is_list),
        "global_parameters": common("arrays by name", lambda value, _: isinstance(value, dict)),
        "outer": common("the state of the outer optimizer, or None", lambda *_: True),
        "reducers": per_rank(
            "a state for each fragment",
            lambda value, found: is_list(value) and len(value) == len(found["fragments"]),
            _reducers,
        ),
        "exchanges": common(
            "exchanges that are in flight at this step of the schedule",
            _are_exchanges,
            lambda old, *_: [{**each, "nanoseconds": []} for each in old[0]["exchanges"]],
        ),
        "late": per_rank("fragments and rounds of exchanges", _are_late, lambda *_: []),
        "unsent": per_rank(
            "names of parameters",
            lambda value, found: is_list(value) and set(value) <= found["global_parameters"].keys(),
            lambda old, *_: sorted({name for state in old for name in state["unsent"]}),
        ),
        "mixed": per_rank("checksums by name", _are_mixed, lambda *_: {}),
    },
    "start from the global parameters",
    _from_version_3,
)


def fit(
    found: StateDict,
    specs: Mapping[str, TensorSpec],
    fragments: Sequence[Sequence[str]],
    schedule: SyncSchedule,
    outer: bool,
) -> StateDict:
    """Check the fields of a state against the settings of a `LocalSteps`. Return them with new, flat arrays.

    ``outer`` says whether there is an outer optimizer. The states of the outer optimizer and of the reducers are
    neither checked nor changed.
    """
    names = [list(each) for each in found["fragments"]]
    if names != [list(each) for each in fragments]:
        raise InvalidInputError(
            f"state: it has {len(names)} fragments, and this LocalSteps has {len(fragments)}, or their names differ; "
            "build the same model with the same fragments"
        )
    saved, here = (found["sync_every"], found["fragment_sync_delay"]), (schedule.sync_every, schedule.delay)
    if saved != here and (found["local_step"] or found["exchanges"]):
        raise InvalidInputError(
            f"state: it was saved in the middle of a round, with sync_every={saved[0]} and fragment_sync_delay="
            f"{saved[1]}; here they are {here[0]} and {here[1]}; change them between rounds"
        )
    if found["steps"] and not schedule.by_speed:
        if found["local_step"] or found["passed"] or found["exchanges"]:
            raise InvalidInputError(
                "state: it was saved in the middle of a round with by_speed=True; create LocalSteps with it, and "
                "change it between rounds"
            )
        found["steps"] = ()
    if (found["outer"] is not None) != outer:
        with_or_without = "with" if found["outer"] is not None else "without"
        raise InvalidInputError(
            f"state: it was saved {with_or_without} an outer optimizer; create LocalSteps {with_or_without} one"
        )
    exchanges = []
    for i, each in enumerate(found["exchanges"]):
        with reading(f"exchanges[{i}]", "an exchange in flight"):
            means, untrained = each["means"], sorted(set(map(str, each["without_gradient"])))
            if means is not None:
                exchanged = {name: specs[name] for name in names[each["fragment"]] if name not in untrained}
                means = read_arrays(means, exchanged, f"exchanges[{i}]['means']", _ADVICE)
            numbers = {"fragment": int(each["fragment"]), "round": int(each["round"])}
            times = [int(time) for time in each["nanoseconds"]]
            exchanges.append({**numbers, "nanoseconds": times, "means": means, "without_gradient": untrained})
    return {
        **found,
        "fragments": names,
        "steps": tuple(found["steps"]),
        "round_seconds": float(found["round_seconds"]),
        "step_seconds": float(found["step_seconds"]),
        "global_parameters": read_arrays(found["global_parameters"], specs, "global_parameters", _ADVICE),
        "exchanges": exchanges,
        "late": [list(map(int, each)) for each in found["late"]],
    }
