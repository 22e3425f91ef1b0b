"""The arithmetic of one device: all that algorithms ask of it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from sparsecomm.interop import Tensor
from sparsecomm.memory import Memory
from sparsecomm.sparse import Array, SparseVector

__all__ = ["Ops"]


class Ops(Protocol):
    """Selection, merging and dense arithmetic. Every result is the same, bit for bit, on every device.

    The order of selection is (|v| descending, index ascending), NaN above infinity, zeros never selected. A
    ``residual`` has x's type, or float32 beside a 16-bit x, and is updated in place.
    """

    def using(self, x: Tensor | None) -> AbstractContextManager[Any]:
        """Within it, work on the device, and on the stream of ``x`` if given. Every other method is called within."""

    def memory(self, direct: bool) -> Memory:
        """Where messages are made; ``direct``: the transport takes memory of the device."""

    def topk(self, x: Tensor, k: int, residual: Tensor | None) -> SparseVector:
        """The first k entries of x, or of residual + x; then residual = residual + x, with 0 at those entries.

        If memory runs out, the residual is as it was.
        """

    def absorb(self, x: Tensor, residual: Tensor) -> None:
        """residual = residual + x, as `topk` would store it."""

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

    def store(self, values: Array | None, out: Tensor) -> None:
        """out = values, rounded to the type of out; ``None`` stands for zeros."""
