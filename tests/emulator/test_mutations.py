"""Faults planted into the kernels, one at a time: the emulator must detect each of them.

This tests the tests: a fault that they miss here, they would also miss in a later change.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.emulator.mutated import (
    CAUGHT,
    DRIVERS,
    FINE,
    adding_where,
    bucket,
    chunks,
    densify,
    dropping_zeros,
    merge,
    packing,
    packing_few_bits,
    patches,
    patches_of_pieces,
    radix,
    radix_with_residual,
    threshold,
    threshold_with_residual,
    topk,
    topk_of_a_few,
    topk_with_residual,
    warp_chunks,
)
from tests.emulator.runtime import ROOT
from tests.processes import LIMIT
from tests.thinning import one_in


class Fault(NamedTuple):
    """Replaces the occurrence number ``at`` of ``old`` in a file with ``new``. ``driver`` must fail."""

    name: str
    file: str
    old: str
    new: str
    driver: Callable[[Path, int], None]
    at: int = 0


BARRIER = "__syncthreads();"
LEAVE = "    reset_after_last_block(look_back, gridDim.x);\n"
IS_LAST = "is_last_block(&state->parts_done)"
FAULTS = [
    Fault(*fault)
    for fault in (
        # barriers
        ("is_last_block counts a block before its threads", "lookback.cuh", BARRIER, "", topk, 2),
        ("block_scan adds sums before they are there", "scan.cuh", BARRIER, "", radix, 1),
        ("tile_ticket does not wait for the ticket", "lookback.cuh", BARRIER, "", merge, 0),
        ("exclusive_prefix does not wait for the sum", "lookback.cuh", BARRIER, "", threshold, 1),
        ("is_last_block does not wait for the answer", "lookback.cuh", BARRIER, "", threshold, 3),
        ("find_rank returns before it is found", "select.cuh", BARRIER, "", radix, 0),
        ("take_part does not wait for the ticket", "lookback.cuh", BARRIER, "", radix, 4),
        ("end_step ends a step before its threads", "lookback.cuh", BARRIER, "", radix, 5),
        ("take_part does not wait for the step before", "lookback.cuh", "< taken / gridDim.x", "< 0", merge),
        ("filter adds counts too early", "topk.cu", BARRIER, "", topk, 2),
        ("radix counts into what is cleared", "radix.cu", BARRIER, "", radix, 0),
        ("radix adds counts too early", "radix.cu", BARRIER, "", radix, 1),
        ("radix changes what its threads look at", "radix.cu", BARRIER, "", radix, 2),
        ("radix ends a step with its first part", "radix.cu", IS_LAST, "true", radix, 2),
        ("a block counts into what is cleared", "chunks.cu", BARRIER, "", chunks, 1),
        ("a block looks at counts too early", "chunks.cu", BARRIER, "", chunks, 2),
        ("a block selects before there are elements", "chunks.cu", BARRIER, "", chunks, 4),
        ("a warp counts into what is cleared", "chunks.cu", "__syncwarp();", ";", chunks),
        ("merge reads the split too early", "merge.cu", BARRIER, "", merge, 0),
        ("merge reads the tile too early", "merge.cu", BARRIER, "", merge, 1),
        ("merge adds counts too early", "merge.cu", BARRIER, "", merge, 2),
        ("densify writes into what is cleared", "dense.cu", BARRIER, "", densify, 0),
        ("densify copies what is not there yet", "dense.cu", BARRIER, "", densify, 1),
        ("scatter_add_where moves the range on too early", "dense.cu", BARRIER, "", adding_where, 2),
        ("scatter_add_where looks before there is a range", "dense.cu", BARRIER, "", adding_where, 3),
        # warps
        (
            "some lanes leave the exponent to the others",
            "packed.cu",
            "each(block, block * SHARERS",
            "if (threadIdx.x % WARP < count % WARP) each(block, block * SHARERS",
            packing,
        ),
        ("the largest of half a warp", "scan.cuh", "u32 d = WARP / 2;", "u32 d = WARP / 4;", packing, 1),
        ("a mask without the last lane", "compact.cuh", "__any_sync(ALL_LANES", "__any_sync(0x7fffffffu", threshold),
        ("lanes change what others still read", "filter.cuh", "__syncwarp();", "", topk_of_a_few),
        ("some lanes skip a ballot", "lookback.cuh", "(threadIdx.x < WARP)", "(threadIdx.x < WARP - 1)", threshold),
        ("a shuffle in a branch", "compact.cuh", "__any_sync(ALL_LANES, taken != 0)", "taken", threshold),
        # look-back
        ("a tile's own count is the sum", "lookback.cuh", "tile == 0 ? INCLUSIVE : AGGREGATE", "INCLUSIVE", threshold),
        ("tile 0 has no sum", "lookback.cuh", "? INCLUSIVE : AGGREGATE) | own", "? 0 : AGGREGATE | own)", threshold),
        ("the sum without its own tile is published", "lookback.cuh", "(before + own)", "before", threshold),
        ("more than the sum is added", "lookback.cuh", "lane <= last ?", "true ?", threshold),
        ("a window of too few tiles", "lookback.cuh", "end -= WINDOWS * WARP", "end -= WINDOWS * WARP - 1", threshold),
        ("the state is not cleared", "lookback.cuh", "state->status[t] = 0;", ";", threshold),
        ("tickets go on", "lookback.cuh", "state->ticket = 0;", ";", threshold),
        ("blocks that are done are counted on", "lookback.cuh", "*blocks_done = 0;", ";", threshold),
        ("merge counts other sums", "merge.cu", "(look_back, ticket, all)", "(look_back, ticket, u64(count))", merge),
        ("unpack counts others", "packed.cu", "(look_back, ticket, all)", "(look_back, ticket, word != 0)", packing),
        ("unpack does not leave", "packed.cu", LEAVE, "", packing),
        # bounds
        ("16 bytes are read behind the end", "load.cuh", "+ VECTOR <= n", "+ VECTOR <= n + 3", threshold, 0),
        ("16 bytes written behind it", "load.cuh", "+ VECTOR <= n", "+ VECTOR <= n + 3", threshold_with_residual, 1),
        ("a round is read behind the end", "filter.cuh", "_ROUND <= n", "_ROUND <= n + 3", threshold_with_residual),
        ("one entry too many", "filter.cuh", "base + w < capacity", "base + w <= capacity", threshold),
        ("one entry too many that was read again", "filter.cuh", "own < capacity", "own <= capacity", threshold),
        ("what finds no room is lost", "filter.cuh", "count > stored &&", "false &&", threshold_with_residual),
        ("what waits is read again", "filter.cuh", "own >= base + stored && ", "", topk),
        ("the next tile's entries take the place", "compact.cuh", "turn ^= 1", "", threshold),
        ("the next chunk's entries take the place", "chunks.cu", "turn ^= 1;", ";", chunks),
        ("one tie too many", "emit.cuh", "&& equal < ties)", "&& equal <= ties)", topk_with_residual),
        ("one tie too many from radix", "radix.cu", "key != 0 && tied < ties)", "key != 0 && tied <= ties)", radix),
        ("one tie too many of a chunk", "chunks.cu", "position < ties_end", "position <= ties_end", chunks),
        ("all ties win in registers", "chunks.cu", "+ e < ties_end)", "+ e < TILE)", chunks),
        ("a whole bin wins of which some lose", "chunks.cu", "if (rank == count)", "if (rank <= count)", chunks),
        ("a key of another bin counts", "chunks.cu", "if (key && key >> SHIFT == bin)", "if (key)", chunks),
        ("zeros of a chunk count", "chunks.cu", "if (key && ", "if (", chunks),
        ("warps leave out chunks", "chunks.cu", "BY_CHUNK_THREADS / TEAM * chunk", "TILE", chunks),
        ("a row's entries are numbered again", "compact.cuh", "first += field(all, r);", ";", warp_chunks),
        ("one tie too many of a warp's chunk", "warp_chunks.cu", "< winners.ties", "<= winners.ties", warp_chunks),
        (
            "a misleading sample decides",
            "warp_chunks.cu",
            "if (count >= k || threshold <= 1) break;",
            "break;",
            warp_chunks,
        ),
        ("candidates without room", "warp_chunks.cu", "count + entries.count() <= ROOM", "true", warp_chunks),
        ("a sum is added again", "warp_chunks.cu", "x = nullptr;", "", warp_chunks),
        ("signs are lost", "warp_chunks.cu", "at >> 15", "0", warp_chunks),
        ("one rank too low", "select.cuh", "above < r && r <= above + mine", "above < r && r < above + mine", radix),
        ("a bin with one key too few", "select.cuh", "r <= above + here[i])", "r < above + here[i])", radix),
        ("merge does not look ahead in b", "merge.cu", "i < b_size + 1;", "i < b_size;", merge),
        ("merge does not look back in a", "merge.cu", "a_begin + i > 0 ? a_indices", "i > 0 ? a_indices", merge),
        ("merge takes b's twice", "merge.cu", "a_begin + i == 0 || tile.a[i] != where[item]", "true", merge),
        ("densify without a tile's first element", "dense.cu", "0 ? first :", "0 ? first + 1 :", densify),
        ("densify with one element too few", "dense.cu", "i < size;", "i + 1 < size;", densify),
        ("scatter_add_where's last one", "dense.cu", "u64(indices[last]) + 1", "u64(indices[last])", adding_where),
        ("scatter_add_where with one entry too few", "dense.cu", "if (e > last)", "if (e >= last)", adding_where),
        ("a gradient with a fault is added", "bucket.cu", "if (flags && flags[t.row - sources]) continue;", "", bucket),
        ("squares may overflow", "bucket.cu", "is_finite(a.scaled * a.scaled)", "true", bucket),
        ("a velocity keeps its speed", "bucket.cu", "momentum * v + value[c]", "v + value[c]", bucket),
        ("a tile goes on behind its tensor", "bucket.cu", "end < row->size ? end : row->size", "end", bucket),
        ("a tensor begins one element late", "bucket.cu", "field <= at", "field < at", bucket),
        ("lanes are added before all are there", "bucket.cu", BARRIER, "", bucket, 0),
        ("lanes of the next tile come too early", "bucket.cu", BARRIER, "", bucket, 1),
        ("entries are written before the zeros", "bucket.cu", BARRIER, "", bucket, 2),
        ("a tile is written before its entries are there", "bucket.cu", BARRIER, "", bucket, 3),
        ("one step too many", "bucket.cu", "p.step, p.last[i]", "p.step + 1, p.last[i]", bucket),
        ("a row behind the table", "../adamw.hpp", ": rows - 1;", ": rows;", bucket),
        (
            "what rounding has lost is lost",
            "bucket.cu",
            "before + p.compensation[i] : before",
            "before : before",
            bucket,
        ),
        ("overflows are not counted", "bucket.cu", "overflows |= jump == OVERFLOWS;", ";", bucket),
        ("jumps of any length", "../adamw.hpp", "above > MOST ?", "false ?", bucket),
        ("a residual that becomes infinite", "../adamw.hpp", "is_finite(converted) ?", "true ?", bucket),
        ("a word of high without its first entry", "packed.cu", "+ middle < begin", "+ middle <= begin", packing),
        ("low bits end with their word", "packed.cu", "shift + l > WORD ?", "false ?", packing),
        ("a word of low begins too late", "packed.cu", "= begin / l;", "= (begin + l - 1) / l;", packing),
        ("as many entries as bits", "packed.cu", "bits >> bit & 1 && i < count", "bits >> bit & 1", packing),
        ("any number of bits will do", "packed.cu", "tiles_before + all == count", "true", packing),
        ("the message's end is left as it was", "packed.cu", "bytes[at] = 0;", ";", packing),
        ("zeros of one lane only", "packed.cu", "found = warp_sum(found);", "", packing),
        ("a last block of too many", "packed.cu", "count - block * SHARERS < SHARERS ?", "false ?", packing_few_bits),
        ("the middle of nothing counts", "../few_bits.hpp", "below - (BLOCK - count)", "below", packing_few_bits),
        ("half a plane is lost", "codecs.cuh", "u64(__ballot_sync(ALL_LANES, b)) << WARP", "u64(0)", packing_few_bits),
        (
            "bits behind the last value will do",
            "packed.cu",
            "size == SHARERS || plane[p] >> size == 0",
            "true",
            packing_few_bits,
        ),
        ("any magnitudes will do", "packed.cu", "good &= block.valid();", ";", packing_few_bits),
        ("what is not finite is not found", "packed.cu", "*found = 1;", ";", packing_few_bits),
        (
            "only the last error counts",
            "packed.cu",
            "errors[positions[i]] += error;",
            "errors[i] = error;",
            dropping_zeros,
        ),
        (
            "each rounding counts positions anew",
            "packed.cu",
            "? Index(i) : positions[i]",
            "? Index(i) : Index(i)",
            dropping_zeros,
        ),
        ("drop_zeros leaves gaps", "packed.cu", "u32(value != 0), &all)", "u32(i < count), &all)", dropping_zeros),
        ("drop_zeros does not leave", "packed.cu", LEAVE, "", dropping_zeros, 1),
        # patches
        ("slices are added before they are there", "patches.cu", BARRIER, "", patches, 0),
        ("a slice counts its own elements", "patches.cu", "s < slice;", "s <= slice;", patches),
        ("zeros after the end are elements", "patches.cu", "count -= u32(SIZE - (n - b * SIZE));", ";", patches),
        ("a word behind the end", "patches.cu", "i + PER_WORD <= n", "i <= n", patches),
        ("an element behind the end", "patches.cu", "return i < n ?", "return i < n + 9 ?", patches),
        ("one warp's hashes", "patches.cu", "threadIdx.x % WARP == 0 ? of_warp", "threadIdx.x == 0 ? of_warp", patches),
        ("all blocks are the first one", "patches.cu", "first_block + b);", "first_block);", patches),
        ("ranks count later lanes", "patches.cu", "members.of(c) & lower", "members.of(c)", patches),
        ("ranks begin anew", "patches.cu", "next += u32(__popc(members.of(lane)));", ";", patches),
        ("a distance has no sign", "patches.cu", "u64(i64(step << UNUSED) >> UNUSED)", "step", patches),
        ("changes of a batch overwrite each other", "patches.cu", "to += u32(__popc(changed));", ";", patches),
        ("a piece begins with its own changes", "patches.cu", "= start + total;", "= total;", patches_of_pieces),
        ("the last block of a piece has none", "patches.cu", "(b + 1) % BLOCKS == 0 ||", "", patches_of_pieces),
        ("pieces share places", "patches.cu", "place = piece * PIECE + rank[i]", "place = rank[i]", patches_of_pieces),
        ("classes share places", "patches.cu", "place += members[r];", ";", patches),
        ("any rank has a place", "patches.cu", "if (rank[i] < members[range]) ", "", patches),
        ("places begin anew", "patches.cu", "next += u32(__popc(members_of.of(lane)));", ";", patches),
        ("a place behind the end", "patches.cu", "= exists ?", "= true ?", patches),
        ("hashes of elements that are not there yet", "patches.cu", "__syncwarp();", ";", patches),
        ("tiles find the same changes", "patches.cu", "u64 to = tiles_before + within;", "u64 to = within;", patches),
        (
            "only the last tile's changes count",
            "patches.cu",
            "sums[2] = tiles_before + all;",
            "sums[2] = all;",
            patches,
        ),
        ("offsets does not leave", "patches.cu", LEAVE, "", patches),
        ("find_changes does not leave", "patches.cu", LEAVE, "", patches, 1),
        # sequences of launches
        ("radix never resumes", "topk.cu", "retry = found > capacity ||", "retry = false &&", topk),
        ("what lost is not given back", "emit.cuh", "if (residual != nullptr)", "if (false)", topk_with_residual),
        ("radix gets nothing back", "radix.cu", "residual[indices[i]] = bits[i];", ";", topk_with_residual),
        ("no room is a loss", "filter.cuh", "residual[i] = bits;", ";", threshold_with_residual),
        ("what is sent stays in the residual", "filter.cuh", "group[r].set(e, 0);", ";", topk_with_residual),
        ("what a chunk sends stays in the residual", "chunks.cu", "rest.set(e, 0);", ";", chunks),
        (
            "what a warp sends stays in the residual",
            "warp_chunks.cu",
            "(waiting.at[i] & POSITION)] = 0;",
            "0];",
            warp_chunks,
        ),
        ("what a long chunk sends stays in the residual", "chunks.cu", "if (taken) store", "if (false) store", chunks),
        ("what radix sends stays in the residual", "radix.cu", "residual[i] = 0;", ";", radix_with_residual),
        ("the candidates' histogram is not cleared", "select.cuh", "selection->histogram[b] = 0;", ";", merge),
        ("emit's tickets go on", "emit.cuh", "->ticket = selection->steps_done", "->steps_done", merge),
        ("emit counts other bins", "emit.cuh", "first <= key && key <= last", "first <= key", topk),
        ("emit leaves the bin of the k-th", "emit.cuh", "if (first == last) break;", "break;", topk),
        ("any bin wins", "select.cuh", "found.last = found.rank == here[i];", "found.last = true;", topk),
        ("radix's histogram is not cleared", "radix.cu", "state->histogram[b] = 0;", ";", radix),
        ("radix's tickets go on", "radix.cu", "state->ticket = state->steps_done", "state->steps_done", radix),
        ("radix has one pass too few", "radix.cu", "shift == 0 ?", "shift <= RADIX_BITS ?", radix),
    )
]


def planted(fault: Fault, folder: Path) -> Path:
    """Return a folder with the library's kernels and a fault."""
    shutil.copytree(ROOT / "kernels", folder)
    file = folder / "cuda" / fault.file
    parts = file.read_text().split(fault.old)
    assert len(parts) > fault.at + 1, f"{fault.file} has changed: {fault.old!r} is not there"
    file.write_text(fault.old.join(parts[: fault.at + 1]) + fault.new + fault.old.join(parts[fault.at + 1 :]))
    return folder


def driven(sources: Path, *drivers: Callable[[Path, int], None]) -> subprocess.CompletedProcess[str]:
    names = [driver.__name__ for driver in drivers]
    command = [sys.executable, "-m", "tests.emulator.mutated", str(sources), *names]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=LIMIT)


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, id=fault.name, marks=one_in(34, i)) for i, fault in enumerate(FAULTS)]
)
def test_a_planted_fault_is_seen(fault: Fault, tmp_path: Path) -> None:
    try:
        done = driven(planted(fault, tmp_path / "kernels"), fault.driver)
    except subprocess.TimeoutExpired:  # a fault may also hang
        return
    print(done.stdout)
    assert done.returncode == CAUGHT or done.returncode < 0, (done.returncode, done.stdout, done.stderr)


@pytest.mark.exhaustive  # tests/backends and tests/algorithms make the same checks
def test_the_shipped_kernels_pass(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels")
    done = driven(tmp_path / "kernels", *DRIVERS)
    assert done.returncode == FINE, (done.stdout, done.stderr)
