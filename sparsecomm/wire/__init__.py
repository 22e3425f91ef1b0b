"""Entries to bytes and back. Every message starts with the header of `sparsecomm.wire.header`."""

from sparsecomm.wire.header import HEADER_BYTES, OPS, Call
from sparsecomm.wire.messages import Messages
from sparsecomm.wire.plain import Plain

__all__ = ["HEADER_BYTES", "OPS", "WIRES", "Call", "Messages", "Plain"]

# The formats that a caller can ask for by name.
WIRES = {"plain": Plain()}
