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

from sparsecomm.errors import InvalidInputError
from sparsecomm.interop import Tensor
from sparsecomm.memory import Memory
from sparsecomm.ops.cuda.dense import DenseArithmetic
from sparsecomm.ops.cuda.memory import DeviceMemory, StagedMemory
from sparsecomm.ops.cuda.merging import Merging
from sparsecomm.ops.cuda.packing import Packing
from sparsecomm.ops.cuda.runtime import Runtime

__all__ = ["CudaOps"]


class CudaOps(DenseArithmetic, Merging, Packing):
    """`sparsecomm.ops.base.Ops` on one device and its current stream."""

    def __init__(self, runtime: Runtime, **limits: int) -> None:
        """``limits``: those of `Selecting`."""
        super().__init__(runtime, **limits)
        self._memories = StagedMemory(runtime), DeviceMemory(runtime)
        self._limits = limits

    def using(self, x: Tensor | None) -> AbstractContextManager[Any]:
        return self.runtime.using(x.stream if x else None)

    def aside(self) -> tuple[CudaOps, AbstractContextManager[Any]]:
        return self._aside, self.runtime.aside(self.runtime.record())

    @cached_property
    def _aside(self) -> CudaOps:
        """With scratch memory of its own."""
        return CudaOps(self.runtime, **self._limits)

    def memory(self, direct: bool) -> Memory:
        if self.runtime.capturing():
            raise InvalidInputError(
                "x is on a stream that is being captured into a CUDA graph; expected one on which work runs: a call "
                "that talks to other ranks cannot be replayed; call it before or after the graph"
            )
        return self._memories[direct]
