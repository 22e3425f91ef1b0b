"""The state of local steps in checkpoints, and for another number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sparsecomm.calls.loading import DAMAGED, reading
from sparsecomm.checks import number
from sparsecomm.errors import InvalidInputError
from sparsecomm.local_steps.fragments import SyncSchedule
from sparsecomm.reducer.bucket import TensorSpec
from sparsecomm.reducer.state import StateFormat, is_count, read_arrays, summed

__all__ = ["COMMON", "FORMAT", "prepare", "reshard"]

FORMAT = 2
COMMON = ("round", "steps", "round_seconds", "local_step", "global_parameters", "outer", "exchanges")  # of all ranks
_OF = "the parameters with which LocalSteps was made: build the same model"


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple))


def _is_word(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < 1 << 64


def _is_seconds(value: object) -> bool:
    return 0 <= number(value) < math.inf


def _is_steps(value: Any, found: dict[str, Any]) -> bool:
    return _is_list(value) and len(value) in (0, found["world_size"]) and all(is_count(n) and n > 0 for n in value)


def _is_passed(value: Any, found: dict[str, Any]) -> bool:
    if not is_count(value) or value >= found["sync_every"]:
        return False
    return bool(found["steps"]) or value == found["local_step"]  # without a pace each local step is one of the schedule


def _steps_of(found: dict[str, Any]) -> int:
    """Return how many local steps the rank takes in the round."""
    return int(found["steps"][found["rank"]] if found["steps"] else found["sync_every"])


_LOCAL_STEPS = StateFormat(
    "LocalSteps",
    "begin from the global parameters",
    ["reducers", "local_step", "passed", "step_seconds", "late", "mixed"],
    {
        "sync_every": lambda value, _: is_count(value) and value > 0,
        "fragment_sync_delay": lambda value, found: is_count(value) and value < found["sync_every"],
        "round": lambda value, _: is_count(value),
        "steps": _is_steps,
        "round_seconds": lambda value, _: _is_seconds(value),
        "local_step": lambda value, found: is_count(value) and value < _steps_of(found),
        "passed": _is_passed,
        "step_seconds": lambda value, _: _is_seconds(value),
        "fragments": lambda value, _: _is_list(value),
        "global_parameters": lambda value, _: isinstance(value, dict),
        "outer": lambda value, _: True,
        "reducers": lambda value, found: _is_list(value) and len(value) == len(found["fragments"]),
        "exchanges": lambda value, _: _is_list(value),
        "late": lambda value, _: _is_list(value),
        "mixed": lambda value, _: isinstance(value, dict) and all(map(_is_word, value.values())),
    },
    FORMAT,
)


def prepare(
    state: Mapping[str, Any],
    specs: Mapping[str, TensorSpec],
    fragments: Sequence[Sequence[str]],
    schedule: SyncSchedule,
    by_speed: bool,
    outer: bool,
    rank: int,
    world_size: int,
) -> dict[str, Any]:
    """Read a state, which must be one of these settings, of ``rank`` of ``world_size``.

    Returns:
        Its parts, of which those of the outer optimizer and of the reducers are as they are in the state. Arrays are
        new and flat, and in the accumulator's type. ``under_way``: of each exchange fragment, round, means (``None``:
        it does not count), nanoseconds of local steps, what this rank has sent if it was late, and the names of
        parameters that no rank had trained. ``mixed``: checksums by name.

    Raises:
        InvalidInputError: it is no state, is damaged, or is one of others.
    """
    found = _LOCAL_STEPS.read_on(state, rank, world_size)
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
                raise InvalidInputError(f"state: exchanges of it cannot be: {place} is not under way here; {DAMAGED}")
            its_own = {name: specs[name] for name in fragments[fragment]}
            without = tuple(sorted(set(map(str, each["without_gradient"]))))
            if means is not None:
                exchanged = {name: spec for name, spec in its_own.items() if name not in without}
                means = read_arrays(means, exchanged, f"{place}['means']", _OF)
            if sent := late.pop((fragment, round_no), None):
                trained = {name: spec for name, spec in its_own.items() if name in sent}
                sent = read_arrays(sent, trained, f"what was sent in {place}", _OF)
            times = tuple(map(int, each["nanoseconds"]))
            if len(times) not in (0, world_size):
                raise InvalidInputError(f"state: {place} has {len(times)} times; expected one of each rank; {DAMAGED}")
            under_way.append((int(fragment), int(round_no), means, times, sent, without))
    if late or len({each[0] for each in under_way}) != len(under_way):
        raise InvalidInputError(f"state: exchanges of it cannot be: a fragment is there twice; {DAMAGED}")
    return {
        **found,
        "round": int(found["round"]),
        "steps": tuple(map(int, found["steps"])),
        "round_seconds": float(found["round_seconds"]),
        "local_step": int(found["local_step"]),
        "passed": int(found["passed"]),
        "step_seconds": float(found["step_seconds"]),
        "global_parameters": read_arrays(found["global_parameters"], specs, "global_parameters", _OF),
        "exchanges": [(*each[:4], each[-1]) for each in under_way],  # without `sent`, of this rank alone
        "under_way": under_way,
    }


def reshard(states: Iterable[Mapping[str, Any]], rank: int, size: int) -> dict[str, Any]:
    """Return a state for rank ``rank`` of ``size`` ranks, made from the states of all ranks of another number.

    New rank r takes what the residuals of old ranks r, r + size, r + 2 size ... held, added up; where there are more
    new ranks, the others begin with zeros. So the sum over ranks, which is what still has to be applied, stays what it
    was. The global parameters and the outer optimizer's state are the same on all ranks. Where ranks take local steps
    by speed, all take equally many until the new ones have been measured.

    Args:
        states: what `Reducer.state_dict`, or `LocalSteps.state_dict`, returned on every old rank, in any order. Local
            parameters are not in them: with `LocalSteps` begin with the global ones on the new ranks.
        rank, size: of the new run.

    Raises:
        InvalidInputError: states are missing, are there twice, are damaged, or do not belong together.
    """
    with reading("states", "what state_dict() returned on each rank"):
        each = list(states)
        local = [isinstance(state, Mapping) and "reducers" in state for state in each]
        if not any(local):
            return summed(each, rank, size)
        if not all(local):
            raise InvalidInputError("states: some are of LocalSteps, others of a Reducer; expected those of one kind")
        by_rank, common = _LOCAL_STEPS.of_all_ranks(each, rank, size)
        steps = {state["local_step"] for state in by_rank}
        if not common["steps"] and len(steps) > 1:
            raise InvalidInputError(
                f"states: they differ in local_step: {sorted(steps)}; expected states that were saved together"
            )
        passed = max(state["passed"] for state in by_rank)
        common |= {"steps": [], "round_seconds": 0.0, "local_step": passed, "passed": passed, "step_seconds": 0.0}
        common |= {"late": [], "mixed": {}}
        common["exchanges"] = [{**each, "nanoseconds": []} for each in common["exchanges"]]
        of_reducers = zip(*(state["reducers"] for state in by_rank), strict=True)
        return {**common, "reducers": [summed(inner, rank, size) for inner in of_reducers]}
