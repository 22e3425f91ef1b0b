"""The packed format on every device, against the slow reference in `packed_format`."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsecomm.backends import CpuBackend
from sparsecomm.backends.cuda import CudaBackend, packing
from sparsecomm.tensors.kinds import BFLOAT16, EXACT, FLOAT16, INT8, KINDS, ValueKind
from sparsecomm.tensors.sparse import SparseVector
from tests import data
from tests.backends import packed_format
from tests.backends.devices import Device, Emulated, same
from tests.backends.packed_format import (
    SHAPES,
    areas,
    check_both_ways,
    check_rounding,
    entries_of,
    flipped,
    packed,
    unpacked,
    values_of,
)
from tests.emulator.deferred import DeferredRuntime

HOST = CpuBackend(1)
NARROW, FEW = KINDS[1:], [kind for kind in KINDS if kind.planes]
of_kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
of_narrow_kinds = pytest.mark.parametrize("kind", NARROW, ids=lambda kind: kind.name)
on_devices = pytest.mark.parametrize("device", ["avx512", "avx2", "portable", "cuda"], indirect=True)
on_cuda = pytest.mark.parametrize("device", ["cuda"], indirect=True)


def check(device: Device, examples: int = 60) -> settings:
    return settings(max_examples=8 if device.name == "cuda" else examples)


def test_the_kernels_have_the_same_kinds() -> None:
    header = (Path(__file__).parents[2] / "kernels" / "cpu" / "kernels.hpp").read_text()
    (declared,) = re.findall(r"enum class Kind : int {(.*)}", header)
    assert {name: int(code) for name, code in re.findall(r"(\w+) = (\d+)", declared)} == {k.name: k.code for k in KINDS}


# -- there and back ----------------------------------------------------------------------------------------------------


@on_devices
@pytest.mark.parametrize(("kind", "float64_values"), [*((kind, False) for kind in KINDS), (EXACT, True)])
def test_entries_are_packed_and_unpacked(device: Device, kind: ValueKind, float64_values: bool) -> None:
    counts = st.one_of(st.integers(0, 300), st.sampled_from([63, 64, 65, 1000, 5000]))

    @check(device)
    @given(st.sampled_from(SHAPES), counts, st.sampled_from([10**6, 2**31 - 1, 2**40, 2**62]), data.seeds, data.kinds)
    def run(shape: str, count: int, n: int, seed: int, name: str) -> None:
        check_both_ways(device, entries_of(shape, count, n, kind, float64_values, seed, name), kind)

    run()


@of_kinds
def test_many_entries_at_an_odd_address(kind: ValueKind) -> None:
    for n in (40_000, 10**6, 2**31 - 1):  # inputs may lie in scratch memory
        indices = np.unique(np.random.default_rng(0).integers(0, n, 30_000)).astype(np.int32)
        values = data.gradient("normal", len(indices), "float32")
        values = values if kind is EXACT else HOST.quantize_values(values, kind)[0]
        sent = HOST.pack(SparseVector.trusted(indices, values, n, (n,)), kind)
        back = HOST.unpack(np.r_[np.uint8(0), sent][1:], b"", len(indices), n, kind, False)
        assert data.same_bits(back[0], indices)
        assert data.same_bits(back[1], values)


def test_with_tiles_as_they_are(cuda: DeferredRuntime) -> None:
    device = Emulated(packed_threads=256)
    for kind, shape in ((EXACT, "spread"), (INT8, "clustered"), (BFLOAT16, "dense")):
        device.runtime.launches.clear()
        check_both_ways(device, entries_of(shape, 20_001, 3_000_000, kind, False, 7), kind)
        assert device.runtime.launches == ["pack", "unpack"]


@pytest.mark.parametrize("seed", range(3))
def test_more_tiles_than_a_look_back_sees_at_once(seed: int) -> None:
    """Threads run in any order. The state is all zeros afterwards."""
    device = Emulated(seed)
    for shape in ("spread", "clustered"):
        check_both_ways(device, entries_of(shape, 40_000, 2_000_000, EXACT, False, seed), EXACT)
    look_back = device.backend.workspace()._rooms["LOOK_BACK"]
    assert len(look_back) > 8 * 40
    assert not look_back.any()


@pytest.mark.parametrize("device", ["portable", "cuda"], indirect=True)
def test_every_number_of_low_bits(device: Device) -> None:
    """Low bits may cross a word. One or two entries may span all of n."""
    for low in range(1, 57):
        indices = np.array([3, 3 + (5 << low), 3 + 2**low - 1 + (6 << low), *(3 + ((8 + i) << low) for i in range(61))])
        n = int(indices[-1]) + 1
        dtype = np.int64 if n >= 2**31 else np.int32
        entries = SparseVector.trusted(indices.astype(dtype), values_of(64, EXACT, False, low), n, (n,))
        check_both_ways(device, entries, EXACT)
    for few in ([2**62], [0, 2**62], [2**62 - 1, 2**63 - 2]):
        array = np.array(few, np.int64)
        entries = SparseVector.trusted(array, np.ones(len(array), np.float32), 2**63 - 1, (2**63 - 1,))
        check_both_ways(device, entries, EXACT)


@on_cuda
def test_a_vector_whose_length_only_the_device_knows(device: Device) -> None:
    entries = entries_of("spread", 700, 50_000, EXACT, False, 1)
    counted = device.backend.counted(700, np.dtype(np.float32), 50_000, (50_000,))
    for memory, content in zip((counted.counter, *counted.room), ([650], entries.indices, entries.values), strict=True):
        memory[:] = device.array(np.asarray(content, memory.dtype))
    assert device.backend.pack(counted, EXACT).tobytes() == packed(entries.indices[:650], entries.values[:650], EXACT)


# -- rounding ----------------------------------------------------------------------------------------------------------

# Denormals, ties and near ties of some type, the largest numbers of each type, infinities and NaN.
EDGES = """
    00000001 00008000 00008001 0000C000 00010000 00018000 007FFFFF 00800000 33000000 33000001 33800000 387FC000 387FE000
    38800000 3F808000 3F818000 3F801000 3F803000 42FC0000 42FC0001 477FE000 477FEFFF 477FF000 47800000 7F7C0000 7F7F0000
    7F7F7FFF 7F7F8000 7F7FFFFF 7E800000 7F7E0000 7F7E0001 7F800000 7F800001 7FC00000 7FFFFFFF
"""


@on_devices
@of_narrow_kinds
def test_values_are_rounded_as_specified(device: Device, kind: ValueKind) -> None:
    for name in sorted(set(data.KINDS) - {"all zero"}):
        for seed, count in enumerate((0, 1, 63, 64, 65, 1000)):
            values = data.gradient(name, count, "float32", seed)
            values[values == 0] = 0.75
            check_rounding(device, values, kind)


@on_devices
@of_narrow_kinds
def test_values_at_the_edges_are_rounded_as_specified(device: Device, kind: ValueKind) -> None:
    bits_of_edges = np.array([int(bits, 16) for bits in EDGES.split()], np.uint32)
    both = np.concatenate([bits_of_edges, bits_of_edges | np.uint32(0x80000000)]).view(np.float32)
    check_rounding(device, both, kind)
    rng = np.random.default_rng(kind.code)
    for one in both:  # the largest of its block
        with np.errstate(invalid="ignore"):
            block = (rng.standard_normal(64) * np.abs(one, dtype=np.float64) / 8).astype(np.float32)
        block[~np.isfinite(block) | (block == 0)] = 1e-45
        block[17] = one
        check_rounding(device, block, kind)
    for few in ([126, 63.5, 64.5, 0.5, 1.5, 2.5, 0.25], [126.001, 125.9, 1, 3], [63.5, 1], [252, -126.5], [127e36, 1]):
        check_rounding(device, np.array(few, np.float32), kind)  # quotients that end in one half
    random = rng.integers(1, 2**31, 3000).astype(np.uint32) | rng.integers(0, 2, 3000).astype(np.uint32) << 31
    values = random.astype(np.uint32).view(np.float32)
    check_rounding(device, values[np.isfinite(values)] if kind.planes else values, kind)


@on_devices
@pytest.mark.parametrize("kind", [BFLOAT16, FLOAT16], ids=lambda kind: kind.name)
def test_halves_between_two_neighbours_go_to_the_even_one(device: Device, kind: ValueKind) -> None:
    """Values just below or above are rounded to the nearest."""
    bits = np.arange(1, 0x7BFF if kind == FLOAT16 else 0x7F7F, 23, dtype=np.uint16)
    views = (b.view(packed_format.VIEWS[kind]).astype(np.float32).astype(np.float64) for b in (bits, bits + 1))
    middle = (sum(views) / 2).astype(np.float32)
    values = np.concatenate([np.nextafter(middle, np.float32(0)), middle, np.nextafter(middle, np.float32(np.inf))])
    check_rounding(device, values.astype(np.float32), kind)


@on_devices
@pytest.mark.parametrize("kind", FEW, ids=lambda kind: kind.name)
def test_with_a_value_that_is_not_finite_nothing_is_rounded(device: Device, kind: ValueKind) -> None:
    values, indices = np.arange(1, 69, dtype=np.float32) / 3, np.r_[np.arange(5, 72), 500].astype(np.int32)
    values[40] = -np.inf
    rounded, errors, zeros = device.backend.quantize_values(device.array(values), kind)
    assert data.same_bits(np.asarray(rounded), values)
    assert not np.any(errors)
    assert zeros == 0
    entries = SparseVector.trusted(indices, values, 501, (501,))
    sent, exact = (device.backend.pack(entries, value_kind).tobytes() for value_kind in (kind, EXACT))
    assert sent == exact[:15] + bytes([exact[15] | 128]) + exact[16:]
    for other in set(KINDS) - set(FEW):
        with pytest.raises(ValueError, match=r"beyond the end|expected less than"):
            unpacked(device.backend, sent, 68, 501, other)


@on_cuda
@pytest.mark.parametrize("int64_indices", [False, True])
@pytest.mark.parametrize("kind", [INT8, FLOAT16, *FEW], ids=lambda kind: kind.name)
def test_zeros_are_dropped_by_the_device(
    device: Device, kind: ValueKind, int64_indices: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host waits once for each rounding. Dropping zeros changes the blocks, and more values may become zero."""
    runtime, rng, size = device.backend.runtime, np.random.default_rng(1), 2**40 if int64_indices else 60_000
    waits, rounds, read = list[int](), list[int](), packing.Packing._read

    def counted(*arguments: Any) -> Any:
        result = read(*arguments)
        waits.append(result[1])
        return result

    monkeypatch.setattr(packing.Packing, "_read", counted)
    spread = (10.0 ** rng.uniform(-9, 0, 3000) * rng.choice([-1, 1], 3000)).astype(np.float32)
    with_nan, denormals = spread.copy(), np.full(64, 1e-41, np.float32)
    with_nan[100] = np.nan
    for values in (spread, with_nan, spread[:64], np.full(70, 1e-9, np.float32), denormals, spread[:0]):
        indices = np.sort(rng.choice(60_000, len(values), replace=False)) * (size // 60_000)
        host = SparseVector(indices, values, size)
        entries = device.entries(host.indices, host.values, size)
        expected, lost = HOST.quantize(host, kind)
        waits.clear()
        runtime.launches.clear()
        result, errors = device.backend.quantize(entries, kind)
        same(result, (expected.indices, expected.values))
        same(errors, (lost.indices, lost.values))
        assert len(waits) == 0 if not len(values) else waits[-1] == 0 or sum(waits) == len(values)
        assert runtime.launches.count("drop_zeros") == sum(zeros > 0 for zeros in waits)
        runtime.check()
        rounds.append(len(waits))
    assert rounds[0] >= (3 if kind == INT8 else 2 if kind == FLOAT16 else 1)


def test_values_that_do_not_fit_the_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="float64"):
        HOST.pack(SparseVector([0], np.ones(1), 1), BFLOAT16)
    with pytest.raises(ValueError, match="does not round values"):
        HOST.quantize_values(np.ones(1, np.float32), EXACT)


# -- damaged bytes -----------------------------------------------------------------------------------------------------

COUNT, N = 777, 60_000


@on_devices
@of_kinds
def test_bytes_that_are_wrong_are_refused(device: Device, kind: ValueKind) -> None:
    entries, backend = entries_of("spread", COUNT, N, kind, False, 3), device.backend
    message = packed(entries.indices, entries.values, kind)
    first, last = int(entries.indices[0]), int(entries.indices[-1])
    span = last - first
    lengths = areas(COUNT, span, kind, False)
    begin_of = {name: packed_format.place_of(name, lengths) for name, _ in lengths}

    def refused(wrong: bytes, count: int = COUNT, n: int = N) -> None:
        with pytest.raises(ValueError, match=r"\w"):
            unpacked(backend, wrong, count, n, kind)

    for length in (0, 1, 8, 15, 16, 24, len(message) // 2, len(message) - 8, len(message) - 1):
        refused(message[:length])
    for more in (1, 7, 8, 800):
        refused(message + bytes(more))
    for count in (0, 1, COUNT - 64, COUNT - 1, COUNT + 1, COUNT + 64, N + 1, 2**40):
        refused(message, count)
    refused(message, 2**62, 2**63 - 1)
    for n in (0, 1, last, COUNT):
        refused(message, n=n)
    refused(struct.pack("<QQ", N - 1, span) + message[16:])
    for head in ((2**64 - 1, span), (first, 2**64 - 1), (2**63, 2**63), (2**64 - 1, 2**64 - 1)):
        for n in (N, 2**63 - 1):
            refused(struct.pack("<QQ", *head) + message[16:], n=n)
    begin, end = begin_of["high"]
    for bit in (8 * begin, 8 * begin + 99, 8 * end - 1):  # one bit too many or too few
        refused(flipped(message, bit))
    refused(message[:begin] + bytes(end - begin) + message[end:])
    refused(message[:begin] + b"\xff" * (end - begin) + message[end:])
    bits = (span >> packed_format.low_bits(COUNT, span)) + COUNT
    assert bits % 64
    for bit in range(8 * begin + bits, 8 * end):  # the right number of bits, and one beyond the last entry
        refused(flipped(flipped(message, bit), 8 * begin))
    begin, end = begin_of["low"]
    assert COUNT * packed_format.low_bits(COUNT, span) % 64
    refused(flipped(message, 8 * end - 1))
    begin, end = begin_of["padding"]
    assert end > begin
    refused(flipped(message, 8 * begin))
    refused(flipped(message, 8 * end - 1))
    if kind == INT8:
        begin, end = begin_of["shared"]
        for at in (begin, end - 1):
            for exponent in (b"\xf8", b"\xff"):
                refused(message[:at] + exponent + message[at + 1 :])
            for exponent in (b"\xf7", b"\0"):
                assert unpacked(backend, message[:at] + exponent + message[at + 1 :], COUNT, N, kind)
    if kind.planes:
        begin, end = begin_of["shared"]
        for lowest in (0, 0x7F80, 0xFFFF, 0x8001):  # no magnitude, infinity, NaN, below zero
            for at in (begin, begin + 2 * (COUNT // 64)):  # of the first block, and of the last
                refused(message[:at] + lowest.to_bytes(2, "little") + message[at + 2 :])
        values = unpacked(backend, message[:begin] + b"\1\0" + message[begin + 2 :], COUNT, N, kind)[1]
        assert np.isfinite(np.asarray(values)).all()
        assert np.asarray(values).all()
        begin, end = begin_of["values"]
        for plane in range(1, kind.planes + 1):  # behind the last value
            refused(flipped(message, 8 * (end - 8 * (plane - 1)) - 1))
            refused(flipped(message, 8 * (end - 8 * plane) + COUNT % 64))
            assert unpacked(backend, flipped(message, 8 * (end - 8 * plane) + COUNT % 64 - 1), COUNT, N, kind)
        refused(flipped(message, 127))  # exact values would be longer
    if isinstance(backend, CudaBackend):
        assert not backend.workspace()._rooms["LOOK_BACK"].any()
    unpacked(backend, message, COUNT, N, kind)


def damaged(sent: bytes, damage: str, rng: np.random.Generator) -> bytes:
    if damage == "bits" and sent:
        for bit in rng.integers(0, 8 * (len(sent) if rng.random() < 0.5 else min(len(sent), 48)), rng.integers(1, 5)):
            sent = flipped(sent, int(bit))
    if damage == "shorter":
        sent = sent[: rng.integers(0, len(sent) + 1)]
    if damage == "longer":
        sent += rng.bytes(int(rng.integers(1, 40)))
    if damage == "noise":
        sent = rng.bytes(len(sent))
    return sent[:16] + rng.bytes(max(len(sent) - 16, 0)) if damage == "noise after the head" else sent


@pytest.mark.parametrize("device", ["portable", "cuda"], indirect=True)
@of_kinds
def test_damage_is_refused_or_gives_as_many_entries(device: Device, kind: ValueKind) -> None:
    damages = st.sampled_from(["bits", "shorter", "longer", "noise", "noise after the head", "none"])
    counts = st.one_of(st.integers(0, 300), st.sampled_from([63, 64, 65, 1000]))

    shapes, more = st.sampled_from(SHAPES), st.integers(-3, 3)

    @check(device, 120)
    @given(shapes, counts, st.booleans(), data.seeds, damages, more, st.sampled_from([0, 1, -1]))
    def run(shape: str, m: int, int64_indices: bool, seed: int, damage: str, more: int, other_n: int) -> None:
        n = 2**62 if int64_indices else 10**6
        entries, rng = entries_of(shape, m, n, kind, False, seed), np.random.default_rng(seed)
        sent = damaged(device.backend.pack(entries, kind).tobytes(), damage, rng)
        count, n = max(m + more, 0), n + other_n
        try:
            back = unpacked(device.backend, sent, count, n, kind)
        except ValueError:
            return
        assert [len(part) for part in back] == [count, count]
        assert (back[0].dtype, back[1].dtype) == (entries.indices.dtype, np.float32)
        device.backend.well_formed(SparseVector.trusted(*back, n, (n,)))

    run()
