"""The header of every message: which call it belongs to, and what follows.

    offset  bytes  field
         0      4  magic "SPC2"
         4      1  element type of the gradient (codes of `sparsecomm.tensors.dtypes`)
         5      1  operation: 0 sum, 1 mean, 2 mean of contributors
         6      1  wire format (codes of `sparsecomm.wire.formats`)
         7      1  bit 1: there is a residual; 2: there is an out
         8      8  n, number of elements
        16      8  k
        24     24  name of the algorithm, ASCII, padded with zero bytes; of a longer one the first 15 characters, "~",
                   and its CRC-32
        48      4  checksum of the shape of x; 0 where x is flat, and of calls whose label covers the shapes
        52      4  elements of a chunk, of each of which entries are selected; 0 where they are selected from the whole,
                   2^32 - 1 for as many or more
        56      4  checksum of the costs by which the call was planned; 0 where none matter
        60      4  checksum of the label; 0 where there is none
                   -- up to here about the call: equal in all its messages; from here on about the message:
        64      8  number of the call on this communicator
        72      4  rank that made the message
        76      4  round of the algorithm, in the low 31 bits; the highest bit says that a contribution is incomplete:
                   that of the sender, or of a rank from which it has received a message with this bit in this call
        80      8  number of entries, of elements of a dense message, or of words
        88      8  bytes that follow

Little-endian. Two ranks whose first 64 bytes differ made calls that do not belong together.
"""

from __future__ import annotations

import dataclasses
import struct
import zlib
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from sparsecomm.errors import CollectiveMismatchError
from sparsecomm.tensors.dtypes import DTYPES
from sparsecomm.wire.formats import WIRE_OF_CODE

__all__ = [
    "CALL_BYTES",
    "HEADER",
    "HEADER_BYTES",
    "INCOMPLETE",
    "LABEL_AT",
    "MEAN_OF_CONTRIBUTORS",
    "MEASUREMENT",
    "OPS",
    "CallSignature",
    "Op",
    "shape_checksum",
]

_CALL = struct.Struct("<4sBBBBQQ24sIIII")
CALL_BYTES = _CALL.size
HEADER = struct.Struct(f"<{CALL_BYTES}sQIIQQ")  # call, number, sender, round, items, bytes that follow
HEADER_BYTES = HEADER.size
LABEL_AT = CALL_BYTES - 4  # where the label's checksum stands
INCOMPLETE = 1 << 31  # the bit of the round field
_NAME_BYTES = 24
_MAX_CHUNK = 2**32 - 1
_MAGIC = b"SPC2"
Op: TypeAlias = Literal["sum", "mean", "mean_of_contributors"]
MEAN_OF_CONTRIBUTORS: Final = "mean_of_contributors"
OPS: tuple[Op, ...] = get_args(Op)
MEASUREMENT: Final = "measurement of links"  # the name of the call in which ranks without a profile measure costs
_GIVEN = "residual", "out"
_DTYPE_NAMES = {d.code: d.name for d in DTYPES.values()}


def shape_checksum(shape: tuple[int, ...]) -> int:
    """Return the checksum by which ranks compare shapes; 0 for a flat one."""
    return 0 if len(shape) == 1 else zlib.crc32(repr(shape).encode()) or 1


@dataclass(frozen=True, slots=True)
class CallSignature:
    """The arguments on which the ranks of one collective call must agree.

    Attributes:
        algorithm: its name.
        dtype: the code of the gradient's element type, in `sparsecomm.tensors.dtypes`.
        op: an index into `OPS`.
        wire: the code of the wire format.
        n, k: elements, and entries that each rank selects.
        costs: the checksum of the costs by which the call was planned; 0 where none matter.
        label: the checksum of the label; 0 where there is none.
        chunk: elements of a chunk; 0 where there are none.
        shape: the checksum of x's shape; 0 where it is flat.
        residual, out: whether the caller has passed one.
    """

    algorithm: str
    dtype: int
    op: int
    wire: int
    n: int
    k: int
    costs: int = 0
    label: int = 0
    chunk: int = 0
    shape: int = 0
    residual: bool = False
    out: bool = False

    def pack(self) -> bytes:
        """Return the first `CALL_BYTES` of a header."""
        name = self.algorithm.encode("ascii")
        if len(name) > _NAME_BYTES:  # its beginning, and a checksum of the whole
            name = name[: _NAME_BYTES - 9] + b"~%08x" % zlib.crc32(name)
        return _CALL.pack(
            _MAGIC,
            self.dtype,
            self.op,
            self.wire,
            self.residual << 1 | self.out << 2,
            self.n,
            self.k,
            name,
            self.shape,
            min(self.chunk, _MAX_CHUNK),
            self.costs,
            self.label,
        )

    @classmethod
    def unpack(cls, data: bytes) -> CallSignature | None:
        """Return the signature that ``data`` starts with; None if these bytes are no header."""
        if len(data) < CALL_BYTES:
            return None
        magic, dtype, op, wire, flags, n, k, name, shape, chunk, costs, label = _CALL.unpack_from(data)
        if magic != _MAGIC:
            return None
        algorithm = name.rstrip(b"\0").decode("ascii", "replace")
        return cls(algorithm, dtype, op, wire, n, k, costs, label, chunk, shape, bool(flags & 2), bool(flags & 4))

    def describe(self, shape: str = "") -> str:
        """Return the signature in words, for messages to users; with the ``shape`` of x, if that is told."""
        op = OPS[self.op] if self.op < len(OPS) else f"op {self.op}"
        dtype = _DTYPE_NAMES.get(self.dtype, f"type {self.dtype}")
        wire = WIRE_OF_CODE[self.wire].name if self.wire in WIRE_OF_CODE else f"format {self.wire}"
        chosen = f", costs of checksum {self.costs:08x}" if self.costs else ""
        chunk = f" by chunks of {self.chunk}" if self.chunk else ""
        labelled = f", label {self.label:08x}" if self.label else ""
        shaped = f" of {shape}" if shape else ""
        given = " and ".join(name for name in _GIVEN if getattr(self, name))
        return (
            f"{self.algorithm} {op} of n={self.n} {dtype}{shaped}, k={self.k}{chunk}, wire {wire}"
            f"{f', with {given}' if given else ''}{chosen}{labelled}"
        )

    def mismatch(
        self, rank: int, theirs: bytes, their_rank: int, shape: tuple[int, ...] = ()
    ) -> CollectiveMismatchError:
        """Return the error for a message of another call, which names what differs.

        Args:
            rank: this rank.
            theirs: the header of the message.
            their_rank: the rank that sent it.
            shape: of x on this rank, of which the message has a checksum only.
        """
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
            advice += (
                "; labels stand for the name, for the shapes of JAX arrays, or for a Reducer's step and its tensors, "
                "their order and settings"
            )
        if fields and set(fields) <= {"costs", "algorithm", "wire"} and self.costs != other.costs:
            advice = "give all ranks the same profile (SPARSECOMM_PROFILE), or none: then they measure"
        elif MEASUREMENT in (self.algorithm, other.algorithm):
            advice += "; ranks that have no profile measure, so give all the same one (SPARSECOMM_PROFILE), or none"
        for name in _GIVEN:
            if name in fields:
                advice += f"; pass {name}= on all ranks, or on none"
        shapes = "", ""
        if "shape" in fields:
            shapes = f"shape {shape}", "another shape" if other.shape else f"shape ({other.n},)"
        return CollectiveMismatchError(
            f"calls differ in {', '.join(fields)}: rank {rank} made {self.describe(shapes[0])}; rank {their_rank} made "
            f"{other.describe(shapes[1])}; {advice}"
        )
