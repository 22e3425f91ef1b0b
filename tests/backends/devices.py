"""The devices that tests of backends run over, and how arrays get to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from sparsecomm.backends import Backend, CpuBackend, _cpu
from sparsecomm.backends.cuda import CudaBackend
from sparsecomm.backends.cuda.modules import structures
from sparsecomm.tensors import interop
from sparsecomm.tensors.sparse import Array, SparseVector
from tests import data
from tests.emulator.deferred import DeferredRuntime
from tests.emulator.tensor import CudaTensor

__all__ = ["DEVICES", "Device", "Emulated", "device_named", "same", "selection_state"]

DEVICES = ("avx512", "avx2", "portable", "threads", "cuda")


@dataclass
class Device:
    """An implementation of `Backend`, and how arrays get to it."""

    name: str
    backend: Backend

    def tensor(self, array: np.ndarray) -> interop.Tensor:
        return interop.tensor(array, "x", writable=True)

    def array(self, array: np.ndarray) -> Array:
        return array

    def entries(self, indices: np.ndarray, values: np.ndarray, n: int) -> SparseVector:
        return SparseVector.trusted(self.array(indices), self.array(values), n, (n,))

    def wait(self) -> None:
        """Wait until all work on tensors is done."""


class Emulated(Device):
    """The CUDA kernels, on the CPU. Limits are small, so that short vectors take every branch."""

    def __init__(self, seed: int = 0, **sizes: int) -> None:
        self.runtime = DeferredRuntime(seed=seed)
        small: Any = {"radix_max_size": 300, "spare_candidates": 500, "packed_threads": 32, **sizes}
        super().__init__("cuda", CudaBackend(self.runtime, **small))

    def tensor(self, array: np.ndarray) -> interop.Tensor:
        return interop.tensor(CudaTensor(array), "x", writable=True)

    def array(self, array: np.ndarray) -> Array:
        return self.runtime.library.asarray(array)

    def wait(self) -> None:
        self.runtime.synchronize()


def selection_state(backend: CudaBackend) -> Array:
    """Return the state that the kernels of a selection share, as an array of one element."""
    dtype = structures(backend.tuning)["SELECTION"]
    return backend.workspace()._rooms["SELECTION"][: dtype.itemsize].view(dtype)


@contextmanager
def device_named(name: str) -> Iterator[Device]:
    """Make a device: an instruction set on one thread, "threads" (the best set on several threads) or "cuda"."""
    if name == "cuda":
        device = Emulated()
        yield device
        device.runtime.check()
        return
    best = _cpu.simd()
    if not _cpu.use_simd(best if name == "threads" else name):
        pytest.skip(f"this processor has no {name}")
    yield Device(name, CpuBackend(threads=3 if name == "threads" else 1))
    _cpu.use_simd(best)


def same(entries: SparseVector, expected: tuple[np.ndarray, np.ndarray]) -> None:
    """Compare indices, and the bits of values."""
    np.testing.assert_array_equal(entries.indices, expected[0])
    assert data.same_bits(np.asarray(entries.values), expected[1])
