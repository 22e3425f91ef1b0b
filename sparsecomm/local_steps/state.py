"""The state of local steps in checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sparsecomm.checks import to_float
from sparsecomm.errors import InvalidInputError
from sparsecomm.local_steps.fragments import SyncSchedule
from sparsecomm.reducer.bucket import TensorSpec
from sparsecomm.reducer.state import REDUCER
from sparsecomm.states.loading import DAMAGED, reading
from sparsecomm.states.schema import Schema, StateDict, common, is_count, per_rank, read_arrays

__all__ = ["LOCAL_STEPS", "fit"]

_ADVICE = "build the same model as the one with which LocalSteps was made"


def _is_list(value: object, _: object = None) -> bool:
    return isinstance(value, (list, tuple))


def _is_seconds(value: object, _: object) -> bool:
    return 0 <= to_float(value) < math.inf


def _is_steps(value: Any, found: Mapping[str, Any]) -> bool:
    return _is_list(value) and len(value) in (0, found["world_size"]) and all(is_count(n) and n > 0 for n in value)


def _is_local_step(value: Any, found: Mapping[str, Any]) -> bool:
    steps = found["steps"]
    return is_count(value) and value < (steps[found["rank"]] if steps else found["sync_every"])


def _is_passed(value: Any, found: Mapping[str, Any]) -> bool:
    if not is_count(value) or value >= found["sync_every"]:
        return False
    return bool(found["steps"]) or value == found["local_step"]  # without a pace each local step is one of the schedule


def _is_mixed(value: Any, _: object) -> bool:
    return isinstance(value, dict) and all(isinstance(each, int) and 0 <= each < 1 << 64 for each in value.values())


class _LocalStepsSchema(Schema):
    def reshard(self, states: Iterable[object], rank: int, size: int) -> StateDict:
        states = list(states)
        made = super().reshard(states, rank, size)
        by_rank = [self.read(state) for state in states]
        steps = sorted({state["local_step"] for state in by_rank})
        if not by_rank[0]["steps"] and len(steps) > 1:
            raise InvalidInputError(
                f"states: they differ in local_step: {steps}; expected states that were saved together"
            )
        return {**made, "local_step": made["passed"]}


LOCAL_STEPS = _LocalStepsSchema(
    "LocalSteps",
    3,
    {
        "sync_every": common("at least 1", lambda value, _: is_count(value) and value > 0),
        "fragment_sync_delay": common(
            "a number below sync_every", lambda value, found: is_count(value) and value < found["sync_every"]
        ),
        "round": common("a number of rounds", lambda value, _: is_count(value)),
        "steps": common("a number of steps for each rank, or none", _is_steps, lambda *_: []),
        "round_seconds": common("seconds", _is_seconds, lambda *_: 0.0),
        "local_step": per_rank("a number below the steps of a round", _is_local_step, lambda *_: 0),
        "passed": per_rank("a number below sync_every", _is_passed, lambda values, *_: max(values)),
        "step_seconds": per_rank("seconds", _is_seconds, lambda *_: 0.0),
        "fragments": common("a list of names for each fragment", _is_list),
        "global_parameters": common("arrays by name", lambda value, _: isinstance(value, dict)),
        "outer": common("the state of the outer optimizer, or None", lambda *_: True),
        "reducers": per_rank(
            "a state for each fragment",
            lambda value, found: _is_list(value) and len(value) == len(found["fragments"]),
            lambda values, rank, size: [REDUCER.reshard(its, rank, size) for its in zip(*values, strict=True)],
        ),
        "exchanges": common(
            "a list of exchanges", _is_list, lambda values, *_: [{**each, "nanoseconds": []} for each in values[0]]
        ),
        "late": per_rank("a list of exchanges", _is_list, lambda *_: []),
        "mixed": per_rank("checksums by name", _is_mixed, lambda *_: {}),
    },
    "start from the global parameters",
)


def fit(
    found: StateDict,
    specs: Mapping[str, TensorSpec],
    fragments: Sequence[Sequence[str]],
    schedule: SyncSchedule,
    by_speed: bool,
    outer: bool,
) -> StateDict:
    """Return the fields of a state for local steps with these settings.

    Args:
        found: as `LOCAL_STEPS` has read it.
        specs: of the parameters.
        fragments: names of the parameters of each.
        schedule: of the exchanges.
        by_speed: whether ranks take local steps by speed.
        outer: whether there is an outer optimizer.

    Returns:
        The fields. Those of the outer optimizer and of the reducers are as in the state. Arrays are new, flat, and in
        the accumulator's type. ``under_way`` has for each exchange: the fragment, the round, the means (``None``: it
        does not count), the nanoseconds of local steps, what this rank has sent if it was late, and the names of
        parameters that no rank had trained.

    Raises:
        InvalidInputError: the state is damaged, or one of other parameters or settings.
    """
    given = [list(names) for names in found["fragments"]]
    if given != [list(names) for names in fragments]:
        raise InvalidInputError(
            f"state: it has {len(given)} fragments, and this LocalSteps {len(fragments)}, or other names in them; "
            "build the same model with the same fragments"
        )
    theirs, here = (found["sync_every"], found["fragment_sync_delay"]), (schedule.sync_every, schedule.delay)
    if theirs != here and (found["local_step"] or found["exchanges"]):
        raise InvalidInputError(
            f"state: it was saved in the middle of a round, with sync_every={theirs[0]} and fragment_sync_delay="
            f"{theirs[1]}; here they are {here[0]} and {here[1]}; change them between rounds"
        )
    if found["steps"] and not by_speed:
        if found["local_step"] or found["passed"] or found["exchanges"]:
            raise InvalidInputError(
                "state: it was saved in the middle of a round, in which ranks take local steps by speed; make "
                "LocalSteps with by_speed=True, and change that between rounds"
            )
        found["steps"] = ()
    if (found["outer"] is not None) != outer:
        with_or_without = "with" if found["outer"] is not None else "without"
        raise InvalidInputError(
            f"state: it was saved {with_or_without} an outer optimizer; make LocalSteps {with_or_without} one"
        )
    taken = found["round"] * schedule.sync_every + found["passed"]
    with reading("late", "exchanges for which this rank was late"):
        late = {(each["fragment"], each["round"]): each["sent"] for each in found["late"]}
    under_way: list[tuple[Any, ...]] = []
    for i, each in enumerate(found["exchanges"]):
        place = f"exchanges[{i}]"
        with reading(place, "an exchange that is under way"):
            fragment, round_no, means = each["fragment"], each["round"], each["means"]
            well = is_count(fragment) and fragment < len(fragments) and is_count(round_no)
            if not (well and schedule.begun_at(fragment, round_no) <= taken < schedule.applied_at(fragment, round_no)):
                raise InvalidInputError(
                    f"state: it lists an impossible exchange: {place} is not under way here; {DAMAGED}"
                )
            its_own = {name: specs[name] for name in fragments[fragment]}
            without = tuple(sorted(set(map(str, each["without_gradient"]))))
            if means is not None:
                exchanged = {name: spec for name, spec in its_own.items() if name not in without}
                means = read_arrays(means, exchanged, f"{place}['means']", _ADVICE)
            if sent := late.pop((fragment, round_no), None):
                trained = {name: spec for name, spec in its_own.items() if name in sent}
                sent = read_arrays(sent, trained, f"what was sent in {place}", _ADVICE)
            times = tuple(map(int, each["nanoseconds"]))
            if len(times) not in (0, found["world_size"]):
                raise InvalidInputError(f"state: {place} has {len(times)} times; expected one of each rank; {DAMAGED}")
            under_way.append((int(fragment), int(round_no), means, times, sent, without))
    if late or len({each[0] for each in under_way}) != len(under_way):
        raise InvalidInputError(f"state: impossible exchange: a fragment appears twice; {DAMAGED}")
    return {
        **found,
        "sync_every": int(found["sync_every"]),
        "fragment_sync_delay": int(found["fragment_sync_delay"]),
        "fragments": given,
        "round": int(found["round"]),
        "steps": tuple(map(int, found["steps"])),
        "round_seconds": float(found["round_seconds"]),
        "local_step": int(found["local_step"]),
        "passed": int(found["passed"]),
        "step_seconds": float(found["step_seconds"]),
        "global_parameters": read_arrays(found["global_parameters"], specs, "global_parameters", _ADVICE),
        "exchanges": [(*each[:4], each[-1]) for each in under_way],  # without `sent`, of this rank alone
        "under_way": under_way,
    }
