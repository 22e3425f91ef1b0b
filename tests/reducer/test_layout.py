"""The tensors of a reducer: names with arrays, and what else is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sparsecomm as sc

X = np.ones(9, np.float32)


@pytest.mark.parametrize(
    "tensors",
    [{"x": X}, [("x", X)], (pair for pair in [("x", X)]), [["x", X]]],
    ids=["mapping", "pairs", "generator", "lists"],
)
def test_names_and_tensors(tensors: Any) -> None:
    assert sc.Reducer(tensors).names == ["x"]


@pytest.mark.parametrize(
    ("tensors", "seen"),
    [
        ([X], "got list with ndarray in it; expected names and tensors: a dict"),
        (X, "got ndarray; expected names and tensors: a dict"),
        ([("x", X, 3)], "got list with tuple in it; expected names"),
        (3, "got int; expected names"),
        ([(3, X)], "got the name 3; expected texts"),
        ([("x", X), ("x", X)], "'x' is there twice"),
        ({}, "there are none"),
    ],
    ids=["list", "array", "triple", "number", "numbered", "twice", "none"],
)
def test_what_is_no_names_and_tensors(tensors: Any, seen: str) -> None:
    with pytest.raises(sc.InvalidInputError, match=f"^tensors: .*{seen}"):
        sc.Reducer(tensors, 0.01)
