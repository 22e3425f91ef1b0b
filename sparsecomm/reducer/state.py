"""A reducer's state in checkpoints, and for another number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

import numpy as np

from sparsecomm.calls.loading import DAMAGED, as_float, reading
from sparsecomm.errors import InvalidInputError
from sparsecomm.reducer.layout import TensorSpec
from sparsecomm.tensors.sparse import Array

__all__ = ["FORMAT", "LoadedState", "State", "StateDict", "is_count", "prepare", "reshard"]

StateDict: TypeAlias = dict[str, Any]  # what `Reducer.state_dict` returns: arrays, numbers, lists and texts
State: TypeAlias = Mapping[str, Any]  # the same, to be loaded

FORMAT = 1
_KEYS = ("format", "world_size", "rank", "step", "order", "bucket_bytes", "residuals", "velocities")


@dataclass(frozen=True)
class LoadedState:
    """What a state holds, converted and checked.

    Attributes:
        step, order, bucket_bytes: as in `Reducer` and `Group`.
        residuals, velocities: new flat arrays by name, in the accumulator's type.
    """

    step: int
    order: list[str] | None
    bucket_bytes: int
    residuals: dict[str, Array]
    velocities: dict[str, Array]


def prepare(state: State, specs: Mapping[str, TensorSpec], rank: int, world_size: int, momentum: bool) -> LoadedState:
    """Read a state, which must be that of a reducer of tensors ``specs`` on ``rank`` of ``world_size``.

    Raises:
        InvalidInputError: it is no state, or one of other tensors, another rank or another number of ranks; or its
            arrays cannot be read.
    """
    found = _read(state, "state")
    check_place(found, rank, world_size)
    arrays: dict[str, dict[str, Array]] = {}
    for kind, expected in (("residuals", specs), ("velocities", specs if momentum else {})):
        given = found[kind]
        lacking, others = sorted(expected.keys() - given.keys()), sorted(given.keys() - expected.keys())
        if lacking or others:
            raise InvalidInputError(
                f"rank {rank}: {kind} of the state lack {_listed(lacking)} and have {_listed(others)} besides; "
                "expected the names of this Reducer's tensors, and velocities if it has momentum: build the same model "
                "with the same settings, or rename the entries"
            )
        arrays[kind] = {}
        for name, spec in expected.items():
            with reading(f"{kind}[{name!r}]", f"floats of shape {spec.shape}"):
                arrays[kind][name] = as_float(given[name], f"{kind}[{name!r}]", spec.shape, spec.accumulator)
    order = None if found["order"] is None else [str(name) for name in found["order"]]
    if order is not None and sorted(order) != sorted(specs):
        raise InvalidInputError(f"rank {rank}: the state's order has other names than its residuals")
    return LoadedState(int(found["step"]), order, int(found["bucket_bytes"]), arrays["residuals"], arrays["velocities"])


def check_place(state: State, rank: int, world_size: int) -> None:
    """Check that a state is of a rank and a number of ranks.

    Raises:
        InvalidInputError: it is not.
    """
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
    with reading("states", "what Reducer.state_dict() returned on each rank"):
        return _reshard(states, rank, size)


def _reshard(states: Iterable[State], rank: int, size: int) -> StateDict:
    by_rank: dict[int, State] = {}
    for state in states:
        found = {**state, **_read(state, "states")} if isinstance(state, Mapping) else _read(state, "states")
        if found["rank"] in by_rank:
            raise InvalidInputError(f"states: that of rank {found['rank']} is there twice; expected each rank's once")
        by_rank[found["rank"]] = found
    if not (is_count(rank) and is_count(size) and rank < size):
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


def _read(state: object, name: str) -> dict[str, Any]:
    """Return the parts of a state, each read once.

    Raises:
        InvalidInputError: a part is missing, or cannot be one.
    """
    with reading("it", "what Reducer.state_dict() returned"):
        if not isinstance(state, Mapping) or any(key not in state for key in _KEYS):
            raise InvalidInputError(f"{name}: got {type(state).__name__}; expected what Reducer.state_dict() returned")
    found: dict[str, Any] = {}
    for key in _KEYS:
        with reading(key, "what Reducer.state_dict() returned"):
            found[key] = state[key]
            if key == "format" and not (is_count(found[key]) and found[key] == FORMAT):
                raise InvalidInputError(
                    f"{name}: got format {found[key]!r:.80}; this version of sparsecomm reads {FORMAT}; load it with "
                    "the version that saved it, or begin without it: residuals are then zero"
                )
            if key in ("residuals", "velocities") and isinstance(found[key], Mapping):
                found[key] = dict(found[key])
    with reading("it", "what Reducer.state_dict() returned"):
        broken = [key for key, holds in _EXPECTED.items() if not holds(found[key])]
        if not broken and found["rank"] >= found["world_size"]:
            broken = ["rank"]
    if broken:
        raise InvalidInputError(
            f"{name}: got a state whose {_listed(broken)} cannot be; expected what Reducer.state_dict() returned; "
            f"{DAMAGED}"
        )
    return found


def is_count(value: object) -> bool:
    """Return whether a value is a whole number that fits into 63 bits."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(0 <= value < 1 << 63)


def _is_names(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value)


def _is_arrays(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) and _is_array(value[key]) for key in value)


def _is_array(value: object) -> bool:
    try:
        return np.asarray(value).dtype.kind == "f"
    except (ValueError, TypeError, RuntimeError):  # not rectangular, or a tensor that is not in host memory
        return False


_EXPECTED: Mapping[str, Callable[[object], bool]] = {
    "world_size": is_count,
    "rank": is_count,
    "step": is_count,
    "order": lambda value: value is None or _is_names(value),
    "bucket_bytes": lambda value: is_count(value) and value != 0,
    "residuals": _is_arrays,
    "velocities": _is_arrays,
}


def _shapes(arrays: Mapping[str, Array]) -> dict[str, tuple[int, ...]]:
    return {name: np.shape(array) for name, array in arrays.items()}


def _equal(a: object, b: object) -> bool:
    try:
        return bool(a == b)
    except Exception:  # arrays have no one answer
        return False


def _listed(names: Sequence[str]) -> str:
    if not names:
        return "nothing"
    return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
