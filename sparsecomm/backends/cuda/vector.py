"""Entries whose number the device knows and the host may not yet."""

from __future__ import annotations

import numpy as np

from sparsecomm.backends.cuda.runtime import Runtime
from sparsecomm.tensors.interop import Device
from sparsecomm.tensors.sparse import Array, SparseVector

__all__ = ["CountedVector", "count_of"]


class CountedVector(SparseVector):
    """A `SparseVector` as kernels leave it: room for many entries, and their number in device memory.

    Kernels go on with it without waiting. The host waits when it first asks for ``nnz``, ``indices`` or ``values``.
    """

    __slots__ = ("_counter", "_host", "_room", "_runtime")

    def __init__(
        self, runtime: Runtime, room: tuple[Array, Array], counter: Array, size: int, shape: tuple[int, ...]
    ) -> None:
        """``room``: arrays for indices and values; ``counter``: one uint64, how many of each are entries."""
        self._runtime, self._room, self._counter = runtime, room, counter
        self._host: int | None = None
        self.size, self.shape = size, shape

    @property
    def nnz(self) -> int:
        if self._host is None:
            word = self._runtime.pinned(8)
            self._runtime.copy(word.ctypes.data, self._runtime.address(self._counter), 8)
            self._runtime.record().wait()
            self._host = int(word.view(np.uint64)[0])
        return self._host

    @property
    def indices(self) -> Array:  # type: ignore[override]
        return self._room[0][: self.nnz]

    @property
    def values(self) -> Array:  # type: ignore[override]
        return self._room[1][: self.nnz]

    @property
    def _accumulator(self) -> np.dtype:
        return self._room[1].dtype

    @property
    def _like(self) -> Array:
        return self._room[1]

    @property
    def device(self) -> Device:
        return Device("cuda", self._runtime.device)

    def known(self) -> bool:
        """Whether the host knows the number of entries."""
        return self._host is not None

    def with_values(self, values: Array) -> CountedVector:
        """The same indices with other values."""
        other = CountedVector(self._runtime, (self._room[0], values), self._counter, self.size, self.shape)
        other._host = self._host
        return other


def count_of(runtime: Runtime, entries: SparseVector) -> tuple[Array, Array, int, int, int]:
    """For a kernel: indices, values, at most how many entries, the number if it is known, else where it stands."""
    if isinstance(entries, CountedVector) and not entries.known():
        indices, values = entries._room
        return indices, values, len(indices), 0, runtime.address(entries._counter)
    return entries.indices, entries.values, entries.nnz, entries.nnz, 0
