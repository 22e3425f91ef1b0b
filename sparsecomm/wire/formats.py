"""The table of wire formats.

A format is one line here, and its name in `WireName`: the name that callers give, its code in the header of messages,
the kind of its values, and the class that encodes it. The CLI's choices, the cost model, the tests' parameters and the
tables in the docs come from this table. The code of a format never changes: ranks of different versions must not
mistake it for another.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from sparsecomm.tensors.kinds import BFLOAT16, EXACT, FLOAT16, INT2, INT4, INT8, SIGN
from sparsecomm.wire.base import Wire
from sparsecomm.wire.packed import Packed
from sparsecomm.wire.plain import Plain

__all__ = ["PLAIN", "WIRES", "WIRE_OF_CODE", "WireName"]

WireName: TypeAlias = Literal[  # "auto" and those of the table
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

PLAIN = Plain("plain", 0, EXACT)
_FORMATS: tuple[Wire, ...] = (
    PLAIN,
    Packed("packed", 1, EXACT),
    Packed("packed_bfloat16", 2, BFLOAT16),
    Packed("packed_float16", 3, FLOAT16),
    Packed("packed_int8", 5, INT8),  # 4 was one without infinities
    Packed("packed_int4", 6, INT4),
    Packed("packed_int2", 7, INT2),
    Packed("packed_sign", 8, SIGN),
)
WIRES = {wire.name: wire for wire in _FORMATS}
WIRE_OF_CODE = {wire.code: wire for wire in _FORMATS}
