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

import pytest

from tests.emulator.mutated import (
    CAUGHT,
    DRIVERS,
    FINE,
    adding_where,
    chunks,
    densify,
    merge,
    packing,
    packing_few_bits,
    radix,
    radix_with_residual,
    threshold,
    threshold_with_residual,
    topk,
    topk_with_residual,
)
from tests.emulator.runtime import ROOT
from tests.thinning import rarely


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
    command = [sys.executable, "-m", "tests.emulator.mutated", str(sources), *names]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=seconds)


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, id=fault.name, marks=rarely(i, test_all=6)) for i, fault in enumerate(FAULTS)]
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
