"""Scratch memory of one stream: kept from call to call, grown when a call needs more."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np
from numpy.typing import DTypeLike

from sparsecomm.backends.cuda.runtime import Runtime
from sparsecomm.backends.cuda.tuning import Tuning
from sparsecomm.tensors.arrays import ArrayDType
from sparsecomm.tensors.sparse import Array

__all__ = ["Workspace", "structure_definitions", "structures"]

_LINE = 128  # bytes: OWN_LINE of kernels/cuda/platform.cuh


@cache
def structures(tuning: Tuning) -> dict[str, ArrayDType]:
    """Return the structures that kernels keep in device memory, as kernels/cuda declares them.

    Their sizes are checked when a kernel is compiled. What stands once per tile or block is in it once.
    """
    u4, u8 = np.dtype(np.uint32), np.dtype(np.uint64)
    selection = dict.fromkeys(("threshold", "count", "kth", "ties", "rank", "bin"), u8) | {"shift": u4, "retry": u4}
    histogram, radix_histogram = np.dtype((u4, tuning.bins)), np.dtype((u4, 2**tuning.radix_bits))
    step = dict.fromkeys(("kth", "above", "ties"), u8) | dict.fromkeys(("decided", "stage", "over"), u4)
    return {
        "SELECTION": _structure(selection, {"survivors": u8}, {"blocks_done": u4}, {"histogram": histogram}),
        "LOOK_BACK": _structure({"ticket": u4}, {"blocks_done": u4}, {"status": u8}),
        "SAMPLE": _structure({"blocks_done": u4}, {"histogram": np.dtype((u4, tuning.sample_bins))}),
        "RADIX": _structure(
            {"ticket": u4},
            step,
            {"parts_done": u4},
            {"blocks_done": u4},
            {"histogram": radix_histogram},
            {"sums": np.dtype((u8, 2))},
        ),
    }


def structure_definitions(tuning: Tuning) -> tuple[str, ...]:
    """Return ``NAME_BYTES=value`` for each structure."""
    return tuple(f"{name}_BYTES={dtype.itemsize}u" for name, dtype in structures(tuning).items())


def _structure(*lines: Mapping[str, ArrayDType]) -> ArrayDType:
    """Return a structure of fields, of which each group begins a line."""
    offsets, end = [], 0
    for line in lines:
        end += -end % _LINE
        for dtype in line.values():
            offsets.append(end)
            end += dtype.itemsize
    names, formats = zip(*(field for line in lines for field in line.items()), strict=True)
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": end + -end % _LINE})


class Workspace:
    """The kernels' shared state, which is zero between calls, and room for candidates."""

    def __init__(self, runtime: Runtime, tuning: Tuning) -> None:
        self._runtime = runtime
        self._structures = structures(tuning)
        self._rooms: dict[str, Array] = {}
        self._outgrown: list[Array] = []  # a captured graph may still use it

    @property
    def selection(self) -> int:
        """The address of the state of a selection."""
        return self._state("SELECTION")

    @property
    def sample(self) -> int:
        """The address of the histogram of a sample."""
        return self._state("SAMPLE")

    def look_back(self, tiles: int) -> int:
        """Return the address of the state of a look-back over so many tiles."""
        return self._state("LOOK_BACK", 8 * tiles)

    def radix(self, blocks: int) -> int:
        """Return the address of the state of a radix selection by so many blocks."""
        return self._state("RADIX", 16 * blocks)

    def room(self, name: str, count: int, dtype: DTypeLike) -> int:
        """Return the address of room for ``count`` elements, not initialised."""
        return self._grown(f"{name} {dtype}", count, dtype, zero=False)

    def state(self, name: str) -> Array:
        """Return a structure, as an array of one element; for tests."""
        dtype = self._structures[name]
        return self._rooms[name][: dtype.itemsize].view(dtype)

    def _state(self, name: str, more_bytes: int = 0) -> int:
        return self._grown(name, self._structures[name].itemsize + more_bytes, "u1", zero=True)

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
