"""The kinds of packed values: how the value of an entry travels. Wire formats and kernels take them from here."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BFLOAT16", "EXACT", "FLOAT16", "INT8", "KINDS", "ValueKind"]


@dataclass(frozen=True, slots=True)
class ValueKind:
    """A kind of values in messages.

    Attributes:
        name: of the kind.
        code: its number in ``Kind`` of kernels/cpu/kernels.hpp.
        codec: the structure of kernels/cuda/packed.cu that converts its values.
        itemsize: bytes of a value; 0 for the bytes of the accumulator's type, which travels as it is.
        block: number of values that share one more byte, their exponent; 0 if none do.
    """

    name: str
    code: int
    codec: str
    itemsize: int = 0
    block: int = 0

    def nbytes(self, count: int, accumulator_itemsize: int) -> int:
        """Return the bytes of ``count`` values, without padding."""
        return count * (self.itemsize or accumulator_itemsize) + (-(-count // self.block) if self.block else 0)

    def bytes_per_value(self, accumulator_itemsize: int) -> float:
        """Return what a value of many takes on average."""
        return (self.itemsize or accumulator_itemsize) + (1 / self.block if self.block else 0)


EXACT = ValueKind("exact", 0, "Exact")
BFLOAT16 = ValueKind("bfloat16", 1, "Rounded<BF16>", itemsize=2)
FLOAT16 = ValueKind("float16", 2, "Rounded<F16>", itemsize=2)
INT8 = ValueKind("int8", 3, "Int8", itemsize=1, block=64)
KINDS = (EXACT, BFLOAT16, FLOAT16, INT8)
