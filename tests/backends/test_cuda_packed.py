"""The packed format on an emulated CUDA device, against one that is written bit by bit."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest

from sparsecomm.backends.cuda import CudaBackend
from sparsecomm.backends.cuda.vector import CountedVector
from sparsecomm.tensors.kinds import BFLOAT16, EXACT, FLOAT16, INT8, KINDS, ValueKind
from sparsecomm.tensors.sparse import SparseVector
from tests import data, reference
from tests.emulator.deferred import DeferredRuntime
from tests.emulator.test_emulator import PREAMBLE, sanitized

VIEWS = {BFLOAT16: data.DTYPES["bfloat16"], FLOAT16: data.DTYPES["float16"]}
NARROW = KINDS[1:]
INT64_SIZE = 2**40  # elements

# -- the format, as slowly as can be -----------------------------------------------------------------------------------


def exponents_of(values: np.ndarray) -> list[int]:
    """For each 64 values, in numbers that do not round."""
    found = []
    for begin in range(0, len(values), 64):
        block = values[begin : begin + 64]
        max_abs = max((abs(float(v)) for v in block if np.isfinite(v)), default=0.0)
        found.append(next(e for e in range(-126, 122) if max_abs <= 126 * 2.0**e or e == 121))
    return found


def quotient(v: float, e: int) -> int:
    if not math.isfinite(v):
        return -128 if math.isnan(v) else 127 if v > 0 else -127
    return max(-126, min(126, round(v / 2.0**e)))


def narrowed(values: np.ndarray, kind: ValueKind) -> np.ndarray:
    """bfloat16 and float16: what is finite stays finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = values.astype(VIEWS[kind])
    bits = narrow.view(np.uint16)
    infinity = np.array(np.inf, VIEWS[kind]).view(np.uint16)
    bits[np.isfinite(values) & (bits & 0x7FFF == infinity)] -= 1
    bits[np.isnan(values)] = 0x7FC0 if kind == BFLOAT16 else 0x7E00
    return narrow


def quantized(values: np.ndarray, kind: ValueKind) -> np.ndarray:
    if kind == EXACT:
        return values
    if kind.planes:
        return reference.few_bits(values, kind.planes - 1)[0]
    if kind != INT8:
        found = narrowed(values, kind).astype(np.float32)
    else:
        shared = exponents_of(values)
        qs = [quotient(float(v), shared[i // 64]) for i, v in enumerate(values)]
        beyond = {-128: math.nan, -127: -math.inf, 127: math.inf}
        numbers = [beyond.get(q, q * 2.0 ** shared[i // 64]) for i, q in enumerate(qs)]
        found = np.array(numbers, np.float32)
    found[found == 0] = 0
    found.view(np.uint32)[np.isnan(found)] = 0x7FC00000
    return found


def low_bits(count: int, span: int) -> int:
    return max(0, ((span + 1) // count).bit_length() - 1)


def areas(count: int, span: int, kind: ValueKind, float64_values: bool) -> list[tuple[str, int]]:
    """Names, and lengths in bytes."""
    low = low_bits(count, span)
    blocks = -(-count // 64)
    values = 8 * kind.planes * blocks or count * (8 if float64_values else (4, 2, 2, 1)[kind.code])
    shared = {"int8": 1, "int4": 3, "int2": 3, "sign": 2}.get(kind.name, 0) * blocks
    return [
        ("head", 16),
        ("low", -(-count * low // 64) * 8),
        ("high", -(-((span >> low) + count) // 64) * 8),
        ("values", values),
        ("shared", shared),
        ("padding", -(values + shared) % 8),
    ]


def packed(indices: np.ndarray, values: np.ndarray, kind: ValueKind) -> bytes:
    """Values are rounded."""
    if not len(indices):
        return b""
    first, last, count = int(indices[0]), int(indices[-1]), len(indices)
    if few := reference.few_bits_bytes(values, kind.planes - 1) if kind.planes else None:
        kind = EXACT if few[1] else kind
    length = dict(areas(count, last - first, kind, values.itemsize == 8))
    low, low_area, high_area = low_bits(count, last - first), 0, 0
    for i, index in enumerate(indices.tolist()):
        offset = index - first
        low_area |= (offset % 2**low) << (i * low)
        high_area |= 1 << ((offset >> low) + i)
    exponents = b""
    if few:
        sent = few[0]
    elif kind == EXACT:
        sent = values.tobytes()
    elif kind == INT8:
        shared = exponents_of(values)
        sent = np.array([quotient(float(v), shared[i // 64]) for i, v in enumerate(values)], np.int8).tobytes()
        exponents = bytes(e + 126 for e in shared)
    else:
        sent = narrowed(values, kind).tobytes()
    parts = [
        struct.pack("<QQ", first, last - first | (few[1] if few else False) << 63),
        low_area.to_bytes(length["low"], "little"),
        high_area.to_bytes(length["high"], "little"),
        sent,
        exponents,
        bytes(length["padding"]),
    ]
    return b"".join(parts)


# -- entries -----------------------------------------------------------------------------------------------------------


def indices_of(shape: str, count: int, n: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng([seed, count])
    gaps = {
        "spread": lambda: rng.integers(1, max(2, n // (count + 1)), count),
        "dense": lambda: np.ones(count, np.int64),
        "clustered": lambda: np.where(rng.random(count) < 0.01, max(1, n // (count + 1)), 1),
        "far end": lambda: np.where(np.arange(count) == count - 1, n - count - 10, 1),
    }[shape]()
    dtype = np.int64 if n >= 2**31 else np.int32
    return (np.cumsum(gaps) + (0 if shape == "dense" else 5)).astype(dtype)


def values_of(count: int, kind: ValueKind, float64_values: bool, seed: int, name: str = "normal") -> np.ndarray:
    """Rounded, and none is zero."""
    values = data.gradient(name, count, "float64" if float64_values else "float32", seed)
    values[values == 0] = 1
    values = quantized(values, kind)
    values[values == 0] = 1
    return quantized(values, kind)


def entries_of(shape: str, count: int, n: int, kind: ValueKind, float64_values: bool, seed: int) -> SparseVector:
    found = indices_of(shape, count, n, seed), values_of(count, kind, float64_values, seed)
    return SparseVector.trusted(*found, n, (n,))


def crowded(seed: int = 0) -> CudaBackend:
    """With tiles of 32 words, so that short vectors have many."""
    return CudaBackend(DeferredRuntime(seed=seed), packed_threads=32)


@pytest.fixture
def backend() -> CudaBackend:
    return crowded()


def unpacked(
    backend: CudaBackend, message: bytes, count: int, n: int, kind: ValueKind, float64_values: bool = False
) -> tuple:
    on_device = backend.runtime.empty(len(message), np.uint8)
    on_device[:] = np.frombuffer(message, np.uint8)
    return backend.unpack(on_device, message[:16], count, n, kind, float64_values)


def check_both_ways(backend: CudaBackend, entries: SparseVector, kind: ValueKind) -> bytes:
    message = packed(entries.indices, entries.values, kind)
    found = backend.pack(entries, kind)
    backend.runtime.check()
    assert found.dtype == np.uint8
    assert found.tobytes() == message
    float64_values = entries.values.itemsize == 8
    indices, values = unpacked(backend, message, entries.nnz, entries.size, kind, float64_values)
    backend.runtime.check()
    assert (indices.dtype, values.dtype) == (entries.indices.dtype, entries.values.dtype)
    np.testing.assert_array_equal(indices, entries.indices)
    assert data.same_bits(values, entries.values)
    return message


# -- there and back ----------------------------------------------------------------------------------------------------


@pytest.mark.covering(2)
@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 1000, 5000])
@pytest.mark.parametrize(("kind", "float64_values"), [*((kind, False) for kind in KINDS), (EXACT, True)])
@pytest.mark.parametrize("int64_indices", [False, True])
def test_bytes_are_those_of_the_format_and_back(
    backend: CudaBackend, count: int, kind: ValueKind, float64_values: bool, int64_indices: bool
) -> None:
    for seed, shape in enumerate(["spread", "dense", "clustered", "far end"]):
        n = INT64_SIZE if int64_indices else 10_000_000
        check_both_ways(backend, entries_of(shape, count, n, kind, float64_values, seed), kind)


def test_with_tiles_as_they_are(cuda: DeferredRuntime) -> None:
    backend = CudaBackend(cuda)
    for kind, shape in ((EXACT, "spread"), (INT8, "clustered"), (BFLOAT16, "dense")):
        cuda.launches.clear()
        check_both_ways(backend, entries_of(shape, 20_001, 3_000_000, kind, False, 7), kind)
        assert cuda.launches == ["pack", "unpack"]


@pytest.mark.parametrize("seed", range(8))
def test_more_tiles_than_a_look_back_sees_at_once(seed: int) -> None:
    """In any order of threads; the state is all zeros afterwards."""
    backend = crowded(seed)
    for shape in ("spread", "clustered"):
        check_both_ways(backend, entries_of(shape, 40_000, 2_000_000, EXACT, False, seed), EXACT)
    look_back = backend.context.workspace()._rooms["LOOK_BACK"]
    assert len(look_back) > 8 * 40
    assert not look_back.any()


def test_every_number_of_low_bits(backend: CudaBackend) -> None:
    """Low bits that cross a word; one entry, and more, that span all of n."""
    for low in range(1, 62):
        indices = np.array([3, 3 + (5 << low), 3 + 2**low - 1 + (6 << low), *(3 + ((8 + i) << low) for i in range(61))])
        n = int(indices[-1]) + 1
        if n >= 2**63:
            break
        dtype = np.int64 if n >= 2**31 else np.int32
        entries = SparseVector.trusted(indices.astype(dtype), values_of(64, EXACT, False, low), n, (n,))
        check_both_ways(backend, entries, EXACT)
    for indices in ([2**62], [0, 2**62], [2**62 - 1, 2**63 - 2]):
        array = np.array(indices, np.int64)
        entries = SparseVector.trusted(array, np.ones(len(array), np.float32), 2**63 - 1, (2**63 - 1,))
        check_both_ways(backend, entries, EXACT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["NaN and infinities", "only NaN", "denormals", "huge range"])
def test_values_that_are_hard(backend: CudaBackend, kind: ValueKind, name: str) -> None:
    for seed, count in enumerate((64, 65, 1000)):
        values = values_of(count, kind, False, seed, name)
        entries = SparseVector.trusted(indices_of("spread", count, 10**6, seed), values, 10**6, (10**6,))
        check_both_ways(backend, entries, kind)


def test_a_vector_whose_length_only_the_device_knows(backend: CudaBackend) -> None:
    entries = entries_of("spread", 700, 50_000, EXACT, False, 1)
    counter = np.array([650], np.uint64)
    counted = CountedVector(backend.runtime, (entries.indices, entries.values), counter, 50_000, (50_000,))
    assert backend.pack(counted, EXACT).tobytes() == packed(entries.indices[:650], entries.values[:650], EXACT)


# -- rounding ----------------------------------------------------------------------------------------------------------

EDGES = np.array(
    [
        0x00000001,
        0x00008000,
        0x00008001,
        0x0000C000,
        0x00010000,
        0x00018000,
        0x007FFFFF,
        0x00800000,
        0x33000000,
        0x33000001,
        0x33800000,
        0x387FC000,
        0x387FE000,
        0x38800000,
        0x3F808000,
        0x3F818000,
        0x3F801000,
        0x3F803000,
        0x42FC0000,
        0x42FC0001,
        0x477FE000,
        0x477FEFFF,
        0x477FF000,
        0x47800000,
        0x7F7C0000,
        0x7F7F0000,
        0x7F7F7FFF,
        0x7F7F8000,
        0x7F7FFFFF,
        0x7E800000,
        0x7F7E0000,
        0x7F7E0001,
        0x7F800000,
        0x7F800001,
        0x7FC00000,
        0x7FFFFFFF,
    ],
    np.uint32,
)


def check_rounding(backend: CudaBackend, values: np.ndarray, kind: ValueKind) -> None:
    expected = quantized(values, kind)
    with np.errstate(invalid="ignore"):
        lost = np.where(np.isfinite(values), values - expected, np.float32(0))
    found, errors, zeros = backend.quantize_values(values, kind)
    backend.runtime.check()
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))
    np.testing.assert_array_equal(errors.view(np.uint32), lost.view(np.uint32))
    assert zeros == np.count_nonzero(expected == 0)
    if not zeros:  # rounding, and packing, what was rounded changes nothing
        again, errors, _ = backend.quantize_values(found, kind)
        assert data.same_bits(again, found)
        assert not errors.any()


@pytest.mark.parametrize("kind", NARROW, ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", sorted(set(data.KINDS) - {"all zero"}))
def test_values_are_rounded_as_specified(backend: CudaBackend, kind: ValueKind, name: str) -> None:
    for seed, count in enumerate((1, 63, 64, 65, 1000)):
        values = data.gradient(name, count, "float32", seed)
        values[values == 0] = 0.75
        check_rounding(backend, values, kind)


@pytest.mark.parametrize("kind", NARROW, ids=lambda kind: kind.name)
def test_values_at_the_edges_are_rounded_as_specified(backend: CudaBackend, kind: ValueKind) -> None:
    both = np.concatenate([EDGES, EDGES | 0x80000000]).astype(np.uint32).view(np.float32)
    check_rounding(backend, both, kind)
    rng = np.random.default_rng(kind.code)
    for one in both:  # the largest of its block
        with np.errstate(invalid="ignore"):
            block = (rng.standard_normal(64) * np.abs(one, dtype=np.float64) / 8).astype(np.float32)
        block[~np.isfinite(block) | (block == 0)] = 1e-45
        block[17] = one
        check_rounding(backend, block, kind)
    random = rng.integers(1, 2**31, 3000).astype(np.uint32) | rng.integers(0, 2, 3000).astype(np.uint32) << 31
    values = random.astype(np.uint32).view(np.float32)
    check_rounding(backend, values[np.isfinite(values)] if kind.planes else values, kind)


@pytest.mark.parametrize("kind", [BFLOAT16, FLOAT16])
def test_halves_between_two_neighbours_go_to_the_even_one(backend: CudaBackend, kind: ValueKind) -> None:
    """And what is just below or above goes to the nearest."""
    bits = np.arange(1, 0x7BFF if kind == FLOAT16 else 0x7F7F, 23, dtype=np.uint16)
    low, high = (b.view(VIEWS[kind]).astype(np.float32).astype(np.float64) for b in (bits, bits + 1))
    middle = ((low + high) / 2).astype(np.float32)
    values = np.concatenate([np.nextafter(middle, np.float32(0)), middle, np.nextafter(middle, np.float32(np.inf))])
    check_rounding(backend, values.astype(np.float32), kind)


def test_nothing_to_round(backend: CudaBackend) -> None:
    found, errors, zeros = backend.quantize_values(np.empty(0, np.float32), INT8)
    assert (len(found), len(errors), zeros) == (0, 0, 0)
    assert not backend.runtime.launches


def test_exact_values_are_rounded_to_themselves(backend: CudaBackend) -> None:
    for dtype in ("float32", "float64"):
        values = data.gradient("NaN and infinities", 500, dtype)
        found, errors, zeros = backend.quantize_values(values, EXACT)
        assert data.same_bits(found, values)
        assert not errors.any()
        assert zeros == 0


# -- bytes that are wrong ----------------------------------------------------------------------------------------------


def flipped(message: bytes, bit: int) -> bytes:
    wrong = bytearray(message)
    wrong[bit // 8] ^= 1 << bit % 8
    return bytes(wrong)


def place_of(name: str, lengths: list[tuple[str, int]]) -> tuple[int, int]:
    begin = 0
    for area, length in lengths:
        if area == name:
            return begin, begin + length
        begin += length
    raise KeyError(name)


def end_of(name: str, message: bytes, count: int, kind: ValueKind) -> int:
    return place_of(name, areas(count, int.from_bytes(message[8:16], "little"), kind, False))[1]


COUNT, N = 777, 60_000


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_that_are_wrong_are_refused(backend: CudaBackend, kind: ValueKind) -> None:
    entries = entries_of("spread", COUNT, N, kind, False, 3)
    message = packed(entries.indices, entries.values, kind)
    span = int(entries.indices[-1] - entries.indices[0])
    lengths = areas(COUNT, span, kind, False)
    last = int(entries.indices[-1])

    def refused(wrong: bytes, count: int = COUNT, n: int = N) -> None:
        with pytest.raises(ValueError, match=r"\w"):
            unpacked(backend, wrong, count, n, kind)
        backend.runtime.check()

    for length in (0, 1, 8, 15, 16, 24, len(message) // 2, len(message) - 8, len(message) - 1):
        refused(message[:length])
    for more in (1, 7, 8, 800):
        refused(message + bytes(more))
    for count in (0, 1, COUNT - 64, COUNT - 1, COUNT + 1, COUNT + 64, N + 1, 2**40):
        refused(message, count)
    for n in (0, 1, last, COUNT):
        refused(message, n=n)
    for first, int64_indices in (
        (N - 1, span),
        (2**64 - 1, span),
        (int(entries.indices[0]), 2**64 - 1),
        (2**63, 2**63),
    ):
        refused(struct.pack("<QQ", first, int64_indices) + message[16:])
    begin, end = place_of("high", lengths)
    for bit in (8 * begin, 8 * begin + 99, 8 * end - 1):  # a bit too many or too few
        refused(flipped(message, bit))
    refused(message[:begin] + bytes(end - begin) + message[end:])
    refused(message[:begin] + b"\xff" * (end - begin) + message[end:])
    bits = (span >> low_bits(COUNT, span)) + COUNT
    assert bits % 64
    for bit in range(8 * begin + bits, 8 * end):  # beyond the last, and as many as there should be
        refused(flipped(flipped(message, bit), 8 * begin))
    begin, end = place_of("low", lengths)
    assert COUNT * low_bits(COUNT, span) % 64
    refused(flipped(message, 8 * end - 1))
    begin, end = place_of("padding", lengths)
    assert end > begin
    refused(flipped(message, 8 * begin))
    refused(flipped(message, 8 * end - 1))
    if kind == INT8:
        begin, end = place_of("shared", lengths)
        for at in (begin, end - 1):
            refused(message[:at] + b"\xf8" + message[at + 1 :])
        assert unpacked(backend, message[:begin] + b"\xf7" + message[begin + 1 :], COUNT, N, kind)
    if kind.planes:
        begin, end = place_of("shared", lengths)
        for lowest in (0, 0x7F80, 0xFFFF):  # no magnitude, infinity, NaN
            refused(message[:begin] + lowest.to_bytes(2, "little") + message[begin + 2 :])
        begin, end = place_of("values", lengths)
        for plane in range(1, kind.planes + 1):  # behind the last value of all
            refused(flipped(message, 8 * (end - 8 * (plane - 1)) - 1))
            refused(flipped(message, 8 * (end - 8 * plane) + COUNT % 64))
        refused(flipped(message, 127))  # exact values would be longer
    assert not backend.context.workspace()._rooms["LOOK_BACK"].any()
    unpacked(backend, message, COUNT, N, kind)


def test_no_entries_have_no_bytes(backend: CudaBackend) -> None:
    indices, values = unpacked(backend, b"", 0, 5, EXACT)
    assert (len(indices), len(values)) == (0, 0)
    with pytest.raises(ValueError, match="no entries, and 8 bytes"):
        unpacked(backend, bytes(8), 0, 5, EXACT)
    assert not backend.runtime.launches


ANY_BYTES = """
import struct
from sparsecomm.backends.cuda import CudaBackend
from sparsecomm.tensors.kinds import BFLOAT16, EXACT, INT4, INT8
from tests.backends.test_cuda_packed import COUNT, N, entries_of, flipped, packed

backend = CudaBackend(EmulatedRuntime(flags=FLAGS))
rng = np.random.default_rng(5)
refused = 0


def attempt(wrong, count=COUNT, n=N):
    global refused
    data = np.array(np.frombuffer(wrong, np.uint8))  # its end is the end of its memory
    try:
        indices, values = backend.unpack(data, wrong[:16], count, n, kind, False)
    except ValueError:
        refused += 1
    else:
        assert (len(indices), len(values)) == (count, count)
    backend.runtime.check()


for kind in (EXACT, BFLOAT16, INT8, INT4):
    for shape in ("spread", "dense"):
        entries = entries_of(shape, COUNT, N, kind, False, 4)
        message = packed(entries.indices, entries.values, kind)
        assert backend.pack(entries, kind).tobytes() == message
        refused = 0
        attempt(message)
        assert not refused
        attempt(message[:16] + b"\\xff" * (len(message) - 16))
        attempt(message[:16] + bytes(len(message) - 16))
        attempt(struct.pack("<QQ", 0, 2 ** 64 - 1) + message[16:])
        for _ in range(12):
            attempt(flipped(message, rng.integers(8 * len(message))))
            attempt(message[:16] + rng.bytes(len(message) - 16))
        assert refused >= 15, refused
        rounded, errors, zeros = backend.quantize_values(np.array(entries.values), kind)
        assert not errors.any() and not zeros
print("all right")
"""


@pytest.mark.exhaustive
def test_no_bytes_lead_out_of_bounds_under_address_sanitizer() -> None:
    done = sanitized(PREAMBLE + ANY_BYTES)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["all right"]
    assert "AddressSanitizer" not in done.stderr
