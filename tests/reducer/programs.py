"""Reducers on simulated ranks: gradients, steps and invariants."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests import data

SHAPES = {"a": (20, 30), "b": (7,), "c": (500,), "d": (0, 3), "e": (), "f": (16, 16)}
MIXED = {"a": "float32", "b": "float16", "c": "float16", "d": "float32", "e": "float64", "f": "float64"}
MIXED["g"] = "bfloat16"

SETTINGS: dict[str, Any] = {"density": 0.1, "op": "sum", "bucket_bytes": 1500, "dense_below": 10, "nodes": False}

Arrays = dict[str, np.ndarray]


def reducer_of(transport: simulated.SimulatedTransport, **options: Any) -> sc.Reducer:
    """Return a reducer of `SHAPES` with several buckets. Settings extend or override `SETTINGS`."""
    return sc.Reducer(**{"tensors": gradients(0), "comm": transport} | SETTINGS | options)


def gradients(
    seed: int,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    dtypes: Mapping[str, str] | None = None,
    max_: int = 8,
    normal: bool = False,
) -> Arrays:
    """Return integers, whose sums are exact; with ``normal``, normally distributed numbers."""
    arrays = {}
    for position, (name, shape) in enumerate(shapes.items()):
        dtype, n = "float32" if dtypes is None else dtypes[name], int(np.prod(shape))
        arrays[name] = data.integers(n, dtype, 1000 * seed + position, max_).reshape(shape)
        if normal:
            arrays[name] = data.gradient("normal", n, dtype, seed).reshape(shape)
    return arrays


def as_float64(arrays: Mapping[str, Any]) -> Arrays:
    return {name: np.asarray(array).astype(np.float64) for name, array in arrays.items()}


def total(several: Iterable[Mapping[str, Any]]) -> Arrays:
    """Return the sums by name."""
    sums: Arrays = {}
    for named in several:
        for name, array in as_float64(named).items():
            sums[name] = sums[name] + array if name in sums else array
    return sums


def copies(arrays: Mapping[str, np.ndarray]) -> Arrays:
    return {name: array.copy() for name, array in arrays.items()}


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def bits(arrays: Mapping[str, Any]) -> dict[str, tuple[str, bytes]]:
    return {name: (str(np.asarray(a).dtype), np.asarray(a).tobytes()) for name, a in arrays.items()}


def residuals(reducer: sc.Reducer) -> Arrays:
    return reducer.state_dict()["residuals"]
