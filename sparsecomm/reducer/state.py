"""The state of a reducer in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple
from typing import Any, TypeAlias

from sparsecomm.errors import InvalidInputError
from sparsecomm.primitives.costs import Link
from sparsecomm.reducer.bucket import TensorSpec
from sparsecomm.states.loading import DAMAGED
from sparsecomm.states.schema import Schema, StateDict, common, is_count, read_arrays, summed
from sparsecomm.tuning.profile import KnownCosts, measured

__all__ = ["REDUCER", "costs_dict", "fit", "measured_costs"]

CostsDict: TypeAlias = dict[str, "list[float] | None"]  # of each link: alpha, beta and gap

_LINKS = ("link", "node")  # between nodes, and inside
_ADVICE = "build the same model with the same settings (velocities require momentum), or rename its entries"


def _is_order(value: Any, _: object) -> bool:
    return value is None or (isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value))


def _is_costs(value: Any, _: object) -> bool:
    links = [value[name] for name in _LINKS] if value is not None else []
    numbers = [[float(each) for each in link] for link in links if link is not None]
    return value is None or (
        links[0] is not None and all(len(each) == 3 and 0 < min(each) <= max(each) < 1e9 for each in numbers)
    )


REDUCER = Schema(
    "Reducer",
    2,
    {
        "residuals": summed("arrays of floats by name"),
        "velocities": summed("arrays of floats by name"),
        "step": common("a number of steps", lambda value, _: is_count(value)),
        "order": common("a list of names, or None", _is_order),
        "bucket_bytes": common("a number of bytes, at least 1", lambda value, _: is_count(value) and value != 0),
        "costs": common(
            "measured links, or None", _is_costs, lambda values, _, size: values[0] if size == len(values) else None
        ),
    },
    "begin without it: residuals are then zero",
)


def fit(found: Mapping[str, Any], specs: Mapping[str, TensorSpec], momentum: bool) -> StateDict:
    """Return the fields of a state for a reducer of these tensors. Arrays are new, flat, and in the accumulator's type.

    Args:
        found: as `REDUCER` has read it.
        specs: of the reducer's tensors.
        momentum: whether the reducer has velocities.

    Raises:
        InvalidInputError: the state is of other tensors.
    """
    made = dict(found)
    made["residuals"] = read_arrays(found["residuals"], specs, "residuals", _ADVICE)
    made["velocities"] = read_arrays(found["velocities"], specs if momentum else {}, "velocities", _ADVICE)
    if found["order"] is not None:
        made["order"] = [str(name) for name in found["order"]]
        if sorted(made["order"]) != sorted(specs):
            raise InvalidInputError(f"state: its order has other names than its residuals; {DAMAGED}")
    made["step"], made["bucket_bytes"] = int(found["step"]), int(found["bucket_bytes"])
    if (costs := found["costs"]) is not None:
        made["costs"] = {name: None if costs[name] is None else [float(x) for x in costs[name]] for name in _LINKS}
    return made


def costs_dict(used: KnownCosts | None) -> CostsDict | None:
    """Return the links that ranks have measured, for a state; ``None``: they have not measured."""
    if used is None:
        return None
    links = [(name, getattr(used.costs, name)) for name in _LINKS]
    return {name: None if link is None else list(astuple(link)) for name, link in links}


def measured_costs(found: CostsDict) -> KnownCosts:
    """Return the costs of which `costs_dict` has returned the links."""
    link, node = (None if (numbers := found[name]) is None else Link(*numbers) for name in _LINKS)
    return measured(link, node)
