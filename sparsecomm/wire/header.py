"""The header of every message: which call it belongs to, and what follows.

    offset  bytes  field
         0      4  magic "SPC1"
         4      1  element type of the gradient (codes of `sparsecomm.dtypes`)
         5      1  operation: 0 sum, 1 mean
         6      1  wire format
         7      1  0
         8      8  n, number of elements
        16      8  k
        24     24  name of the algorithm, ASCII, padded with zero bytes
                   -- up to here about the call: equal in all its messages; from here on about the message:
        48      8  number of the call on this communicator
        56      4  rank that made the message
        60      4  round of the algorithm
        64      8  number of entries, or of elements of a dense message
        72      8  bytes that follow

Little-endian. Two ranks whose first 48 bytes differ made calls that do not belong together.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

from sparsecomm.dtypes import DTYPES
from sparsecomm.errors import CollectiveMismatchError

__all__ = ["CALL_BYTES", "HEADER_BYTES", "OPS", "Call", "Part"]

_CALL = struct.Struct("<4sBBBxQQ24s")
_MESSAGE = struct.Struct("<QIIQQ")
CALL_BYTES = _CALL.size
HEADER_BYTES = CALL_BYTES + _MESSAGE.size
_MAGIC = b"SPC1"
OPS = ("sum", "mean")
_DTYPE_NAMES = {d.code: d.name for d in DTYPES.values()}


@dataclass(frozen=True, slots=True)
class Call:
    """What the ranks of one collective call must agree on."""

    algorithm: str
    dtype: int
    op: int
    wire: int
    n: int
    k: int

    def pack(self) -> bytes:
        return _CALL.pack(_MAGIC, self.dtype, self.op, self.wire, self.n, self.k, self.algorithm.encode("ascii"))

    @classmethod
    def unpack(cls, data: bytes) -> Call | None:
        """The call that ``data`` starts with; None if these are not bytes of ours."""
        if len(data) < CALL_BYTES:
            return None
        magic, dtype, op, wire, n, k, name = _CALL.unpack_from(data)
        if magic != _MAGIC:
            return None
        return cls(name.rstrip(b"\0").decode("ascii", "replace"), dtype, op, wire, n, k)

    def describe(self) -> str:
        op = OPS[self.op] if self.op < len(OPS) else f"op {self.op}"
        dtype = _DTYPE_NAMES.get(self.dtype, f"type {self.dtype}")
        return f"{self.algorithm} {op} of n={self.n} {dtype}, k={self.k}, wire format {self.wire}"

    def mismatch(self, rank: int, theirs: bytes, their_rank: int) -> CollectiveMismatchError:
        """The error for a message of another call, which names what differs."""
        other = Call.unpack(theirs)
        if other is None:
            return CollectiveMismatchError(
                f"rank {rank} made the call {self.describe()}, and rank {their_rank} sent {len(theirs)} bytes that are "
                "no message of this version of sparsecomm; install one version on all ranks"
            )
        fields = [f for f in ("algorithm", "dtype", "op", "wire", "n", "k") if getattr(self, f) != getattr(other, f)]
        return CollectiveMismatchError(
            f"calls differ in {', '.join(fields)}: rank {rank} made {self.describe()}; rank {their_rank} made "
            f"{other.describe()}; make the same calls in the same order on all ranks"
        )


class Part(NamedTuple):
    """What a header says of its message."""

    number: int
    sender: int
    round: int
    items: int
    nbytes: int

    def pack(self) -> bytes:
        return _MESSAGE.pack(*self)

    @classmethod
    def unpack(cls, header: bytes) -> Part:
        return cls(*_MESSAGE.unpack_from(header, CALL_BYTES))
