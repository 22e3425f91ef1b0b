"""What a format is."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from sparsecomm.tensors.kinds import ValueKind
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.transport.memory import Array, Bytes, Memory

__all__ = ["Packer", "Wire"]


class Packer(Protocol):
    """What formats ask of a device's arithmetic."""

    def pack(self, entries: SparseVector, kind: ValueKind) -> Array:
        """Entries, whose values are of that kind, as flat bytes of the device: see `sparsecomm.wire.packed`."""

    def unpack(
        self, data: Array, head: bytes, count: int, n: int, kind: ValueKind, float64_values: bool
    ) -> tuple[Array, Array]:
        """The indices and values of ``count`` entries of a vector of ``n`` elements.

        ``head``: the first bytes of ``data``, on the host.

        Raises:
            ValueError: these are not ``count`` entries.
        """


class Wire(Protocol):
    """Entries to bytes and back.

    Attributes:
        name: what callers ask for.
        code: its number in the header.
        kind: of values on the way: `EXACT`, or what `Backend.quantize` rounds to before.
    """

    name: str
    code: int
    kind: ValueKind

    def parts(self, entries: SparseVector, packer: Packer) -> list[Array]:
        """Arrays of the device that are, in a row, the bytes."""

    def max_bytes(self, count: int, n: int, index: np.dtype[Any], value: np.dtype[Any]) -> int:
        """Bytes that so many entries take at most."""

    def bytes_per_entry(self, k: int, n: int, index: np.dtype[Any], value: np.dtype[Any]) -> float:
        """What an entry of k, evenly spread over n elements, takes on average."""

    def decode(
        self,
        data: Bytes,
        count: int,
        n: int,
        index: np.dtype[Any],
        value: np.dtype[Any],
        packer: Packer,
        memory: Memory,
    ) -> tuple[Array, Array]:
        """The indices and values of ``count`` entries of a vector of ``n`` elements.

        Raises:
            ValueError: ``data`` are not these.
        """
