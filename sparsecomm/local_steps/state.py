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

_ADVICE = "build the model that this LocalSteps had when its state was saved"


def _is_below_sync_every(value: object, fields: Mapping[str, Any]) -> bool:
    return is_count(value) and value < fields["sync_every"]


def _is_seconds(value: object, _: object) -> bool:
    return 0 <= to_float(value) < math.inf


def _is_steps(value: Any, fields: Mapping[str, Any]) -> bool:
    return is_list(value) and len(value) in (0, fields["world_size"]) and all(map(is_positive, value))


def _is_local_step(value: Any, fields: Mapping[str, Any]) -> bool:
    steps = fields["steps"]
    return is_count(value) and value < (steps[fields["rank"]] if steps else fields["sync_every"])


def _is_passed(value: Any, fields: Mapping[str, Any]) -> bool:
    # Without ``by_speed``, each local step is a step of the schedule.
    return _is_below_sync_every(value, fields) and bool(fields["steps"] or value == fields["local_step"])


def _are_exchanges(value: Any, fields: Mapping[str, Any]) -> bool:
    schedule = SyncSchedule(fields["sync_every"], len(fields["fragments"]), fields["fragment_sync_delay"])
    step = fields["round"] * schedule.sync_every + fields["passed"]

    def is_exchange(exchange: Mapping[str, Any]) -> bool:
        fragment, round_no = exchange["fragment"], exchange["round"]
        in_flight = (
            is_count(fragment)
            and is_count(round_no)
            and fragment < schedule.fragments
            and schedule.begun_at(fragment, round_no) <= step < schedule.applied_at(fragment, round_no)
        )
        times = exchange["nanoseconds"] if in_flight else ()
        return in_flight and len(times) in (0, fields["world_size"]) and all(map(is_count, times))

    return is_list(value) and all(map(is_exchange, value)) and len({e["fragment"] for e in value}) == len(value)


def _are_late(value: Any, fields: Mapping[str, Any]) -> bool:
    in_flight = [[exchange["fragment"], exchange["round"]] for exchange in fields["exchanges"]]
    return is_list(value) and all(list(key) in in_flight for key in value)


def _are_mixed(value: Any, _: object) -> bool:
    return isinstance(value, dict) and all(isinstance(c, int) and 0 <= c < 1 << 64 for c in value.values())


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


LOCAL_STEPS = Schema(
    "LocalSteps",
    1,
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
            lambda value, fields: is_list(value) and len(value) == len(fields["fragments"]),
            _reducers,
        ),
        "exchanges": common(
            "exchanges that are in flight at this step of the schedule",
            _are_exchanges,
            lambda old, *_: [{**exchange, "nanoseconds": []} for exchange in old[0]["exchanges"]],
        ),
        "late": per_rank("fragments and rounds of exchanges", _are_late, lambda *_: []),
        "unsent": per_rank(
            "names of parameters",
            lambda value, fields: is_list(value) and set(value) <= fields["global_parameters"].keys(),
            lambda old, *_: sorted({name for state in old for name in state["unsent"]}),
        ),
        "mixed": per_rank("checksums by name", _are_mixed, lambda *_: {}),
    },
    "start from the global parameters",
)


def fit(
    fields: StateDict,
    specs: Mapping[str, TensorSpec],
    fragments: Sequence[Sequence[str]],
    schedule: SyncSchedule,
    outer: bool,
) -> StateDict:
    """Check the fields of a state against the settings of a `LocalSteps`. Return them with new, flat arrays.

    ``outer`` says whether there is an outer optimizer. The states of the outer optimizer and of the reducers are
    neither checked nor changed.
    """
    names = [*map(list, fields["fragments"])]
    if names != [*map(list, fragments)]:
        raise InvalidInputError(
            f"state: it has {len(names)} fragments, and this LocalSteps has {len(fragments)}, or their names differ; "
            "build the same model with the same fragments"
        )
    saved, here = (fields["sync_every"], fields["fragment_sync_delay"]), (schedule.sync_every, schedule.delay)
    if saved != here and (fields["local_step"] or fields["exchanges"]):
        raise InvalidInputError(
            f"state: it was saved in the middle of a round, with sync_every={saved[0]} and fragment_sync_delay="
            f"{saved[1]}; here they are {here[0]} and {here[1]}; change them between rounds"
        )
    if fields["steps"] and not schedule.by_speed:
        if fields["local_step"] or fields["passed"] or fields["exchanges"]:
            raise InvalidInputError(
                "state: it was saved in the middle of a round with by_speed=True; create LocalSteps with it, and "
                "change it between rounds"
            )
        fields["steps"] = ()
    if (fields["outer"] is not None) != outer:
        with_or_without = "with" if fields["outer"] is not None else "without"
        raise InvalidInputError(
            f"state: it was saved {with_or_without} an outer optimizer; create LocalSteps {with_or_without} one"
        )
    exchanges = []
    for i, exchange in enumerate(fields["exchanges"]):
        with reading(f"exchanges[{i}]", "an exchange in flight"):
            means, untrained = exchange["means"], sorted(set(map(str, exchange["without_gradient"])))
            if means is not None:
                exchanged = {name: specs[name] for name in names[exchange["fragment"]] if name not in untrained}
                means = read_arrays(means, exchanged, f"exchanges[{i}]['means']", _ADVICE)
            numbers = {"fragment": int(exchange["fragment"]), "round": int(exchange["round"])}
            times = [int(time) for time in exchange["nanoseconds"]]
            exchanges.append({**numbers, "nanoseconds": times, "means": means, "without_gradient": untrained})
    return {
        **fields,
        "fragments": names,
        "steps": tuple(fields["steps"]),
        "round_seconds": float(fields["round_seconds"]),
        "step_seconds": float(fields["step_seconds"]),
        "global_parameters": read_arrays(fields["global_parameters"], specs, "global_parameters", _ADVICE),
        "exchanges": exchanges,
        "late": [list(map(int, key)) for key in fields["late"]],
    }
