"""`REDUCER`: the state dict of a `Reducer`, and the checks against the tensors of the reducer that loads it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import astuple
from typing import Any

import numpy as np

from sparsecomm.backends import default_float_mode
from sparsecomm.backends.adamw import unit_dtype
from sparsecomm.checks import to_float
from sparsecomm.errors import InvalidInputError, listed
from sparsecomm.primitives.costs import Link
from sparsecomm.reducer.bucket import Contents
from sparsecomm.reducer.connection import Buckets, Connection
from sparsecomm.states.loading import DAMAGED, OtherPartsError, as_float, reading
from sparsecomm.states.schema import Schema, StateDict, are_arrays, common, is_count, is_list, is_positive, per_rank
from sparsecomm.tensors.arrays import Array
from sparsecomm.tensors.interop import TensorSpec, to_host
from sparsecomm.tuning.profile import KnownCosts, measured

_LINKS = ("link", "node")  # between nodes, and inside a node
_ADVICE = "build the same model with the same settings (velocities require momentum), or rename its entries"


def _is_costs(value: Any, _: object) -> bool:
    return value is None or (_is_link(value["link"]) and (value["node"] is None or _is_link(value["node"])))


def _is_link(value: Any) -> bool:
    return is_list(value) and len(value) == 3 and all(0 < to_float(number) < 1e9 for number in value)


def _parts(state: StateDict, key: str) -> dict[str, tuple[tuple[int, ...], int, Array]]:
    """Return by name the shape of the whole tensor, the index of the state's first element, and its elements."""
    arrays, slices = {name: np.asarray(array) for name, array in state[key].items()}, state["slices"]
    if slices is None:
        return {name: (array.shape, 0, array.reshape(-1)) for name, array in arrays.items()}
    return {name: (tuple(slices[name]["shape"]), slices[name]["part"][0], array) for name, array in arrays.items()}


def _sums(key: str) -> Callable[[list[StateDict], int, int], dict[str, Array]]:
    """Return a function of `Field.reshard` that preserves the sum of arrays over all ranks."""

    @default_float_mode
    def reshard(old: list[StateDict], rank: int, size: int) -> dict[str, Array]:
        by_rank = [_parts(state, key) for state in old]
        shapes = {name: shape for name, (shape, _, _) in by_rank[0].items()}
        for other, own in enumerate(by_rank):
            if {name: shape for name, (shape, _, _) in own.items()} != shapes:
                raise InvalidInputError(f"states: names or shapes of arrays differ between ranks 0 and {other}")
        sums = {name: np.zeros(shape, by_rank[0][name][2].dtype) for name, shape in shapes.items()}
        for own in by_rank[rank::size]:
            for name, (_, begin, array) in own.items():
                sums[name].reshape(-1)[begin : begin + len(array)] += array
        return sums

    return reshard


def _unsummed(old: list[StateDict], rank: int, size: int) -> dict[str, list[Array]]:
    sums: dict[str, list[Array]] = {}
    for state in old[rank::size]:
        for name, arrays in state["unsummed"].items():
            totals = sums.setdefault(name, [np.zeros_like(array) for array in arrays])
            for total, array in zip(totals, arrays, strict=True):
                total += array
    return sums


def _units(old: list[StateDict], rank: int, size: int) -> dict[str, Array]:
    units: dict[str, Array] = {}
    if old[0]["slices"] is None:
        units = old[0]["units"]
        return units
    for state in old:
        for name, entry in state["slices"].items():
            if entry["units"] is not None:
                own = np.asarray(entry["units"])
                units.setdefault(name, np.zeros(entry["shape"], own.dtype)).reshape(-1)[slice(*entry["part"])] = own
    for name, entry in old[0]["slices"].items() if units else ():  # zeros for those that have not begun
        dtype = unit_dtype(np.asarray(old[0]["residuals"][name]).dtype)
        units.setdefault(name, np.zeros(entry["shape"], dtype))
    return units


def _are_slices(value: Any, _: object) -> bool:
    def is_slice(entry: Mapping[str, Any]) -> bool:
        (begin, end), shape, units = entry["part"], entry["shape"], entry["units"]
        are_counts = all(map(is_count, (begin, end, *shape)))
        return are_counts and begin <= end <= math.prod(shape) and (units is None or len(units) == end - begin)

    return value is None or all(map(is_slice, value.values()))


REDUCER = Schema(
    "Reducer",
    1,
    {
        # With nodes, by name: this rank's part of the tensor, the tensor's shape, and the units of the part.
        "slices": per_rank("parts of tensors by name, or None", _are_slices, lambda *_: None),
        "residuals": per_rank("arrays of floats by name", are_arrays("f"), _sums("residuals")),
        "velocities": per_rank("arrays of floats by name", are_arrays("f"), _sums("velocities")),
        # See `Bucket.unsummed`: for each name a residual, and with momentum a velocity.
        "unsummed": per_rank("lists of arrays by name", lambda value, _: isinstance(value, dict), _unsummed),
        "units": common("arrays of unsigned integers by name", are_arrays("u"), _units),
        "units_lag": common("True or False", lambda value, _: isinstance(value, bool)),
        "step": common("a number of steps", is_count),
        "bucket_bytes": common("a number of bytes, at least 1", is_positive),
        "costs": common(
            "measured links, or None", _is_costs, lambda old, _, size: old[0]["costs"] if size == len(old) else None
        ),
    },
    "begin without it: residuals are then zero",
)


def fields_of(connection: Connection, step: int) -> StateDict:
    """Return the fields of a reducer's state, and clear the caches of algorithms."""
    buckets, known_costs = connection.buckets, connection.queue.plans.costs
    for plan in (bucket.last_plan for bucket in buckets.all):
        if plan is not None:
            plan.comm.cache.clear()
    costs = None  # alpha, beta and gap of each link, if the ranks have measured them
    if known_costs is not None:
        links = [(name, getattr(known_costs.costs, name)) for name in _LINKS]
        costs = {name: None if link is None else list(astuple(link)) for name, link in links}
    shapes = {name: spec.shape for name, spec in connection.specs.items()}
    fields: StateDict = {"slices": None if buckets.nodes is None else {}}
    fields |= {"residuals": {}, "velocities": {}, "unsummed": {}, "units": {}}
    with buckets.on_current_stream():
        for name, (part, state, exponents, unsummed) in buckets.contents().items():
            arrays = dict(zip(("residuals", "velocities"), map(to_host, state), strict=False))
            if unsummed:
                fields["unsummed"][name] = [to_host(array).reshape(shapes[name]) for array in unsummed]
            if fields["slices"] is not None:
                units = None if exponents is None else to_host(exponents)
                fields["slices"][name] = {"part": list(part), "shape": list(shapes[name]), "units": units}
            else:
                units = buckets.by_name[name].exponents_of.get(name)  # zeros if they have not begun
                arrays |= {} if units is None else {"units": to_host(units)}
                arrays = {key: array.reshape(shapes[name]) for key, array in arrays.items()}
            for key, array in arrays.items():
                fields[key][name] = array
    return fields | {
        "units_lag": any(bucket.units_lag for bucket in buckets.all),
        "step": step,
        "bucket_bytes": buckets.bucket_bytes,
        "costs": costs,
    }


def buckets_of(fields: Mapping[str, Any], connection: Connection) -> Buckets:
    """Return buckets with the residuals, velocities and units of a state that `REDUCER` or an extension has read."""
    specs, momentum, slices = connection.specs, connection.settings.momentum, fields["slices"]
    parts = {name: (0, spec.size) for name, spec in specs.items()}
    if slices is not None:
        with reading("slices", "a part of each tensor"):
            parts = {name: tuple(slices[name]["part"]) for name in specs}
    shapes = {} if slices is None else {name: (end - begin,) for name, (begin, end) in parts.items()}
    residuals = read_arrays(fields["residuals"], specs, "residuals", _ADVICE, copy=False, shapes=shapes)
    moving = specs if momentum else {}
    velocities = read_arrays(fields["velocities"], moving, "velocities", _ADVICE, copy=False, shapes=shapes)
    buckets = connection.new_buckets(fields["bucket_bytes"])
    contents = {}
    for name, spec in specs.items():
        exponents, units = buckets.by_name[name].exponents_of.get(name), None
        saved = fields["units"].get(name) if slices is None else slices[name]["units"]
        if exponents is not None and saved is not None:
            units = _checked_units(name, saved, exponents.dtype, parts[name])
            if slices is None and not units.any():
                units = None  # they have not begun
        if units is None and exponents is not None and spec.size and name in fields.get("moments", ()):
            raise InvalidInputError(f"state: it has moments of {name} and no units; {DAMAGED}")
        own = buckets.by_name[name].part_in_slice(name)
        if slices is not None and units is not None and parts[name] != own:
            raise OtherPartsError(
                f"state: it has units of elements {parts[name][0]} to {parts[name][1]} of {name}, and this rank keeps "
                f"{own[0]} to {own[1]}; convert the states of all ranks with sparsecomm.reshard(states, rank, size)"
            )
        state = [residuals[name], *([velocities[name]] if momentum else [])]
        saved, key = fields["unsummed"].get(name, [])[: len(state)], f"unsummed[{name!r}]"
        unsummed = [as_float(array, key, spec.shape, spec.accumulator) for array in saved]
        contents[name] = Contents(parts[name], state, units, unsummed)
    buckets.fill(contents, units_lag=fields["units_lag"])
    return buckets


def _checked_units(name: str, saved: Any, dtype: Any, part: tuple[int, int]) -> Array:
    """Return the exponents of the units of a tensor's part as a flat array."""
    units = np.asarray(saved).reshape(-1)
    if len(units) != part[1] - part[0] or units.dtype != dtype:
        raise InvalidInputError(
            f"state: units[{name!r}] are {units.dtype} of {len(units)} elements; expected {dtype} of "
            f"{part[1] - part[0]} elements"
        )
    highest = 254 if units.dtype == np.uint8 else 2046
    if units.any() and not 1 <= units.min() <= units.max() <= highest:
        raise InvalidInputError(f"state: units[{name!r}]: expected exponents from 1 to {highest}; {DAMAGED}")
    return units


def measured_costs(costs: Mapping[str, Any] | None) -> KnownCosts | None:
    """Return the measured costs of a state, or ``None``."""
    if costs is None:
        return None
    link, node = (None if (numbers := costs[name]) is None else Link(*map(float, numbers)) for name in _LINKS)
    return measured(link, node)


def read_arrays(
    arrays: Any,
    specs: Mapping[str, TensorSpec],
    key: str,
    advice: str,
    copy: bool = True,
    shapes: Mapping[str, tuple[int, ...]] = {},
) -> dict[str, Array]:
    """Return the arrays that a state has under ``key`` as flat arrays of the accumulator dtype, by name.

    ``specs``: the expected tensors; ``shapes``: shapes of parts, by name. ``advice``: how to get the expected
    names, for the error. See `as_float`.
    """
    with reading(key, "arrays by name"):
        missing, unexpected = sorted(specs.keys() - arrays.keys()), sorted(arrays.keys() - specs.keys())
    if missing or unexpected:
        raise InvalidInputError(f"state: {key} lacks {listed(missing)}; unexpected: {listed(unexpected)}; {advice}")
    return {
        name: as_float(arrays[name], f"{key}[{name!r}]", shapes.get(name, spec.shape), spec.accumulator, copy)
        for name, spec in specs.items()
    }
