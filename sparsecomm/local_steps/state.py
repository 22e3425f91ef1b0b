"""The state of local steps in checkpoints, and for another number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sparsecomm.calls.loading import DAMAGED, reading
from sparsecomm.errors import InvalidInputError
from sparsecomm.local_steps.fragments import SyncSchedule
from sparsecomm.reducer.bucket import TensorSpec
from sparsecomm.reducer.state import StateFormat, is_count, read_arrays, summed

__all__ = ["COMMON", "prepare", "reshard"]

COMMON = ("round", "local_step", "global_parameters", "outer", "exchanges")  # in the states of all ranks
_OF = "the parameters with which LocalSteps was made: build the same model"


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple))


_LOCAL_STEPS = StateFormat(
    "LocalSteps",
    "begin from the global parameters",
    ["reducers"],
    {
        "sync_every": lambda value, _: is_count(value) and value > 0,
        "fragment_sync_delay": lambda value, found: is_count(value) and value < found["sync_every"],
        "round": lambda value, _: is_count(value),
        "local_step": lambda value, found: is_count(value) and value < found["sync_every"],
        "fragments": lambda value, _: _is_list(value),
        "global_parameters": lambda value, _: isinstance(value, dict),
        "outer": lambda value, _: True,
        "reducers": lambda value, found: _is_list(value) and len(value) == len(found["fragments"]),
        "exchanges": lambda value, _: _is_list(value),
    },
)


def prepare(
    state: Mapping[str, Any],
    specs: Mapping[str, TensorSpec],
    fragments: Sequence[Sequence[str]],
    schedule: SyncSchedule,
    outer: bool,
    rank: int,
    world_size: int,
) -> dict[str, Any]:
    """Read a state, which must be one of these settings, of ``rank`` of ``world_size``.

    Returns:
        Its parts, of which those of the outer optimizer and of the reducers are as they are in the state. Arrays are
        new and flat, and in the accumulator's type. Of each exchange under way: fragment, round, and means; ``None``:
        it does not count.

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
    if (found["outer"] is not None) != outer:
        with_or_without = "with" if found["outer"] is not None else "without"
        raise InvalidInputError(
            f"state: it was saved {with_or_without} an outer optimizer; make LocalSteps {with_or_without} one"
        )
    taken = found["round"] * schedule.sync_every + found["local_step"]
    exchanges = []
    for i, each in enumerate(found["exchanges"]):
        place = f"exchanges[{i}]"
        with reading(place, "an exchange that is under way"):
            fragment, round_no, means = each["fragment"], each["round"], each["means"]
            well = is_count(fragment) and fragment < len(fragments) and is_count(round_no)
            if not (well and schedule.begun_at(fragment, round_no) <= taken < schedule.applied_at(fragment, round_no)):
                raise InvalidInputError(f"state: exchanges of it cannot be: {place} is not under way here; {DAMAGED}")
            if means is not None:
                means = read_arrays(
                    means, {name: specs[name] for name in fragments[fragment]}, f"{place}['means']", _OF
                )
            exchanges.append((int(fragment), int(round_no), means))
    if len({fragment for fragment, _, _ in exchanges}) != len(exchanges):
        raise InvalidInputError(f"state: exchanges of it cannot be: a fragment is there twice; {DAMAGED}")
    return {
        **found,
        "round": int(found["round"]),
        "local_step": int(found["local_step"]),
        "global_parameters": read_arrays(found["global_parameters"], specs, "global_parameters", _OF),
        "exchanges": exchanges,
    }


def reshard(states: Iterable[Mapping[str, Any]], rank: int, size: int) -> dict[str, Any]:
    """Return a state for rank ``rank`` of ``size`` ranks, made from the states of all ranks of another number.

    New rank r takes what the residuals of old ranks r, r + size, r + 2 size ... held, added up; where there are more
    new ranks, the others begin with zeros. So the sum over ranks, which is what still has to be applied, stays what it
    was. The global parameters and the outer optimizer's state are the same on all ranks.

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
        of_reducers = zip(*(state["reducers"] for state in by_rank), strict=True)
        return {**common, "reducers": [summed(inner, rank, size) for inner in of_reducers]}
