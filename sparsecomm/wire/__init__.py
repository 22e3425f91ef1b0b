"""Messages: the encoding of entries, dense arrays and integers. `sparsecomm.wire.header` describes the header."""

from sparsecomm.tensors.kinds import EXACT
from sparsecomm.wire.formats import WIRES, WireName, format_of_updates
from sparsecomm.wire.header import HEADER_BYTES, MEAN_OF_CONTRIBUTORS, MEASUREMENT, OPS, CallSignature, Op
from sparsecomm.wire.messages import PLAIN, Messages, VectorType, Wire

__all__ = [
    "EXACT", "HEADER_BYTES", "MEAN_OF_CONTRIBUTORS", "MEASUREMENT", "OPS", "PLAIN", "WIRES", "CallSignature",
    "Messages", "Op", "VectorType", "Wire", "WireName", "format_of_updates",
]  # fmt: skip
