"""The compilation of the kernels: one module per file and combination of types that is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import sparsecomm._kernels
from sparsecomm.tensors.dtypes import BFLOAT16, DTYPES, FLOAT16, FLOAT32, FLOAT64, DType
from sparsecomm.tensors.kinds import EXACT, KINDS, ValueKind

__all__ = [
    "OPTIONS",
    "SOURCES",
    "dense_definitions",
    "merge_definitions",
    "packed_definitions",
    "selection_definitions",
    "variants",
]

SOURCES = Path(sparsecomm._kernels.__path__[0])
OPTIONS = ("-std=c++17", "--fmad=false")  # a fused multiply-add would round differently from the CPU
_FORMATS = {FLOAT16: "F16", BFLOAT16: "BF16", FLOAT32: "F32", FLOAT64: "F64"}


def selection_definitions(x: DType, residual: DType | None, int64_indices: bool) -> tuple[str, ...]:
    """Return the types of topk.cu, radix.cu, threshold.cu and chunks.cu."""
    return (
        _format("FORMAT", x),
        _format("ACC", residual or x),
        f"RESIDUAL={int(residual is not None)}",
        _index(int64_indices),
    )


def merge_definitions(float64_values: bool, int64_indices: bool) -> tuple[str, ...]:
    """Return the types of merge.cu."""
    return (_format("ACC", FLOAT64 if float64_values else FLOAT32), _index(int64_indices))


def dense_definitions(x: DType, residual: DType | None = None, int64_indices: bool = False) -> tuple[str, ...]:
    """Return the types of dense.cu."""
    return (_format("FORMAT", x), _format("ACC", residual or x), _index(int64_indices))


def packed_definitions(kind: ValueKind, float64_values: bool, int64_indices: bool) -> tuple[str, ...]:
    """Return the types of packed.cu. float64 values travel as they are only."""
    acc = FLOAT64 if float64_values else FLOAT32
    itemsize = 0 if kind.planes else kind.itemsize or acc.itemsize
    sent = f"CODEC={kind.codec}", f"VALUE_BYTES={itemsize}", f"VALUE_PLANES={kind.planes}"
    blocks = f"VALUE_BLOCK={kind.block}", f"SHARED_BYTES={kind.shared}"
    return (*sent, *blocks, _format("ACC", acc), _index(int64_indices))


def variants() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield every module that may be compiled: file and definitions of types."""
    for int64_indices in (False, True):
        for x in DTYPES.values():
            residuals = [None, x, FLOAT32] if x.itemsize == 2 else [None, x]
            for residual in residuals:
                for file in ("topk.cu", "radix.cu", "threshold.cu", "chunks.cu"):
                    yield file, selection_definitions(x, residual, int64_indices)
            for residual in residuals[1:]:
                yield "dense.cu", dense_definitions(x, residual, int64_indices)
        for float64_values in (False, True):
            yield "merge.cu", merge_definitions(float64_values, int64_indices)
            for kind in (EXACT,) if float64_values else KINDS:
                yield "packed.cu", packed_definitions(kind, float64_values, int64_indices)


def _format(name: str, dtype: DType) -> str:
    return f"{name}=sparsecomm::{_FORMATS[dtype]}"


def _index(int64_indices: bool) -> str:
    return f"INDEX={'long long' if int64_indices else 'int'}"
