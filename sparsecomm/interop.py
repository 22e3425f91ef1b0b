"""Tensors of other libraries, in: DLPack to a pointer with what the kernels must know about it."""

from __future__ import annotations

from dataclasses import dataclass

from sparsecomm.dtypes import DType

__all__ = ["Device", "Tensor"]


@dataclass(frozen=True, slots=True)
class Device:
    """Where memory is: ``kind`` "cpu" or "cuda", and the number of the GPU."""

    kind: str
    index: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


@dataclass(frozen=True, slots=True)
class Tensor:
    """Contiguous memory of somebody else's array. ``owner`` keeps it alive."""

    pointer: int
    size: int
    shape: tuple[int, ...]
    dtype: DType
    device: Device
    readonly: bool
    owner: object
