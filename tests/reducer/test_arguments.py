"""Arguments of a reducer: names, tensors, settings and densities, valid and refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.reducer.options import density_at

X = np.ones(100, np.float32)


# -- names and tensors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensors", [{"x": X}, [("x", X)], (pair for pair in [("x", X)]), [["x", X]]], ids=["dict", "pairs", "iter", "lists"]
)
def test_names_and_tensors(tensors: Any) -> None:
    assert sc.Reducer(tensors).names == ["x"]


@pytest.mark.parametrize(
    ("tensors", "seen"),
    [
        ([X], "got list with ndarray in it; expected names and tensors: pass"),
        (X, "got ndarray; expected names and tensors: pass"),
        ([("x", X, 3)], "got list with tuple in it; expected names"),
        (3, "got int; expected names"),
        ({3: X}, "got the name 3; expected names"),
        ([("x", X), ("x", X)], "'x' appears twice"),
        ({}, "must contain at least one tensor"),
    ],
    ids=["list", "array", "triple", "number", "numbers", "twice", "none"],
)
def test_what_is_no_names_and_tensors(tensors: Any, seen: str) -> None:
    with pytest.raises(sc.InvalidInputError, match=f"^tensors: .*{seen}"):
        sc.Reducer(tensors, 0.01)


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "seen"),
    [
        ({"momentum": 1.0}, "momentum=1.0: must be at least 0 and below 1"),
        ({"momentum": "0.9"}, "momentum='0.9'"),
        ({"clip": 0.0}, "clip=0.0: must be a norm above 0, or None"),
        ({"clip": "median"}, "clip='median'"),
        ({"density": lambda step: 2.0}, "returned 2.0 for step 0"),
        ({"scope": "layer"}, "scope='layer': expected one of"),
        ({"bucket_bytes": 0}, "bucket_bytes=0"),
        ({"dense_below": -1}, "dense_below=-1"),
        ({"op": "max"}, "op='max'"),
        ({"algorithm": "best"}, "algorithm='best'"),
        ({"wire": "zip"}, "wire='zip'"),
        ({"tensors": {"x": np.zeros(3, int)}}, "elements of type int64"),
        ({"decay": 0.9, "algorithm": "dense"}, "decay=0.9 has no effect with algorithm='dense'"),
        *(({"decay": decay}, r"decay=.*: must be a number in \(0, 1\]") for decay in (0, -0.5, 1.5, np.nan, "most")),
        *(({"scope": "chunk", "chunk": c}, "chunk=.*: expected a number of elements") for c in (0, 1.5, None, "half")),
    ],
)
def test_bad_settings_are_refused(wrong: dict[str, Any], seen: str) -> None:
    with pytest.raises(sc.InvalidInputError, match=seen):
        sc.Reducer(**{"tensors": {"x": X}} | wrong)


# -- densities --------------------------------------------------------------------------------------------------------


NO_DENSITIES = [1, np.int64(1), True, "0.01", 0.0, 1.5, float("nan"), None, [0.5], np.array(0.5), 1j]
ASKING: dict[str, Any] = {
    "Reducer": lambda density: sc.Reducer({"x": X}, density),
    "LocalSteps": lambda density: sc.LocalSteps({"x": X.copy()}, density),
    "Warmup": lambda density: sc.Warmup(density, 10),
}


@pytest.mark.parametrize("asked", ASKING)
def test_what_is_no_density_is_refused_at_once(asked: str) -> None:
    for density in NO_DENSITIES:
        with pytest.raises(sc.InvalidInputError, match=r"density=.*: must be a float in \(0, 1\].*1\.0 is a dense sum"):
            ASKING[asked](density)


def test_densities_of_functions() -> None:
    for returned in (1, 0.5, np.float32(0.5), np.array(0.5)):
        assert density_at(lambda step, returned=returned: returned, 3) == returned
    for returned in (None, "0.5", True, 2, 0, float("nan"), [], 10**400, np.ones(2)):
        with pytest.raises(sc.InvalidInputError, match=r"the function returned .* for step 3: must be a float"):
            density_at(lambda step, returned=returned: returned, 3)


def test_a_warm_up_is_the_papers() -> None:
    warmup = sc.Warmup(0.001, 4 * 10)
    densities = [warmup(10 * epoch + 5) for epoch in range(6)]
    np.testing.assert_allclose(densities, [0.25, 0.0629, 0.0158, 0.00398, 0.001, 0.001], rtol=0.01)
    assert [warmup(step) for step in (0, 9, 10)] == [0.25, 0.25, warmup(19)]
    assert [sc.Warmup(0.1, 2, dense_steps=3)(step) for step in range(3)] == [1.0] * 3
    assert sc.Warmup(0.1, 0)(0) == 0.1


@pytest.mark.parametrize(
    "wrong", [{"density": 0}, {"density": 2}, {"start": 0}, {"steps": -1}, {"stages": 0}, {"dense_steps": -1}]
)
def test_a_warm_up_of_bad_numbers_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(sc.InvalidInputError, match=f"^{next(iter(wrong))}="):
        sc.Warmup(**{"density": 0.1, "steps": 3} | wrong)
