"""`Schema`: declares, reads and checks the state dict of a class. `reshard` makes states for another world size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np

from sparsecomm.checks import quote, to_int
from sparsecomm.errors import InvalidInputError
from sparsecomm.states.loading import DAMAGED, check_equal, compared_text, reading
from sparsecomm.transport import Transport

StateDict: TypeAlias = dict[str, Any]  # the return type of ``state_dict``
State: TypeAlias = Mapping[str, Any]  # the argument of ``load_state_dict``
IsValid: TypeAlias = Callable[[Any, Mapping[str, Any]], bool]  # (value, the fields before it) -> whether it is valid
Reshard: TypeAlias = Callable[[list[StateDict], int, int], Any]  # (states of the old ranks, new rank, new world size)


@dataclass(frozen=True)
class Field:
    """An entry of a state dict. Create one by `common` or `per_rank`."""

    expected: str  # describes valid values, for error messages
    is_valid: IsValid  # checks a value. Any exception that it raises counts as an invalid value
    common: bool = False  # all ranks have the same value, which is compared when states are loaded or resharded
    reshard: Reshard | None = None  # returns the value for a new rank; None keeps the value of the old rank 0


def common(expected: str, is_valid: IsValid, reshard: Reshard | None = None) -> Field:
    """Return a field whose value is the same on all ranks."""
    return Field(expected, is_valid, common=True, reshard=reshard)


def per_rank(expected: str, is_valid: IsValid, reshard: Reshard) -> Field:
    """Return a field whose value belongs to one rank."""
    return Field(expected, is_valid, reshard=reshard)


class Schema:
    """The layout of a class's state dict. Each rank has its own state dict."""

    _by_name: ClassVar[dict[str, Schema]] = {}

    def __init__(self, name: str, version: int, fields: Mapping[str, Field], advice: str) -> None:
        """Declare the state dict of a class.

        Args:
            name: the name of the class.
            fields: the fields by key, in the order in which they are read. "format", "world_size" and "rank" are added.
            version: the version of the format. Increase it when a field changes its meaning.
            advice: what the user can do with a state of another version, for the error.
        """
        self.name, self._version, self._advice = name, version, advice
        self.format, self.fields = f"{name} {version}", dict(fields)
        self.keys = [key for key, field in fields.items() if field.common]  # of the common fields
        Schema._by_name[name] = self

    def extended(self, name: str, fields: Mapping[str, Field]) -> Schema:
        """Return the schema of a class whose state dict has more fields."""
        return Schema(name, self._version, {**self.fields, **fields}, self._advice)

    def state(self, transport: Transport, fields: Mapping[str, Any]) -> StateDict:
        return {"format": self.format, "world_size": transport.size, "rank": transport.rank, **fields}

    def read(self, state: object) -> StateDict:
        """Return the entries of a state dict, each read once and checked. NumPy scalars become Python numbers."""
        expected = f"the dictionary that {self.name}.state_dict() returned"
        with reading("it", expected):
            if not isinstance(state, Mapping) or "format" not in state:
                raise InvalidInputError(f"state: got {type(state).__name__}; expected {expected}")
            if not isinstance(state["format"], str) or state["format"] != self.format:
                raise InvalidInputError(
                    f"state: got format {quote(state['format'])}; this version of sparsecomm reads {self.format!r}. "
                    f"Load it with the class and the version that saved it, or {self._advice}"
                )
            if missing := [key for key in (*_HEADER, *self.fields) if key not in state]:
                raise InvalidInputError(f"state: {missing[0]!r} is missing; expected {expected}; {DAMAGED}")
        entries: StateDict = {"format": self.format}
        for key, field in (*_HEADER.items(), *self.fields.items()):
            with reading(key, field.expected):
                value = state[key]
                value = dict(value) if isinstance(value, Mapping) else value
                entries[key] = value.item() if isinstance(value, np.generic) else value
                if not field.is_valid(entries[key], entries):
                    raise InvalidInputError(f"state[{key!r}] is {quote(value)}; expected {field.expected}; {DAMAGED}")
        return entries

    def read_own(self, state: object, transport: Transport) -> StateDict:
        """Return the entries of a state dict, which must be this rank's: see `read`."""
        entries = self.read(state)
        size, rank = entries["world_size"], entries["rank"]
        if size != transport.size:
            raise InvalidInputError(
                f"state['world_size'] is {size}, but this job has {transport.size} ranks; convert the states of all "
                "old ranks with sparsecomm.reshard(states, rank, size)"
            )
        if rank != transport.rank:
            raise InvalidInputError(
                f"state['rank'] is {rank}; pass the state of rank {transport.rank}, or one that sparsecomm.reshard "
                "made for it"
            )
        return entries

    def reshard(self, states: Iterable[object], rank: int, size: int) -> StateDict:
        """Return the state dict of rank ``rank`` of ``size`` ranks: see the function `reshard`."""
        old = self._sort_by_rank(states)
        if not (is_count(rank) and is_count(size) and rank < size):
            raise InvalidInputError(f"rank={quote(rank)}, size={quote(size)}: expected a rank from 0 to size - 1")
        new: StateDict = {"format": self.format, "world_size": int(size), "rank": int(rank)}
        for key, field in self.fields.items():
            values = [state[key] for state in old]
            if field.common and (error := check_equal(key, [compared_text(value) for value in values])) is not None:
                raise error
            new[key] = values[0] if field.reshard is None else field.reshard(old, rank, size)
        return new

    def _sort_by_rank(self, states: Iterable[object]) -> list[StateDict]:
        by_rank: dict[int, StateDict] = {}
        for state in states:
            entries = self.read(state)
            rank = entries["rank"]
            if rank in by_rank:
                raise InvalidInputError(f"states: rank {rank} appears twice; pass each rank's state exactly once")
            by_rank[rank] = entries
        sizes = sorted({entries["world_size"] for entries in by_rank.values()})
        if len(sizes) > 1:
            raise InvalidInputError(
                f"states: they have world sizes {sizes[0]} and {sizes[1]}; pass states that all ranks saved together"
            )
        if len(by_rank) < sizes[0]:
            missing = next(rank for rank in range(sizes[0]) if rank not in by_rank)
            raise InvalidInputError(
                f"states: got {len(by_rank)} of {sizes[0]}; rank {missing} is missing; pass the states of all old ranks"
            )
        return [by_rank[rank] for rank in range(sizes[0])]


def is_state(value: object) -> bool:
    """Return whether a value is a state dict of a declared class, of any version."""
    return isinstance(value, Mapping) and _schema_of(value) is not None


def check(state: State) -> None:
    """Check a state dict if it belongs to a declared class."""
    if (schema := _schema_of(state)) is not None:
        schema.read(state)


def reshard(states: Iterable[State], rank: int, size: int) -> StateDict:
    """Return a state for rank ``rank`` of ``size`` ranks, made from the states of all ranks of another world size.

    New rank r receives the sum of the residuals of the old ranks r, r + size, r + 2 size, ..., or zeros if there is no
    old rank r. So the sum over all ranks does not change. Values that all ranks share stay the same. With
    `LocalSteps` and ``by_speed``, all new ranks take the same number of local steps until their speeds are measured.

    Args:
        states: the values that ``state_dict`` returned on every old rank, in any order. They do not contain local
            parameters: with `LocalSteps`, set the local parameters to the global ones on the new ranks.
        rank, size: the rank and the world size of the new job.

    Raises:
        InvalidInputError: states are missing, appear twice, are damaged, or were not saved together.
    """
    expected = "the values that state_dict() returned on all old ranks"
    with reading("states", expected):
        old = list(states)
        schema = _schema_of(old[0]) if old else None
        if schema is None:
            got = quote(old[0]) if old else "none"
            raise InvalidInputError(f"states: got {got}; expected {expected}")
        return schema.reshard(old, rank, size)


def _schema_of(state: object) -> Schema | None:
    """Return the schema of the class that a state belongs to, whatever its version."""
    with suppress(Exception):  # a state may be any object
        name, _, version = str(state["format"]).rpartition(" ")  # type: ignore[index]
        return Schema._by_name.get(name) if version.isdecimal() else None
    return None


def is_count(value: object, _: object = None) -> bool:
    """Return whether a value is an integer from 0 to 2^63 - 1."""
    return to_int(value) is not None


def is_positive(value: object, _: object = None) -> bool:
    """Return whether a value is an integer from 1 to 2^63 - 1."""
    return to_int(value, 1) is not None


def is_list(value: object, _: object = None) -> bool:
    """Return whether a value is a list or a tuple."""
    return isinstance(value, (list, tuple))


def are_arrays(kind: str) -> IsValid:
    """Return a check that a value has arrays by name, with dtypes of this kind."""
    return lambda value, _: (
        isinstance(value, dict)
        and all(isinstance(name, str) and np.asarray(array).dtype.kind == kind for name, array in value.items())
    )


_HEADER = {
    "world_size": Field("at least 1", is_positive),
    "rank": Field("a rank below world_size", lambda value, fields: is_count(value) and value < fields["world_size"]),
}
