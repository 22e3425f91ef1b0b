"""The state dict of a `Reducer`: its fields, and the checks against the tensors of the reducer that loads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple
from typing import Any, TypeAlias

from sparsecomm.checks import to_float
from sparsecomm.errors import InvalidInputError, listed
from sparsecomm.primitives.costs import Link
from sparsecomm.reducer.bucket import TensorSpec
from sparsecomm.states.loading import DAMAGED, as_float, reading
from sparsecomm.states.schema import Schema, StateDict, common, is_count, is_list, is_positive, summed
from sparsecomm.tensors.arrays import Array
from sparsecomm.tuning.profile import KnownCosts, measured

__all__ = ["REDUCER", "costs_dict", "fit", "measured_costs", "read_arrays"]

CostsDict: TypeAlias = dict[str, "list[float] | None"]  # alpha, beta and gap of each link

_LINKS = ("link", "node")  # between nodes, and inside a node
_ADVICE = "build the same model with the same settings (velocities require momentum), or rename its entries"


def _is_order(value: Any, _: object) -> bool:
    return value is None or (is_list(value) and all(isinstance(name, str) for name in value))


def _is_costs(value: Any, _: object) -> bool:
    return value is None or (_is_link(value["link"]) and (value["node"] is None or _is_link(value["node"])))


def _is_link(value: Any) -> bool:
    return is_list(value) and len(value) == 3 and all(0 < to_float(each) < 1e9 for each in value)


REDUCER = Schema(
    "Reducer",
    2,
    {
        "residuals": summed(),
        "velocities": summed(),
        "step": common("a number of steps", is_count),
        "order": common("a list of names, or None", _is_order),
        "bucket_bytes": common("a number of bytes, at least 1", is_positive),
        "costs": common(
            "measured links, or None", _is_costs, lambda old, _, size: old[0]["costs"] if size == len(old) else None
        ),
    },
    "begin without it: residuals are then zero",
)


def fit(found: Mapping[str, Any], specs: Mapping[str, TensorSpec], momentum: bool) -> StateDict:
    """Check the fields of a state against the tensors of a reducer, and return them with flat arrays.

    Args:
        found: the fields, as `REDUCER` read them.
        specs: the tensors of the reducer, by name.
        momentum: whether the reducer has velocities.

    Returns:
        The fields. Arrays have the accumulator dtype, and may be views of the state's arrays.

    Raises:
        InvalidInputError: the state belongs to other tensors.
    """
    residuals = read_arrays(found["residuals"], specs, "residuals", _ADVICE, copy=False)
    velocities = read_arrays(found["velocities"], specs if momentum else {}, "velocities", _ADVICE, copy=False)
    if found["order"] is not None and sorted(found["order"]) != sorted(specs):
        raise InvalidInputError(f"state: its order has other names than its residuals; {DAMAGED}")
    return {**found, "residuals": residuals, "velocities": velocities}


def costs_dict(used: KnownCosts | None) -> CostsDict | None:
    """Return the costs of the links that the ranks measured, for a state; ``None`` if they did not measure."""
    if used is None:
        return None
    links = [(name, getattr(used.costs, name)) for name in _LINKS]
    return {name: None if link is None else list(astuple(link)) for name, link in links}


def measured_costs(costs: CostsDict) -> KnownCosts:
    """Return the costs that `costs_dict` converted."""
    link, node = (None if (numbers := costs[name]) is None else Link(*map(float, numbers)) for name in _LINKS)
    return measured(link, node)


def read_arrays(
    arrays: Any, specs: Mapping[str, TensorSpec], key: str, advice: str, copy: bool = True
) -> dict[str, Array]:
    """Return the arrays of a state as flat arrays of the accumulator dtype, by name.

    Args:
        arrays: the arrays by name, as the state contains them.
        specs: the tensors that they belong to, by name.
        key: the key of the arrays in the state.
        advice: tells the user how to get the expected names.
        copy: see `as_float`.

    Raises:
        InvalidInputError: they have other names, dtypes or shapes than the tensors.
    """
    with reading(key, "arrays by name"):
        missing, unexpected = sorted(specs.keys() - arrays.keys()), sorted(arrays.keys() - specs.keys())
    if missing or unexpected:
        raise InvalidInputError(f"state: {key} lacks {listed(missing)}; unexpected: {listed(unexpected)}; {advice}")
    return {
        name: as_float(arrays[name], f"{key}[{name!r}]", spec.shape, spec.accumulator, copy)
        for name, spec in specs.items()
    }
