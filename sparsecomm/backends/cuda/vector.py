"""Entries whose number the device knows and the host may not yet."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sparsecomm.backends.cuda.runtime import Runtime, read_word
from sparsecomm.tensors.interop import Device
from sparsecomm.tensors.sparse import Array, SparseVector

__all__ = ["CountedVector", "Operand"]


class CountedVector(SparseVector):
    """A `SparseVector` as kernels leave it: room for many entries, and their number in device memory.

    Kernels go on with it without waiting. The host waits when it first asks for ``nnz``, ``indices`` or ``values``.

    Attributes:
        room: arrays for indices and values.
        counter: one uint64, how many of each are entries.
        host_count: the same, once the host knows it.
    """

    __slots__ = ("_runtime", "counter", "host_count", "room")

    def __init__(
        self, runtime: Runtime, room: tuple[Array, Array], counter: Array, size: int, shape: tuple[int, ...]
    ) -> None:
        self._runtime, self.room, self.counter = runtime, room, counter
        self.host_count: int | None = None
        self.size, self.shape = size, shape

    @property
    def nnz(self) -> int:
        if self.host_count is None:
            self.host_count = read_word(self._runtime, self.counter)
        return self.host_count

    @property
    def indices(self) -> Array:  # type: ignore[override]
        return self.room[0][: self.nnz]

    @property
    def values(self) -> Array:  # type: ignore[override]
        return self.room[1][: self.nnz]

    @property
    def _accumulator(self) -> np.dtype:
        return self.room[1].dtype

    @property
    def _like(self) -> Array:
        return self.room[1]

    @property
    def device(self) -> Device:
        return Device("cuda", self._runtime.device)

    def with_values(self, values: Array) -> CountedVector:
        """Return the same indices with other values."""
        other = CountedVector(self._runtime, (self.room[0], values), self.counter, self.size, self.shape)
        other.host_count = self.host_count
        return other


class Operand(NamedTuple):
    """A sparse vector as an argument of a kernel: its number of entries is ``device_count``, if that is not `None`."""

    indices: Array
    values: Array
    max_count: int
    host_count: int
    device_count: Array | None

    @classmethod
    def of(cls, entries: SparseVector) -> Operand:
        """Return the operand without waiting for the number of entries."""
        if isinstance(entries, CountedVector) and entries.host_count is None:
            indices, values = entries.room
            return cls(indices, values, len(indices), 0, entries.counter)
        return cls(entries.indices, entries.values, entries.nnz, entries.nnz, None)

    def arguments(self, prefix: str = "") -> dict[str, Array | int | None]:
        """Return a kernel's arguments, whose names begin with ``prefix``."""
        names = "indices", "values", "host_count", "device_count"
        given = self.indices, self.values, self.host_count, self.device_count
        return {prefix + name: argument for name, argument in zip(names, given, strict=True)}
