"""Messages: what goes in comes out, and nothing else is taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsecomm import CollectiveMismatchError
from sparsecomm.sparse import SparseVector
from sparsecomm.wire import HEADER_BYTES, WIRES, Call, Messages

CALL = Call("tree", 2, 0, 0, n=1000, k=10)


def messages(n: int = 1000, value: Any = np.float32, number: int = 7, wire: str = "plain") -> Messages:
    made = Messages(Call("tree", 2, 0, WIRES[wire].code, n, 10), WIRES[wire], 3, np.dtype(value), (n,))
    made.number = number
    return made


def entries(nnz: int, n: int, value: Any) -> SparseVector:
    rng = np.random.default_rng(nnz)
    indices = np.sort(rng.choice(min(n, 10**6), nnz, replace=False)).astype(np.int32 if n < 2**31 else np.int64)
    return SparseVector.trusted(indices, rng.standard_normal(nnz).astype(value), n, (n,))


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("value", [np.float32, np.float64])
@pytest.mark.parametrize("n", [1000, 2**31 - 1, 2**31])
@pytest.mark.parametrize("nnz", [0, 1, 2, 3, 100, 999])
def test_round_trip(wire: str, value: Any, n: int, nnz: int) -> None:
    sent, m = entries(nnz, n, value), messages(n, value, wire=wire)
    message = m.entries(sent, maker=3, round=2)
    got = m.read_entries(message, source=3, maker=3, round=2)
    assert got.indices.dtype == sent.indices.dtype
    assert got.values.dtype == sent.values.dtype
    np.testing.assert_array_equal(got.indices, sent.indices)
    np.testing.assert_array_equal(got.values, sent.values)
    assert len(message) <= HEADER_BYTES + nnz * (sent.indices.itemsize + sent.values.itemsize) + 4


def test_the_header_is_as_documented() -> None:
    message = messages().entries(entries(2, 1000, np.float32), maker=3, round=5).tobytes()
    assert HEADER_BYTES == 80
    assert message[:8] == b"SPC1\x02\x00\x00\x00"
    assert message[8:24] == (1000).to_bytes(8, "little") + (10).to_bytes(8, "little")
    assert message[24:48] == b"tree".ljust(24, b"\0")
    assert [int.from_bytes(message[a:b], "little") for a, b in ((48, 56), (56, 60), (60, 64), (64, 72), (72, 80))] == [
        7, 3, 5, 2, 16,
    ]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_messages_are_refused_or_read_in_bounds(draw: st.DataObject) -> None:
    m = messages()
    message = m.entries(entries(20, 1000, np.float32), maker=3, round=2).copy()
    if draw.draw(st.booleans()):
        message = message[: draw.draw(st.integers(0, len(message) - 1))]
    for _ in range(draw.draw(st.integers(0, 3))):
        if len(message):
            message[draw.draw(st.integers(0, len(message) - 1))] = draw.draw(st.integers(0, 255))
    try:
        got = m.read_entries(message, source=3, maker=3, round=2)
    except CollectiveMismatchError:
        pass
    else:
        assert len(got.indices) == len(got.values) == 20


def test_what_is_not_expected_is_refused_and_named() -> None:
    m, sent = messages(), entries(3, 1000, np.float32)
    good = m.entries(sent, maker=1, round=2)
    for arguments, seen in (((1, 2, 2), "rank 1, round 2, instead of rank 2, round 2"), ((1, 1, 3), "round 3")):
        with pytest.raises(CollectiveMismatchError, match=seen):
            m.read_entries(good, *arguments)
    with pytest.raises(CollectiveMismatchError, match="call 6 in call 7"):
        m.read_entries(messages(number=6).entries(sent, 1, 2), 1, 1, 2)
    with pytest.raises(CollectiveMismatchError, match=r"calls differ in n: rank 3 made tree .*n=1000.*rank 1 made"):
        m.read_entries(messages(n=1001).entries(sent, 1, 2), 1, 1, 2)
    with pytest.raises(CollectiveMismatchError, match="no message of this version"):
        m.read_entries(np.frombuffer(b"hello", np.uint8), 1, 1, 2)
    segment = m.dense(np.ones(5, np.float32), 0)
    np.testing.assert_array_equal(m.read_dense(segment, 3, 0, 5), 1)
    with pytest.raises(CollectiveMismatchError, match="instead of 6 elements"):
        m.read_dense(segment, 3, 0, 6)
