"""`Wire`: the interface of a wire format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from sparsecomm.backends.base import Backend
from sparsecomm.tensors.arrays import Array, ArrayDType, Bytes
from sparsecomm.tensors.kinds import ValueKind
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.transport.base import MessageMemory

__all__ = ["VectorType", "Wire"]


class VectorType(NamedTuple):
    """The type of a call's sparse vectors: ``n`` elements, and the dtypes of indices and values."""

    n: int
    indices: ArrayDType
    values: ArrayDType


@dataclass(frozen=True)
class Wire(ABC):
    """A wire format, which encodes entries as bytes. `sparsecomm.wire.formats` has one instance per format.

    Attributes:
        name: the value of ``wire=``.
        code: its number in message headers.
        kind: of values in messages: `EXACT`, or the kind to which `Backend.quantize` rounds values before encoding.
        packed: whether the cost model counts the time of encoding and decoding.
    """

    name: str
    code: int
    kind: ValueKind
    packed: ClassVar[bool] = True

    @abstractmethod
    def parts(self, entries: SparseVector, backend: Backend) -> list[Array]:
        """Encode entries; return arrays of the device whose concatenated bytes are the result. They may be views."""

    @abstractmethod
    def max_bytes(self, count: int, vector: VectorType) -> int:
        """Return an upper bound of the encoded size of ``count`` entries."""

    @abstractmethod
    def bytes_per_entry(self, k: int, vector: VectorType) -> float:
        """Return the mean encoded size of one of k entries that are spread evenly over all elements."""

    @abstractmethod
    def decode(
        self, data: Bytes, count: int, vector: VectorType, backend: Backend, memory: MessageMemory
    ) -> tuple[Array, Array]:
        """Decode ``count`` entries; return indices and values as flat arrays of the device, views if possible.

        Does not check that indices increase and that values are not zero.

        Args:
            data: a part of a message that ``memory`` has made.

        Raises:
            ValueError: ``data`` does not encode ``count`` entries.
        """
