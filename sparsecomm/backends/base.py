"""The arithmetic of one device: all that algorithms ask of it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from numpy.typing import DTypeLike

from sparsecomm.tensors.interop import Tensor
from sparsecomm.tensors.kinds import ValueKind
from sparsecomm.tensors.sparse import Array, SparseVector
from sparsecomm.transport.memory import Memory

__all__ = ["Backend"]


class Backend(Protocol):
    """Selection, merging and dense arithmetic. Every result is the same, bit for bit, on every device.

    The order of selection is (|v| descending, index ascending), NaN above infinity, zeros never selected. A
    ``residual`` has x's type, or float32 beside a 16-bit x, and is updated in place.
    """

    def on_stream(self, x: Tensor | None) -> AbstractContextManager[Any]:
        """Within it, work on the device, and on the stream of ``x`` if given. Every other method is called within."""

    def side_stream(self) -> tuple[Backend, AbstractContextManager[Any]]:
        """Arithmetic for another thread, and what it is to be used within there, once.

        It then works on what the current stream has been given by now; on leaving, all its work is done.
        """

    def memory(self, direct: bool) -> Memory:
        """Where messages are made; ``direct``: the transport takes memory of the device."""

    def topk(self, x: Tensor, k: int, residual: Tensor | None) -> SparseVector:
        """The first k entries of x, or of residual + x; then residual = residual + x, with 0 at those entries.

        If memory runs out, the residual is as it was.
        """

    def add_into(self, x: Tensor, residual: Tensor) -> None:
        """residual = residual + x, as `topk` would store it."""

    def zeros(self, count: int, dtype: DTypeLike) -> Array:
        """A new flat array of zeros."""

    def finite(self, x: Tensor) -> bool:
        """Whether x holds neither NaN nor infinity."""

    def threshold(self, x: Tensor, tau: float, residual: Tensor | None) -> SparseVector:
        """Every entry with |v| >= tau, and NaN; the residual as in `topk`."""

    def merge(self, a: SparseVector, b: SparseVector) -> SparseVector:
        """a + b. Equal indices are added as a's value + b's; zero sums leave."""

    def merge_topk(self, a: SparseVector, b: SparseVector, k: int) -> tuple[SparseVector, SparseVector]:
        """The first k entries of a + b, and all its others."""

    def scatter_add(self, dense: Tensor, entries: SparseVector) -> None:
        """dense[indices] += values, rounded once to the type of dense."""

    def densify(self, out: Tensor, entries: SparseVector) -> None:
        """out = 0, then out[indices] = values, rounded to the type of out."""

    def divide(self, entries: SparseVector, divisor: int) -> SparseVector:
        """The entries with every value divided."""

    def well_formed(self, entries: SparseVector) -> bool:
        """Whether indices increase strictly within [0, size) and no value is zero."""

    def accumulate(self, x: Tensor, residual: Tensor | None) -> Array:
        """x, or residual + x as `topk` would store it, as a new flat array in which sums are carried."""

    def add(self, total: Array, addend: Array) -> None:
        """total += addend."""

    def nonzeros(self, dense: Array, shape: tuple[int, ...]) -> SparseVector:
        """The entries of a flat array that are not zero; it is kept, and may not change any more."""

    # What follows touches entries, not elements. Positions, indices, keys and counts are the host's.
    # Keys: `sparsecomm.backends.entries`.

    def searchsorted(self, entries: SparseVector, edges: list[int]) -> list[int]:
        """For each edge, which rise, how many indices are below it."""

    def windows(self, entries: SparseVector, edges: list[int]) -> list[SparseVector]:
        """For each range between two edges, which rise, its entries as a flat vector of its own."""

    def indices_at(self, entries: SparseVector, places: list[int]) -> list[int]:
        """The indices of the entries with these numbers."""

    def concatenate_entries(self, vectors: list[SparseVector]) -> SparseVector:
        """One vector of several, of which each ends before the next begins."""

    def empty_like(self, entries: SparseVector) -> SparseVector:
        """No entries."""

    def nth_key(self, entries: SparseVector, n: int) -> int:
        """The key of the n-th largest; 0 if there are fewer."""

    def count_keys(self, entries: SparseVector, low: int, shift: int, bins: int) -> list[int]:
        """How many keys are in each range of 2^shift from ``low`` on; all above are in the last of the ``bins``."""

    def split_at_key(self, entries: SparseVector, low: int) -> tuple[SparseVector, SparseVector]:
        """The entries whose key is at least ``low``, and the others."""

    def quantize(self, entries: SparseVector, kind: ValueKind) -> tuple[SparseVector, SparseVector]:
        """The entries as a format with values of that kind carries them, and what that takes away, without zeros."""

    def pack(self, entries: SparseVector, kind: ValueKind) -> Array:
        """See `sparsecomm.wire.base.Packer`."""

    def unpack(
        self, data: Array, head: bytes, count: int, n: int, kind: ValueKind, float64_values: bool
    ) -> tuple[Array, Array]:
        """See `sparsecomm.wire.base.Packer`."""

    def gather(self, dense: Tensor, entries: SparseVector) -> Array:
        """What ``dense`` has where the entries are, in the type in which sums are carried."""

    def clear(self, dense: Tensor, entries: SparseVector) -> None:
        """dense[indices] = 0."""

    def overlay(self, values: Array, entries: SparseVector, over: SparseVector) -> None:
        """Of ``values``, which belong to ``entries``, replace those whose index ``over`` has by its."""

    def with_values(self, entries: SparseVector, values: Array) -> SparseVector:
        """The same indices with other values, without those of which the value is zero."""

    def dense_part(self, entries: SparseVector, begin: int, end: int) -> Array:
        """Elements ``begin`` to ``end`` of the vector, in which all its entries are, dense."""

    def concatenate(self, arrays: list[Array]) -> Array:
        """One flat array of several."""

    def flat(self, array: Array, shape: tuple[int, ...]) -> Tensor:
        """A flat array of this device as a tensor of that shape."""

    def cast_into(self, values: Array | None, out: Tensor) -> None:
        """out = values, rounded to the type of out; ``None`` stands for zeros."""
