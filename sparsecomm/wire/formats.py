"""The wire formats.

To add a format, add a line to `_FORMATS` (name, code in message headers, kind of values) and its name to `WireName`.
The CLI, the cost model, the tests and the docs use this table. Never change the code of a format, because ranks of
different versions would confuse formats.

`Packed`: an index takes about 2 + log2(n/k) bits, a value 1 to 64 bits.

Source: Elias, "Efficient storage and retrieval by content and address of static files", J. ACM 1974; Fano, "On the
number of bits required to implement an associative memory", MIT 1971. At density 0.001 an index takes 11.96 bits; its
entropy is 11.41. The length depends only on the number of entries and on the first and last index, and the position of
an entry's bits only on its number and index. So threads can write in parallel, and decoders know the length in advance.

For m entries, in little-endian words of 64 bits:

    first, span    the first index, and the last index minus the first
    low            m times the l low bits of (index - first), with l = floor(log2((span + 1) / m)), to a whole word
    high           one set bit per entry i, at position ((index - first) >> l) + i, to a whole word
    values         m values of one of the kinds below
    padding        zero bytes to a multiple of 8

    float32, float64, bfloat16, float16    unchanged
    int8              m bytes q, then one exponent byte per 64 values. Values are q 2^(exponent - 126) with q from -126
                      to 126; q = 127 and -127 are the infinities, q = -128 is NaN
    int4, int2, sign  4, 2 or 1 words per 64 values: the signs, then the bits of the levels j, lowest first; unused bits
                      are zero. Then, per 64 values, `lowest`: the 2 bytes of a bfloat16 p 2^q > 0 with p < 256 and
                      q >= -133. Then, except for sign, per 64 values `step`: 1 byte. Values are
                      +- (p + j * step * UNIT) 2^q with j up to 7, 1 or 0, and UNIT = 2 for int4 and 16 for int2. If any
                      of the m values is not finite, bit 63 of span is set, and all values are float32

A message without entries is empty. Values are quantized before packing (`Backend.quantize`), so packing loses nothing.
For int4, int2 and sign, the smallest of 64 magnitudes then has level 0 and the largest the last level, which determines
`lowest` and `step`.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from sparsecomm.tensors.kinds import BFLOAT16, EXACT, FLOAT16, INT2, INT4, INT8, SIGN
from sparsecomm.wire.messages import PLAIN, Packed, Wire

WireName: TypeAlias = Literal[  # "auto" and the names in the table
    "auto",
    "plain",
    "packed",
    "packed_bfloat16",
    "packed_float16",
    "packed_int8",
    "packed_int4",
    "packed_int2",
    "packed_sign",
]

_FORMATS: tuple[Wire, ...] = (
    PLAIN,
    Packed("packed", 1, EXACT),
    Packed("packed_bfloat16", 2, BFLOAT16),
    Packed("packed_float16", 3, FLOAT16),
    Packed("packed_int8", 5, INT8),  # 4 was a format without infinities
    Packed("packed_int4", 6, INT4),
    Packed("packed_int2", 7, INT2),
    Packed("packed_sign", 8, SIGN),
)
WIRES = {wire.name: wire for wire in _FORMATS}


def format_of_updates(wire: Wire) -> Wire:
    """Return the format in which owners send an optimizer's updates if they receive gradients in ``wire``.

    With updates of one bit, models end with a higher loss: docs/reports/adamw.md.
    """
    return WIRES["packed_int2"] if wire.kind is SIGN else wire
