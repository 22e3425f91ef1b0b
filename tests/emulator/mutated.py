"""Runs the kernels of a folder on the emulator, in a process of its own, since a wrong kernel may write anywhere.

    python -m tests.emulator.mutated FOLDER DRIVER ...

It exits with `FINE`, `CAUGHT` or `BROKEN`, or by a signal. The limit is CPU time, which does not depend on other
programs.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from sparsecomm import backends
from sparsecomm.backends import CpuBackend, _codec
from sparsecomm.backends.adamw import AdamWPart, Moments
from sparsecomm.backends.base import Addend, Segment
from sparsecomm.backends.cuda import CudaBackend
from sparsecomm.patches import cuda as patch_codec
from sparsecomm.tensors import interop
from sparsecomm.tensors.kinds import INT4, ValueKind
from sparsecomm.tensors.sparse import SparseVector
from tests import data, reference
from tests.backends import packed_format as packed
from tests.backends.devices import Device, same
from tests.emulator.runtime import EmulatedRuntime, EmulatorError
from tests.patches import elements as weights

FINE, CAUGHT, BROKEN = 0, 3, 4  # exit statuses
SEEDS = 2
MAX_SECONDS = 20  # CPU time of a driver, which usually takes 1 s
N = 9001  # some tiles of `filter` and of `chunks`; 16 bytes do not divide it
# Kind of gradient, k, and chunk length: a tile has many chunks, some, one, or only a part of one.
CHUNKS = (
    ("ties", 9, 200),
    ("mostly zero", 9, 200),
    ("few values", 200, 1000),
    ("ties", 140, 2500),
    ("few values", 200, 4096),
    ("normal", 700, 5000),
)
# For warp_chunks.cu: a warp has many chunks or one, a misleading sample, or more candidates than room.
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
    if kind == "ties":  # each value occurs a few times
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
    """Return a copy that detects writes behind its end."""
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
    """Select twice: the second call uses the state that the first one left."""
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
    """Select from candidates; if too many are close to each other, `radix` takes over."""
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
    """Use the sizes of a GPU, with empty parts of the last tile."""
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
    """Select with `radix` alone."""
    topk(sources, seed, residual, dtype, radix_max_size=10**9)


def radix_of_doubles(sources: Path, seed: int) -> None:
    """float64 needs twice as many passes."""
    radix(sources, seed, dtype="float64")


def radix_with_residual(sources: Path, seed: int) -> None:
    radix(sources, seed, True)


def threshold(sources: Path, seed: int, residual: bool = False) -> None:
    """There are more entries than the first call has room for, in more or fewer tiles than a look-back's window."""
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
    """Three tiles, with equal indices, zero sums and ties."""
    it, rng, n = crowded(sources, seed, multiprocessors=3), np.random.default_rng(seed), 6000
    runtime = it.backend.runtime
    for kind, k in (("normal", 1500), ("few values", 1500), ("all equal", 2000), ("normal", 20), ("normal", 9000)):
        sides = []
        for nnz in (3000, 2100):
            indices = np.sort(rng.choice(n, nnz, replace=False)).astype(np.int32)
            values = data.gradient(kind, nnz, "float32", seed)
            values[values == 0] = 1
            sides.append((guarded(runtime, indices), guarded(runtime, values)))
        results = it.backend.merge_topk(*(it.entries(*side, n) for side in sides), k)
        runtime.check()
        for entries, expected in zip(results, reference.merge_topk(*sides, k), strict=True):
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


def bucket(sources: Path, seed: int) -> None:
    """Compare with the CPU: gradients, AdamW for some or all weights, and updates, in tensors of several dtypes.

    Some weights missed more steps than the table has rows.
    """
    sizes, rng = (3000, 4097, 40, *20 * [5]), np.random.default_rng(seed)  # more tiles than blocks
    dtypes = ["float32", "bfloat16", "float16", *20 * ["float32"]]
    n, bounds = sum(sizes), [0, *np.cumsum(sizes).tolist()]
    xs = [
        data.gradient("normal", size, dtype, seed + i)
        for i, (size, dtype) in enumerate(zip(sizes, dtypes, strict=True))
    ]
    xs[0][:40], g = np.inf, data.gradient("normal", n, "float32", seed + 5)
    tables, squares = (
        [rng.random((6 + i, 6)).astype(np.float32) for i in range(len(sizes))],
        np.square(g) + np.float32(1e-3),
    )
    squares[rng.random(n) < 0.1] *= 1e6
    squares[50:90], last, lost = 3e38, rng.integers(0, 9, n).astype(np.int32), g[::-1] / 64
    lost[100:110] = np.inf
    exponents = np.where(rng.random(n) < 0.1, 1, rng.integers(100, 130, n)).astype(np.uint8)
    for nnz in (700, n):
        indices = np.sort(rng.choice(n, nnz, replace=False)).astype(np.int32)
        values, jumps = (data.gradient("normal", nnz, "float32", seed + i) for i in (3, 4))
        outcomes = []
        for it in (crowded(sources, seed, multiprocessors=1), Device("portable", CpuBackend(1))):
            backend = it.backend
            put = partial(guarded, backend.runtime) if isinstance(backend, CudaBackend) else np.array
            residual, velocity, units, *state = map(put, (g, g, exponents, g, squares, last, lost))
            weights, written = ([put(x) for x in xs] for _ in "12")
            left_out, ones = [], put(np.full(n, 127, np.uint8))  # units with which only squares overflow
            for scale, momentum, kind in ((0.5, 0, "units"), (1e20, 0, "ones"), (0.3, 0.5, ""), (1, 0.5, "minuend")):
                addends = []
                for x, begin, end in zip(xs, bounds, bounds[1:], strict=False):
                    exponent = {"units": units[begin:end], "ones": ones[begin:end]}.get(kind)
                    minuend = state[0][begin:end] if kind == "minuend" else None
                    addends.append(Addend(begin, it.tensor(put(x)), scale, exponent, minuend))
                while addends:
                    arguments = residual, velocity if momentum else None, 0.9 if momentum else 1.0, momentum, True
                    count, flags = backend.add_first(addends, *arguments)
                    left_out += [len(addends) - i for i in backend.wait_for((), flags)]
                    del addends[:count]
            squared = backend.sums_of_squares([it.tensor(x) for x in weights])
            parts = []
            for i, (w, begin, end) in enumerate(zip(weights, bounds, bounds[1:], strict=False)):
                moments = Moments(*(array[begin:end] for array in state))
                parts.append(AdamWPart(begin, it.tensor(w), moments, tables[i], 1e-3, 1e-8 * (i + 1), 7))
            step, dense = backend.adamw(parts, units, it.entries(put(indices), put(values), n), 4, True), put(g)
            if nnz < n:
                backend.store_adamw(parts, units, step, True)
            else:
                del parts[1]
                step = step._replace(overflows=backend.adamw_dense(parts, units, dense, 0).overflows)
                backend.store_adamw(parts, None, backend.adamw_dense(parts, units, put(g), 0), True)
            backend.change_units(it.tensor(residual), units, it.entries(put(indices), put(2 * jumps), n))
            segments = [Segment(begin, it.tensor(x)) for x, begin in zip(written, bounds, strict=False)]
            backend.write(segments[::2], it.entries(put(indices), put(values), n))
            backend.add_entries(segments[1:], it.entries(put(indices), put(jumps), n))
            backend.write(segments[:1], backend.nonzeros(put(g), (n,)))
            flat = [array.view(np.uint16) if array.itemsize == 2 else array for array in (*weights, *written)]
            arrays = [*flat, residual, velocity, units, dense, *state, step.changes, step.jumps, np.array(squared)]
            outcomes.append([*map(np.asarray, arrays), sorted(left_out), step.overflows])
        for on_cuda, on_cpu in zip(*outcomes, strict=True):
            np.testing.assert_array_equal(on_cuda, on_cpu)


def adding_where(sources: Path, seed: int) -> None:
    """More tiles than blocks. The other vector has some of the indices, all, none, or a range."""
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
    """Pack and unpack some tiles, round, and refuse messages with too many or too few indices."""
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
    """Drop the zeros of several roundings, in some tiles."""
    it, n, count = crowded(sources, seed), 60_000, 2999
    values = gradient("huge range", count, "float32", seed)
    indices = np.sort(np.random.default_rng(seed).choice(n, count, replace=False)).astype(np.int32)
    entries = it.entries(*(guarded(it.backend.runtime, a) for a in (indices, values)), n)
    for _ in range(2):
        results = it.backend.quantize(entries, packed.INT8)
        it.backend.runtime.check()
        for result, expected in zip(
            results, CpuBackend(1).quantize(SparseVector(indices, values, n), packed.INT8), strict=True
        ):
            same(result, (expected.indices, expected.values))


def packing_few_bits(sources: Path, seed: int) -> None:
    """Also with values that are not finite, and with bits behind the last value."""
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
    """Each damaged message is refused or read within its bounds."""
    it, rng, n, count = crowded(sources, seed, multiprocessors=3), np.random.default_rng(seed), 60_000, 777
    for kind, shape in ((packed.EXACT, "spread"), (packed.INT8, "dense"), (INT4, "spread")):
        entries = packed.entries_of(shape, count, n, kind, False, seed)
        message, wrong = packed.packed(entries.indices, entries.values, kind), 0
        for trial in range(24):
            bad = packed.flipped(message, int(rng.integers(8 * len(message))))
            bad = bad if trial % 2 else message[:16] + rng.bytes(len(message) - 16)
            exact = np.array(np.frombuffer(bad, np.uint8))  # its end is the end of its memory
            try:
                arrays = it.backend.unpack(exact, bad[:16], count, n, kind, False)
            except ValueError:
                wrong += 1
            else:
                assert [len(part) for part in arrays] == [count, count]
            it.backend.runtime.check()
        assert wrong >= 12


def refused(backend: CudaBackend, message: bytes, count: int, n: int, kind: ValueKind) -> None:
    try:
        packed.unpacked(backend, message, count, n, kind)
    except ValueError:
        backend.runtime.check()
    else:
        raise AssertionError("wrong bytes are taken for entries")


def patches(sources: Path, seed: int) -> None:
    """Several tiles that end within a block, and weights that do not fit the patch."""
    it = crowded(sources, seed, patch_threads=64)
    backends._thread_backends.backends._cuda[0] = it.backend
    runtime, device = it.backend.runtime, interop.Device("cuda", 0)
    for name, n, density in (("bfloat16", 4900, 0.1), ("float8_e4m3", 9000, 0.5), ("float64", 1100, 0.1)):
        old, layout = weights.elements(name, n, seed), weights.layout_of(name)
        new = weights.changed(name, old, density, seed + 1)
        new[1500:4000] = old[1500:4000]
        copies = [guarded(runtime, array) for array in (old, new)]
        tensors = [weights.tensor_of(array.ctypes.data, array.nbytes, name, device, array) for array in copies]
        weights.check(patch_codec, name, old, new, *tensors)
        runtime.check()
        np.testing.assert_array_equal(copies[0], new)
        coded = _codec.diff(*(weights.host_tensor(array, name) for array in (old, new)), layout)[0]
        other = guarded(runtime, weights.elements(name, n, seed + 2))
        tensor = weights.tensor_of(other.ctypes.data, other.nbytes, name, device, other)
        expected = _codec.locate(weights.host_tensor(np.array(other), name), layout, coded)
        located = patch_codec.locate(tensor, layout, coded)
        assert (located and located.after) == (expected and expected.after)


def patches_of_pieces(sources: Path, seed: int) -> None:
    """The changes of the first piece are in its last block."""
    it, name = crowded(sources, seed, patch_threads=64), "uint8"
    backends._thread_backends.backends._cuda[0] = it.backend
    old = np.zeros(_codec.PIECE + 3000, np.uint8)
    new = weights.changed(name, old, 0.1, seed)
    new[: _codec.PIECE - _codec.BLOCK] = 0
    tensors = [
        weights.tensor_of(array.ctypes.data, array.nbytes, name, interop.Device("cuda", 0), array)
        for array in (old.copy(), new.copy())
    ]
    expected = _codec.diff(*(weights.host_tensor(array, name) for array in (old, new)), weights.layout_of(name))
    assert patch_codec.diff(*tensors, weights.layout_of(name)) == expected
    located = patch_codec.locate(tensors[0], weights.layout_of(name), expected[0])
    assert located is not None
    assert located.after == expected[3]


DRIVERS = (
    bucket,
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
    patches,
    patches_of_pieces,
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
