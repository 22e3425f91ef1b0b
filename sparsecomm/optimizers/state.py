"""The moments of `SparseAdamW` in states: reading, checking and resharding them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sparsecomm.backends.adamw import Moments, unit_exponents
from sparsecomm.checks import quote
from sparsecomm.errors import InvalidInputError
from sparsecomm.states.loading import OtherPartsError, as_float, reading
from sparsecomm.states.schema import is_count, per_rank
from sparsecomm.tensors.arrays import Array
from sparsecomm.tensors.interop import TensorSpec


class SavedMoments(NamedTuple):
    """Moments that were read from a state, in host memory. ``exponents``: of units, if the state has none."""

    moments: Moments
    step: int
    exponents: Array | None


def read_moments(
    saved: Mapping[str, Any], spec: TensorSpec, part: tuple[int, int], eps: float | None = None
) -> SavedMoments:
    """Return the checked moments of a rank's part of a tensor.

    Args:
        saved: the fields of `Moments` as NumPy arrays, and "step". They may be those of the whole tensor, or only of
            ``part``; "part" then contains its begin and end. ``last`` may be ``None``, as in a state of dense AdamW:
            the last update of every weight is then ``step``. So may ``compensation``: zeros.
        part: the begin and the end of the part.
        eps: if not ``None``, compute the exponents of units from the second moments of the whole tensor.
    """
    name = spec.name
    with reading(f"moments of {name}", "mean, squares, last and step"):
        step, last, saved_part = saved["step"], saved["last"], saved.get("part")
        if not is_count(step):
            raise InvalidInputError(f"state: step of {name} is {quote(step)}; expected a number of steps")
        shape = spec.shape if saved_part is None else (saved_part[1] - saved_part[0],)
        if saved_part is not None and tuple(saved_part) != part:
            raise OtherPartsError(
                f"state: it has elements {saved_part[0]} to {saved_part[1]} of {name}, and this rank keeps {part[0]} "
                f"to {part[1]}; convert the states of all ranks with sparsecomm.reshard(states, rank, size)"
            )
        last = np.full(shape, step, np.int32) if last is None else np.asarray(last)
        if last.dtype.kind != "i" or last.shape != shape:
            raise InvalidInputError(f"state: last of {name}: expected whole numbers of shape {shape}")
        if missing := [field for field in ("mean", "squares") if saved[field] is None]:
            raise InvalidInputError(f"state: {missing[0]} of {name} is missing")
        arrays = {
            field: as_float(saved[field], f"{field} of {name}", shape, spec.accumulator)
            for field in ("mean", "squares", "compensation")
            if saved.get(field) is not None
        }
        max_ = float(np.finfo(spec.accumulator.accumulator).max)
        lowest = {"last": 0.0, "squares": 0.0, "mean": -max_, "compensation": -max_}
        for field, array in {"last": last, **arrays}.items():
            low, high = lowest[field], step if field == "last" else max_
            if array.size and not low <= array.min() <= array.max() <= high:
                raise InvalidInputError(f"state: {field} of {name}: expected finite numbers from {low:g} to {high:g}")
        arrays["last"], exponents = last.astype(np.int32).reshape(-1), None
        if eps is not None:
            if saved_part is not None:
                raise InvalidInputError(
                    f"state: it has no units, and only a part of the moments of {name}; load the state that contains "
                    "its residuals, or for PyTorch what consolidate_state_dict() returned"
                )
            exponents = unit_exponents(np, arrays["squares"], arrays["squares"].dtype.type(eps))
        own = slice(*part) if saved_part is None else slice(None)
        own_arrays: Any = [arrays[field][own] if field in arrays else None for field in Moments._fields]
        return SavedMoments(Moments(*own_arrays), int(step), exponents)


def _whole_moments(old: Sequence[Mapping[str, Any]], rank: int, size: int) -> dict[str, Any]:
    """Return the moments of whole tensors, for any rank of another world size: see `read_moments`."""
    by_name: dict[str, Any] = {}
    slices = old[0]["slices"]
    for name, first in old[0]["moments"].items():
        if "part" not in first:  # a resharded state
            by_name[name] = first
            continue
        shape = np.shape(old[0]["residuals"][name]) if slices is None else slices[name]["shape"]
        parts = sorted((state["moments"][name] for state in old), key=lambda part: part["part"])
        arrays = {
            field: np.concatenate([np.asarray(part[field]) for part in parts]).reshape(shape)
            for field in Moments._fields
            if first[field] is not None
        }
        by_name[name] = {"compensation": None, **arrays, "step": first["step"]}
    return by_name


STATE_FIELDS = {  # of an optimizer's state, besides those of its reducer
    "moments": per_rank("moments by name", lambda value, _: isinstance(value, dict), _whole_moments)
}
