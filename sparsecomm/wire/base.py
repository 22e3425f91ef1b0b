"""The interface of a wire format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from sparsecomm.backends.base import Backend
from sparsecomm.tensors.arrays import Array, ArrayDType, Bytes
from sparsecomm.tensors.kinds import ValueKind
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.transport.memory import MessageMemory

__all__ = ["VectorType", "Wire"]


class VectorType(NamedTuple):
    """The type of the sparse vectors of one call: ``n`` elements, and the dtypes of indices and values."""

    n: int
    indices: ArrayDType
    values: ArrayDType


@dataclass(frozen=True)
class Wire(ABC):
    """A wire format: entries to bytes and back. `sparsecomm.wire.formats` has one of these for each format.

    Attributes:
        name: what callers ask for, and the docs say.
        code: its number in the header of messages.
        kind: of values in a message: `EXACT`, or what `Backend.quantize` rounds them to before they are encoded.
        packed: whether encoding and decoding take time that the cost model counts.
    """

    name: str
    code: int
    kind: ValueKind
    packed: ClassVar[bool] = True

    @abstractmethod
    def parts(self, entries: SparseVector, backend: Backend) -> list[Array]:
        """Return arrays of the device whose bytes, one after another, are the entries. They may be the entries' own."""

    @abstractmethod
    def max_bytes(self, count: int, vector: VectorType) -> int:
        """Return an upper bound of the bytes of ``count`` entries."""

    @abstractmethod
    def bytes_per_entry(self, k: int, vector: VectorType) -> float:
        """Return the bytes that an entry of k takes on average, if they are spread evenly over all elements."""

    @abstractmethod
    def decode(
        self, data: Bytes, count: int, vector: VectorType, backend: Backend, memory: MessageMemory
    ) -> tuple[Array, Array]:
        """Return the indices and values of ``count`` entries, as flat arrays of the device.

        They are views of ``data`` where that is possible. Whether the indices are in order, and values are not zero, is
        not checked.

        Args:
            data: a part of a message that ``memory`` has made.

        Raises:
            ValueError: ``data`` are not ``count`` entries.
        """
