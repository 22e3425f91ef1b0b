"""The definitions with which CUDA kernels are compiled: sizes, structures and types, one module per combination."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

import numpy as np

import sparsecomm._kernels
from sparsecomm.backends.base import LANES, SQUARES_TILE
from sparsecomm.tensors.arrays import ArrayDType
from sparsecomm.tensors.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, DType
from sparsecomm.tensors.kinds import ValueKind

SOURCES = Path(sparsecomm._kernels.__path__[0])
# As on the CPU: each operation is rounded by itself, quotients to nearest, and subnormal floats are supported.
OPTIONS = ("-std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
_FORMATS = {FLOAT16: "F16", BFLOAT16: "BF16", FLOAT32: "F32", FLOAT64: "F64"}
_LAUNCH_ONLY = {"sample_sectors", "radix_max_size", "spare_candidates", "filter_blocks", "tail_blocks"}
_LAUNCH_ONLY |= {"by_warp_min_chunk", "by_warp_part"}
_UNSIGNED = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long"}
_LINE = 128  # bytes: OWN_LINE of kernels/cuda/platform.cuh


@dataclass(frozen=True)
class Tuning:
    """Sizes of kernels and launches, for compute capability 9.0: see kernels/README.md."""

    # Names that end in "threads" are threads per block; names that end in "blocks", blocks per multiprocessor.
    sample_threads: int = 512
    sample_bins: int = 8192  # of the sample's histogram, over the whole range of keys
    filter_threads: int = 256
    filter_vectors: int = 4  # vectors of 16 bytes that each thread holds
    filter_rounds: int = 4  # rounds in which a thread reads its part of a tile
    bins: int = 4096  # of the candidates' histogram
    emit_threads: int = 256
    emit_items: int = 4  # candidates per thread
    radix_threads: int = 512
    radix_bits: int = 11  # bits of a key that each pass decides
    merge_threads: int = 256
    merge_items: int = 4  # entries of both vectors together, per thread
    by_chunk_threads: int = 256
    by_chunk_items: int = 16  # elements per thread, in registers or in shared memory
    by_chunk_blocks: int = 3  # as many as leave enough registers per thread
    by_warp_threads: int = 256
    by_warp_blocks: int = 4  # maximum; fewer are resident with some types
    by_warp_max_k: int = 128  # maximum k of a chunk from which a warp selects alone
    dense_threads: int = 256
    densify_tile: int = 4096  # elements that a block writes
    packed_threads: int = 256  # in unpack also the words of a tile
    patch_threads: int = 512

    # Only for the launch code (`_LAUNCH_ONLY`):
    sample_sectors: int = 32768  # maximum sectors of 32 bytes in a sample
    radix_max_size: int = 1 << 16  # maximum elements for which a single launch of `radix` selects
    filter_blocks: int = 4  # maximum; fewer are resident with some types
    by_warp_min_chunk: int = 256  # minimum elements of a chunk from which a warp selects alone
    by_warp_part: int = 4096  # elements that a warp takes at a time, if chunks are not longer
    tail_blocks: int = 4  # maximum, for emit
    spare_candidates: int = 1 << 20  # room beyond the expected candidates, for many equal elements

    @property
    def definitions(self) -> tuple[str, ...]:
        """``NAME=value`` for each size that is compiled into kernels."""
        names = (field.name for field in fields(self) if field.name not in _LAUNCH_ONLY)
        return tuple(f"{name.upper()}={getattr(self, name)}u" for name in names)


TUNING = Tuning()


@cache
def structures(tuning: Tuning) -> dict[str, ArrayDType]:
    """Return the structures of kernels/cuda in device memory; the kernels check their sizes.

    A field that exists once per tile or block is included once.
    """
    u4, u8 = np.dtype(np.uint32), np.dtype(np.uint64)
    selection = dict.fromkeys(("threshold", "count", "first", "last", "rank"), u8)
    selected = selection | {"shift": u4, "retry": u4, "steps_done": u4}
    histogram, radix_histogram = np.dtype((u4, tuning.bins)), np.dtype((u4, 2**tuning.radix_bits))
    step = dict.fromkeys(("kth", "above", "ties"), u8) | dict.fromkeys(("decided", "stage", "steps_done"), u4)
    return {
        "SELECTION": _structure(selected, {"ticket": u4}, {"parts_done": u4}, {"histogram": histogram}),
        "LOOK_BACK": _structure({"ticket": u4}, {"blocks_done": u4}, {"status": u8}),
        "SAMPLE": _structure({"blocks_done": u4}, {"histogram": np.dtype((u4, tuning.sample_bins))}),
        "RADIX": _structure(
            {"ticket": u4},
            step,
            {"parts_done": u4},
            {"blocks_done": u4},
            {"histogram": radix_histogram},
            {"sums": np.dtype((u8, 2))},
        ),
    }


def structure_definitions(tuning: Tuning) -> tuple[str, ...]:
    return tuple(f"{name}_BYTES={dtype.itemsize}u" for name, dtype in structures(tuning).items())


def _structure(*lines: Mapping[str, ArrayDType]) -> ArrayDType:
    """Return a structure of fields; each group of fields begins a cache line."""
    offsets, end = [], 0
    for line in lines:
        end += -end % _LINE
        for dtype in line.values():
            offsets.append(end)
            end += dtype.itemsize
    names, formats = zip(*(field for line in lines for field in line.items()), strict=True)
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": end + -end % _LINE})


def selection_definitions(x: DType, residual: DType | None, int64_indices: bool) -> tuple[str, ...]:
    """Return the type definitions of topk.cu, radix.cu, threshold.cu, chunks.cu and warp_chunks.cu."""
    flag = f"RESIDUAL={int(residual is not None)}"
    return (_format("FORMAT", x), _format("ACC", residual or x), flag, _index(int64_indices))


def merge_definitions(float64_values: bool, int64_indices: bool) -> tuple[str, ...]:
    """Return the type definitions of merge.cu."""
    return (_format("ACC", FLOAT64 if float64_values else FLOAT32), _index(int64_indices))


def dense_definitions(x: DType, residual: DType | None = None, int64_indices: bool = False) -> tuple[str, ...]:
    """Return the type definitions of dense.cu."""
    return (_format("FORMAT", x), _format("ACC", residual or x), _index(int64_indices))


def bucket_definitions(real: ArrayDType, int64_indices: bool = False) -> tuple[str, ...]:
    """Return the definitions of bucket.cu for an accumulator dtype."""
    return (
        f"REAL={'double' if real.itemsize == 8 else 'float'}",
        _index(int64_indices),
        f"TILE={SQUARES_TILE}u",
        f"SQUARES_LANES={LANES}u",
    )


def packed_definitions(kind: ValueKind, float64_values: bool, int64_indices: bool) -> tuple[str, ...]:
    """Return the type definitions of packed.cu."""
    acc = FLOAT64 if float64_values else FLOAT32
    itemsize = 0 if kind.planes else kind.itemsize or acc.itemsize
    sent = f"CODEC={kind.codec}", f"VALUE_BYTES={itemsize}", f"VALUE_PLANES={kind.planes}"
    blocks = f"VALUE_BLOCK={kind.block}", f"SHARED_BYTES={kind.shared}"
    return (*sent, *blocks, _format("ACC", acc), _index(int64_indices))


def patch_definitions(itemsize: int) -> tuple[str, ...]:
    """Return the type definitions of patches.cu for elements of ``itemsize`` bytes."""
    return (f"ELEMENT={_UNSIGNED[itemsize]}",)


def _format(name: str, dtype: DType) -> str:
    return f"{name}=sparsecomm::{_FORMATS[dtype]}"


def _index(int64_indices: bool) -> str:
    return f"INDEX={'long long' if int64_indices else 'int'}"
