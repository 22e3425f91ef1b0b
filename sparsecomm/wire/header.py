"""The header of every message: which call it belongs to, and what follows.

    offset  bytes  field
         0      4  magic "SPC1"
         4      1  element type of the gradient (codes of `sparsecomm.tensors.dtypes`)
         5      1  operation: 0 sum, 1 mean
         6      1  wire format
         7      1  bit 0: complete
         8      8  n, number of elements
        16      8  k
        24     32  name of the algorithm, ASCII, padded with zero bytes; of a longer one the first 23 characters, "~",
                   and its CRC-32
        56      4  checksum of the costs by which "auto" chose; 0 where the caller chose
        60      4  checksum of the label; 0 where there is none
                   -- up to here about the call: equal in all its messages; from here on about the message:
        64      8  number of the call on this communicator
        72      4  rank that made the message
        76      4  round of the algorithm
        80      8  number of entries, of elements of a dense message, or of words
        88      8  bytes that follow

Little-endian. Two ranks whose first 64 bytes differ made calls that do not belong together.
"""

from __future__ import annotations

import dataclasses
import struct
import zlib
from dataclasses import dataclass
from typing import NamedTuple

from sparsecomm.errors import CollectiveMismatchError
from sparsecomm.tensors.dtypes import DTYPES

__all__ = ["CALL_BYTES", "HEADER_BYTES", "OPS", "WIRE_NAMES", "CallSignature", "Part"]

_CALL = struct.Struct("<4sBBBBQQ32sII")
_MESSAGE = struct.Struct("<QIIQQ")
CALL_BYTES = _CALL.size
HEADER_BYTES = CALL_BYTES + _MESSAGE.size
_NAME = 32
_MAGIC = b"SPC1"
OPS = ("sum", "mean")
WIRE_NAMES = {0: "plain", 1: "packed", 2: "packed_bfloat16", 3: "packed_float16", 4: "packed_int8"}
_DTYPE_NAMES = {d.code: d.name for d in DTYPES.values()}


@dataclass(frozen=True, slots=True)
class CallSignature:
    """What the ranks of one collective call must agree on."""

    algorithm: str
    dtype: int
    op: int
    wire: int
    n: int
    k: int
    complete: bool = False
    costs: int = 0
    label: int = 0

    def pack(self) -> bytes:
        name = self.algorithm.encode("ascii")
        if len(name) > _NAME:  # a part of it, and a checksum of all
            name = name[: _NAME - 9] + b"~%08x" % zlib.crc32(name)
        return _CALL.pack(
            _MAGIC, self.dtype, self.op, self.wire, self.complete, self.n, self.k, name, self.costs, self.label
        )

    @classmethod
    def unpack(cls, data: bytes) -> CallSignature | None:
        """The call that ``data`` starts with; None if these are not bytes of ours."""
        if len(data) < CALL_BYTES:
            return None
        magic, dtype, op, wire, flags, n, k, name, costs, label = _CALL.unpack_from(data)
        if magic != _MAGIC:
            return None
        algorithm = name.rstrip(b"\0").decode("ascii", "replace")
        return cls(algorithm, dtype, op, wire, n, k, bool(flags), costs, label)

    def describe(self) -> str:
        op = OPS[self.op] if self.op < len(OPS) else f"op {self.op}"
        dtype = _DTYPE_NAMES.get(self.dtype, f"type {self.dtype}")
        wire = WIRE_NAMES.get(self.wire, f"format {self.wire}")
        chosen = f", chosen by costs {self.costs:08x}" if self.costs else ""
        complete = ", complete" if self.complete else ""
        labelled = f", label {self.label:08x}" if self.label else ""
        return f"{self.algorithm} {op} of n={self.n} {dtype}, k={self.k}, wire {wire}{complete}{chosen}{labelled}"

    def mismatch(self, rank: int, theirs: bytes, their_rank: int) -> CollectiveMismatchError:
        """The error for a message of another call, which names what differs."""
        other = CallSignature.unpack(theirs)
        if other is None:
            return CollectiveMismatchError(
                f"rank {rank} made the call {self.describe()}, and rank {their_rank} sent {len(theirs)} bytes that are "
                "no message of this version of sparsecomm; install one version on all ranks"
            )
        mine = CallSignature.unpack(self.pack())  # names may have been cut
        fields = [f.name for f in dataclasses.fields(self) if getattr(mine, f.name) != getattr(other, f.name)]
        advice = "make the same calls in the same order on all ranks"
        if "label" in fields:
            advice += "; labels stand for the name, or for a Reducer's step and its tensors, their order and settings"
        if fields and set(fields) <= {"costs", "algorithm", "wire"} and self.costs != other.costs:
            advice = 'give all ranks the same profile (SPARSECOMM_PROFILE), or name the algorithm instead of "auto"'
        return CollectiveMismatchError(
            f"calls differ in {', '.join(fields)}: rank {rank} made {self.describe()}; rank {their_rank} made "
            f"{other.describe()}; {advice}"
        )


class Part(NamedTuple):
    """What a header says of its message."""

    number: int
    sender: int
    round_no: int
    items: int
    nbytes: int

    def pack(self) -> bytes:
        return _MESSAGE.pack(*self)

    @classmethod
    def unpack(cls, header: bytes) -> Part:
        return cls(*_MESSAGE.unpack_from(header, CALL_BYTES))
