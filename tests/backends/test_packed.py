"""The packed format, by its definition: bit by bit, on the host."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sparsecomm as sc
from sparsecomm.backends import _cpu
from sparsecomm.tensors import kinds
from tests import data, reference

KINDS = {kind.name: kind.code for kind in kinds.KINDS}
ROOT = Path(__file__).parents[2]
NARROW = {name: kind for name, kind in KINDS.items() if kind}
FEW = {kinds.INT4.code: 3, kinds.INT2.code: 1, kinds.SIGN.code: 0}  # bits of a level
NAN = np.float32(np.nan)
check = settings(max_examples=60, deadline=None, derandomize=True)
with_kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
with_narrow_kinds = pytest.mark.parametrize("kind", NARROW.values(), ids=list(NARROW))


@pytest.fixture(params=["avx512", "avx2", "portable"])
def simd(request: pytest.FixtureRequest) -> Iterator[None]:
    """The instruction set that values are rounded, packed and unpacked by."""
    best = _cpu.simd()
    if not _cpu.use_simd(request.param):
        pytest.skip(f"this processor has no {request.param}")
    yield
    _cpu.use_simd(best)


with_simd = pytest.mark.usefixtures("simd")


def test_the_kernels_have_the_same_kinds() -> None:
    header = (ROOT / "kernels" / "cpu" / "kernels.hpp").read_text()
    (declared,) = re.findall(r"enum class Kind : int {(.*)}", header)
    assert {name: int(code) for name, code in re.findall(r"(\w+) = (\d+)", declared)} == KINDS


# -- the definition ----------------------------------------------------------------------------------------------------


def exponent(block: np.ndarray) -> int:
    """The smallest e from -126 to 121 for which 126 * 2^e is no less than any finite value."""
    max_abs = max((abs(float(v)) for v in block if np.isfinite(v)), default=0.0)
    return next((e for e in range(-126, 121) if max_abs <= 126 * 2.0**e), 121)


def quotient(v: np.float32, e: int) -> int:
    if not np.isfinite(v):
        return -128 if np.isnan(v) else 127 if v > 0 else -127
    return int(np.clip(np.rint(float(v) / 2.0**e), -126, 126))


def quantized(values: np.ndarray, kind: int) -> np.ndarray:
    if kind == 0:
        return values
    if kind in FEW:
        return reference.few_bits(values, FEW[kind])[0]
    out = []
    if kind == 3:
        for begin in range(0, len(values), 64):
            block = values[begin : begin + 64]
            e = exponent(block)
            for v in block:
                q = quotient(v, e)
                out.append(NAN if q == -128 else np.float32(q * (np.inf if abs(q) == 127 else 2.0**e)))
    else:
        narrow = np.dtype(ml_dtypes.bfloat16 if kind == 1 else np.float16)
        max_value = np.float32(ml_dtypes.finfo(narrow).max)
        for v in values:
            with np.errstate(over="ignore"):
                to = np.float32(v.astype(narrow))
            if np.isfinite(v) and np.isinf(to):
                to = np.copysign(max_value, v)
            out.append(NAN if np.isnan(to) else to if to else np.float32(0))
    return np.array(out, np.float32)


def value_bytes(values: np.ndarray, kind: int) -> bytes:
    if kind == 0:
        return values.tobytes()
    if kind == 1:
        return values.astype(ml_dtypes.bfloat16).tobytes()
    if kind == 2:
        return values.astype(np.float16).tobytes()
    blocks = [values[begin : begin + 64] for begin in range(0, len(values), 64)]
    quotients = [quotient(v, exponent(block)) for block in blocks for v in block]
    return np.array(quotients, np.int8).tobytes() + bytes(exponent(block) + 126 for block in blocks)


def words(number: int, bits: int) -> bytes:
    return number.to_bytes(-(-bits // 64) * 8, "little")


def packed(indices: np.ndarray, values: np.ndarray, kind: int) -> bytes:
    m = len(indices)
    if m == 0:
        return b""
    first, span = int(indices[0]), int(indices[-1]) - int(indices[0])
    low_bits = max((span + 1) // m, 1).bit_length() - 1
    low = high = 0
    for i, index in enumerate(indices):
        offset = int(index) - first
        low |= (offset % 2**low_bits) << i * low_bits
        high |= 1 << (offset >> low_bits) + i
    sent, as_they_are = (
        reference.few_bits_bytes(values, FEW[kind]) if kind in FEW else (value_bytes(values, kind), False)
    )
    head = words(first, 64) + words(span | as_they_are << 63, 64)
    message = head + words(low, m * low_bits) + words(high, (span >> low_bits) + m) + sent
    return message + bytes(-len(message) % 8)


# -- entries -----------------------------------------------------------------------------------------------------------


def clustered(rng: np.random.Generator, m: int) -> np.ndarray:
    starts = rng.integers(0, 10**6, 5) * 1000
    return np.unique(starts[rng.integers(0, 5, m)] + rng.integers(0, m, m))


# Indices by how they lie, and the number of elements.
SPREADS = {
    "evenly": lambda rng, m: (np.unique(rng.integers(0, 1000 * m, m)), 1000 * m),
    "densely": lambda rng, m: (np.arange(m), m),
    "every other": lambda rng, m: (2 * np.arange(m) + 1, 2 * m),
    "in clusters": lambda rng, m: (clustered(rng, m), 10**9 + m),
    "two ends": lambda rng, m: (np.unique(np.r_[np.arange(m - 1), 2**31 - 2]), 2**31 - 1),
    "far": lambda rng, m: (np.unique(2**31 - 2 - rng.integers(0, 50 * m, m)), 2**31 - 1),
    "over 31 bits": lambda rng, m: (np.unique(rng.integers(0, 2**31 - 1, m)), 2**31 - 1),
    "over 40 bits": lambda rng, m: (np.unique(rng.integers(0, 2**41, m)), 2**41),
    "over 62 bits": lambda rng, m: (np.unique(rng.integers(0, 2**62, m)), 2**62),
    "far of 62 bits": lambda rng, m: (np.unique(2**62 - 1 - rng.integers(0, 2**60, m)), 2**62),
    "two far apart": lambda rng, m: (np.array([0, 2**62 - 1]), 2**62),
}
sizes = st.one_of(st.sampled_from([0, 1, 2, 3, 63, 64, 65, 127, 1000]), st.integers(0, 300))
spreads = st.sampled_from(sorted(SPREADS))


def entries(
    spread: str, m: int, int64_indices: bool, float64_values: bool, kind: int, seed: int, of: str
) -> tuple[np.ndarray, np.ndarray, int, bool]:
    """Indices, values that need no more rounding, the number of elements, whether the indices are of 64 bits."""
    rng = np.random.default_rng([seed, m])
    indices, n = SPREADS[spread](rng, m) if m else (np.empty(0, np.int64), 100)
    int64_indices = int64_indices or n > 2**31 - 1
    values = data.gradient(of, len(indices), "float64" if float64_values else "float32", seed)
    values[values == 0] = 1
    return indices.astype(np.int64 if int64_indices else np.int32), quantized(values, kind), n, int64_indices


# -- bytes -------------------------------------------------------------------------------------------------------------


@with_simd
@pytest.mark.parametrize(
    ("kind", "float64_values"), [*((kind, False) for kind in KINDS.values()), (KINDS["exact"], True)]
)
def test_bytes_and_back(kind: int, float64_values: bool) -> None:
    @check
    @given(spreads, sizes, st.booleans(), data.seeds, data.kinds)
    def run(spread: str, m: int, int64_indices: bool, seed: int, of: str) -> None:
        indices, values, n, int64_indices = entries(spread, m, int64_indices, float64_values, kind, seed, of)
        sent = _cpu.pack(indices, values, kind, int64_indices, float64_values)
        assert sent.dtype == np.uint8
        assert sent.tobytes() == packed(indices, values, kind)
        for arrived in (sent, np.r_[np.uint8(0), sent][1:]):  # from an odd address, too
            back = _cpu.unpack(arrived, len(indices), n, kind, int64_indices, float64_values)
            assert data.same_bits(back[0], indices)
            assert data.same_bits(back[1], values)

    run()


@with_kinds
def test_many_entries(kind: int) -> None:
    rng = np.random.default_rng(0)
    for n in (40_000, 10**6, 2**31 - 1):  # arrays that stand on scratch memory
        indices = np.unique(rng.integers(0, n, 30_000)).astype(np.int32)
        values = rng.standard_normal(len(indices), dtype=np.float32)
        if kind:
            values = _cpu.quantize_values(values, kind)[0]
        back = _cpu.unpack(_cpu.pack(indices, values, kind, False, False), len(indices), n, kind, False, False)
        assert data.same_bits(back[0], indices)
        assert data.same_bits(back[1], values)


BITS = {"exact": 40.1, "bfloat16": 24.1, "float16": 24.1, "int8": 16.2, "int4": 12.5, "int2": 10.5, "sign": 9.4}


@pytest.mark.parametrize(("kind", "max_bits"), list(BITS.items()))
def test_bits_per_entry(kind: str, max_bits: float) -> None:
    top = sc.topk(data.gradient("normal", 2_560_000, "float32"), 40_000)  # 64 of 4,096
    values = _cpu.quantize_values(top.values, KINDS[kind])[0] if KINDS[kind] else top.values
    assert 8 * _cpu.pack(top.indices, values, KINDS[kind], False, False).nbytes <= max_bits * 40_000


# -- rounding ----------------------------------------------------------------------------------------------------------


@with_simd
@with_narrow_kinds
def test_rounding(kind: int) -> None:
    @check
    @given(sizes, data.kinds, data.seeds)
    def run(m: int, of: str, seed: int) -> None:
        values = data.gradient(of, m, "float32", seed)
        values[values == 0] = 1
        expected = quantized(values, kind)
        to, errors, zeros = _cpu.quantize_values(values, kind)
        assert data.same_bits(to, expected)
        assert zeros == np.count_nonzero(expected == 0)
        with np.errstate(invalid="ignore"):
            assert data.same_bits(errors, np.where(np.isfinite(values), values - expected, np.float32(0)))
        again, nothing, _ = _cpu.quantize_values(to, kind)
        assert data.same_bits(again, to)
        assert not np.any(nothing)

    run()


@with_narrow_kinds
def test_rounded_and_error_are_the_value(kind: int) -> None:
    @check
    @given(sizes, data.seeds)
    def run(m: int, seed: int) -> None:
        for max_value in (8, 1000, 2**24):  # float16 ends at 65504
            values = data.integers(m, "float32", seed, max_value)
            values[values == 0] = 1
            to, errors, _ = _cpu.quantize_values(values, kind)
            assert data.same_bits(to + errors, values)

    run()


@with_simd
@with_narrow_kinds
def test_rounding_at_the_edges(kind: int) -> None:
    largest, ties = 2.0**128 - 2.0**104, [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11]
    halves = [65504, 65519, 65520, 2.0**-24, 2.0**-25, 1.5 * 2.0**-25, 2.0**-14 - 2.0**-26]
    blocks = [
        [largest, -largest, 1],
        [127 * 2.0**121, 126 * 2.0**121, 1e38],
        [126, 63.5, 64.5, 0.5, 1.5, 2.5, 0.25],
        [126.001, 125.9, 1, 3],
        [2.0**-149, -(2.0**-149)],
        [126 * 2.0**-126, 2.0**-127, 1.5 * 2.0**-126],
        [np.inf, -np.inf, np.nan, 5],
        [np.nan],
        ties,
        halves,
        [63.5, 1],
        [252, -126.5],
    ]
    for block in blocks:
        values = np.array(block, np.float32)
        values = np.concatenate([values, -values])
        to, _, _ = _cpu.quantize_values(values, kind)
        assert data.same_bits(to, quantized(values, kind)), block
        assert np.isfinite(to)[np.isfinite(values)].all()
        sent = _cpu.pack(np.arange(len(to), dtype=np.int32), to, kind, False, False)
        assert data.same_bits(_cpu.unpack(sent, len(to), len(to), kind, False, False)[1], to), block


@with_simd
@pytest.mark.parametrize("kind", [kind for kind in NARROW.values() if kind not in FEW])
def test_values_that_were_not_rounded_are_sent_as_if_they_were(kind: int) -> None:
    for of in data.KINDS:
        values = data.gradient(of, 1000, "float32")
        values[values == 0] = 1
        indices, n = np.arange(1000, dtype=np.int32), 1000
        back = _cpu.unpack(_cpu.pack(indices, values, kind, False, False), n, n, kind, False, False)[1]
        expected = quantized(values, kind)
        np.testing.assert_array_equal(back, expected)
        assert data.same_bits(back[expected != 0], expected[expected != 0])


def tails(distribution: str, blocks: int = 400) -> np.ndarray:
    """Return the 64 largest of each 4,096, a row for each."""
    rng = np.random.default_rng(0)
    draws = {"normal": rng.standard_normal, "Laplace": rng.laplace, "Student t": lambda size: rng.standard_t(5, size)}
    x = draws[distribution](size=(blocks, 4096)).astype(np.float32)
    return np.take_along_axis(x, np.argpartition(-np.abs(x), 64, axis=1)[:, :64], axis=1)


def left_by_two_levels(v: np.ndarray) -> float:
    """The least squared error of two magnitudes for each row, by trying every threshold."""
    u, count = np.sort(np.abs(v.astype(np.float64)), axis=1), np.arange(1, v.shape[1])
    below = np.cumsum(u, axis=1)[:, :-1]
    explained = below**2 / count + (u.sum(axis=1, keepdims=True) - below) ** 2 / (v.shape[1] - count)
    return float(np.sum(u**2) - explained.max(axis=1).sum())


@pytest.mark.parametrize(("distribution", "above_least"), [("normal", 1.06), ("Laplace", 1.06), ("Student t", 1.12)])
def test_two_levels_leave_little_more_than_the_least_error(distribution: str, above_least: float) -> None:
    v = tails(distribution)
    _, errors, _ = _cpu.quantize_values(v.reshape(-1), KINDS["int2"])
    assert np.sum(errors.astype(np.float64) ** 2) <= above_least * left_by_two_levels(v)


@with_simd
def test_zeros_are_counted_and_have_no_sign() -> None:
    to, errors, zeros = _cpu.quantize_values(np.array([1e-10, -1e-10, 1], np.float32), KINDS["float16"])
    assert zeros == 2
    assert to.tobytes() == np.array([0, 0, 1], np.float32).tobytes()
    assert errors.tolist() == [np.float32(1e-10), -np.float32(1e-10), 0]


def test_unknown_kinds() -> None:
    one, index, double = np.ones(1, np.float32), np.zeros(1, np.int32), np.ones(1)
    for kind in (-1, len(KINDS)):
        with pytest.raises(ValueError, match="kind"):
            _cpu.pack(index, one, kind, False, False)
        with pytest.raises(ValueError, match="kind"):
            _cpu.unpack(np.zeros(32, np.uint8), 1, 1, kind, False, False)
    with pytest.raises(ValueError, match="float64"):
        _cpu.pack(index, double, 1, False, True)
    with pytest.raises(ValueError, match="nothing to round"):
        _cpu.quantize_values(one, 0)


# -- bytes that are no message -----------------------------------------------------------------------------------------


def message(kind: int) -> np.ndarray:
    """68 entries, the first at 5, the last at 500: 2 low bits each, and (495 >> 2) + 68 = 191 high bits."""
    indices = np.r_[np.arange(5, 72), 500].astype(np.int32)
    values = quantized(np.arange(1, 69, dtype=np.float32), kind)
    return _cpu.pack(indices, values, kind, False, False)


HIGH = 16 + 24  # where its high bits begin
VALUES = HIGH + 24


def changed(sent: np.ndarray, position: int, byte: int) -> np.ndarray:
    out = sent.copy()
    out[position] = byte
    return out


@pytest.mark.parametrize(
    ("damage", "count", "n", "match"),
    [
        (lambda sent: sent[:-1], 68, 501, "too few"),
        (lambda sent: sent[:-8], 68, 501, "too few"),
        (lambda sent: sent[:15], 68, 501, "too few"),
        (lambda sent: sent[:0], 68, 501, "too few"),
        (lambda sent: np.r_[sent, np.uint8(0)], 68, 501, "too many"),
        (lambda sent: sent, 0, 501, "no entries"),
        (lambda sent: sent, 67, 501, "too many|set beyond|more or fewer"),
        (lambda sent: sent, 69, 501, "too few|set beyond|more or fewer"),
        (lambda sent: sent, 2**62, 2**63, "too few"),
        (lambda sent: sent, 68, 500, "beyond the end of the vector"),
        (lambda sent: sent, 68, 67, "more entries than"),
        (lambda sent: sent, 68, 0, "more entries than"),
        (lambda sent: changed(sent, 7, 255), 68, 501, "beyond the end of the vector"),
        (lambda sent: np.r_[np.full(16, 255, np.uint8), sent[16:]], 68, 501, "beyond the end of the vector"),
        (lambda sent: np.r_[sent[:8], np.full(8, 255, np.uint8), sent[16:]], 68, 2**63 - 1, "beyond the end of the v"),
        (lambda sent: changed(sent, 9, 0), 68, 501, "too many"),
        (lambda sent: changed(sent, HIGH - 1, 128), 68, 501, "beyond the end of an area"),
        (lambda sent: changed(sent, VALUES - 1, 128), 68, 501, "beyond the end of an area"),
        (lambda sent: changed(sent, HIGH, sent[HIGH] & 254), 68, 501, "more or fewer"),
        (lambda sent: changed(sent, HIGH + 15, 255), 68, 501, "more or fewer"),
        (lambda sent: np.r_[sent[:HIGH], np.zeros(24, np.uint8), sent[VALUES:]], 68, 501, "more or fewer"),
    ],
)
@with_kinds
def test_what_is_refused(kind: int, damage: Callable[[np.ndarray], np.ndarray], count: int, n: int, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        _cpu.unpack(damage(message(kind)), count, n, kind, False, False)


@with_simd
def test_exponents_and_padding_are_looked_at() -> None:
    sent = message(KINDS["int8"])
    exponents = VALUES + 68
    assert sent[exponents:].tolist() == [126, 126, 0, 0]
    for byte in (0, 247):
        _cpu.unpack(changed(sent, exponents + 1, byte), 68, 501, KINDS["int8"], False, False)
    for position, byte, match in (
        (exponents, 248, "exponent"),
        (exponents + 1, 255, "exponent"),
        (exponents + 3, 1, "set"),
    ):
        with pytest.raises(ValueError, match=match):
            _cpu.unpack(changed(sent, position, byte), 68, 501, KINDS["int8"], False, False)


@with_simd
@pytest.mark.parametrize("kind", FEW, ids=["int4", "int2", "sign"])
def test_levels_and_bits_of_no_value_are_looked_at(kind: int) -> None:
    sent, planes = message(kind), FEW[kind] + 1
    lowest = VALUES + 2 * planes * 8  # of two blocks, the second of 4 values
    for bits in (0, 1, 0x7F7F, 0x7F80, 0x8001):
        for block in (0, 1):  # the second, from 65 to 68, has a step of 0
            fine = bits == 1 or (bits == 0x7F7F and (block == 1 or kind == KINDS["sign"]))
            changed_to = sent.copy()
            changed_to[lowest + 2 * block :][:2] = np.frombuffer(np.uint16(bits).tobytes(), np.uint8)
            if fine:
                values = _cpu.unpack(changed_to, 68, 501, kind, False, False)[1]
                assert np.isfinite(values).all()
                assert values.all()
            else:
                with pytest.raises(ValueError, match="magnitudes that no block has"):
                    _cpu.unpack(changed_to, 68, 501, kind, False, False)
    for plane in range(planes):
        last = VALUES + (planes + plane) * 8
        _cpu.unpack(changed(sent, last, sent[last] ^ 15), 68, 501, kind, False, False)
        for position, byte in ((last, sent[last] | 16), (last + 7, 128)):
            with pytest.raises(ValueError, match="set beyond"):
                _cpu.unpack(changed(sent, position, byte), 68, 501, kind, False, False)


@pytest.mark.parametrize("kind", FEW, ids=["int4", "int2", "sign"])
def test_a_value_that_is_not_finite_keeps_all_as_they_are(kind: int) -> None:
    values, indices = np.arange(1, 69, dtype=np.float32) / 3, np.r_[np.arange(5, 72), 500].astype(np.int32)
    values[40] = -np.inf
    rounded, errors, zeros = _cpu.quantize_values(values, kind)
    assert data.same_bits(rounded, values)
    assert not errors.any()
    assert zeros == 0
    sent, exact = _cpu.pack(indices, rounded, kind, False, False), _cpu.pack(indices, rounded, 0, False, False)
    assert sent.tobytes() == exact.tobytes()[:15] + bytes([exact[15] | 128]) + exact.tobytes()[16:]
    for other in set(KINDS.values()) - set(FEW):
        with pytest.raises(ValueError, match="beyond the end of the vector"):
            _cpu.unpack(sent, 68, 501, other, False, False)


def damaged(sent: np.ndarray, options: str, rng: np.random.Generator) -> np.ndarray:
    if options == "bits" and len(sent):
        bits = rng.integers(0, 8 * len(sent) if rng.random() < 0.5 else 8 * min(len(sent), 48), rng.integers(1, 5))
        sent = sent.copy()
        np.bitwise_xor.at(sent, bits // 8, (1 << bits % 8).astype(np.uint8))
    elif options == "shorter":
        sent = sent[: rng.integers(0, len(sent) + 1)]
    elif options == "longer":
        sent = np.r_[sent, rng.integers(0, 256, rng.integers(1, 40), np.uint8)]
    elif options == "noise":
        sent = rng.integers(0, 256, len(sent), np.uint8)
    elif options == "noise after the head":
        sent = np.r_[sent[:16], rng.integers(0, 256, max(len(sent) - 16, 0), np.uint8)]
    return sent


@with_kinds
def test_damage_is_refused_or_gives_as_many_entries(kind: int) -> None:
    hows = st.sampled_from(["bits", "shorter", "longer", "noise", "noise after the head", "none"])

    @settings(check, max_examples=300)
    @given(
        spreads, sizes, st.booleans(), data.seeds, hows, st.integers(-3, 3), st.sampled_from([None, 0, 1, -1, 2**62])
    )
    def run(spread: str, m: int, int64_indices: bool, seed: int, options: str, more: int, other_n: int | None) -> None:
        indices, values, n, int64_indices = entries(spread, m, int64_indices, False, kind, seed, "normal")
        rng = np.random.default_rng(seed)
        sent = damaged(_cpu.pack(indices, values, kind, int64_indices, False), options, rng)
        count = max(len(indices) + more, 0)
        n = n if other_n is None else max(n + other_n, 0) if other_n != 2**62 else other_n
        try:
            back = _cpu.unpack(sent, count, n, kind, int64_indices, False)
        except ValueError:
            return
        assert [len(part) for part in back] == [count, count]
        assert back[0].dtype == indices.dtype
        assert back[1].dtype == np.float32
        _cpu.well_formed(*back, n, int64_indices, False)

    run()
