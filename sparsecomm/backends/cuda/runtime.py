"""What the arithmetic of a CUDA device asks of CUDA, so that its launch code runs unchanged on anything that gives it.

`sparsecomm.backends.cuda.cupy_runtime` is CuPy's. The tests have one that runs the same kernels on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from sparsecomm.tensors.sparse import Array

__all__ = ["Argument", "Event", "Kernel", "Runtime"]

Argument = np.generic  # a NumPy scalar of the parameter's type; addresses are np.uint64


class Kernel(Protocol):
    """A compiled kernel."""


class Event(Protocol):
    """A place in the work of a stream."""

    def wait(self) -> None:
        """Until all work before it is done."""

    def done(self) -> bool:
        """Whether it is."""


class Runtime(Protocol):
    """One device, and the stream that is current."""

    device: int
    multiprocessors: int

    def kernel(self, file: str, name: str, definitions: tuple[str, ...]) -> Kernel:
        """Kernel ``name`` of ``kernels/cuda/<file>``, compiled with ``-D<definition>`` each, once."""

    def resident(self, kernel: Kernel, threads: int) -> int:
        """Blocks of so many threads that run at once on the whole device: the most for a cooperative launch."""

    def launch(
        self, kernel: Kernel, blocks: int, threads: int, arguments: Sequence[Argument], *, cooperative: bool = False
    ) -> None:
        """Start a grid on the current stream, after what was started there before."""

    def empty(self, count: int, dtype: DTypeLike) -> Array:
        """New memory of the device: an array of the library that users of this device have. Holds anything."""

    def address(self, array: Array) -> int:
        """Where an array that `empty` made, or a contiguous part of it, begins."""

    def view(self, address: int, count: int, dtype: DTypeLike, owner: object) -> Array:
        """Memory of the device that ``owner`` keeps, as an array."""

    def clear(self, array: Array) -> None:
        """Fill with zero bytes, on the current stream."""

    def pinned(self, nbytes: int) -> NDArray[np.uint8]:
        """Host memory that the device copies to and from without a copy in between."""

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Start copying bytes, each way, on the current stream. Host memory must be `pinned`, or the call waits."""

    def record(self) -> Event:
        """The place in the current stream that has been reached."""

    def capturing(self) -> bool:
        """Whether the current stream is being captured into a graph: then nothing runs or can be waited for."""

    def on_stream(self, stream: int | None) -> AbstractContextManager[Any]:
        """Make the device current, and the stream with this handle (``None``: leave it)."""

    def side_stream(self, after: Any) -> AbstractContextManager[Any]:
        """Make a stream current that is for other threads, from the event ``after`` on; on leaving wait for it."""

    def stream(self) -> int:
        """The handle of the current stream, as DLPack numbers it: 1 is the legacy default, 2 the per-thread default."""
