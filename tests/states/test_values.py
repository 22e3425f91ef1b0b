"""Archives of plain values: a round trip changes nothing, and foreign or damaged bytes are refused."""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as of_numpy

import sparsecomm as sc
from sparsecomm.states.values import checksum, from_bytes, to_bytes
from tests.damage import NUMBERS, damaged

CHECK = settings(max_examples=150, deadline=None, derandomize=True)
ARRAYS = of_numpy.arrays(
    st.sampled_from(["?", "i1", "<i8", ">u4", "<f2", ">f4", "<f8", ">c8"]),
    of_numpy.array_shapes(min_dims=0, min_side=0),
)
NUMBERS_64 = st.integers(-(2**63), 2**64 - 1)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS_64 | st.floats() | st.text() | ARRAYS,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | NUMBERS_64, inner),
    max_leaves=20,
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        a = a.astype(a.dtype.newbyteorder("="))
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and repr(a) == repr(b)


@CHECK
@given(VALUES)
def test_values_are_read_as_they_were_written(value: Any) -> None:
    assert same(value, from_bytes(to_bytes(value)))


def test_checksums_do_not_depend_on_the_layout() -> None:
    a = np.arange(12, dtype="<f4").reshape(3, 4)
    for other in (np.asfortranarray(a), a.astype(">f4"), np.repeat(a, 2, 1)[:, ::2], np.ascontiguousarray(a.T).T):
        assert checksum([other]) == checksum([a])
        assert same(from_bytes(to_bytes(other)), a)
    assert len({checksum(v) for v in (a, a.reshape(4, 3), a + 1, a.astype("f8"), [a], 0.0, -0.0, None, "None")}) == 9


def test_bfloat16_is_written_only_if_it_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    torch, ml_dtypes = pytest.importorskip("torch"), pytest.importorskip("ml_dtypes")
    value = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    loaded = from_bytes(to_bytes({"x": value}))["x"]
    assert loaded.dtype == ml_dtypes.bfloat16
    assert loaded.tolist() == value.tolist()
    assert checksum(value) == checksum(loaded)

    class NumPyWithoutBfloat16:
        def __getattr__(self, name: str) -> Any:
            return getattr(np, name)

        def dtype(self, name: str) -> Any:
            if name == "bfloat16":
                raise TypeError(name)
            return np.dtype(name)

    monkeypatch.setattr(sys.modules["sparsecomm.states.values"], "np", NumPyWithoutBfloat16())
    with pytest.raises(sc.InvalidInputError, match=r"bfloat16 at \['x'\].* ml_dtypes"):
        to_bytes({"x": value})


def test_other_types_are_refused() -> None:
    masked, loop = np.ma.array([1, 2], mask=[0, 1]), list[Any]()
    loop.append(loop)
    arrays = np.zeros(2, object), masked, np.zeros(2, "g")
    for value in (object(), {1, 2}, *arrays, {(): 1}, 2**64, 1j, b"x", [[[], object()], print], loop):
        with pytest.raises(sc.InvalidInputError, match="nested" if value is loop else None):
            to_bytes({"a": [value]})


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("/this/must/not/be",)


def archive(**members: Any) -> np.ndarray:
    buffer = io.BytesIO()
    np.savez(buffer, **members)
    return np.frombuffer(buffer.getbuffer(), np.uint8)


def test_a_pickle_is_refused_and_not_loaded() -> None:
    evil = np.array([Evil()], object)
    tree = np.frombuffer(json.dumps({"array": [0, "object", [1]]}).encode(), np.uint8)
    single = io.BytesIO()
    np.save(single, np.zeros(3))
    for raw in (pickle.dumps(Evil()), b"", b"\0" * 7, b"\xff" * 64, single.getvalue()):
        with pytest.raises(sc.InvalidInputError, match="cannot read an archive of values"):
            from_bytes(np.frombuffer(raw, np.uint8))
    for members in ({"values": tree, "0": evil}, {"values": evil}, {"0": evil}):
        with pytest.raises(sc.InvalidInputError, match="cannot read an archive of values"):
            from_bytes(archive(**members))


def test_an_invalid_description_is_refused() -> None:
    arrays = '0,"float32",[6]', '0,"float64",[5]', '0,"float32",[-1]', '0,"object",[5]', '1,"float32",[5]'
    arrays = *arrays, '"../../etc/passwd","float32",[5]'
    trees = ["", str(2**70), "{}", '{"tuple":1}', *(f'{{"array":[{array}]}}' for array in arrays)]
    trees += [f'{{"dict":[[{key},2]]}}' for key in ("[1]", "1.5", "true")]
    trees += ['{"tuple":[],"dict":[]}', "[" * 200 + "]" * 200, "[" * 100_000, '{"eval":"1"}']
    for tree in trees:
        members = {"values": np.frombuffer(tree.encode(), np.uint8), "0": np.zeros(5, np.float32)}
        with pytest.raises(sc.InvalidInputError, match="cannot read an archive of values"):
            from_bytes(archive(**members))


def test_damaged_bytes_are_values_or_refused() -> None:
    velocities = {"a": np.arange(5, dtype="f4"), "b": np.zeros((2, 3))}
    state = {"velocities": velocities, "rate": 0.7, "steps": [3, None, True]}
    taken = refused = 0
    for content in damaged(to_bytes(state), 2000, 8, list(NUMBERS), np.random.default_rng(0)):
        with suppress(sc.InvalidInputError):
            refused += 1
            assert same(from_bytes(content), state)
            taken += 1
    refused -= taken
    assert taken > 20
    assert refused > 1000
