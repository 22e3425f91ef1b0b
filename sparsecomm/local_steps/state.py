"""The state of local steps in checkpoints, and for another number of ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from sparsecomm.errors import InvalidInputError
from sparsecomm.local_steps.fragments import SyncSchedule
from sparsecomm.reducer import reshard as reshard_reducer
from sparsecomm.reducer.layout import TensorSpec

__all__ = ["FORMAT", "check", "checksum", "reshard"]

FORMAT = 1
_KEYS = (
    "format",
    "round",
    "local_step",
    "sync_every",
    "fragment_sync_delay",
    "fragments",
    "global_parameters",
    "outer",
    "reducers",
    "exchanges",
)


def check(
    state: Mapping[str, Any],
    specs: Mapping[str, TensorSpec],
    fragments: Sequence[Sequence[str]],
    schedule: SyncSchedule,
    outer: bool,
) -> None:
    """Check that a state is one of these settings.

    Raises:
        InvalidInputError: it is no state, is damaged, or is one of others.
    """
    if not isinstance(state, Mapping) or any(key not in state for key in _KEYS):
        raise InvalidInputError(f"state: got {type(state).__name__}; expected what LocalSteps.state_dict() returned")
    if state["format"] != FORMAT:
        raise InvalidInputError(
            f"state: got format {state['format']!r}; this version of sparsecomm reads {FORMAT}; load it with the "
            "version that saved it, or begin from the global parameters"
        )
    try:
        broken = _broken(state)
    except (TypeError, ValueError, KeyError, AttributeError):
        broken = "a part"
    if broken:
        raise InvalidInputError(
            f"state: {broken} of it cannot be; expected what LocalSteps.state_dict() returned; the checkpoint may be "
            "damaged: load an older one"
        )
    if [list(names) for names in state["fragments"]] != [list(names) for names in fragments]:
        raise InvalidInputError(
            f"state: it has {len(state['fragments'])} fragments, and this LocalSteps {len(fragments)}, or other names "
            "in them; build the same model with the same fragments"
        )
    between = not state["local_step"] and not state["exchanges"]
    theirs = state["sync_every"], state["fragment_sync_delay"]
    here = schedule.sync_every, schedule.delay
    if theirs != here and not between:
        raise InvalidInputError(
            f"state: it was saved in the middle of a round, with sync_every={theirs[0]} and fragment_sync_delay="
            f"{theirs[1]}; here they are {here[0]} and {here[1]}; change them between rounds"
        )
    means = [each["means"] for each in state["exchanges"] if each["means"] is not None]
    for name, array in [pair for arrays in (state["global_parameters"], *means) for pair in arrays.items()]:
        if np.shape(array) != specs[name].shape:
            raise InvalidInputError(f"state: {name!r} has shape {np.shape(array)}; expected {specs[name].shape}")
    if (state["outer"] is not None) != outer:
        raise InvalidInputError(
            f"state: it was saved {'with' if state['outer'] is not None else 'without'} an outer optimizer; make "
            f"LocalSteps {'with' if state['outer'] is not None else 'without'} one"
        )


def _broken(state: Mapping[str, Any]) -> str:
    """Return which part of a state cannot be; empty: none."""
    names = {name for part in state["fragments"] for name in part}
    exchanges = state["exchanges"]
    holds = {
        "round": _is_count(state["round"]),
        "sync_every": _is_count(state["sync_every"]) and state["sync_every"] > 0,
        "local_step": _is_count(state["local_step"]) and state["local_step"] < state["sync_every"],
        "global_parameters": state["global_parameters"].keys() == names,
        "reducers": len(state["reducers"]) == len(state["fragments"]),
        "exchanges": len({each["fragment"] for each in exchanges}) == len(exchanges)
        and all(
            0 <= each["fragment"] < len(state["fragments"])
            and _is_count(each["round"])
            and (each["means"] is None or each["means"].keys() == set(state["fragments"][each["fragment"]]))
            for each in exchanges
        ),
    }
    return next((key for key, well in holds.items() if not well), "")


def _is_count(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= 0)


def checksum(state: Mapping[str, Any]) -> int:
    """Return a checksum of what states that were saved together have in common."""
    found = zlib.crc32(repr([each["step"] for each in state["reducers"]]).encode())
    for array in state["global_parameters"].values():
        found = zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, found)
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
        InvalidInputError: states are missing, are there twice, or do not belong together.
    """
    each = list(states)
    whole = [isinstance(state, Mapping) and "reducers" in state for state in each]
    if not any(whole):
        return reshard_reducer(each, rank, size)
    if not all(whole):
        raise InvalidInputError("states: some are of LocalSteps, others of a Reducer; expected those of one kind")
    first = each[0]
    for key in ("round", "local_step", "fragments"):
        if any(state[key] != first[key] for state in each):
            raise InvalidInputError(f"states: they differ in {key}; expected states that were saved together")
    count = len(first["reducers"])
    reducers = [reshard_reducer([state["reducers"][i] for state in each], rank, size) for i in range(count)]
    return {**first, "reducers": reducers}
