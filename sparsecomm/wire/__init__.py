"""Entries to bytes and back. Every message starts with the header of `sparsecomm.wire.header`."""

from sparsecomm.tensors.kinds import BFLOAT16, EXACT, FLOAT16, INT8
from sparsecomm.wire.base import Packer, Wire
from sparsecomm.wire.header import HEADER_BYTES, OPS, WIRE_NAMES, CallSignature
from sparsecomm.wire.messages import Messages
from sparsecomm.wire.packed import Packed
from sparsecomm.wire.plain import Plain

__all__ = [
    "EXACT",
    "HEADER_BYTES",
    "OPS",
    "PLAIN",
    "WIRES",
    "CallSignature",
    "Messages",
    "Packed",
    "Packer",
    "Plain",
    "Wire",
]

PLAIN = Plain()
_KINDS = {"packed": EXACT, "packed_bfloat16": BFLOAT16, "packed_float16": FLOAT16, "packed_int8": INT8}

# The formats that a caller can ask for by name.
WIRES: dict[str, Wire] = {"plain": PLAIN}
WIRES |= {name: Packed(name, code, _KINDS[name]) for code, name in WIRE_NAMES.items() if name in _KINDS}
