"""Scratch memory of one stream: kept from call to call, grown when a call needs more."""

from __future__ import annotations

from numpy.typing import DTypeLike

from sparsecomm.backends.cuda.runtime import Runtime
from sparsecomm.backends.cuda.tuning import sizes
from sparsecomm.tensors.sparse import Array

__all__ = ["Workspace"]


class Workspace:
    """The kernels' shared state, which is zero between calls, and room for candidates.

    The layouts are those of the structures in ``kernels/cuda``: Selection (select.cuh), LookBack (lookback.cuh), Sample
    (topk.cu) and Radix (radix.cu).
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._rooms: dict[str, Array] = {}
        self._outgrown: list[Array] = []  # a captured graph may still use it
        self.selection = self._zeros("selection", 7 * 8 + 4 * 4 + 4 * sizes()["BINS"])
        self.sample = self._zeros("sample", 4 + 4 * sizes()["SAMPLE_BINS"])

    def tiles(self, count: int) -> int:
        """The state of a look-back over so many tiles."""
        return self._zeros("tiles", 8 + 8 * count)

    def radix(self, blocks: int) -> int:
        """The state of a radix selection by so many blocks."""
        return self._zeros("radix", 8 + 3 * 4 * 2 ** sizes()["RADIX_BITS"] + 16 * blocks)

    def room(self, name: str, count: int, dtype: DTypeLike) -> int:
        """Room for so many elements, holding anything."""
        return self._grown(f"{name} {dtype}", count, dtype, zero=False)

    def _zeros(self, name: str, nbytes: int) -> int:
        return self._grown(name, nbytes, "u1", zero=True)

    def _grown(self, name: str, count: int, dtype: DTypeLike, zero: bool) -> int:
        array = self._rooms.get(name)
        if array is None or len(array) < count:
            grown = self._runtime.empty(max(count, 2 * len(array) if array is not None else 0), dtype)
            if zero:
                self._runtime.clear(grown)
            if array is not None:
                self._outgrown.append(array)
            self._rooms[name] = array = grown
        return self._runtime.address(array)
