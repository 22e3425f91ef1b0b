"""Declare what a class saves: the fields of its state dict, and how the ranks' values of each field relate.

A class that has ``state_dict`` declares a `Schema` with a `Field` for each entry. The schema then reads and checks a
state, says what the ranks must compare, and makes states for another world size (`reshard`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np

from sparsecomm.checks import quote
from sparsecomm.errors import InvalidInputError, listed
from sparsecomm.states.loading import DAMAGED, as_float, reading
from sparsecomm.states.values import checksum
from sparsecomm.tensors.arrays import Array
from sparsecomm.tensors.dtypes import DType
from sparsecomm.transport import Transport

__all__ = [
    "Field",
    "Schema",
    "Spec",
    "State",
    "StateDict",
    "check",
    "common",
    "is_arrays",
    "is_count",
    "is_state",
    "per_rank",
    "read_arrays",
    "reshard",
    "summed",
]

StateDict: TypeAlias = dict[str, Any]  # what ``state_dict`` returns
State: TypeAlias = Mapping[str, Any]  # what ``load_state_dict`` takes
Valid: TypeAlias = Callable[[Any, Mapping[str, Any]], bool]  # (value, the fields before it) -> whether it can be loaded
Reshard: TypeAlias = Callable[[list[Any], int, int], Any]  # (values by old rank, new rank, new world size) -> value

_MAX_LISTED = 5


@dataclass(frozen=True)
class Field:
    """An entry of a state dict. Made by `common`, `per_rank` and `summed`.

    Attributes:
        expected: describes valid values, for error messages.
        valid: see `Valid`.
        common: whether all ranks have the same value. It is compared when a state is loaded or resharded.
        reshard: see `Reshard`; ``None``: the value stays.
    """

    expected: str
    valid: Valid
    common: bool
    reshard: Reshard | None


def common(expected: str, valid: Valid, reshard: Reshard | None = None) -> Field:
    """Return a field that is the same on all ranks."""
    return Field(expected, valid, True, reshard)


def per_rank(expected: str, valid: Valid, reshard: Reshard) -> Field:
    """Return a field that differs between ranks."""
    return Field(expected, valid, False, reshard)


def summed(expected: str) -> Field:
    """Return a field of arrays by name whose sum over all ranks is preserved by `reshard`."""
    return Field(expected, lambda value, _: is_arrays(value), False, _share_out)


class Schema:
    """The state dict of a class, one per rank.

    Attributes:
        name: of the class.
        fields: by key, in the order in which they are read.
        keys: of the fields that all ranks have in common.
    """

    _by_name: ClassVar[dict[str, Schema]] = {}

    def __init__(self, name: str, version: int, fields: Mapping[str, Field], advice: str) -> None:
        """Declare a state dict.

        Args:
            name: of the class.
            version: of the format. It is raised when a field changes its meaning.
            fields: by key. "format", "world_size" and "rank" are added.
            advice: what to do with a state of another version.
        """
        self.name, self.fields, self._version, self._advice = name, dict(fields), version, advice
        self.keys = [key for key, field in fields.items() if field.common]
        self.format = f"{name} {version}"
        Schema._by_name[name] = self

    def extended(self, name: str, fields: Mapping[str, Field]) -> Schema:
        """Return the schema of a class that saves more fields."""
        return Schema(name, self._version, {**self.fields, **fields}, self._advice)

    def state(self, transport: Transport, fields: Mapping[str, Any]) -> StateDict:
        """Return this rank's state dict."""
        return {"format": self.format, "world_size": transport.size, "rank": transport.rank, **fields}

    def read(self, state: object) -> StateDict:
        """Return the entries of a state, each read once and checked.

        Raises:
            InvalidInputError: an entry is missing or invalid, or the state has another format.
        """
        expected = f"the dictionary that {self.name}.state_dict() returned"
        with reading("it", expected):
            if not isinstance(state, Mapping) or "format" not in state:
                raise InvalidInputError(f"state: got {type(state).__name__}; expected {expected}")
            if not isinstance(state["format"], str) or state["format"] != self.format:
                raise InvalidInputError(
                    f"state: got format {quote(state['format'])}; this version of sparsecomm reads {self.format!r}. "
                    f"Load it with the class and the version that saved it, or {self._advice}"
                )
            if missing := [key for key in ("world_size", "rank", *self.fields) if key not in state]:
                raise InvalidInputError(f"state: {missing[0]!r} is missing; expected {expected}; {DAMAGED}")
            size, rank = state["world_size"], state["rank"]
        if not (is_count(size) and size > 0):
            raise InvalidInputError(f"state['world_size'] is {quote(size)}; expected at least 1; {DAMAGED}")
        if not (is_count(rank) and rank < size):
            raise InvalidInputError(
                f"state['rank'] is {quote(rank)}; expected 0 to {size - 1} (world size {size}); {DAMAGED}"
            )
        found: StateDict = {"format": self.format, "world_size": int(size), "rank": int(rank)}
        for key, field in self.fields.items():
            with reading(key, field.expected):
                value = state[key]
                found[key] = dict(value) if isinstance(value, Mapping) else value
                if not field.valid(found[key], found):
                    raise InvalidInputError(f"state[{key!r}] is {quote(value)}; expected {field.expected}; {DAMAGED}")
        return found

    def read_own(self, state: object, transport: Transport) -> StateDict:
        """Return the entries of a state that must be this rank's.

        Raises:
            InvalidInputError: as `read`, or it is a state of another rank or world size.
        """
        found = self.read(state)
        size, rank = found["world_size"], found["rank"]
        if size != transport.size:
            raise InvalidInputError(
                f"the state has world size {size}, and this job {transport.size}; "
                "sparsecomm.reshard(states, rank, size) converts the states of all old ranks"
            )
        if rank != transport.rank:
            raise InvalidInputError(
                f"this is the state of rank {rank}; pass the state of rank {transport.rank}, or one that "
                "sparsecomm.reshard made for it"
            )
        return found

    def reshard(self, states: Iterable[object], rank: int, size: int) -> StateDict:
        """Return the state of ``rank`` of ``size`` ranks: see the function `reshard`.

        Raises:
            InvalidInputError: states are missing, appear twice, or were not saved together.
        """
        by_rank = self._by_rank(states)
        if not (is_count(rank) and is_count(size) and rank < size):
            raise InvalidInputError(f"rank={quote(rank)}, size={quote(size)}: expected a rank from 0 to size - 1")
        first = by_rank[0]
        made: StateDict = {"format": self.format, "world_size": int(size), "rank": int(rank)}
        for key, field in self.fields.items():
            values = [state[key] for state in by_rank]
            for other, value in enumerate(values):
                if field.common and not _alike(value, first[key]):
                    raise InvalidInputError(
                        f"states: those of ranks 0 and {other} differ in {key}: {quote(first[key])} and "
                        f"{quote(value)}; expected states that were saved together"
                    )
            made[key] = first[key] if field.reshard is None else field.reshard(values, rank, size)
        return made

    def _by_rank(self, states: Iterable[object]) -> list[StateDict]:
        """Return the states of all old ranks, in order of rank."""
        found: dict[int, StateDict] = {}
        for state in states:
            fields = self.read(state)
            if fields["rank"] in found:
                raise InvalidInputError(
                    f"states: rank {fields['rank']} appears twice; pass each rank's state exactly once"
                )
            found[fields["rank"]] = fields
        size = next(iter(found.values()))["world_size"]
        missing = [rank for rank in range(min(size, len(found) + _MAX_LISTED)) if rank not in found]
        if missing or len(found) > size:
            raise InvalidInputError(
                f"states: got {len(found)} of {size}; rank {missing[0] if missing else size} is missing or of another "
                "world size; pass the states of all old ranks"
            )
        for state in found.values():
            if state["world_size"] != size:
                raise InvalidInputError(
                    f"states: they have world sizes {size} and {state['world_size']}; expected states that were saved "
                    "together"
                )
        return [found[rank] for rank in range(size)]


def is_state(value: object) -> bool:
    """Return whether a value is a state dict of a declared schema, of any version."""
    return isinstance(value, Mapping) and _name_of(value) in Schema._by_name


def check(state: State) -> None:
    """Check a state dict, as loading it would.

    Raises:
        InvalidInputError: an entry is missing or invalid.
    """
    Schema._by_name[_name_of(state)].read(state)


def reshard(states: Iterable[State], rank: int, size: int) -> StateDict:
    """Return a state for rank ``rank`` of ``size`` ranks, made from the states of all ranks of another world size.

    New rank r receives the residuals of the old ranks r, r + size, r + 2 size, ..., added up. If there are more new
    ranks than old ones, the others start with zeros. So the sum over all ranks, which still has to be applied, does not
    change. Everything else that is common to all ranks stays. If ranks take local steps by speed, all take the same
    number of steps until the new ranks have been measured.

    Args:
        states: the values that ``state_dict`` returned on every old rank, in any order: of a `Reducer`, `LocalSteps`,
            `SparseAdamW`, or an object of `sparsecomm.torch`. Local parameters are not part of them: with `LocalSteps`,
            set them to the global parameters on the new ranks.
        rank, size: of the new job.

    Raises:
        InvalidInputError: states are missing, appear twice, are damaged, or were not saved together.
    """
    with reading("states", "what state_dict() returned on each rank"):
        each = list(states)
        if not each:
            raise InvalidInputError("states: got none; pass the states of all old ranks")
        names = [_name_of(state) for state in each]
        if unknown := [state for state, name in zip(each, names, strict=True) if name not in Schema._by_name]:
            got = unknown[0].get("format", "a dictionary") if isinstance(unknown[0], Mapping) else type(unknown[0])
            raise InvalidInputError(
                f"states: got {quote(got)}; expected what state_dict() of this version of sparsecomm returned"
            )
        if len(set(names)) > 1:
            raise InvalidInputError(f"states: they are of {' and '.join(sorted(set(names)))}; expected one class")
        return Schema._by_name[names[0]].reshard(each, rank, size)


def _name_of(state: object) -> str:
    """Return the class that a state says it is of, or an empty string."""
    with suppress(Exception):  # a state may be any object
        name, _, version = str(state["format"]).rpartition(" ")  # type: ignore[index]
        return name if version.isdecimal() else ""
    return ""


# -- values -----------------------------------------------------------------------------------------------------------


def is_count(value: object) -> bool:
    """Return whether a value is a non-negative integer below 2^63."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(0 <= value < 1 << 63)


def is_arrays(value: Any) -> bool:
    """Return whether a value is a dictionary from names to arrays of floats."""
    return isinstance(value, dict) and all(
        isinstance(name, str) and np.asarray(array).dtype.kind == "f" for name, array in value.items()
    )


class Spec(Protocol):
    """The shape of a tensor, and the type in which it is summed."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def accumulator(self) -> DType: ...


def read_arrays(given: Any, specs: Mapping[str, Spec], key: str, advice: str) -> dict[str, Array]:
    """Return new flat arrays, in the accumulator's type, of the arrays in a state.

    Args:
        given: arrays by name, as they are in the state.
        specs: of the tensors, by name.
        key: of the arrays in the state.
        advice: how to get the expected names.

    Raises:
        InvalidInputError: they have other names, types or shapes.
    """
    with reading(key, "arrays by name"):
        lacking, others = sorted(specs.keys() - given.keys()), sorted(given.keys() - specs.keys())
    if lacking or others:
        raise InvalidInputError(
            f"state: {key} lacks {listed(lacking, _MAX_LISTED)}; unexpected: {listed(others, _MAX_LISTED)}; {advice}"
        )
    return {
        name: as_float(given[name], f"{key}[{name!r}]", spec.shape, spec.accumulator) for name, spec in specs.items()
    }


def _share_out(by_rank: list[dict[str, Any]], rank: int, size: int) -> dict[str, Array]:
    """Return the sums of the arrays of old ranks ``rank``, ``rank + size``, and so on."""
    arrays = [{name: np.asarray(array) for name, array in its.items()} for its in by_rank]
    shapes = {name: array.shape for name, array in arrays[0].items()}
    for other, its in enumerate(arrays):
        if {name: array.shape for name, array in its.items()} != shapes:
            raise InvalidInputError(f"states: names or shapes of arrays differ between ranks 0 and {other}")
    made = {name: np.zeros(array.shape, array.dtype) for name, array in arrays[0].items()}
    for its in arrays[rank::size]:
        for name, array in its.items():
            made[name] += array
    return made


def _alike(a: object, b: object) -> bool:
    with suppress(Exception):  # comparing arrays gives no single answer
        if a == b:
            return True
    with suppress(InvalidInputError):
        return checksum(a) == checksum(b)
    return False
