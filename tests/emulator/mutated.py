"""The kernels of a folder, on the emulator: a program of its own, as a wrong kernel may write anywhere.

    python -m tests.emulator.mutated FOLDER DRIVER ...

It exits with `FINE`, `CAUGHT` or `BROKEN`; a fault may also end it by a signal, and one that never ends does: what
counts is the time of the processor, which does not depend on what else runs.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from sparsecomm.backends.cuda import CudaBackend
from sparsecomm.tensors import interop
from sparsecomm.tensors.kinds import INT4, ValueKind
from sparsecomm.tensors.sparse import SparseVector
from tests import data, reference
from tests.backends import packed_format as packed
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


class WrongError(Exception):
    """A result that is not the oracle's."""


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
    if kind == "large first":  # the sample of a chunk of 4,096 misleads
        return data.gradient("normal", n, dtype, seed) * np.where(np.arange(n) % 4096 < 512, 1, 0.001).astype(dtype)
    return data.gradient(kind, n, dtype, seed)


def guarded(runtime: EmulatedRuntime, array: np.ndarray) -> np.ndarray:
    """A copy, behind whose end writes are seen."""
    copy = runtime.empty(array.size, array.dtype)
    copy[:] = array
    return copy


def tensor(array: np.ndarray) -> interop.Tensor:
    return interop.tensor(array, "x", writable=True)


def same(what: str, entries: SparseVector, expected: tuple[np.ndarray, np.ndarray]) -> None:
    if not np.array_equal(entries.indices, expected[0]):
        raise WrongError(f"{what}: indices")
    if not data.same_bits(np.asarray(entries.values), expected[1]):
        raise WrongError(f"{what}: values")


def selections(
    select: Callable, expected: Callable, residual: bool, seed: int, n: int, kind: str, dtype: str = "float32"
) -> None:
    """Twice: the second call finds what the first one left behind."""
    runtime: EmulatedRuntime = select.__self__.runtime
    what = f"{select.__name__} of {kind}"
    for again in range(2):
        x = guarded(runtime, gradient(kind, n, dtype, seed + again))
        r = guarded(runtime, gradient(kind, n, dtype, seed + 10)) if residual else None
        total = x if r is None else r + x
        wanted = expected(total)
        same(what, select(tensor(x), None if r is None else tensor(r)), wanted)
        runtime.check()
        if r is not None:
            total[wanted[0]] = 0
            if not np.array_equal(r, total):
                raise WrongError(f"{what}: residual")


class Selecting:
    """`CudaBackend` with k or tau set."""

    def __init__(self, sources: Path, seed: int, spare: int = 100, short: int = 50, multiprocessors: int = 2):
        self.runtime = Crowd(sources=sources, seed=100 * seed, multiprocessors=multiprocessors)
        tiles = {"filter_threads": 64, "filter_vectors": 1, "filter_rounds": 2}  # short, so that there are many
        self.backend = CudaBackend(self.runtime, radix_max_size=short, spare_candidates=spare, **tiles)

    def topk(self, x: interop.Tensor, r: interop.Tensor | None) -> SparseVector:
        return self.backend.topk(x, 2100, r)

    def threshold(self, x: interop.Tensor, r: interop.Tensor | None) -> SparseVector:
        return self.backend.threshold(x, 1.0, r)


def best(total: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return reference.topk(total, 2100)


def topk(sources: Path, seed: int, residual: bool = False) -> None:
    """Of candidates; where too many are close to each other, `radix` resumes."""
    it = Selecting(sources, seed)
    for kind in ("normal", "ties", "few values", "close", "all equal", "mostly zero", "rising"):
        selections(it.topk, best, residual, seed, N, kind)


def topk_with_residual(sources: Path, seed: int) -> None:
    topk(sources, seed, True)
    it = Selecting(sources, seed, spare=0)
    selections(it.topk, best, True, seed, N, "close")


def radix(sources: Path, seed: int, residual: bool = False, dtype: str = "float32") -> None:
    """From the beginning."""
    it = Selecting(sources, seed, short=10**9)
    for kind in ("normal", "ties", "few values", "close", "all equal", "mostly zero"):
        selections(it.topk, best, residual, seed, N, kind, dtype)


def radix_of_doubles(sources: Path, seed: int) -> None:
    """Twice as many passes."""
    radix(sources, seed, dtype="float64")


def radix_with_residual(sources: Path, seed: int) -> None:
    radix(sources, seed, True)


def threshold(sources: Path, seed: int, residual: bool = False) -> None:
    """There are more entries than the first call has room for; in more tiles than a look-back's windows, and fewer."""
    it = Selecting(sources, seed, multiprocessors=50)
    for n, kind in ((150_001, "few values"), (N, "normal"), (N, "mostly zero"), (20_095, "normal"), (30_001, "small")):
        selections(it.threshold, lambda v: reference.threshold(v, 1.0), residual, seed, n, kind)


def threshold_with_residual(sources: Path, seed: int) -> None:
    threshold(sources, seed, True)


def warp_chunks(sources: Path, seed: int) -> None:
    chunks(sources, seed, WARP_CHUNKS)


def chunks(sources: Path, seed: int, shapes: tuple[tuple[str, int, int], ...] = CHUNKS) -> None:
    """With decay."""
    runtime = Crowd(sources=sources, seed=100 * seed, multiprocessors=2)
    backend = CudaBackend(runtime)
    for kind, k, chunk in shapes:
        for again in range(2):
            x = guarded(runtime, gradient(kind, N, "float32", seed + again))
            r = guarded(runtime, gradient(kind, N, "float32", seed + 10))
            total = reference.accumulated(x, r, 0.95)
            wanted = reference.topk_by_chunk(total, k, chunk)
            same(f"{k} in {chunk} of {kind}", backend.topk_by_chunk(tensor(x), k, chunk, tensor(r), 0.95), wanted)
            runtime.check()
            total[wanted[0]] = 0
            if not np.array_equal(r, total):
                raise WrongError(f"{k} in {chunk} of {kind}: residual")


def merge(sources: Path, seed: int) -> None:
    """Three tiles; of equal indices; with sums that are zero; with ties."""
    runtime = Crowd(sources=sources, seed=100 * seed)
    backend, rng, n = CudaBackend(runtime), np.random.default_rng(seed), 6000
    for kind, k in (("normal", 1500), ("few values", 1500), ("all equal", 2000), ("normal", 20), ("normal", 9000)):
        sides = []
        for nnz in (3000, 2100):
            indices = np.sort(rng.choice(n, nnz, replace=False)).astype(np.int32)
            values = data.gradient(kind, nnz, "float32", seed)
            values[values == 0] = 1
            sides.append((guarded(runtime, indices), guarded(runtime, values)))
        (a, b), (kept, lost) = sides, reference.merge_topk(*sides, k)
        out = backend.merge_topk(SparseVector(*a, n), SparseVector(*b, n), k)
        runtime.check()
        same(f"merge_topk of {kind}: kept", out[0], kept)
        same(f"merge_topk of {kind}: lost", out[1], lost)


def densify(sources: Path, seed: int) -> None:
    runtime = Crowd(sources=sources, seed=100 * seed)
    backend, n = CudaBackend(runtime), 10_001
    for nnz in (0, 700, n):
        indices = np.sort(np.random.default_rng(seed).choice(n, nnz, replace=False)).astype(np.int32)
        entries = indices, data.gradient("normal", nnz, "float32", seed)
        out = runtime.empty(n, np.float32)
        backend.densify(tensor(out), SparseVector(*entries, n))
        runtime.check()
        if not np.array_equal(out, reference.dense(entries, n)):
            raise WrongError("densify")


def adding_where(sources: Path, seed: int) -> None:
    """More tiles than blocks; the others are some, all, none, or end within a tile."""
    runtime = Crowd(sources=sources, seed=100 * seed, multiprocessors=1)
    backend, n, nnz, rng = CudaBackend(runtime), 20_000, 9000, np.random.default_rng(seed)
    indices = np.sort(rng.choice(n, nnz, replace=False)).astype(np.int32)
    values = data.gradient("normal", nnz, "float32", seed)
    for others in (indices[::3], indices, indices[:0], indices[-300:], np.arange(n // 2, dtype=np.int32)):
        for present in (True, False):
            dense = guarded(runtime, data.gradient("normal", n, "float32", seed + 1))
            expected, chosen = dense.copy(), np.isin(indices, others) == present
            expected[indices[chosen]] += values[chosen]
            entries = SparseVector.trusted(guarded(runtime, indices), guarded(runtime, values), n, (n,))
            among = guarded(runtime, others)
            backend.scatter_add_where(tensor(dense), entries, SparseVector.trusted(among, among, n, (n,)), present)
            runtime.check()
            if not data.same_bits(np.array(dense), expected):
                raise WrongError("scatter_add_where")


def packing(sources: Path, seed: int) -> None:
    packing_of(sources, seed, (packed.EXACT, "spread"), (packed.INT8, "clustered"), (packed.FLOAT16, "dense"))


def packing_few_bits(sources: Path, seed: int) -> None:
    """Also of a vector that is not finite, and with bits behind the last value."""
    packing_of(sources, seed, (INT4, "spread"))
    runtime = Crowd(sources=sources, seed=100 * seed)
    backend, n, count, kind = CudaBackend(runtime), 2**20, 333, INT4
    entries = packed.entries_of("spread", count, n, kind, False, seed)
    message = packed.packed(entries.indices, entries.values, kind)
    end = packed.end_of("values", message, count, kind)
    refused(backend, packed.flipped(message, 8 * end - 1), count, n, kind)
    refused(backend, message[:end] + bytes(2) + message[end + 2 :], count, n, kind)  # a magnitude of zero
    for name in ("normal", "NaN and infinities"):
        values = gradient(name, count, "float32", seed)
        rounded, _, _ = backend.quantize_values(guarded(runtime, values), kind)
        if not data.same_bits(np.array(rounded), packed.quantized(values, kind)):
            raise WrongError(f"rounding of {name}")
    found = backend.pack(SparseVector(guarded(runtime, entries.indices), guarded(runtime, rounded), n), kind)
    if found.tobytes() != packed.packed(entries.indices, rounded, kind):
        raise WrongError("pack of values that are not finite")


def packing_of(sources: Path, seed: int, *kinds: tuple[ValueKind, str]) -> None:
    """There and back, in some tiles of words; rounding; and bytes with indices too few and too many."""
    runtime = Crowd(sources=sources, seed=100 * seed, multiprocessors=2)
    backend, n, count = CudaBackend(runtime), 2**21, 17_001  # 5 low bits
    for kind, shape in kinds:
        entries = packed.entries_of(shape, count, n, kind, False, seed)
        wanted = entries.indices, entries.values
        message = packed.packed(*wanted, kind)
        made = backend.pack(SparseVector(*(guarded(runtime, array) for array in wanted), n), kind)
        runtime.check()
        if made.tobytes() != message:
            raise WrongError(f"pack of kind {kind}, {shape}")
        try:
            indices, values = packed.unpacked(backend, message, count, n, kind)
        except ValueError as error:
            raise WrongError(f"unpack of kind {kind}, {shape}: {error}") from None
        runtime.check()
        same(f"unpack of kind {kind}, {shape}", SparseVector.trusted(indices, values, n, (n,)), wanted)
        unrounded = gradient("huge range", count, "float32", seed)
        rounded, errors, zeros = backend.quantize_values(guarded(runtime, unrounded), kind)
        runtime.check()
        if not np.array_equal(rounded, packed.quantized(unrounded, kind)) or zeros != np.count_nonzero(rounded == 0):
            raise WrongError(f"rounding to kind {kind}")
        if not np.array_equal(errors, unrounded - rounded):
            raise WrongError(f"errors of rounding to kind {kind}")
        span = int(entries.indices[-1] - entries.indices[0])
        begin, end = packed.place_of("high", packed.areas(count, span, kind, False))
        for byte in (b"\xff", b"\0"):
            refused(backend, message[:begin] + byte * (end - begin - 8) + message[end - 8 :], count, n, kind)


def refused(backend: CudaBackend, message: bytes, count: int, n: int, kind: ValueKind) -> None:
    try:
        packed.unpacked(backend, message, count, n, kind)
    except ValueError:
        backend.runtime.check()
    else:
        raise WrongError("wrong bytes are taken for entries")


DRIVERS = (
    topk,
    topk_with_residual,
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
)


def main(sources: Path, *drivers: str) -> int:
    """Print what is wrong first."""
    try:
        for name in drivers:
            for seed in range(SEEDS):
                globals()[name](sources, seed)
    except (EmulatorError, WrongError) as error:
        print(type(error).__name__, error)
        return BROKEN if "does not compile" in str(error) else CAUGHT
    return FINE


if __name__ == "__main__":
    limit = MAX_SECONDS * len(sys.argv[2:])
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
