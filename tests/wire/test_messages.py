"""Messages and wire formats: round trips are exact, and invalid messages are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparsecomm import CollectiveMismatchError
from sparsecomm.backends import CpuBackend
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.transport.base import HOST
from sparsecomm.wire import EXACT, HEADER_BYTES, PLAIN, WIRES, CallSignature, Messages, VectorType
from sparsecomm.wire.header import WIRE_NAMES

BACKEND = CpuBackend(1)
RANK = 3


def messages(
    n: int = 1000, value: Any = np.float32, number: int = 7, wire: str = "plain", rank: int = RANK
) -> Messages:
    result = Messages(CallSignature("tree", 2, 0, WIRES[wire].code, n, 10), rank, np.dtype(value), (n,), BACKEND)
    result.begin(number, 0, HOST)
    return result


def entries(nnz: int, n: int, value: Any, wire: str = "plain") -> SparseVector:
    rng = np.random.default_rng(nnz)
    indices = np.sort(rng.choice(min(n, 10**6), nnz, replace=False)).astype(np.int32 if n < 2**31 else np.int64)
    vector = SparseVector.trusted(indices, rng.standard_normal(nnz).astype(value), n, (n,))
    return vector if WIRES[wire].kind == EXACT else BACKEND.quantize(vector, WIRES[wire].kind)[0]


def same(got: SparseVector, sent: SparseVector) -> None:
    assert got.indices.dtype == sent.indices.dtype
    assert got.values.dtype == sent.values.dtype
    np.testing.assert_array_equal(got.indices, sent.indices)
    np.testing.assert_array_equal(got.values, sent.values)


CARRIED = [(w, v) for w in WIRES for v in (np.float32, np.float64) if v is np.float32 or WIRES[w].kind == EXACT]


@pytest.mark.parametrize(("wire", "value"), CARRIED)
@pytest.mark.parametrize("n", [1000, 2**31 - 1, 2**31])
@pytest.mark.parametrize("nnz", [0, 1, 2, 3, 100, 999])
def test_round_trip(wire: str, value: Any, n: int, nnz: int) -> None:
    format_, sent, m = WIRES[wire], entries(nnz, n, value, wire), messages(n, value, wire=wire)
    message = m.entries(sent, format_, round_no=2)
    same(m.read_entries(message, format_, source=3, round_no=2), sent)
    assert len(message) <= m.max_bytes(nnz, format_)
    spread = min(n, 10**6)
    vector = VectorType(spread, sent.indices.dtype, sent.values.dtype)
    assert len(message) <= HEADER_BYTES + 64 + 1.01 * nnz * format_.bytes_per_entry(nnz, vector)


RANDOM_WORDS: list[int] = np.random.default_rng(0).integers(0, 2**63, 1000).tolist()


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("counts", [[], [0], [5], [3, 0, 101, 1, 64]])
@pytest.mark.parametrize("words", [[], [0], [5, 2**16, 1], [2**64 - 1, 0], [1, 300] * 400, RANDOM_WORDS])
def test_several_vectors_and_words_in_one_message(wire: str, counts: list[int], words: list[int]) -> None:
    m, format_ = messages(wire=wire), WIRES[wire]
    sent = [entries(nnz, 1000, np.float32, wire) for nnz in counts]
    message = m.parcel(sent, words, format_, round_no=1)
    vectors, numbers = m.read_parcel(message, format_, 3, 1, len(counts))
    assert numbers == words
    for got, vector in zip(vectors, sent, strict=True):
        same(got, vector)
    with pytest.raises(CollectiveMismatchError, match="instead of"):
        m.read_parcel(message, format_, 3, 1, len(counts) + 1)
    assert m.read_parcel(m.parcel([], words, format_, 1), format_, 3, 1, 7, or_none=True) == ([], words)
    longer = np.append(message, np.zeros(8, np.uint8))
    with pytest.raises(CollectiveMismatchError, match=f"{len(longer)} bytes whose header says {len(message)}"):
        m.read_parcel(longer, format_, 3, 1, len(counts))
    longer[88:96] = np.frombuffer((len(longer) - HEADER_BYTES).to_bytes(8, "little"), np.uint8)
    with pytest.raises(CollectiveMismatchError, match="in a message of"):
        m.read_parcel(longer, format_, 3, 1, len(counts))


@pytest.mark.parametrize("largest", [0, 1, 255, 256, 2**16 - 1, 2**16, 2**32 - 1, 2**32, 2**64 - 1])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_words_travel_in_as_few_bytes_as_hold_the_largest(largest: int, count: int) -> None:
    m = messages()
    words = [largest, *range(6)][:count]
    message = m.parcel((), words, PLAIN, 0)
    width = next(width for width in (1, 2, 4, 8) if max(words, default=0) < 256**width)
    assert len(message) == HEADER_BYTES + -(-width * count // 8) * 8
    assert m.read_parcel(message, PLAIN, 3, 0, 0) == ([], words)
    for cut in range(1, 8 if count else 0):
        with pytest.raises(CollectiveMismatchError, match="whose header says"):
            m.read_parcel(message[:-cut], PLAIN, 3, 0, 0)


@pytest.mark.parametrize(("words", "nbytes"), [([7] * 10**4, 100), ([*range(10**4)], 2000), (RANDOM_WORDS, 8000)])
def test_many_words_are_compressed_if_that_is_shorter(words: list[int], nbytes: int) -> None:
    assert len(messages().parcel((), words, PLAIN, 0)) <= HEADER_BYTES + nbytes


def test_more_compressed_words_than_any_call_sends() -> None:
    m = messages()
    message = m.parcel((), [7] * 2000, PLAIN, 0).copy()
    items = int.from_bytes(message[80:88].tobytes(), "little") % 2**21 + 2 ** (40 + 21)
    message[80:88] = np.frombuffer(items.to_bytes(8, "little"), np.uint8)
    with pytest.raises(CollectiveMismatchError, match=f"from rank 3 {2**40} numbers"):
        m.read_parcel(message, PLAIN, 3, 0, 0)


def test_the_header_is_as_documented() -> None:
    message = messages().entries(entries(2, 1000, np.float32), PLAIN, round_no=5).tobytes()
    assert HEADER_BYTES == 96
    assert message[:8] == b"SPC3\x02\x00\x00\x00"
    assert message[8:24] == (1000).to_bytes(8, "little") + (10).to_bytes(8, "little")
    assert message[24:48] == b"tree".ljust(24, b"\0")
    assert message[48:64] == bytes(16)
    offsets = (64, 72), (72, 76), (76, 80), (80, 88), (88, 96)
    assert [int.from_bytes(message[a:b], "little") for a, b in offsets] == [7, 3, 5, 2, 16]
    signature = CallSignature("split", 2, 1, 4, 9, 3, 0x01020304, 0, 4096, 0x05060708, residual=True, out=True)
    packed = signature.pack()
    assert packed[4:8] == b"\x02\x01\x04\x06"
    assert packed[48:52] == b"\x08\x07\x06\x05"
    assert packed[52:56] == b"\0\x10\0\0"
    assert packed[56:64] == b"\x04\x03\x02\x01\0\0\0\0"
    assert CallSignature.unpack(packed) == signature
    assert [CallSignature("split", 2, 1, 4, 9, 3, **{flag: True}).pack()[7] for flag in ("residual", "out")] == [2, 4]


def test_what_is_not_expected_is_refused_and_named() -> None:
    m, sent = messages(), entries(3, 1000, np.float32)
    good = messages(rank=1).entries(sent, PLAIN, round_no=2)
    for arguments, seen in (((2, 2), "rank 1, round 2, instead of rank 2, round 2"), ((1, 3), "round 3")):
        with pytest.raises(CollectiveMismatchError, match=seen):
            m.read_entries(good, PLAIN, *arguments)
    with pytest.raises(CollectiveMismatchError, match="call 6 in call 7"):
        m.read_entries(messages(number=6).entries(sent, PLAIN, 2), PLAIN, 1, 2)
    with pytest.raises(CollectiveMismatchError, match=r"calls differ in n: rank 3 made tree .*n=1000.*rank 1 made"):
        m.read_entries(messages(n=1001).entries(sent, PLAIN, 2), PLAIN, 1, 2)
    with pytest.raises(CollectiveMismatchError, match=r"calls differ in wire: .*wire plain.* wire packed_int8"):
        m.read_entries(messages(wire="packed_int8").entries(sent, PLAIN, 2), PLAIN, 1, 2)
    with pytest.raises(CollectiveMismatchError, match="not a message of this version"):
        m.read_entries(np.frombuffer(b"hello", np.uint8), PLAIN, 1, 2)
    for count in (2, 4):
        miscounted = good.copy()
        miscounted[80] = count  # the number of entries in the header
        with pytest.raises(CollectiveMismatchError, match=f"{count} entries in 24 bytes"):
            m.read_entries(miscounted, PLAIN, 1, 2)
    segment = m.dense(np.ones(5, np.float32), 0)
    np.testing.assert_array_equal(m.read_dense(segment, 3, 0, 5), 1)
    with pytest.raises(CollectiveMismatchError, match="instead of 6 elements"):
        m.read_dense(segment, 3, 0, 6)


def test_codes_of_formats_stay_and_the_docs_name_all() -> None:
    """If codes changed, ranks with different versions would misread messages."""
    codes = {"plain": 0, "packed": 1, "packed_bfloat16": 2, "packed_float16": 3, "packed_int8": 5}
    assert {name: wire.code for name, wire in WIRES.items()}.items() >= codes.items()
    assert len({wire.code for wire in WIRES.values()} | {4}) == len(WIRES) + 1  # 4 was int8 without infinities
    assert {code: WIRES[name].code for code, name in WIRE_NAMES.items()} == {code: code for code in WIRE_NAMES}
    page = Path(__file__).parents[2] / "docs" / "algorithms" / "details.md"
    assert set(WIRES) <= set(re.findall(r'`"?(\w+)"?`', page.read_text()))


def test_costs_and_labels_of_the_header_are_named() -> None:
    mine, theirs = (CallSignature("tree", 2, 0, 0, 9, 3, costs=costs) for costs in (1, 2))
    assert "SPARSECOMM_PROFILE" in str(mine.mismatch(0, theirs.pack(), 1))
    mine, theirs = (CallSignature("tree", 2, 0, 0, 9, 3, label=label) for label in (0x0A0B0C0D, 7))
    packed = mine.pack()
    assert packed[60:64] == b"\x0d\x0c\x0b\x0a"
    assert CallSignature.unpack(packed) == mine
    assert packed[:60] == theirs.pack()[:60]
    text = str(mine.mismatch(0, theirs.pack(), 1))
    assert "differ in label: rank 0 made" in text
