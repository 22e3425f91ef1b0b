"""Faults planted into the kernels, one at a time: each must be seen when they run on the emulator.

This tests the tests. What the emulator and a few short vectors do not see here, they would not see in a later change.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from sparsecomm.backends.cuda import CudaBackend
from sparsecomm.tensors import interop
from sparsecomm.tensors.kinds import INT4, ValueKind
from sparsecomm.tensors.sparse import SparseVector
from tests import data, reference
from tests.backends import test_cuda_packed as packed
from tests.emulator.runtime import ROOT, EmulatedRuntime, EmulatorError
from tests.thinning import rarely

# -- the driver: a program of its own, as a wrong kernel may write anywhere --------------------------------------------

FINE, CAUGHT, BROKEN = 0, 3, 4  # how it exits; a fault may also end it by a signal
SEEDS = 2
N = 9001  # three tiles of `filter`; 16 bytes do not divide it


class WrongError(Exception):
    """A result that is not the oracle's."""


class Crowd(EmulatedRuntime):
    """All blocks of a grid are resident, so that look-backs find many tiles whose sums are not there yet."""

    crowded = True


def gradient(kind: str, n: int, dtype: str, seed: int) -> np.ndarray:
    if kind == "ties":  # a few of every value
        return (np.round(50 * data.gradient("normal", n, "float32", seed)) / 50).astype(dtype)
    if kind == "close":  # most of them in one bin of the sample, some well above
        v = 1 + np.random.default_rng(seed).integers(0, 30, n) / 1024
        v[::10] *= 4
        return v.astype(dtype)
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

    def __init__(self, sources: Path, seed: int, spare: int = 100, short: int = 50):
        self.runtime = Crowd(sources=sources, seed=100 * seed, multiprocessors=2)
        self.backend = CudaBackend(self.runtime, radix_max_size=short, spare_candidates=spare)

    def topk(self, x: interop.Tensor, r: interop.Tensor | None) -> SparseVector:
        return self.backend.topk(x, 2100, r)

    def threshold(self, x: interop.Tensor, r: interop.Tensor | None) -> SparseVector:
        return self.backend.threshold(x, 1.0, r)


def best(total: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return reference.topk(total, 2100)


def topk(sources: Path, seed: int, residual: bool = False) -> None:
    """Of candidates; where too many are close to each other, `radix` resumes."""
    it = Selecting(sources, seed)
    for kind in ("normal", "ties", "few values", "close", "all equal", "mostly zero"):
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
    """There are more entries than the first call has room for; in more tiles than a look-back's window, and fewer."""
    it = Selecting(sources, seed)
    for n, kind in ((150_001, "few values"), (N, "normal"), (N, "mostly zero"), (20_001, "normal")):
        selections(it.threshold, lambda v: reference.threshold(v, 1.0), residual, seed, n, kind)


def threshold_with_residual(sources: Path, seed: int) -> None:
    threshold(sources, seed, True)


def chunks(sources: Path, seed: int) -> None:
    """Of which a tile has many, some, or not a whole one; with decay."""
    runtime = Crowd(sources=sources, seed=100 * seed, multiprocessors=2)
    backend = CudaBackend(runtime)
    for kind, k, chunk in (("ties", 9, 300), ("mostly zero", 9, 300), ("few values", 200, 1000), ("normal", 700, 5000)):
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


# -- the faults -------------------------------------------------------------------------------------------------------


class Fault(NamedTuple):
    """``old`` becomes ``new`` in one place of the file: the ``at``-th. One driver must notice."""

    name: str
    file: str
    old: str
    new: str
    driver: Callable[[Path, int], None]
    at: int = 0


BARRIER = "__syncthreads();"
IS_LAST = "is_last_block(&state->parts_done)"
FAULTS = [
    # barriers
    Fault("is_last_block counts a block before its threads", "lookback.cuh", BARRIER, "", topk, 2),
    Fault("block_scan adds sums before they are there", "scan.cuh", BARRIER, "", radix, 1),
    Fault("block_scan returns before sums are there", "scan.cuh", BARRIER, "", radix, 2),
    Fault("tile_ticket does not wait for the ticket", "lookback.cuh", BARRIER, "", merge, 0),
    Fault("exclusive_prefix does not wait for the sum", "lookback.cuh", BARRIER, "", threshold, 1),
    Fault("is_last_block does not wait for the answer", "lookback.cuh", BARRIER, "", threshold, 3),
    Fault("find_rank returns before it is found", "select.cuh", BARRIER, "", radix, 0),
    Fault("find_kth counts into what is cleared", "select.cuh", BARRIER, "", merge, 3),
    Fault("find_kth looks at counts too early", "select.cuh", BARRIER, "", merge, 4),
    Fault("take_part does not wait for the ticket", "radix.cu", BARRIER, "", radix, 0),
    Fault("next_step ends a step before its threads", "radix.cu", BARRIER, "", radix, 1),
    Fault("radix counts into what is cleared", "radix.cu", BARRIER, "", radix, 2),
    Fault("radix adds counts too early", "radix.cu", BARRIER, "", radix, 3),
    Fault("radix changes what its threads look at", "radix.cu", BARRIER, "", radix, 4),
    Fault("radix ends a step with its first part", "radix.cu", IS_LAST, "true", radix, 2),
    Fault("a block selects before there are elements", "chunks.cu", BARRIER, "", chunks, 1),
    Fault("a warp counts into what is cleared", "chunks.cu", "__syncwarp();", ";", chunks),
    Fault("merge reads the split too early", "merge.cu", BARRIER, "", merge, 0),
    Fault("merge reads the tile too early", "merge.cu", BARRIER, "", merge, 1),
    Fault("densify writes into what is cleared", "dense.cu", BARRIER, "", densify, 0),
    Fault("densify copies what is not there yet", "dense.cu", BARRIER, "", densify, 1),
    Fault("scatter_add_where moves the range on too early", "dense.cu", BARRIER, "", adding_where, 2),
    Fault("scatter_add_where looks before there is a range", "dense.cu", BARRIER, "", adding_where, 3),
    # warps
    Fault(
        "some lanes leave the exponent to the others",
        "packed.cu",
        "each(block, i, i < count ? values[i] : Value(0)",
        "if (j >= count) return; each(block, i, values[i]",
        packing,
    ),
    Fault("the largest of half a warp", "scan.cuh", "u32 d = WARP / 2;", "u32 d = WARP / 4;", packing, 1),
    Fault("a mask without the last lane", "filter.cuh", "__any_sync(ALL_LANES", "__any_sync(0x7fffffffu", threshold),
    Fault(
        "some lanes leave a ballot to the others",
        "lookback.cuh",
        "if (threadIdx.x < WARP) {",
        "if (threadIdx.x < WARP - 1) {",
        threshold,
    ),
    Fault(
        "a shuffle in a branch",
        "filter.cuh",
        "if (__any_sync(ALL_LANES, taken[c] != 0))",
        "if (taken[c] != 0)",
        threshold,
    ),
    # look-back
    Fault(
        "a tile's own count is published as the sum",
        "lookback.cuh",
        "(tile == 0 ? INCLUSIVE : AGGREGATE)",
        "INCLUSIVE",
        threshold,
    ),
    Fault(
        "the first tile's sum is not published",
        "lookback.cuh",
        "(tile == 0 ? INCLUSIVE : AGGREGATE) | own",
        "tile == 0 ? 0 : AGGREGATE | own",
        threshold,
    ),
    Fault("the sum without its own tile is published", "lookback.cuh", "(before + own)", "before", threshold),
    Fault("more than the sum is added", "lookback.cuh", "lane <= last ?", "true ?", threshold),
    Fault("a window of too few tiles", "lookback.cuh", "end -= WARP", "end -= WARP - 1", threshold),
    Fault("the state is not cleared", "lookback.cuh", "state->status[t] = 0;", ";", threshold),
    Fault("tickets go on", "lookback.cuh", "state->ticket = 0;", ";", threshold),
    Fault("blocks that are done are device_count on", "lookback.cuh", "*blocks_done = 0;", ";", threshold),
    Fault(
        "merge looks back at other sums",
        "merge.cu",
        "exclusive_prefix(look_back, ticket, all)",
        "exclusive_prefix(look_back, ticket, u64(count))",
        merge,
    ),
    Fault(
        "unpack looks back at other sums",
        "packed.cu",
        "exclusive_prefix(look_back, ticket, all)",
        "exclusive_prefix(look_back, ticket, word != 0)",
        packing,
    ),
    Fault("unpack does not leave", "packed.cu", "    reset_after_last_block(look_back, gridDim.x);\n", "", packing),
    # bounds
    Fault("16 bytes behind the end are read", "load.cuh", "i + VECTOR <= n", "i + VECTOR <= n + 3", threshold, 0),
    Fault(
        "16 bytes behind the end are written",
        "load.cuh",
        "i + VECTOR <= n",
        "i + VECTOR <= n + 3",
        threshold_with_residual,
        1,
    ),
    Fault("one entry too many", "filter.cuh", "to < capacity", "to <= capacity", threshold),
    Fault(
        "one tie too many",
        "emit.cuh",
        "key == kth && equal < ties)",
        "key == kth && equal <= ties)",
        topk_with_residual,
    ),
    Fault("one tie too many from radix", "radix.cu", "key != 0 && tied < ties)", "key != 0 && tied <= ties)", radix),
    Fault("one tie too many of a chunk", "chunks.cu", "position < ties_end", "position <= ties_end", chunks),
    Fault("a whole bin wins of which some lose", "chunks.cu", "rank == found->count", "rank <= found->count", chunks),
    Fault("zeros of a chunk count", "chunks.cu", "if (key && ", "if (", chunks),
    Fault("warps take chunks twice", "chunks.cu", "BY_CHUNK_THREADS / TEAM * chunk", "chunk", chunks),
    Fault("one rank too low", "select.cuh", "above < r && r <= above + mine", "above < r && r < above + mine", radix),
    Fault("a bin with one key too few", "select.cuh", "if (r <= above + here)", "if (r < above + here)", radix),
    Fault("merge does not look ahead in b", "merge.cu", "i < b_size + 1;", "i < b_size;", merge),
    Fault(
        "merge does not look back in a",
        "merge.cu",
        "a_begin + i > 0 ? a_indices[a_begin + i - 1]",
        "i > 0 ? a_indices[a_begin + i - 1]",
        merge,
    ),
    Fault("merge takes b's twice", "merge.cu", "a_begin + i == 0 || tile.a[i] != where[item]", "true", merge),
    Fault("densify without a tile's first element", "dense.cu", "count, first);", "count, first + 1);", densify),
    Fault("densify with one element too few", "dense.cu", "i < size;", "i + 1 < size;", densify),
    Fault(
        "scatter_add_where without the last one's other",
        "dense.cu",
        "u64(indices[last]) + 1",
        "u64(indices[last])",
        adding_where,
    ),
    Fault("scatter_add_where with one entry too few", "dense.cu", "if (e > last)", "if (e >= last)", adding_where),
    Fault("a word of high without its first entry", "packed.cu", "+ middle < begin", "+ middle <= begin", packing),
    Fault("low bits end with their word", "packed.cu", "shift + l > WORD ?", "false ?", packing),
    Fault(
        "a word of low without what begins before it",
        "packed.cu",
        "u64 i = begin / l;",
        "u64 i = (begin + l - 1) / l;",
        packing,
    ),
    Fault("as many entries as bits", "packed.cu", "bits >> bit & 1 && i < count", "bits >> bit & 1", packing),
    Fault("any number of bits will do", "packed.cu", "tiles_before + all == count", "true", packing),
    Fault("the message's end is left as it was", "packed.cu", "bytes[at] = 0;", ";", packing),
    Fault("zeros of one lane only", "packed.cu", "found = warp_sum(found);", "", packing),
    Fault(
        "the last block has values that are none",
        "packed.cu",
        "u32(count - block * SHARERS < SHARERS ?",
        "u32(false ?",
        packing_few_bits,
    ),
    Fault(
        "the middle of nothing counts",
        "codecs.cuh",
        "counted(has_u && u <= lower, ",
        "counted(u <= lower, ",
        packing_few_bits,
    ),
    Fault(
        "the second half of a plane is lost",
        "packed.cu",
        "u64(__ballot_sync(ALL_LANES, b)) << WARP",
        "u64(0)",
        packing_few_bits,
    ),
    Fault("bits behind the last value will do", "packed.cu", "plane[p] >> bit < 2", "true", packing_few_bits),
    Fault("any magnitudes will do", "packed.cu", "good &= block.valid();", ";", packing_few_bits),
    Fault("what is not finite is not found", "packed.cu", "*found = 1;", ";", packing_few_bits),
    # sequences of launches
    Fault(
        "radix never resumes", "topk.cu", "selection->retry = found > capacity ||", "selection->retry = false &&", topk
    ),
    Fault("what lost is not given back", "emit.cuh", "if (residual != nullptr)", "if (false)", topk_with_residual),
    Fault(
        "what was taken is not given back to radix",
        "radix.cu",
        "residual[indices[i]] = bits[i];",
        ";",
        topk_with_residual,
    ),
    Fault(
        "what has no room is lost",
        "filter.cuh",
        "else residual[i] =",
        "else if (false) residual[i] =",
        threshold_with_residual,
    ),
    Fault("what is sent stays in the residual", "filter.cuh", "rest.set(e, 0);", ";", topk_with_residual),
    Fault("what a long chunk sends stays in the residual", "chunks.cu", "if (fits || taken)", "if (fits)", chunks),
    Fault("what radix sends stays in the residual", "radix.cu", "residual[i] = 0;", ";", radix_with_residual),
    Fault("the candidates' histogram is not cleared", "select.cuh", "selection->histogram[b] = 0;", ";", merge),
    Fault("the survivors are device_count on", "emit.cuh", "selection->survivors = 0;", ";", merge),
    Fault("radix's histogram is not cleared", "radix.cu", "state->histogram[b] = 0;", ";", radix),
    Fault("radix's tickets go on", "radix.cu", "state->ticket = state->over", "state->over", radix),
    Fault("radix has one pass too few", "radix.cu", "shift == 0 ?", "shift <= RADIX_BITS ?", radix),
]


def planted(fault: Fault, folder: Path) -> Path:
    """The shipped kernels, with a fault."""
    shutil.copytree(ROOT / "kernels", folder)
    file = folder / "cuda" / fault.file
    parts = file.read_text().split(fault.old)
    assert len(parts) > fault.at + 1, f"{fault.file} has changed: {fault.old!r} is not there"
    file.write_text(fault.old.join(parts[: fault.at + 1]) + fault.new + fault.old.join(parts[fault.at + 1 :]))
    return folder


def driven(
    sources: Path, *drivers: Callable[[Path, int], None], seconds: float = 300
) -> subprocess.CompletedProcess[str]:
    names = [driver.__name__ for driver in drivers]
    command = [sys.executable, "-m", "tests.emulator.test_mutations", str(sources), *names]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=seconds)


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, id=fault.name, marks=rarely(number)) for number, fault in enumerate(FAULTS)]
)
def test_a_planted_fault_is_seen(fault: Fault, tmp_path: Path) -> None:
    try:
        done = driven(planted(fault, tmp_path / "kernels"), fault.driver, seconds=30)
    except subprocess.TimeoutExpired:  # some write anywhere, and then end by a signal or not at all
        return
    print(done.stdout)
    assert done.returncode == CAUGHT or done.returncode < 0, (done.returncode, done.stdout, done.stderr)


def test_the_shipped_kernels_pass(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels")
    done = driven(tmp_path / "kernels", *DRIVERS)
    assert done.returncode == FINE, (done.stdout, done.stderr)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
