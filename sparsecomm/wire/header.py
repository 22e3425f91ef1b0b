"""The header of every message, which identifies its call and its contents.

    offset  bytes  field
         0      4  magic "SPC3"
         4      1  dtype of the gradient (codes of `sparsecomm.tensors.dtypes`)
         5      1  operation: 0 sum, 1 mean, 2 mean of contributors
         6      1  wire format (codes of `sparsecomm.wire.formats`)
         7      1  bit 1: a residual was passed; bit 2: an out was passed
         8      8  n, number of elements
        16      8  k
        24     24  name of the algorithm, ASCII, padded with zero bytes; of a longer name the first 15 characters, "~",
                   and its CRC-32
        48      4  checksum of the shape of x; 0 if x is flat, or if the label covers the shapes
        52      4  number of elements of a chunk, at most 2^32 - 1; 0 if entries are selected from the whole tensor
        56      4  checksum of the costs with which the call was planned; 0 if the plan does not depend on them
        60      4  checksum of the label; 0 if there is none
                   -- The fields above describe the call and are equal on all ranks; those below, the message. --
        64      8  number of the call on this communicator
        72      4  rank of the sender
        76      4  round number in the low 31 bits; the highest bit is set if the sender's contribution is incomplete,
                   or if it has received a message with this bit in this call
        80      8  number of entries or dense elements, or the counts of a parcel (see `Messages.parcel`)
        88      8  number of bytes that follow

Little-endian. If the first 64 bytes of two ranks differ, their calls do not match.
"""

from __future__ import annotations

import dataclasses
import struct
import zlib
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from sparsecomm.errors import CollectiveMismatchError
from sparsecomm.tensors.dtypes import DTYPES

_CALL = struct.Struct("<4sBBBBQQ24sIIII")
CALL_BYTES = _CALL.size
HEADER = struct.Struct(f"<{CALL_BYTES}sQIIQQ")  # call, number, sender, round, items, bytes that follow
HEADER_BYTES = HEADER.size
LABEL_AT = CALL_BYTES - 4  # offset of the label's checksum
INCOMPLETE = 1 << 31  # bit in the round field
_NAME_BYTES = 24
_MAX_CHUNK = 2**32 - 1
_MAGIC = b"SPC3"
Op: TypeAlias = Literal["sum", "mean", "mean_of_contributors"]
MEAN_OF_CONTRIBUTORS: Final = "mean_of_contributors"
OPS: tuple[Op, ...] = get_args(Op)
MEASUREMENT: Final = "measurement of links"  # algorithm name of the call in which ranks without a profile measure costs
_OPTIONAL = "residual", "out"
_DTYPE_NAMES = {d.code: d.name for d in DTYPES.values()}
WIRE_NAMES: dict[int, str] = {}  # by code; each `Wire` adds its name


def shape_checksum(shape: tuple[int, ...]) -> int:
    """Return the checksum with which ranks compare shapes; 0 for a flat shape."""
    return 0 if len(shape) == 1 else zlib.crc32(repr(shape).encode()) or 1


@dataclass(frozen=True, slots=True)
class CallSignature:
    """The arguments that must be equal on all ranks of a call, as in the table above. ``op`` is an index into `OPS`."""

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
        if len(name) > _NAME_BYTES:  # its beginning and a checksum of all of it
            name = name[: _NAME_BYTES - 9] + b"~%08x" % zlib.crc32(name)
        flags, chunk = self.residual << 1 | self.out << 2, min(self.chunk, _MAX_CHUNK)
        fields = self.dtype, self.op, self.wire, flags, self.n, self.k, name, self.shape, chunk
        return _CALL.pack(_MAGIC, *fields, self.costs, self.label)

    @classmethod
    def unpack(cls, data: bytes) -> CallSignature | None:
        """Return the signature at the beginning of ``data``; None if this is not a header."""
        if len(data) < CALL_BYTES:
            return None
        magic, dtype, op, wire, flags, n, k, name, shape, chunk, costs, label = _CALL.unpack_from(data)
        if magic != _MAGIC:
            return None
        algorithm = name.rstrip(b"\0").decode("ascii", "replace")
        return cls(algorithm, dtype, op, wire, n, k, costs, label, chunk, shape, bool(flags & 2), bool(flags & 4))

    @property
    def _names(self) -> tuple[str, str, str]:
        return (
            OPS[self.op] if self.op < len(OPS) else f"op {self.op}",
            _DTYPE_NAMES.get(self.dtype, f"type {self.dtype}"),
            WIRE_NAMES.get(self.wire, f"format {self.wire}"),
        )

    def contents(self, shape: tuple[int, ...]) -> list[tuple[str, object]]:
        """Return the fields by name, without the label, for a comparison with another rank. ``shape``: of x."""
        op, dtype, wire = self._names
        return [
            ("shape", shape),
            ("dtype", dtype),
            ("op", op),
            ("chunk", self.chunk or None),
            ("k", self.k),
            *((name, "passed" if getattr(self, name) else "not passed") for name in _OPTIONAL),
            ("measured costs", f"{self.costs:08x} (checksum)" if self.costs else None),
            ("chosen algorithm", self.algorithm),
            ("chosen wire format", wire),
        ]

    def describe(self) -> str:
        """Return the signature as text for users."""
        op, dtype, wire = self._names
        chosen = f", measured costs {self.costs:08x} (checksum)" if self.costs else ""
        chunk = f" by chunks of {self.chunk}" if self.chunk else ""
        passed = " and ".join(name for name in _OPTIONAL if getattr(self, name))
        return (
            f"{self.algorithm} {op} of n={self.n} {dtype}, k={self.k}{chunk}, wire {wire}"
            f"{f', with {passed}' if passed else ''}{chosen}"
        )

    def mismatch(self, rank: int, header: bytes, peer: int) -> CollectiveMismatchError:
        """Return the error for the ``header`` of a message from ``peer``; it names the fields that differ."""
        other = CallSignature.unpack(header)
        if other is None:
            return CollectiveMismatchError(
                f"rank {rank} made the call {self.describe()}, and rank {peer} sent {len(header)} bytes that are "
                "not a message of this version of sparsecomm; install the same version on all ranks"
            )
        mine = CallSignature.unpack(self.pack())  # cuts a long name
        fields = [f.name for f in dataclasses.fields(self) if getattr(mine, f.name) != getattr(other, f.name)]
        advice = "make the same calls in the same order on all ranks, with the same labels, tensors and settings"
        if fields and set(fields) <= {"costs", "algorithm", "wire"} and self.costs != other.costs:
            advice = "give all ranks the same profile (SPARSECOMM_PROFILE), or none, so that they measure together"
        calls = f"rank {rank} made {self.describe()}; rank {peer} made {other.describe()}"
        error = CollectiveMismatchError(f"calls differ in {', '.join(fields)}: {calls}; {advice}")
        error.peer = peer
        return error
