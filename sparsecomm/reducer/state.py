"""A reducer's state in checkpoints, and for another number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

import numpy as np

from sparsecomm.calls.encoding import checksum
from sparsecomm.calls.loading import DAMAGED, as_float, reading
from sparsecomm.errors import InvalidInputError
from sparsecomm.hints import listed
from sparsecomm.reducer.layout import TensorSpec
from sparsecomm.tensors.sparse import Array

__all__ = [
    "COMMON",
    "FORMAT",
    "LoadedState",
    "State",
    "StateDict",
    "check_place",
    "is_count",
    "of_all_ranks",
    "prepare",
    "read_parts",
    "summed",
]

StateDict: TypeAlias = dict[str, Any]  # what `Reducer.state_dict` returns: arrays, numbers, lists and texts
State: TypeAlias = Mapping[str, Any]  # the same, to be loaded

FORMAT = 1
COMMON = ("step", "order", "bucket_bytes")  # in the states of all ranks
_KINDS = ("residuals", "velocities")
_MAX_SHOWN = 5  # names, or ranks


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
    found = _read(state)
    check_place(found, rank, world_size)
    arrays: dict[str, dict[str, Array]] = {}
    for kind, expected in zip(_KINDS, (specs, specs if momentum else {}), strict=True):
        given = found[kind]
        lacking, others = sorted(expected.keys() - given.keys()), sorted(given.keys() - expected.keys())
        if lacking or others:
            raise InvalidInputError(
                f"rank {rank}: {kind} of the state lack {listed(lacking, _MAX_SHOWN)} and have "
                f"{listed(others, _MAX_SHOWN)} besides; expected the names of this Reducer's tensors, and velocities "
                "if it has momentum: build the same model with the same settings, or rename the entries"
            )
        arrays[kind] = {
            name: as_float(given[name], f"{kind}[{name!r}]", spec.shape, spec.accumulator)
            for name, spec in expected.items()
        }
    order = None if found["order"] is None else [str(name) for name in found["order"]]
    if order is not None and sorted(order) != sorted(specs):
        raise InvalidInputError(f"rank {rank}: the state's order has other names than its residuals")
    return LoadedState(int(found["step"]), order, int(found["bucket_bytes"]), *(arrays[kind] for kind in _KINDS))


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


# -- for another number of ranks --------------------------------------------------------------------------------------


def summed(states: Sequence[State], rank: int, size: int) -> StateDict:
    """Return the state of rank ``rank`` of ``size`` ranks, of the states of reducers: see `sparsecomm.reshard`.

    Raises:
        InvalidInputError: states are missing, are there twice, or do not belong together.
    """
    by_rank, common = of_all_ranks(states, _read, rank, size)
    first = by_rank[0]
    for r, state in enumerate(by_rank):
        for kind in _KINDS:
            if {n: np.shape(a) for n, a in state[kind].items()} != {n: np.shape(a) for n, a in first[kind].items()}:
                raise InvalidInputError(f"states: rank {r}'s names differ from rank 0's, or shapes")
    mine = by_rank[rank::size]
    for kind in _KINDS:
        common[kind] = {name: _sum(array, [state[kind][name] for state in mine]) for name, array in first[kind].items()}
    return common


def of_all_ranks(
    states: Iterable[State], read: Callable[[Any], dict[str, Any]], rank: int, size: int, own: Sequence[str] = _KINDS
) -> tuple[list[dict[str, Any]], StateDict]:
    """Return states in order of rank, each read by ``read``, and what they have in common, as that of a new rank.

    Args:
        rank, size: of the new rank.
        own: keys of what belongs to each rank.

    Raises:
        InvalidInputError: states are missing, are there twice, or were not saved together.
    """
    by_rank: dict[int, dict[str, Any]] = {}
    for state in states:
        found = {**(state if isinstance(state, Mapping) else {}), **read(state)}  # integrations add keys of theirs
        if found["rank"] in by_rank:
            raise InvalidInputError(f"states: that of rank {found['rank']} is there twice; expected each rank's once")
        by_rank[found["rank"]] = found
    if not (is_count(rank) and is_count(size) and rank < size):
        raise InvalidInputError(f"rank={rank}, size={size}: expected a rank from 0 to size - 1")
    if not by_rank:
        raise InvalidInputError("states: there are none; expected those of all ranks")
    first = by_rank[min(by_rank)]
    missing = list(islice((r for r in range(first["world_size"]) if r not in by_rank), _MAX_SHOWN))
    if missing:
        more = " and others" if first["world_size"] - len(by_rank) > len(missing) else ""
        raise InvalidInputError(f"states: of {first['world_size']} ranks, those of {missing}{more} are missing")
    common = {key: value for key, value in first.items() if key not in ("rank", *own)}
    for key, value in common.items():
        for r, state in by_rank.items():
            if not _alike(state.get(key), value):
                raise InvalidInputError(
                    f"states: those of ranks {first['rank']} and {r} differ in {key}: {value!r:.80} and "
                    f"{state.get(key)!r:.80}; expected states that were saved together"
                )
    return [by_rank[r] for r in range(first["world_size"])], {**common, "world_size": size, "rank": rank}


def _alike(a: object, b: object) -> bool:
    with suppress(Exception):  # arrays have no one answer
        if a == b:
            return True
    with suppress(InvalidInputError):  # what an integration adds may be anything
        return checksum(a) == checksum(b)
    return False


def _sum(like: Array, arrays: Sequence[Array]) -> Array:
    total: Array = np.zeros(np.shape(like), np.asarray(like).dtype)
    for array in arrays:
        total += np.asarray(array)
    return total


# -- reading ----------------------------------------------------------------------------------------------------------


def read_parts(
    state: object, whole: str, parts: Mapping[str, Callable[[Any, dict[str, Any]], bool]], otherwise: str
) -> dict[str, Any]:
    """Return the parts of a state, each read once.

    Args:
        state: as it was given.
        whole: what it should be, in words.
        parts: for each key, a function of the value and of the parts before it, that says whether it can be one.
        otherwise: what to do with a state of another format than this one's.

    Raises:
        InvalidInputError: a part is missing, or cannot be one.
    """
    with reading("it", whole):
        if not isinstance(state, Mapping) or any(key not in state for key in ("format", *parts)):
            raise InvalidInputError(f"state: got {type(state).__name__}; expected {whole}")
        version = state["format"]
        if not (is_count(version) and version == FORMAT):
            raise InvalidInputError(
                f"state: got format {version!r:.80}; this version of sparsecomm reads {FORMAT}; load it with the "
                f"version that saved it, or {otherwise}"
            )
    found: dict[str, Any] = {"format": version}
    for key, can_be in parts.items():
        with reading(key, whole):
            value = state[key]
            found[key] = dict(value) if isinstance(value, Mapping) else value
            if not can_be(found[key], found):
                raise InvalidInputError(f"state: its {key!r} cannot be; expected {whole}; {DAMAGED}")
    return found


def is_count(value: object) -> bool:
    """Return whether a value is a whole number that fits into 63 bits."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(0 <= value < 1 << 63)


def _read(state: object) -> dict[str, Any]:
    whole = "what Reducer.state_dict() returned"
    return read_parts(state, whole, _PARTS, "begin without it: residuals are then zero")


def _is_names(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value)


def _is_arrays(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) and _is_array(value[key]) for key in value)


def _is_array(value: object) -> bool:
    try:
        return np.asarray(value).dtype.kind == "f"
    except (ValueError, TypeError, RuntimeError):  # not rectangular, or a tensor that is not in host memory
        return False


_PARTS: Mapping[str, Callable[[Any, dict[str, Any]], bool]] = {
    "world_size": lambda value, _: is_count(value),
    "rank": lambda value, found: is_count(value) and value < found["world_size"],
    "step": lambda value, _: is_count(value),
    "order": lambda value, _: value is None or _is_names(value),
    "bucket_bytes": lambda value, _: is_count(value) and value != 0,
    "residuals": lambda value, _: _is_arrays(value),
    "velocities": lambda value, _: _is_arrays(value),
}
