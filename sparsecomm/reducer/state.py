"""A reducer's state in checkpoints, and for another number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple
from itertools import islice
from typing import Any, TypeAlias

import numpy as np

from sparsecomm.calls.encoding import checksum
from sparsecomm.calls.loading import DAMAGED, as_float, reading
from sparsecomm.errors import InvalidInputError
from sparsecomm.hints import listed
from sparsecomm.primitives.costs import Link
from sparsecomm.reducer.bucket import TensorSpec
from sparsecomm.tensors.sparse import Array
from sparsecomm.tuning.profile import Used, measured

__all__ = [
    "COMMON",
    "FORMAT",
    "State",
    "StateDict",
    "StateFormat",
    "costs_dict",
    "is_count",
    "measured_costs",
    "prepare",
    "read_arrays",
    "summed",
]

StateDict: TypeAlias = dict[str, Any]  # what `Reducer.state_dict` returns: arrays, numbers, lists and texts
State: TypeAlias = Mapping[str, Any]  # the same, to be loaded

FORMAT = 1
COMMON = ("step", "order", "bucket_bytes", "costs")  # in the states of all ranks
_KINDS = ("residuals", "velocities")
_LINKS = ("link", "node")  # between nodes, and inside
_MAX_SHOWN = 5  # names, or ranks


class StateFormat:
    """What is in the states of one class, each of one rank."""

    def __init__(
        self,
        of: str,
        otherwise: str,
        own: Sequence[str],
        parts: Mapping[str, Callable[[Any, dict[str, Any]], bool]],
        version: int = FORMAT,
    ) -> None:
        """Describe states.

        Args:
            of: the name of the class.
            otherwise: what to do with a state of another version.
            own: keys of what belongs to each rank. All else is the same on all.
            parts: for each key, a function of the value and of the parts before it, that says whether it can be one.
            version: of these states.
        """
        self._version = version
        self._whole, self._otherwise, self._own = f"what {of}.state_dict() returned", otherwise, own
        self._parts: dict[str, Callable[[Any, dict[str, Any]], bool]] = {
            "world_size": lambda value, _: is_count(value),
            "rank": lambda value, found: is_count(value) and value < found["world_size"],
            **parts,
        }

    def read(self, state: object) -> dict[str, Any]:
        """Return the parts of a state, each read once.

        Raises:
            InvalidInputError: a part is missing, or cannot be one.
        """
        whole = self._whole
        with reading("it", whole):
            if not isinstance(state, Mapping) or any(key not in state for key in ("format", *self._parts)):
                raise InvalidInputError(f"state: got {type(state).__name__}; expected {whole}")
            version = state["format"]
            if not (is_count(version) and version == self._version):
                raise InvalidInputError(
                    f"state: got format {version!r:.80}; this version of sparsecomm reads {self._version}; load it "
                    f"with the version that saved it, or {self._otherwise}"
                )
        found: dict[str, Any] = {"format": version}
        for key, can_be in self._parts.items():
            with reading(key, whole):
                value = state[key]
                found[key] = dict(value) if isinstance(value, Mapping) else value
                if not can_be(found[key], found):
                    raise InvalidInputError(f"state: its {key!r} cannot be; expected {whole}; {DAMAGED}")
        return found

    def read_on(self, state: object, rank: int, world_size: int) -> dict[str, Any]:
        """Do as `read`, of a state that must be that of ``rank`` of ``world_size`` ranks."""
        found = self.read(state)
        if found["world_size"] != world_size:
            raise InvalidInputError(
                f"the state is of {found['world_size']} ranks, and this is one of {world_size}; "
                "sparsecomm.reshard(states, rank, size) makes states for another number of ranks from all the old ones"
            )
        if found["rank"] != rank:
            raise InvalidInputError(
                f"the state is that of rank {found['rank']}; each rank loads its own, or that which sparsecomm.reshard "
                "made for it"
            )
        return found

    def of_all_ranks(self, states: Iterable[State], rank: int, size: int) -> tuple[list[dict[str, Any]], StateDict]:
        """Return states in order of rank, and what they have in common, as in that of rank ``rank`` of ``size``.

        Raises:
            InvalidInputError: states are missing, are there twice, or were not saved together.
        """
        by_rank: dict[int, dict[str, Any]] = {}
        for state in states:
            found = {**(state if isinstance(state, Mapping) else {}), **self.read(state)}  # integrations add keys
            if found["rank"] in by_rank:
                raise InvalidInputError(
                    f"states: that of rank {found['rank']} is there twice; expected each rank's once"
                )
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
        common = {key: value for key, value in first.items() if key not in ("rank", *self._own)}
        for key, value in common.items():
            for r, state in by_rank.items():
                if not _alike(state.get(key), value):
                    raise InvalidInputError(
                        f"states: those of ranks {first['rank']} and {r} differ in {key}: {value!r:.80} and "
                        f"{state.get(key)!r:.80}; expected states that were saved together"
                    )
        return [by_rank[r] for r in range(first["world_size"])], {**common, "world_size": size, "rank": rank}


def is_count(value: object) -> bool:
    """Return whether a value is a whole number that fits into 63 bits."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(0 <= value < 1 << 63)


def read_arrays(given: Any, specs: Mapping[str, TensorSpec], key: str, of: str) -> dict[str, Array]:
    """Return new flat arrays, in the accumulator's type, of those in a state.

    Args:
        given: arrays by name, as they are in the state.
        specs: of the tensors whose arrays they must be.
        key: the place of the arrays in the state.
        of: whose names are expected, and how to get them.

    Raises:
        InvalidInputError: they have other names, types or shapes.
    """
    with reading(key, "arrays by name"):
        lacking, others = sorted(specs.keys() - given.keys()), sorted(given.keys() - specs.keys())
    if lacking or others:
        raise InvalidInputError(
            f"{key} of the state lack {listed(lacking, _MAX_SHOWN)} and have {listed(others, _MAX_SHOWN)} besides; "
            f"expected the names of {of}"
        )
    return {
        name: as_float(given[name], f"{key}[{name!r}]", spec.shape, spec.accumulator) for name, spec in specs.items()
    }


# -- of reducers ------------------------------------------------------------------------------------------------------


def _is_names(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value)


def _is_arrays(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(name, str) and np.asarray(value[name]).dtype.kind == "f" for name in value
    )


_REDUCERS = StateFormat(
    "Reducer",
    "begin without it: residuals are then zero",
    _KINDS,
    {
        "step": lambda value, _: is_count(value),
        "order": lambda value, _: value is None or _is_names(value),
        "bucket_bytes": lambda value, _: is_count(value) and value != 0,
        "residuals": lambda value, _: _is_arrays(value),
        "velocities": lambda value, _: _is_arrays(value),
    },
)


def prepare(
    state: State, specs: Mapping[str, TensorSpec], rank: int, world_size: int, momentum: bool
) -> dict[str, Any]:
    """Read a state, which must be that of a reducer of tensors ``specs`` on ``rank`` of ``world_size``.

    Returns:
        Its parts; arrays are new and flat, and in the accumulator's type.

    Raises:
        InvalidInputError: it is no state, or one of other tensors, another rank or another number of ranks; or its
            arrays cannot be read.
    """
    found = _REDUCERS.read_on(state, rank, world_size)
    of = (
        "this Reducer's tensors, and velocities if it has momentum: build the same model with the same settings, or "
        "rename the entries"
    )
    for kind, expected in zip(_KINDS, (specs, specs if momentum else {}), strict=True):
        found[kind] = read_arrays(found[kind], expected, kind, of)
    if found["order"] is not None:
        found["order"] = [str(name) for name in found["order"]]
        if sorted(found["order"]) != sorted(specs):
            raise InvalidInputError("the state's order has other names than its residuals")
    with reading("costs", "links that were measured, or None"):
        costs = _measured(state.get("costs"))
    return {**found, "step": int(found["step"]), "bucket_bytes": int(found["bucket_bytes"]), "costs": costs}


CostsDict: TypeAlias = dict[str, "list[float] | None"]  # of each link: alpha, beta and gap


def costs_dict(used: Used | None) -> CostsDict | None:
    """Return what a state holds of the costs that ranks have measured; ``None``: they have not."""
    if used is None:
        return None
    links = [(name, getattr(used.costs, name)) for name in _LINKS]
    return {name: None if link is None else list(astuple(link)) for name, link in links}


def _measured(value: Any) -> CostsDict | None:
    """Return what `costs_dict` has returned, of what a state holds."""
    if value is None:
        return None
    found = {name: None if value[name] is None else [float(each) for each in value[name]] for name in _LINKS}
    if not found["link"] or not all(
        len(each) == 3 and 0 < min(each) <= max(each) < 1e9 for each in found.values() if each
    ):
        raise InvalidInputError(f"state: its 'costs' cannot be: {value!r:.80}; {DAMAGED}")
    return found


def measured_costs(found: CostsDict) -> Used:
    """Return the costs of which `costs_dict` has returned the links."""
    link, node = (None if (numbers := found[name]) is None else Link(*numbers) for name in _LINKS)
    return measured(link, node)


def summed(states: Sequence[State], rank: int, size: int) -> StateDict:
    """Return the state of rank ``rank`` of ``size`` ranks, of the states of reducers: see `sparsecomm.reshard`.

    Raises:
        InvalidInputError: states are missing, are there twice, or do not belong together.
    """
    by_rank, common = _REDUCERS.of_all_ranks(states, rank, size)
    common["costs"] = common.get("costs") if size == len(by_rank) else None
    for kind in _KINDS:
        each = [{name: np.asarray(array) for name, array in state[kind].items()} for state in by_rank]
        for r, arrays in enumerate(each):
            if {n: a.shape for n, a in arrays.items()} != {n: a.shape for n, a in each[0].items()}:
                raise InvalidInputError(f"states: rank {r}'s names differ from rank 0's, or shapes")
        common[kind] = {name: np.zeros(array.shape, array.dtype) for name, array in each[0].items()}
        for arrays in each[rank::size]:
            for name, array in arrays.items():
                common[kind][name] += array
    return common


def _alike(a: object, b: object) -> bool:
    with suppress(Exception):  # arrays have no one answer
        if a == b:
            return True
    with suppress(InvalidInputError):  # what an integration adds may be anything
        return checksum(a) == checksum(b)
    return False
