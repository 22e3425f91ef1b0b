"""`ValueKind`: how wire formats and kernels encode the values of entries."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ValueKind:
    """A kind of values in messages. Some kinds encode blocks of consecutive values together."""

    name: str
    code: int  # its number in ``Kind`` of kernels/cpu/kernels.hpp
    codec: str  # the struct in kernels/cuda/packed.cu that converts its values
    itemsize: int = 0  # bytes of a value; 0: the accumulator dtype, unconverted
    planes: int = 0  # bits of a value, each in a 64-bit word per block; 0: a value takes whole bytes
    block: int = 0  # values per block; 0: no blocks
    shared: int = 0  # bytes per block that its values share


EXACT = ValueKind("exact", 0, "Exact")
BFLOAT16 = ValueKind("bfloat16", 1, "Rounded<BF16>", itemsize=2)
FLOAT16 = ValueKind("float16", 2, "Rounded<F16>", itemsize=2)
INT8 = ValueKind("int8", 3, "Int8", itemsize=1, block=64, shared=1)
INT4 = ValueKind("int4", 4, "FewBits<3>", planes=4, block=64, shared=3)
INT2 = ValueKind("int2", 5, "FewBits<1>", planes=2, block=64, shared=3)
SIGN = ValueKind("sign", 6, "FewBits<0>", planes=1, block=64, shared=2)
KINDS = (EXACT, BFLOAT16, FLOAT16, INT8, INT4, INT2, SIGN)
