"""The state dict of `LocalSteps`: its fields, and the checks against the settings of the object that loads it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sparsecomm.checks import to_float
from sparsecomm.errors import InvalidInputError
from sparsecomm.local_steps.schedule import SyncSchedule
from sparsecomm.reducer.bucket import TensorSpec
from sparsecomm.reducer.state import REDUCER, read_arrays
from sparsecomm.states.loading import DAMAGED, reading
from sparsecomm.states.schema import Schema, StateDict, common, is_count, is_list, is_positive, per_rank

__all__ = ["LOCAL_STEPS", "fit"]

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
    # Unless ranks take local steps by speed, each local step is one of the schedule.
    return _is_below_sync_every(value, found) and bool(found["steps"] or value == found["local_step"])


def _is_mixed(value: Any, _: object) -> bool:
    return isinstance(value, dict) and all(isinstance(each, int) and 0 <= each < 1 << 64 for each in value.values())


def _passed(old: list[StateDict], rank: int, size: int) -> int:
    passed = sorted({state["passed"] for state in old})
    if len(passed) > 1 and not old[0]["steps"]:
        raise InvalidInputError(
            f"states: they differ in local_step ({passed[0]} and {passed[1]}); pass states that were saved together"
        )
    return int(passed[-1])


def _from_version_3(state: Mapping[str, Any]) -> StateDict:
    """Return a state of version 3, which kept what a late rank had sent, as one of version 4."""
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
            lambda old, rank, size: [
                REDUCER.reshard(states, rank, size)
                for states in zip(*(state["reducers"] for state in old), strict=True)
            ],
        ),
        "exchanges": common(
            "a list of exchanges",
            is_list,
            lambda old, *_: [{**each, "nanoseconds": []} for each in old[0]["exchanges"]],
        ),
        "late": per_rank("a list of fragments and rounds", is_list, lambda *_: []),
        "unsent": per_rank(
            "a list of names", is_list, lambda old, *_: sorted({n for state in old for n in state["unsent"]})
        ),
        "mixed": per_rank("checksums by name", _is_mixed, lambda *_: {}),
    },
    "start from the global parameters",
    _from_version_3,
)


def fit(
    found: StateDict,
    specs: Mapping[str, TensorSpec],
    fragments: Sequence[Sequence[str]],
    schedule: SyncSchedule,
    by_speed: bool,
    outer: bool,
) -> StateDict:
    """Check the fields of a state against the settings of local steps, and return them with flat arrays.

    Args:
        found: the fields, as `LOCAL_STEPS` read them.
        specs: the parameters, by name.
        fragments: the names of the parameters of each fragment.
        schedule: the schedule of the exchanges.
        by_speed: whether ranks take local steps by speed.
        outer: whether there is an outer optimizer.

    Returns:
        The fields. Those of the outer optimizer and of the reducers are unchanged. Arrays are new, and have the
        accumulator dtype. "under_way" is added, with a tuple for each exchange: the fragment, the round, whether this
        rank was late, the means (``None`` if the exchange does not count), the nanoseconds of the local steps of each
        rank, and the names of parameters that no rank has trained.

    Raises:
        InvalidInputError: the state is damaged, or belongs to other parameters or settings.
    """
    names = [list(each) for each in found["fragments"]]
    if names != [list(each) for each in fragments]:
        raise InvalidInputError(
            f"state: it has {len(names)} fragments, and this LocalSteps {len(fragments)}, or other names in them; "
            "build the same model with the same fragments"
        )
    saved, here = (found["sync_every"], found["fragment_sync_delay"]), (schedule.sync_every, schedule.delay)
    if saved != here and (found["local_step"] or found["exchanges"]):
        raise InvalidInputError(
            f"state: it was saved in the middle of a round, with sync_every={saved[0]} and fragment_sync_delay="
            f"{saved[1]}; here they are {here[0]} and {here[1]}; change them between rounds"
        )
    if found["steps"] and not by_speed:
        if found["local_step"] or found["passed"] or found["exchanges"]:
            raise InvalidInputError(
                "state: it was saved in the middle of a round, in which ranks take local steps by speed; create "
                "LocalSteps with by_speed=True, and change it between rounds"
            )
        found["steps"] = ()
    if (found["outer"] is not None) != outer:
        with_or_without = "with" if found["outer"] is not None else "without"
        raise InvalidInputError(
            f"state: it was saved {with_or_without} an outer optimizer; create LocalSteps {with_or_without} one"
        )
    with reading("late", "the exchanges for which this rank was late"):
        late = {(int(fragment), int(round_no)) for fragment, round_no in found["late"]}
    if not set(found["unsent"]) <= specs.keys():
        raise InvalidInputError(f"state: 'unsent' has names that are not parameters; {DAMAGED}")
    passed = found["round"] * schedule.sync_every + found["passed"]
    under_way = [
        _read_exchange(i, each, found["world_size"], specs, fragments, schedule, passed, late)
        for i, each in enumerate(found["exchanges"])
    ]
    if not late <= {each[:2] for each in under_way} or len({each[0] for each in under_way}) != len(under_way):
        raise InvalidInputError(f"state: impossible exchange: a fragment appears twice; {DAMAGED}")
    return {
        **found,
        "fragments": names,
        "steps": tuple(found["steps"]),
        "round_seconds": float(found["round_seconds"]),
        "step_seconds": float(found["step_seconds"]),
        "global_parameters": read_arrays(found["global_parameters"], specs, "global_parameters", _ADVICE),
        "exchanges": [(*each[:2], *each[3:]) for each in under_way],  # compared: ranks differ in whether they were late
        "under_way": under_way,
    }


def _read_exchange(
    i: int,
    exchange: Any,
    world_size: int,
    specs: Mapping[str, TensorSpec],
    fragments: Sequence[Sequence[str]],
    schedule: SyncSchedule,
    passed: int,
    late: set[tuple[int, int]],
) -> tuple[Any, ...]:
    """Return the tuple of an exchange that is under way after ``passed`` steps of the schedule."""
    place = f"exchanges[{i}]"
    with reading(place, "an exchange that is under way"):
        fragment, round_no, means = exchange["fragment"], exchange["round"], exchange["means"]
        valid = is_count(fragment) and fragment < len(fragments) and is_count(round_no)
        if not (valid and schedule.begun_at(fragment, round_no) <= passed < schedule.applied_at(fragment, round_no)):
            raise InvalidInputError(f"state: impossible exchange: {place} is not under way here; {DAMAGED}")
        own = {name: specs[name] for name in fragments[fragment]}
        untrained = tuple(sorted(set(map(str, exchange["without_gradient"]))))
        if means is not None:
            exchanged = {name: spec for name, spec in own.items() if name not in untrained}
            means = read_arrays(means, exchanged, f"{place}['means']", _ADVICE)
        times = tuple(map(int, exchange["nanoseconds"]))
        if len(times) not in (0, world_size):
            raise InvalidInputError(f"state: {place} has {len(times)} times; expected one for each rank; {DAMAGED}")
    return int(fragment), int(round_no), (fragment, round_no) in late, means, times, untrained
