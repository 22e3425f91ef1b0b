"""Reducers on simulated ranks: gradients to push, steps to make, and what must hold of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests import data

SHAPES = {"a": (20, 30), "b": (7,), "c": (500,), "d": (0, 3), "e": (), "f": (16, 16)}
MIXED = {
    "a": "float32",
    "b": "float16",
    "c": "float16",
    "d": "float32",
    "e": "float64",
    "f": "float64",
    "g": "bfloat16",
}

Arrays = dict[str, np.ndarray]


def run(P: int, program: Callable[[simulated.SimulatedTransport], Any], **options: Any) -> list[Any]:
    """What the program returned, by rank; or with ``catch`` the results with their errors. Machines of 3 ranks."""
    results = simulated.run(P, program, node_of_rank=[rank // 3 for rank in range(P)], **options)
    return results if options.get("catch") else [result.value for result in results]


def gradients(
    seed: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES, dtypes: Mapping[str, str] | None = None, max_: int = 8
) -> Arrays:
    """Whole numbers, whose sums are exact."""
    made = {}
    for position, (name, shape) in enumerate(shapes.items()):
        dtype = "float32" if dtypes is None else dtypes[name]
        made[name] = data.integers(int(np.prod(shape)), dtype, 1000 * seed + position, max_).reshape(shape)
    return made


def as_float64(arrays: Mapping[str, Any]) -> Arrays:
    return {name: np.asarray(array).astype(np.float64) for name, array in arrays.items()}


def total(each: Iterable[Mapping[str, Any]]) -> Arrays:
    """The sum of several, name by name."""
    found: Arrays = {}
    for arrays in each:
        for name, array in as_float64(arrays).items():
            found[name] = found[name] + array if name in found else array
    return found


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def bits(arrays: Mapping[str, Any]) -> dict[str, tuple[str, bytes]]:
    return {name: (str(np.asarray(a).dtype), np.asarray(a).tobytes()) for name, a in arrays.items()}


def residuals(reducer: sc.Reducer) -> Arrays:
    return reducer.state_dict()["residuals"]
