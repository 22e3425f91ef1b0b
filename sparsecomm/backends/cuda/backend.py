"""The arithmetic of a CUDA device: sequences of the kernels in ``kernels/cuda``.

Nothing here waits for the device, but `CountedVector` when its number of entries is asked for, and `threshold`,
`well_formed` and `Packing`, whose answers the host needs. Grids come from bounds that the host knows; numbers of
entries stay in device memory. After a first call of the same sizes, which compiles and allocates, a sequence can be
captured into a CUDA graph.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

from sparsecomm.backends.cuda.dense import DenseOperations
from sparsecomm.backends.cuda.memory import DeviceMemory, StagedMemory
from sparsecomm.backends.cuda.merging import Merging
from sparsecomm.backends.cuda.packing import Packing
from sparsecomm.backends.cuda.runtime import Runtime
from sparsecomm.errors import InvalidInputError
from sparsecomm.tensors.interop import Tensor
from sparsecomm.transport.memory import MessageMemory

__all__ = ["CudaBackend"]


class CudaBackend(DenseOperations, Merging, Packing):
    """`sparsecomm.backends.base.Backend` on one device and its current stream."""

    def __init__(self, runtime: Runtime, **limits: int) -> None:
        """``limits``: those of `Selecting`."""
        super().__init__(runtime, **limits)
        self._memories = StagedMemory(runtime), DeviceMemory(runtime)
        self._limits = limits

    def on_stream(self, x: Tensor | None) -> AbstractContextManager[Any]:
        return self.runtime.on_stream(x.stream if x else None)

    def side_stream(self) -> tuple[CudaBackend, AbstractContextManager[Any]]:
        return self._side_stream, self.runtime.side_stream(self.runtime.record())

    @cached_property
    def _side_stream(self) -> CudaBackend:
        """With scratch memory of its own."""
        return CudaBackend(self.runtime, **self._limits)

    def memory(self, direct: bool) -> MessageMemory:
        if self.runtime.capturing():
            raise InvalidInputError(
                "x is on a stream that is being captured into a CUDA graph; expected one on which work runs: a call "
                "that talks to other ranks cannot be replayed; call it before or after the graph"
            )
        return self._memories[direct]
