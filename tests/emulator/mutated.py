"""The kernels of a folder, on the emulator: a program of its own, as a wrong kernel may write anywhere.

    python -m tests.emulator.mutated FOLDER DRIVER ...

It exits with `FINE`, `CAUGHT` or `BROKEN`; a fault may also end it by a signal, and one that never ends does: what
counts is the time of the processor, which does not depend on what else runs.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from sparsecomm.backends import CpuBackend
from sparsecomm.backends.adamw import Moments
from sparsecomm.backends.cuda import CudaBackend
from sparsecomm.tensors import interop
from sparsecomm.tensors.kinds import INT4, ValueKind
from sparsecomm.tensors.sparse import SparseVector
from tests import data, reference
from tests.backends import packed_format as packed
from tests.backends.devices import Device, same
from tests.emulator.runtime import EmulatedRuntime, EmulatorError

FINE, CAUGHT, BROKEN = 0, 3, 4  # how it exits; a fault may also end it by a signal
SEEDS = 2
MAX_SECONDS = 20  # of the processor for a driver, which takes one
N = 9001  # some tiles of `filter` and of `chunks`; 16 bytes do not divide it
# Kinds of gradients, k and lengths, of which a tile has many for warps, or some, or one, or not a whole one.
CHUNKS = (
    ("ties", 9, 200),
    ("mostly zero", 9, 200),
    ("few values", 200, 1000),
    ("ties", 140, 2500),
    ("few values", 200, 4096),
    ("normal", 700, 5000),
)
# For warp_chunks.cu: a warp has many, or one; its sample misleads, or its room is full.
WARP_CHUNKS = (
    ("ties", 9, 300),
    ("mostly zero", 9, 300),
    ("few values", 120, 4096),
    ("large first", 120, 4096),
    ("ascending", 120, 4096),
    ("normal", 100, 2500),
)


class Crowd(EmulatedRuntime):
    """All blocks of a grid are resident, so that look-backs find many tiles whose sums are not there yet."""

    crowded = True


def gradient(kind: str, n: int, dtype: str, seed: int) -> np.ndarray:
    if kind == "ties":  # a few of every value
        return (np.round(50 * data.gradient("normal", n, "float32", seed)) / 50).astype(dtype)
    if kind == "small":  # few of a warp's part are 1 or more, so that they wait
        return data.gradient("normal", n, dtype, seed) / 2
    if kind == "close":  # most of them in one bin of the sample, some well above
        v = 1 + np.random.default_rng(seed).integers(0, 30, n) / 1024
        v[::10] *= 4
        return v.astype(dtype)
    if kind == "rising":  # the entries of a warp's first round find room, and later ones do not
        return data.gradient("normal", n, dtype, seed) * np.where(np.arange(n) % 256 < 128, 0.45, 1).astype(dtype)
    if kind == "bursts":  # the same, for few entries
        burst = abs(np.arange(n) // 8 % 256 - 19) < 5
        return data.gradient("normal", n, dtype, seed) * np.where(burst, 10, 1).astype(dtype)
    if kind == "large first":  # the sample of a chunk of 4,096 misleads
        return data.gradient("normal", n, dtype, seed) * np.where(np.arange(n) % 4096 < 512, 1, 0.001).astype(dtype)
    return data.gradient(kind, n, dtype, seed)


def guarded(runtime: EmulatedRuntime, array: np.ndarray) -> np.ndarray:
    """A copy, behind whose end writes are seen."""
    copy = runtime.empty(array.size, array.dtype)
    copy[:] = array
    return copy


def crowded(sources: Path, seed: int, *, multiprocessors: int = 2, **tuning: int) -> Device:
    runtime = Crowd(sources=sources, seed=100 * seed, multiprocessors=multiprocessors)
    return Device("cuda", CudaBackend(runtime, **tuning))


def selections(
    select: Callable[..., SparseVector],
    expected: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]],
    device: Device,
    residual: bool,
    seed: int,
    n: int,
    kind: str,
    dtype: str = "float32",
    decay: float = 1.0,
) -> None:
    """Select twice: the second call finds what the first one left behind."""
    runtime = device.backend.runtime
    for again in range(2):
        x = guarded(runtime, gradient(kind, n, dtype, seed + again))
        r = guarded(runtime, gradient(kind, n, dtype, seed + 10)) if residual else None
        total = x.copy() if r is None else reference.accumulated(x, r, decay)
        wanted = expected(total)
        same(select(device.tensor(x), None if r is None else device.tensor(r)), wanted)
        runtime.check()
        if r is not None:
            total[wanted[0]] = 0
            np.testing.assert_array_equal(r, total)


TILES = {"filter_threads": 64, "filter_vectors": 1, "filter_rounds": 2}  # short, so that there are many


def topk(sources: Path, seed: int, residual: bool = False, dtype: str = "float32", **tuning: int) -> None:
    """Of candidates; where too many are close to each other, `radix` resumes."""
    it = crowded(sources, seed, **TILES, **({"radix_max_size": 50, "spare_candidates": 100} | tuning))

    for kind in ("normal", "ties", "few values", "close", "all equal", "mostly zero", "rising", "bursts"):
        k = 100 if kind == "bursts" else 2100

        def select(x: interop.Tensor, r: interop.Tensor | None, k: int = k) -> SparseVector:
            return it.backend.topk(x, k, r)

        selections(select, partial(reference.topk, k=k), it, residual, seed, N, kind, dtype)


def topk_with_residual(sources: Path, seed: int) -> None:
    topk(sources, seed, True)
    topk(sources, seed, True, spare_candidates=0)


def topk_of_a_few(sources: Path, seed: int, *densities: float) -> None:
    """With the sizes that a GPU gets, and parts of the last tile that are empty."""
    n, it = 150_000, crowded(sources, seed)
    for density in densities or (0.001, 0.01, 0.03, 0.09):
        k = round(n * density)

        def select(x: interop.Tensor, r: interop.Tensor | None, k: int = k) -> SparseVector:
            return it.backend.topk(x, k, r)

        for residual, dtype in ((True, "float32"), (False, "float64")):
            selections(select, partial(reference.topk, k=k), it, residual, seed, n, "normal", dtype)


def topk_of_half(sources: Path, seed: int) -> None:
    topk_of_a_few(sources, seed, 0.5)


def radix(sources: Path, seed: int, residual: bool = False, dtype: str = "float32") -> None:
    """From the beginning."""
    topk(sources, seed, residual, dtype, radix_max_size=10**9)


def radix_of_doubles(sources: Path, seed: int) -> None:
    """Twice as many passes."""
    radix(sources, seed, dtype="float64")


def radix_with_residual(sources: Path, seed: int) -> None:
    radix(sources, seed, True)


def threshold(sources: Path, seed: int, residual: bool = False) -> None:
    """There are more entries than the first call has room for; in more tiles than a look-back's windows, and fewer."""
    it = crowded(sources, seed, multiprocessors=50, radix_max_size=50, spare_candidates=100, **TILES)

    def select(x: interop.Tensor, r: interop.Tensor | None) -> SparseVector:
        return it.backend.threshold(x, 1.0, r)

    for n, kind in ((150_001, "few values"), (N, "normal"), (N, "mostly zero"), (20_095, "normal"), (30_001, "small")):
        selections(select, lambda v: reference.threshold(v, 1.0), it, residual, seed, n, kind)


def threshold_with_residual(sources: Path, seed: int) -> None:
    threshold(sources, seed, True)


def warp_chunks(sources: Path, seed: int) -> None:
    chunks(sources, seed, WARP_CHUNKS)


def chunks(sources: Path, seed: int, shapes: tuple[tuple[str, int, int], ...] = CHUNKS) -> None:
    """With decay."""
    it = crowded(sources, seed)
    for kind, k, chunk in shapes:
        by_chunk = k, chunk

        def select(x: interop.Tensor, r: interop.Tensor | None, by_chunk: tuple[int, int] = by_chunk) -> SparseVector:
            return it.backend.topk_by_chunk(x, *by_chunk, r, 0.95)

        expected = partial(reference.topk_by_chunk, k=k, chunk=chunk)
        selections(select, expected, it, True, seed, N, kind, decay=0.95)


def merge(sources: Path, seed: int) -> None:
    """Three tiles; of equal indices; with sums that are zero; with ties."""
    it, rng, n = crowded(sources, seed, multiprocessors=3), np.random.default_rng(seed), 6000
    runtime = it.backend.runtime
    for kind, k in (("normal", 1500), ("few values", 1500), ("all equal", 2000), ("normal", 20), ("normal", 9000)):
        sides = []
        for nnz in (3000, 2100):
            indices = np.sort(rng.choice(n, nnz, replace=False)).astype(np.int32)
            values = data.gradient(kind, nnz, "float32", seed)
            values[values == 0] = 1
            sides.append((guarded(runtime, indices), guarded(runtime, values)))
        found = it.backend.merge_topk(*(it.entries(*side, n) for side in sides), k)
        runtime.check()
        for entries, expected in zip(found, reference.merge_topk(*sides, k), strict=True):
            same(entries, expected)


def densify(sources: Path, seed: int) -> None:
    it, n = crowded(sources, seed, multiprocessors=3), 10_001
    for nnz in (0, 700, n):
        indices = np.sort(np.random.default_rng(seed).choice(n, nnz, replace=False)).astype(np.int32)
        entries = indices, data.gradient("normal", nnz, "float32", seed)
        out = it.backend.runtime.empty(n, np.float32)
        it.backend.densify(it.tensor(out), it.entries(*entries, n))
        it.backend.runtime.check()
        np.testing.assert_array_equal(out, reference.dense(entries, n))


def adamw(sources: Path, seed: int) -> None:
    """Compare with the CPU, for some weights and for all. Some weights missed more steps than the table has rows."""
    n, rng = 3000, np.random.default_rng(seed)
    x, g = (data.gradient("normal", n, "float32", seed + i) for i in range(2))
    table = rng.random((6, 6)).astype(np.float32)
    x[:40], squares = np.inf, np.square(g) + np.float32(1e-3)
    squares[rng.random(n) < 0.1] *= 1e6
    squares[50:90], last = 3e38, rng.integers(0, 9, n).astype(np.int32)
    exponents = np.where(rng.random(n) < 0.1, 1, rng.integers(100, 130, n)).astype(np.uint8)
    for nnz in (700, n):
        indices = np.sort(rng.choice(n, nnz, replace=False)).astype(np.int32)
        values, jumps = (data.gradient("normal", nnz, "float32", seed + i) for i in (3, 4))
        found = []
        for it in (crowded(sources, seed, multiprocessors=1), Device("portable", CpuBackend(1))):
            put = partial(guarded, it.backend.runtime) if isinstance(it.backend, CudaBackend) else np.array
            weights, residual, units, *state = map(put, (x, g, exponents, g, squares, last, x[::-1] / 64))
            w, r, moments = it.tensor(weights), it.tensor(residual), Moments(*state)
            for scale, exponent in ((0.5, units), (1e20, put(np.full(n, 127, np.uint8)))):  # only squares overflow
                added = it.backend.add_quotient(it.tensor(put(g)), exponent, scale, r, True)
                assert added is (scale < 1)
            sums = it.entries(put(indices), put(values), n) if nnz < n else it.backend.nonzeros(put(values), (n,))
            made = it.backend.adamw(w, moments, units, sums, table, 1e-3, 1e-8, 7, True, 4)
            it.backend.store_adamw(w, moments, units if nnz < n else None, sums, made, 7, True)
            it.backend.change_units(r, units, it.entries(put(indices), put(2 * jumps), n))
            found.append([weights, residual, units, *moments, made.changes, made.jumps, np.array(made.overflows)])
        for ours, theirs in zip(*found, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def adding_where(sources: Path, seed: int) -> None:
    """More tiles than blocks; the others are some, all, none, or end within a tile."""
    it, n, nnz, rng = crowded(sources, seed, multiprocessors=1), 20_000, 9000, np.random.default_rng(seed)
    runtime, indices = it.backend.runtime, np.sort(rng.choice(n, nnz, replace=False)).astype(np.int32)
    values = data.gradient("normal", nnz, "float32", seed)
    entries = it.entries(guarded(runtime, indices), guarded(runtime, values), n)
    for others in (indices[::3], indices, indices[:0], indices[-300:], np.arange(n // 2, dtype=np.int32)):
        among = it.entries(guarded(runtime, others), guarded(runtime, others), n)
        for present in (True, False):
            dense = guarded(runtime, data.gradient("normal", n, "float32", seed + 1))
            expected, chosen = dense.copy(), np.isin(indices, others) == present
            expected[indices[chosen]] += values[chosen]
            it.backend.scatter_add_where(it.tensor(dense), entries, among, present)
            runtime.check()
            assert data.same_bits(np.array(dense), expected)


def packing(sources: Path, seed: int) -> None:
    packing_of(sources, seed, (packed.EXACT, "spread"), (packed.INT8, "clustered"), (packed.FLOAT16, "dense"))


def packing_of(sources: Path, seed: int, *kinds: tuple[ValueKind, str]) -> None:
    """There and back, in some tiles of words; rounding; and bytes with indices too few and too many."""
    it, n, count = crowded(sources, seed), 2**21, 17_001  # 5 low bits
    runtime = it.backend.runtime
    for kind, shape in kinds:
        entries = packed.entries_of(shape, count, n, kind, False, seed)
        packed.check_both_ways(
            it, it.entries(*(guarded(runtime, a) for a in (entries.indices, entries.values)), n), kind
        )
        if kind != packed.EXACT:
            packed.check_rounding(it, guarded(runtime, gradient("huge range", count, "float32", seed)), kind)
        runtime.check()
        message, span = packed.packed(entries.indices, entries.values, kind), int(np.ptp(entries.indices))
        begin, end = packed.place_of("high", packed.areas(count, span, kind, False))
        for byte in (b"\xff", b"\0"):
            refused(it.backend, message[:begin] + byte * (end - begin - 8) + message[end - 8 :], count, n, kind)


def dropping_zeros(sources: Path, seed: int) -> None:
    """Zeros of several roundings, in some tiles."""
    it, n, count = crowded(sources, seed), 60_000, 2999
    values = gradient("huge range", count, "float32", seed)
    indices = np.sort(np.random.default_rng(seed).choice(n, count, replace=False)).astype(np.int32)
    entries = it.entries(*(guarded(it.backend.runtime, a) for a in (indices, values)), n)
    for _ in range(2):
        found = it.backend.quantize(entries, packed.INT8)
        it.backend.runtime.check()
        for ours, theirs in zip(
            found, CpuBackend(1).quantize(SparseVector(indices, values, n), packed.INT8), strict=True
        ):
            same(ours, (theirs.indices, theirs.values))


def packing_few_bits(sources: Path, seed: int) -> None:
    """Also of a vector that is not finite, and with bits behind the last value."""
    packing_of(sources, seed, (INT4, "spread"))
    it, n, count, kind = crowded(sources, seed, multiprocessors=3), 2**20, 333, INT4
    runtime, entries = it.backend.runtime, packed.entries_of("spread", count, n, kind, False, seed)
    message = packed.packed(entries.indices, entries.values, kind)
    end = packed.end_of("values", message, count, kind)
    refused(it.backend, packed.flipped(message, 8 * end - 1), count, n, kind)
    refused(it.backend, message[:end] + bytes(2) + message[end + 2 :], count, n, kind)  # a magnitude of zero
    for name in ("normal", "NaN and infinities"):
        values = gradient(name, count, "float32", seed)
        packed.check_rounding(it, guarded(runtime, values), kind)
    rounded = packed.quantized(values, kind)
    packed.check_both_ways(it, it.entries(guarded(runtime, entries.indices), guarded(runtime, rounded), n), kind)


def damaged_messages(sources: Path, seed: int) -> None:
    """Each is refused, or read within its bounds."""
    it, rng, n, count = crowded(sources, seed, multiprocessors=3), np.random.default_rng(seed), 60_000, 777
    for kind, shape in ((packed.EXACT, "spread"), (packed.INT8, "dense"), (INT4, "spread")):
        entries = packed.entries_of(shape, count, n, kind, False, seed)
        message, wrong = packed.packed(entries.indices, entries.values, kind), 0
        for trial in range(24):
            bad = packed.flipped(message, int(rng.integers(8 * len(message))))
            bad = bad if trial % 2 else message[:16] + rng.bytes(len(message) - 16)
            exact = np.array(np.frombuffer(bad, np.uint8))  # its end is the end of its memory
            try:
                found = it.backend.unpack(exact, bad[:16], count, n, kind, False)
            except ValueError:
                wrong += 1
            else:
                assert [len(part) for part in found] == [count, count]
            it.backend.runtime.check()
        assert wrong >= 12


def refused(backend: CudaBackend, message: bytes, count: int, n: int, kind: ValueKind) -> None:
    try:
        packed.unpacked(backend, message, count, n, kind)
    except ValueError:
        backend.runtime.check()
    else:
        raise AssertionError("wrong bytes are taken for entries")


DRIVERS = (
    adamw,
    topk,
    topk_with_residual,
    topk_of_a_few,
    topk_of_half,
    radix,
    radix_with_residual,
    radix_of_doubles,
    threshold,
    threshold_with_residual,
    chunks,
    warp_chunks,
    merge,
    densify,
    adding_where,
    packing,
    packing_few_bits,
    dropping_zeros,
    damaged_messages,
)


def main(sources: Path, *drivers: str) -> int:
    """Print the first error. A message that cannot be unpacked is a ValueError."""
    try:
        for name in drivers:
            for seed in range(SEEDS):
                globals()[name](sources, seed)
    except (EmulatorError, AssertionError, ValueError) as error:
        print(type(error).__name__, error)
        return BROKEN if "does not compile" in str(error) else CAUGHT
    return FINE


if __name__ == "__main__":
    limit = MAX_SECONDS * len(sys.argv[2:])
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
