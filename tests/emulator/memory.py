"""Memory of the deferring device: freed blocks are reused at once, and new arrays contain poison."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from tests.emulator.runtime import BEHIND, CANARY, POISON, EmulatorError

__all__ = ["Block", "Lease", "PinnedPool", "Pool", "pinned"]

ALIGNMENT = 256


class Block:
    """Memory that lives as long as its pool. ``canary``: the bytes behind the array in it."""

    def __init__(self, nbytes: int) -> None:
        memory = np.full(nbytes + BEHIND + ALIGNMENT, POISON, np.uint8)
        begin = -memory.ctypes.data % ALIGNMENT
        self.memory = memory[begin : begin + nbytes + BEHIND]
        self.room = nbytes
        self.leases = 0  # so far
        self.canary: np.ndarray | None = None

    def poison(self, nbytes: int, lease: int) -> None:
        """Fill the first bytes with poison, and write a canary behind them; ``lease``: the number of the lease."""
        self.memory[:nbytes] = POISON
        self.memory[nbytes : nbytes + BEHIND] = CANARY
        if lease == self.leases:
            self.canary = self.memory[nbytes : nbytes + BEHIND]

    def check(self) -> None:
        if self.canary is not None and (self.canary != CANARY).any():
            raise EmulatorError("a kernel wrote behind the end of an array")


class Lease:
    """A block in use. Without references to the lease, the block returns to its pool, even if streams still use it."""

    def __init__(self, pool: Pool, nbytes: int) -> None:
        self._pool, self.block = pool, pool.take(nbytes)
        self.block.leases += 1
        self.number, self.block.canary = self.block.leases, None
        self.nbytes = nbytes

    @property
    def memory(self) -> np.ndarray:
        """The bytes, which do not keep the lease."""
        return self.block.memory[: self.nbytes]

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self.memory.__array_interface__

    def __del__(self) -> None:
        self._pool.give_back(self)


class Pool:
    """Free blocks. The block that fits and was freed last is reused first."""

    def __init__(self) -> None:
        self._free: list[Block] = []
        self._taking = threading.Lock()
        self.in_use = 0  # bytes

    def take(self, nbytes: int) -> Block:
        self.in_use += nbytes
        with self._taking:
            for block in reversed(self._free):
                if nbytes <= block.room:
                    self._free.remove(block)
                    return block
        return Block(nbytes)

    def give_back(self, lease: Lease) -> None:
        self.in_use -= lease.nbytes
        self._free.append(lease.block)


class PinnedPool(Pool):
    """Blocks that are poisoned when they are freed."""

    def give_back(self, lease: Lease) -> None:
        lease.memory[:] = POISON
        super().give_back(lease)


def pinned(pool: PinnedPool, nbytes: int) -> np.ndarray:
    """Return an array of host memory, whose views keep the lease."""
    array = np.asarray(Lease(pool, nbytes))
    array[:] = POISON
    return array
