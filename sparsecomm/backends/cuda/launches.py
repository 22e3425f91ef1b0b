"""What all sequences of kernels share: how they are prepared and started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from sparsecomm.backends.cuda.modules import selection_definitions
from sparsecomm.backends.cuda.runtime import Argument, Kernel, Runtime
from sparsecomm.backends.cuda.tuning import sizes
from sparsecomm.backends.cuda.workspace import Workspace
from sparsecomm.tensors.dtypes import FLOAT32, FLOAT64, DType
from sparsecomm.tensors.interop import Device, Tensor
from sparsecomm.tensors.sparse import Array, index_dtype

__all__ = [
    "INT64_SIZE",
    "NO_CANDIDATES",
    "Candidates",
    "Launch",
    "Launcher",
    "aligned",
    "dtype_of",
    "emit_tiles",
    "over",
    "pointer",
    "tile",
    "u64",
]

INT64_SIZE = 2**31  # vectors of so many elements and more have int64 indices

u64 = np.uint64


class Launch(NamedTuple):
    """A kernel, ready to be started."""

    kernel: Kernel
    blocks: int
    threads: int
    arguments: tuple[Argument, ...]
    cooperative: bool = False


class Candidates(NamedTuple):
    """Room for so many: indices, bits, and the bits of those that are looked at again; as addresses."""

    capacity: int
    indices: int
    bits: int
    survivors: int


NO_CANDIDATES = Candidates(0, 0, 0, 0)


class Launcher:
    """Prepares and starts kernels of one device on its current stream."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._workspaces: dict[int, Workspace] = {}

    def _workspace(self) -> Workspace:
        stream = self.runtime.stream()
        if stream not in self._workspaces:
            self._workspaces[stream] = Workspace(self.runtime)
        return self._workspaces[stream]

    def _entries(self, count: int, x: Tensor) -> tuple[Array, Array]:
        return self.runtime.empty(count, index_dtype(x.size)), self.runtime.empty(count, x.dtype.accumulator)

    def _tensor(self, array: Array) -> Tensor:
        dtype, pointer = dtype_of(array), self.runtime.address(array)
        return Tensor(pointer, len(array), array.shape, dtype, Device("cuda", self.runtime.device), False, array)

    def _kernels(self, file: str, x: Tensor, residual: Tensor | None) -> Callable[[str], Kernel]:
        definitions = selection_definitions(x.dtype, residual.dtype if residual else None, x.size >= INT64_SIZE)
        return lambda name: self.runtime.kernel(file, name, definitions)

    def _start(self, launches: list[Launch]) -> None:
        """All that can fail, compiling and allocating, was done to make the list: it runs whole or not at all."""
        for it in launches:
            self.runtime.launch(it.kernel, it.blocks, it.threads, it.arguments, cooperative=it.cooperative)

    def _elementwise(self, name: str, most: int, definitions: tuple[str, ...], *arguments: Argument) -> None:
        if most == 0:
            return
        threads = sizes()["DENSE_THREADS"]
        blocks = min(over(most, threads), 16 * self.runtime.multiprocessors)
        self._start([Launch(self.runtime.kernel("dense.cu", name, definitions), blocks, threads, arguments)])

    def _candidates(
        self, work: Workspace, capacity: int, index: np.dtype[Any], bits: Tensor | np.dtype[Any]
    ) -> Candidates:
        width = bits.dtype.itemsize if isinstance(bits, Tensor) else bits.itemsize
        return Candidates(
            capacity,
            work.room("indices", capacity, index),
            work.room("bits", capacity, f"u{width}"),
            work.room("survivors", capacity, f"u{width}"),
        )

    def _kth_and_emit(
        self,
        kernel: Callable[[str], Kernel],
        work: Workspace,
        found: Candidates,
        kept: tuple[Array, Array],
        lost: tuple[Array, Array] | None,
        residual: int,
        counters: Array,
    ) -> list[Launch]:
        """See kernels/cuda/emit.cuh. ``counters``: of the kept entries, and of the lost ones if they are wanted."""
        size, at = sizes(), self.runtime.address
        threads, tiles = size["REFINE_THREADS"], emit_tiles(found.capacity)
        blocks = max(1, min(over(found.capacity, threads), 8 * self.runtime.multiprocessors))
        lost_at = (at(lost[0]), at(lost[1])) if lost else (0, 0)
        counter = at(counters)
        return [
            Launch(kernel("refine"), blocks, threads, (u64(found.bits), u64(found.survivors), u64(work.selection))),
            Launch(
                kernel("emit"),
                tiles,
                size["EMIT_THREADS"],
                (
                    u64(found.indices),
                    u64(found.bits),
                    u64(at(kept[0])),
                    u64(at(kept[1])),
                    u64(lost_at[0]),
                    u64(lost_at[1]),
                    u64(residual),
                    u64(counter),
                    u64(counter + 8 if lost else 0),
                    u64(work.tiles(tiles)),
                    u64(work.selection),
                ),
            ),
        ]


def over(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def tile(x: Tensor) -> int:
    """Elements of a tile of kernels/cuda/filter.cuh."""
    return sizes()["FILTER_THREADS"] * sizes()["FILTER_CHUNKS"] * (16 // x.dtype.itemsize)


def emit_tiles(capacity: int) -> int:
    return max(1, over(capacity, sizes()["EMIT_THREADS"] * sizes()["EMIT_ITEMS"]))


def pointer(tensor: Tensor | None) -> int:
    return tensor.pointer if tensor else 0


def aligned(x: Tensor, residual: Tensor | None) -> Argument:
    return np.bool_((x.pointer | pointer(residual)) % 16 == 0)


def dtype_of(array: Array) -> DType:
    return FLOAT64 if array.dtype.itemsize == 8 else FLOAT32
