"""A reducer's state in checkpoints, and for another number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias

import numpy as np

from sparsecomm.errors import InvalidInputError
from sparsecomm.reducer.layout import TensorSpec
from sparsecomm.tensors.sparse import Array
from sparsecomm.transport.control import format_ranks

__all__ = ["FORMAT", "State", "StateDict", "check", "check_agreement", "reshard"]

StateDict: TypeAlias = dict[str, Any]  # what `Reducer.state_dict` returns: arrays, numbers, lists and texts
State: TypeAlias = Mapping[str, Any]  # the same, to be loaded

FORMAT = 1
_KEYS = ("format", "world_size", "rank", "step", "order", "bucket_bytes", "residuals", "velocities")


def check(state: State, specs: Mapping[str, TensorSpec], rank: int, world_size: int, momentum: bool) -> None:
    """Check that a state is that of a reducer of tensors ``specs`` on ``rank`` of ``world_size``.

    Raises:
        InvalidInputError: it is no state, or one of other tensors, another rank or another number of ranks.
    """
    _check_is_state(state, "state")
    if state["world_size"] != world_size:
        raise InvalidInputError(
            f"rank {rank}: the state is of {state['world_size']} ranks, and this is one of {world_size}; "
            "sparsecomm.reshard(states, rank, size) makes states for another number of ranks from all the old ones"
        )
    if state["rank"] != rank:
        raise InvalidInputError(
            f"rank {rank}: the state is that of rank {state['rank']}; each rank loads its own, or that which "
            "sparsecomm.reshard made for it"
        )
    for kind, expected in (("residuals", specs), ("velocities", specs if momentum else {})):
        arrays = state[kind]
        lacking, others = sorted(expected.keys() - arrays.keys()), sorted(arrays.keys() - expected.keys())
        if lacking or others:
            raise InvalidInputError(
                f"rank {rank}: {kind} of the state lack {_listed(lacking)} and have {_listed(others)} besides; "
                "expected the names of this Reducer's tensors, and velocities if it has momentum: build the same model "
                "with the same settings, or rename the entries"
            )
        for name, spec in expected.items():
            if np.shape(arrays[name]) != spec.shape:
                raise InvalidInputError(
                    f"rank {rank}: {kind} of the state have shape {np.shape(arrays[name])} for {name!r}; expected "
                    f"{spec.shape}"
                )
    if state["order"] is not None and sorted(state["order"]) != sorted(specs):
        raise InvalidInputError(f"rank {rank}: the state's order has other names than its residuals")


def check_agreement(rank: int, fitting: Sequence[int], steps: Sequence[int]) -> None:
    """Check that all ranks have states that fit, of one step.

    Args:
        rank: this one, whose state fits.
        fitting, steps: for each rank, whether its state fits, and its step.

    Raises:
        InvalidInputError: they have not.
    """
    misfits = [other for other, fits in enumerate(fitting) if not fits]
    if misfits:
        raise InvalidInputError(
            f"rank {rank}: {format_ranks(misfits)} cannot load a state, and say why: so no rank loads; the state of "
            "this rank would fit"
        )
    if len(set(steps)) > 1:
        other = next(r for r, step in enumerate(steps) if step != steps[rank])
        raise InvalidInputError(
            f"rank {rank}: the state is of step {steps[rank]}, and that of rank {other} of step {steps[other]}; "
            "expected states that were saved together: load an older checkpoint, which all ranks have saved"
        )


def reshard(states: Iterable[State], rank: int, size: int) -> StateDict:
    """Return a state for rank ``rank`` of ``size`` ranks, made from the states of all ranks of another number.

    New rank r takes what the old ranks r, r + size, r + 2 size ... held, added up; where there are more new ranks,
    the others begin with zeros. So the sum over ranks, which is what still has to be applied, stays what it was.

    Args:
        states: what `Reducer.state_dict` returned on every old rank, in any order.
        rank, size: of the new run.

    Raises:
        InvalidInputError: states are missing, are there twice, or do not belong together.
    """
    by_rank: dict[int, State] = {}
    for state in states:
        _check_is_state(state, "states")
        if state["rank"] in by_rank:
            raise InvalidInputError(f"states: that of rank {state['rank']} is there twice; expected each rank's once")
        by_rank[state["rank"]] = state
    if not 0 <= rank < size:
        raise InvalidInputError(f"rank={rank}, size={size}: expected a rank from 0 to size - 1")
    if not by_rank:
        raise InvalidInputError("states: there are none; expected those of all ranks")
    first = by_rank[min(by_rank)]
    missing = list(islice((r for r in range(first["world_size"]) if r not in by_rank), 5))
    if missing:
        more = " and others" if first["world_size"] - len(by_rank) > len(missing) else ""
        raise InvalidInputError(f"states: of {first['world_size']} ranks, those of {missing}{more} are missing")
    common = [key for key in first if key not in ("rank", "residuals", "velocities")]  # integrations add theirs
    for r, state in by_rank.items():
        for key in common:
            if not _equal(state.get(key), first[key]):
                raise InvalidInputError(
                    f"states: rank {r}'s {key} is {state.get(key)!r}, and rank {min(by_rank)}'s is {first[key]!r}; "
                    "expected states that were saved together"
                )
        if any(_shapes(state[kind]) != _shapes(first[kind]) for kind in ("residuals", "velocities")):
            raise InvalidInputError(f"states: rank {r}'s names differ from rank {min(by_rank)}'s, or shapes")
    mine = [by_rank[r] for r in range(rank, first["world_size"], size)]
    return {
        **{key: first[key] for key in common},
        "world_size": size,
        "rank": rank,
        **{
            kind: {name: _sum(first[kind][name], [s[kind][name] for s in mine]) for name in first[kind]}
            for kind in ("residuals", "velocities")
        },
    }


def _sum(like: Array, arrays: Sequence[Array]) -> Array:
    total: Array = np.zeros(np.shape(like), np.asarray(like).dtype)
    for array in arrays:
        total += np.asarray(array)
    return total


def _check_is_state(state: object, name: str) -> None:
    if not isinstance(state, Mapping) or any(key not in state for key in _KEYS):
        raise InvalidInputError(f"{name}: got {type(state).__name__}; expected what Reducer.state_dict() returned")
    if not _equal(state["format"], FORMAT):
        raise InvalidInputError(
            f"{name}: got format {state['format']!r}; this version of sparsecomm reads {FORMAT}; load it with the "
            "version that saved it, or begin without it: residuals are then zero"
        )
    broken = [key for key, holds in _EXPECTED.items() if not holds(state[key])]
    if not broken and state["rank"] >= state["world_size"]:
        broken = ["rank"]
    if broken:
        raise InvalidInputError(
            f"{name}: got a state whose {_listed(broken)} cannot be; expected what Reducer.state_dict() returned; the "
            "checkpoint may be damaged: load an older one"
        )


def _is_count(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= 0)


def _is_names(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value)


def _is_arrays(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) and _is_array(value[key]) for key in value)


def _is_array(value: object) -> bool:
    try:
        return np.asarray(value).dtype.kind == "f"
    except (ValueError, TypeError, RuntimeError):  # not rectangular, or a tensor that is not in host memory
        return False


_EXPECTED: Mapping[str, Callable[[object], bool]] = {
    "world_size": _is_count,
    "rank": _is_count,
    "step": _is_count,
    "order": lambda value: value is None or _is_names(value),
    "bucket_bytes": lambda value: _is_count(value) and value != 0,
    "residuals": _is_arrays,
    "velocities": _is_arrays,
}


def _shapes(arrays: Mapping[str, Array]) -> dict[str, tuple[int, ...]]:
    return {name: np.shape(array) for name, array in arrays.items()}


def _equal(a: object, b: object) -> bool:
    try:
        return bool(a == b)
    except (ValueError, TypeError, RuntimeError):  # arrays, which have no one answer
        return False


def _listed(names: Sequence[str]) -> str:
    if not names:
        return "nothing"
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
