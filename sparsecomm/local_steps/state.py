"""The state of local steps in checkpoints, and for another number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparsecomm.calls.encoding import checksum
from sparsecomm.calls.loading import DAMAGED, as_float, reading
from sparsecomm.errors import InvalidInputError
from sparsecomm.local_steps.fragments import SyncSchedule
from sparsecomm.reducer import reshard as reshard_reducer
from sparsecomm.reducer.layout import TensorSpec
from sparsecomm.reducer.state import check_place, is_count
from sparsecomm.tensors.arrays import Array

__all__ = ["FORMAT", "LoadedState", "prepare", "reshard"]

FORMAT = 1
_WHOLE = "what LocalSteps.state_dict() returned"
_KEYS = (
    "format",
    "world_size",
    "rank",
    "sync_every",
    "fragment_sync_delay",
    "round",
    "local_step",
    "fragments",
    "global_parameters",
    "outer",
    "reducers",
    "exchanges",
)


@dataclass(frozen=True)
class LoadedState:
    """What a state holds, converted and checked, but for the states of the outer optimizer and of the reducers.

    Attributes:
        round, local_step: numbers.
        global_parameters: new flat arrays by name, in the accumulator's type.
        exchanges: fragment, round and means of those under way; ``None``: it does not count.
        outer, reducers: as they are in the state.
    """

    round: int
    local_step: int
    global_parameters: dict[str, Array]
    exchanges: list[tuple[int, int, dict[str, Array] | None]]
    outer: Any
    reducers: list[Any]


def prepare(
    state: Mapping[str, Any],
    specs: Mapping[str, TensorSpec],
    fragments: Sequence[Sequence[str]],
    schedule: SyncSchedule,
    outer: bool,
    rank: int,
    world_size: int,
) -> LoadedState:
    """Read a state, which must be one of these settings, of ``rank`` of ``world_size``.

    Raises:
        InvalidInputError: it is no state, is damaged, or is one of others.
    """
    found = _read(state)
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
        raise InvalidInputError(
            f"state: it was saved {'with' if found['outer'] is not None else 'without'} an outer optimizer; make "
            f"LocalSteps {'with' if found['outer'] is not None else 'without'} one"
        )
    check_place(found, rank, world_size)
    taken = found["round"] * schedule.sync_every + found["local_step"]
    exchanges = []
    for i, each in enumerate(found["exchanges"]):
        place = f"exchanges[{i}]"
        with reading(place, "an exchange that is under way"):
            fragment, round_no, means = each["fragment"], each["round"], each["means"]
            well = (
                is_count(fragment)
                and fragment < len(fragments)
                and is_count(round_no)
                and round_no <= found["round"] + 1
            )
            if not (well and schedule.begun_at(fragment, round_no) <= taken < schedule.applied_at(fragment, round_no)):
                raise InvalidInputError(f"state: exchanges of it cannot be: {place} is not under way here; {DAMAGED}")
            names = None if means is None else fragments[fragment]
            exchanges.append(
                (int(fragment), int(round_no), names and _arrays(means, names, specs, f"{place}['means']"))
            )
    if len({fragment for fragment, _, _ in exchanges}) != len(exchanges):
        raise InvalidInputError(f"state: exchanges of it cannot be: a fragment is there twice; {DAMAGED}")
    arrays = _arrays(found["global_parameters"], specs, specs, "global_parameters")
    return LoadedState(
        int(found["round"]), int(found["local_step"]), arrays, exchanges, found["outer"], list(found["reducers"])
    )


def _read(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a state, each read once.

    Raises:
        InvalidInputError: a part is missing, or cannot be one.
    """
    with reading("it", _WHOLE):
        if not isinstance(state, Mapping) or any(key not in state for key in _KEYS):
            raise InvalidInputError(f"state: got {type(state).__name__}; expected {_WHOLE}")
    found: dict[str, Any] = {}
    for key in _KEYS:
        with reading(key, _WHOLE):
            value = found[key] = state[key]
            if key == "format" and not (is_count(value) and value == FORMAT):
                raise InvalidInputError(
                    f"state: got format {value!r:.80}; this version of sparsecomm reads {FORMAT}; load it with the "
                    "version that saved it, or begin from the global parameters"
                )
            if not _can_be(key, found):
                raise InvalidInputError(f"state: {key} of it cannot be; expected {_WHOLE}; {DAMAGED}")
    return found


def _can_be(key: str, found: Mapping[str, Any]) -> bool:
    """Return whether a part of a state can be one, beside those before it."""
    value = found[key]
    if key == "outer":
        return True
    if key == "global_parameters":
        return isinstance(value, Mapping)
    if key in ("fragments", "reducers", "exchanges"):
        return isinstance(value, (list, tuple)) and (key != "reducers" or len(value) == len(found["fragments"]))
    below = {"rank": "world_size", "local_step": "sync_every", "fragment_sync_delay": "sync_every"}.get(key)
    return is_count(value) and (key != "sync_every" or value > 0) and (below is None or value < found[below])


def _arrays(given: Any, names: Iterable[str], specs: Mapping[str, TensorSpec], place: str) -> dict[str, Array]:
    """Return new arrays of the given ones, which must be those of ``names``."""
    expected = list(names)
    with reading(place, "arrays by the names of the parameters"):
        if not isinstance(given, Mapping) or sorted(given) != sorted(expected):
            raise InvalidInputError(
                f"state: {place} of it cannot be: other names than those of the parameters; {DAMAGED}"
            )
    found = {}
    for name in expected:
        with reading(f"{place}[{name!r}]", f"floats of shape {specs[name].shape}"):
            found[name] = as_float(given[name], f"{place}[{name!r}]", specs[name].shape, specs[name].accumulator)
    return found


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
        whole = [isinstance(state, Mapping) and "reducers" in state for state in each]
        if not any(whole):
            return reshard_reducer(each, rank, size)
        if not all(whole):
            raise InvalidInputError("states: some are of LocalSteps, others of a Reducer; expected those of one kind")
        found = [{**state, **_read(state)} for state in each]
        first = found[0]
        for key in ("round", "local_step", "sync_every", "fragment_sync_delay", "fragments"):
            if any(state[key] != first[key] for state in found):
                raise InvalidInputError(f"states: they differ in {key}; expected states that were saved together")
        for key in ("global_parameters", "outer", "exchanges"):
            if len({checksum(state[key]) for state in found}) > 1:
                raise InvalidInputError(f"states: they differ in {key}; expected states that were saved together")
        count = len(first["reducers"])
        reducers = [reshard_reducer([state["reducers"][i] for state in found], rank, size) for i in range(count)]
        return {**first, "world_size": size, "rank": rank, "reducers": reducers}
