"""`REDUCER`: the state dict of a `Reducer`, and the checks against the tensors of the reducer that loads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple
from typing import Any

import numpy as np

from sparsecomm.checks import to_float
from sparsecomm.errors import InvalidInputError, listed
from sparsecomm.primitives.costs import Link
from sparsecomm.reducer.connection import Buckets, Connection
from sparsecomm.states.loading import as_float, reading
from sparsecomm.states.schema import Schema, StateDict, are_arrays, common, is_count, is_list, is_positive, summed
from sparsecomm.tensors.arrays import Array
from sparsecomm.tensors.interop import TensorSpec
from sparsecomm.tuning.profile import KnownCosts, measured

_LINKS = ("link", "node")  # between nodes, and inside a node
_ADVICE = "build the same model with the same settings (velocities require momentum), or rename its entries"


def _is_costs(value: Any, _: object) -> bool:
    return value is None or (_is_link(value["link"]) and (value["node"] is None or _is_link(value["node"])))


def _is_link(value: Any) -> bool:
    return is_list(value) and len(value) == 3 and all(0 < to_float(each) < 1e9 for each in value)


REDUCER = Schema(
    "Reducer",
    3,
    {
        "residuals": summed(),
        "velocities": summed(),
        "units": common("arrays of unsigned integers by name", are_arrays("u")),
        "units_lag": common("True or False", lambda value, _: isinstance(value, bool)),
        "step": common("a number of steps", is_count),
        "bucket_bytes": common("a number of bytes, at least 1", is_positive),
        "costs": common(
            "measured links, or None", _is_costs, lambda old, _, size: old[0]["costs"] if size == len(old) else None
        ),
    },
    "begin without it: residuals are then zero",
    lambda state: {"moments": {}, **state, "units": {}, "units_lag": False},  # moments: of optimizers
)


def fields_of(connection: Connection, step: int) -> StateDict:
    """Return the fields of a reducer's state, and clear the caches of algorithms."""
    buckets, known = connection.buckets, connection.queue.measured
    residuals, velocities, units = buckets.to_host()
    for plan in (bucket.last_plan for bucket in buckets.all):
        if plan is not None:
            plan.comm.cache.clear()
    costs = None  # alpha, beta and gap of each link, if the ranks have measured them
    if known is not None:
        links = [(name, getattr(known.costs, name)) for name in _LINKS]
        costs = {name: None if link is None else list(astuple(link)) for name, link in links}
    return {
        "residuals": residuals,
        "velocities": velocities,
        "units": units,
        "units_lag": any(bucket.units_lag for bucket in buckets.all),
        "step": step,
        "bucket_bytes": buckets.bucket_bytes,
        "costs": costs,
    }


def buckets_of(found: Mapping[str, Any], connection: Connection) -> Buckets:
    """Return buckets with the residuals, velocities and units of a state that `REDUCER` has read.

    If it has no units, as one of an older version, they are zeros.
    """
    specs, momentum = connection.specs, connection.settings.momentum
    residuals = read_arrays(found["residuals"], specs, "residuals", _ADVICE, copy=False)
    velocities = read_arrays(found["velocities"], specs if momentum else {}, "velocities", _ADVICE, copy=False)
    buckets = connection.new_buckets(found["bucket_bytes"])
    units: dict[str, Array] = {}
    for name, ours in buckets.arrays()[2].items():
        saved = np.asarray(found["units"].get(name) if found["units"] else np.zeros(specs[name].shape, ours.dtype))
        if saved.shape != specs[name].shape or saved.dtype != ours.dtype:
            raise InvalidInputError(
                f"state: units[{name!r}] are {saved.dtype} of shape {saved.shape}; expected {ours.dtype} of shape "
                f"{specs[name].shape}"
            )
        highest = 254 if ours.dtype == np.uint8 else 2046
        if saved.any() and not 1 <= saved.min() <= saved.max() <= highest:
            raise InvalidInputError(f"state: units[{name!r}]: expected exponents from 1 to {highest}")
        units[name] = saved.reshape(-1)
    buckets.fill(residuals, velocities, units, units_lag=found["units_lag"])
    return buckets


def measured_costs(costs: Mapping[str, Any] | None) -> KnownCosts | None:
    """Return the measured costs of a state, or ``None``."""
    if costs is None:
        return None
    link, node = (None if (numbers := costs[name]) is None else Link(*map(float, numbers)) for name in _LINKS)
    return measured(link, node)


def read_arrays(
    arrays: Any, specs: Mapping[str, TensorSpec], key: str, advice: str, copy: bool = True
) -> dict[str, Array]:
    """Return the arrays that a state has under ``key`` as flat arrays of the accumulator dtype, by name.

    ``specs``: the expected tensors. ``advice``: how to get the expected names, for the error. See `as_float`.
    """
    with reading(key, "arrays by name"):
        missing, unexpected = sorted(specs.keys() - arrays.keys()), sorted(arrays.keys() - specs.keys())
    if missing or unexpected:
        raise InvalidInputError(f"state: {key} lacks {listed(missing)}; unexpected: {listed(unexpected)}; {advice}")
    return {
        name: as_float(arrays[name], f"{key}[{name!r}]", spec.shape, spec.accumulator, copy)
        for name, spec in specs.items()
    }
