"""Plain values as bytes: what comes back is what was sent, and bytes that nobody encoded are refused."""

from __future__ import annotations

import os
import pickle
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as of_numpy

import sparsecomm as sc
from sparsecomm.calls.encoding import checksum, decode, encode
from tests.stress.mutations import NUMBERS, damaged

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
def test_what_was_encoded_comes_back(value: Any) -> None:
    assert same(value, decode(encode(value)))


def test_bytes_and_checksums_do_not_depend_on_the_layout() -> None:
    a = np.arange(12, dtype="<f4").reshape(3, 4)
    others = [np.asfortranarray(a), a.astype(">f4"), np.repeat(a, 2, 1)[:, ::2], np.ascontiguousarray(a.T).T]
    for other in others:
        assert encode({"a": other}).tobytes() == encode({"a": a}).tobytes()
        assert checksum([other]) == checksum([a])
    assert len({checksum(v) for v in (a, a.reshape(4, 3), a + 1, a.astype("f8"), [a], 0.0, -0.0, None, "None")}) == 9


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, np.zeros(2, object), np.zeros(2, "g"), {(): 1}, 2**64, 1j, b"x", [[[], object()], print]],
)
def test_what_is_not_plain_is_refused(value: Any) -> None:
    with pytest.raises(sc.InvalidInputError):
        encode({"a": [value]})


def test_values_within_themselves_are_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(sc.InvalidInputError, match="nested"):
        encode(loop)


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("/this/must/not/be",)


def test_a_pickle_is_refused_and_not_loaded() -> None:
    for raw in (pickle.dumps(Evil()), b"", b"\0" * 7, b"\xff" * 64, (2**63).to_bytes(8, "little")):
        with pytest.raises(sc.InvalidInputError, match="that are no values"):
            decode(np.frombuffer(raw, np.uint8))


@pytest.mark.parametrize(
    "described",
    [
        '{"float":"0x1p99999"}',
        "NaN",
        "1e3",
        str(2**70),
        "[1]",
        "{}",
        '{"list":1}',
        '{"array":["float32",[5]]}',
        '{"array":["float32",[4611686018427387904,4611686018427387904]]}',
        '{"array":["float32",[-1]]}',
        '{"array":["object",[1]]}',
        '{"array":["float32",[true]]}',
        '{"dict":[[[1],2]]}',
        '{"dict":[[1.5,2]]}',
        '{"list":[],"dict":[]}',
        '{"list":[' * 200 + "]}" * 200,
        "[" * 100_000,
        '{"eval":"1"}',
    ],
)
def test_a_description_that_cannot_be_is_refused(described: str) -> None:
    raw = len(described).to_bytes(8, "little") + described.encode()
    with pytest.raises(sc.InvalidInputError, match="that are no values"):
        decode(np.frombuffer(raw, np.uint8))


def test_damaged_bytes_are_values_or_refused() -> None:
    state = {
        "velocities": {"a": np.arange(5, dtype="f4"), "b": np.zeros((2, 3))},
        "rate": 0.7,
        "steps": [3, None, True],
    }
    taken = refused = 0
    for each in damaged(encode(state), 3000, 8, list(NUMBERS), np.random.default_rng(0)):
        with suppress(sc.InvalidInputError):
            refused += 1
            decode(each)
            taken += 1
    refused -= taken
    assert taken > 100
    assert refused > 1000
