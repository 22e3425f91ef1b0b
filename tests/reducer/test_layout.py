"""The tensors of a reducer: names with arrays, and what else is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.reducer.layout import TensorSpec, layout
from sparsecomm.tensors.dtypes import FLOAT32
from sparsecomm.tensors.interop import CPU

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
        ([(3, X)], "got the name 3; expected names"),
        ([("x", X), ("x", X)], "'x' is there twice"),
        ({}, "there are none"),
    ],
    ids=["list", "array", "triple", "number", "numbered", "twice", "none"],
)
def test_what_is_no_names_and_tensors(tensors: Any, seen: str) -> None:
    with pytest.raises(sc.InvalidInputError, match=f"^tensors: .*{seen}"):
        sc.Reducer(tensors, 0.01)


def test_a_name_that_there_is_not() -> None:
    reducer = sc.Reducer({f"layer{i}.weight": X for i in range(20)}, 0.1)
    for ask in (reducer.push, reducer.accumulate):
        with pytest.raises(sc.InvalidInputError) as error:
            ask("layer7.weigth", X)
        for text in (
            "'layer7.weigth' is no name",
            "20 tensors",
            "did you mean 'layer7.weight'?",
            "20 tensors, 'layer0.weight'",
        ):
            assert text in str(error.value)
        assert "and 12 others" in str(error.value)
    with pytest.raises(sc.InvalidInputError, match=r"2 tensors, 'a', 'c'$"):
        sc.Reducer({"a": X, "c": X}, 0.1).residual("b")


def test_the_work_of_a_layout_is_linear_in_the_tensors() -> None:
    looked = 0

    class Counted(TensorSpec):
        @property
        def nbytes(self) -> int:
            nonlocal looked
            looked += 1
            return 4

    specs = [Counted(str(i), (1,), FLOAT32, CPU) for i in range(1000)]
    assert [len(members) for members, _ in layout(specs, "bucket", 0, 1000)] == [250] * 4
    assert looked <= 2 * len(specs)
