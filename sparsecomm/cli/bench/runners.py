"""Calls of `sparse_allreduce` as benchmarks make them: the vectors, and a runner for each algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import sparsecomm as sc
from sparsecomm import transport
from sparsecomm.cli.bench.clocks import clock_of
from sparsecomm.cli.bench.timing import Runner
from sparsecomm.cli.devices import DEVICES
from sparsecomm.cli.world import World, comm_of
from sparsecomm.tensors.arrays import Array, ArrayDType

__all__ = ["Ours", "Vectors", "inputs"]


def inputs(n: int, dtype: ArrayDType, accumulator: ArrayDType, rank: int) -> tuple[Array, Array]:
    """Return a gradient and a residual of a rank, the same wherever they are made: normally distributed."""
    rng = np.random.default_rng([n, rank])
    real = np.dtype(np.float64) if accumulator.itemsize == 8 else np.dtype(np.float32)
    x, residual = (rng.standard_normal(n, dtype=real.type) for _ in range(2))
    return x.astype(dtype, copy=False), residual


class Vectors:
    """A gradient, a residual and an output of this rank, which all contenders share.

    Attributes:
        gradient, kept: in host memory: the gradient, and what the residual is before each call.
        x, before, residual, out: in the device's memory.
    """

    def __init__(self, comm: World, gradient: Array, residual: Array | None = None, device: str = "cpu") -> None:
        """Take a flat gradient; without a ``residual`` it is zero before each call, and x may share memory with it."""
        self.comm, self.memory, self.gradient, self.kept = comm, DEVICES[device](), gradient, residual
        self.n: int = gradient.size
        if residual is None:
            self.x, self.before = gradient, None
            self.residual, self.out = np.zeros_like(gradient), np.zeros_like(gradient)
        else:
            self.x, self.before, self.residual, self.out = map(
                self.memory.put, (gradient, residual, residual, np.zeros_like(gradient))
            )

    def given(self, accumulator: ArrayDType) -> Array:
        """Return residual + gradient, in host memory."""
        given = self.gradient.astype(accumulator)
        return given if self.kept is None else given + self.kept

    def reset(self) -> None:
        """Put the residual back to what it was."""
        if self.before is None:
            self.residual.fill(0)
        else:
            self.memory.assign(self.residual, self.before)
            self.memory.wait()


class Ours(Runner):
    """An algorithm of sparsecomm: a step is a call of `sparse_allreduce` with a residual and a dense result.

    Attributes:
        taken: the algorithm and the format that calls take, also where "auto" was asked for.
    """

    def __init__(
        self, name: str, vectors: Vectors, k: int, wire: str = "auto", dtype: str = "float32", breakdown: bool = False
    ) -> None:
        self.vectors, self.k = vectors, k
        self._asked: dict[str, Any] = {"algorithm": name, "wire": wire}
        asked: dict[str, Any] = {"dtype": dtype, **self._asked}
        self.transport = transport.transport_of(comm_of(vectors.comm))
        self.explained = sc.explain(vectors.n, k, comm=self.transport, **asked)
        self.taken = self.explained.candidates[0]
        self.clock = clock_of(self.transport, vectors.memory.wait) if breakdown else None

    def before(self, action: str) -> None:
        self.vectors.reset()
        if self.clock is not None:
            self.clock.reset()

    def step(self) -> sc.SparseVector:
        v = self.vectors
        return sc.sparse_allreduce(v.x, self.k, comm=self.transport, residual=v.residual, out=v.out, **self._asked)

    def wait(self) -> None:
        self.vectors.memory.wait()

    def traffic(self) -> Sequence[float]:
        return self.transport.counters.bytes_sent, self.transport.counters.bytes_received

    def parts(self) -> dict[str, float]:
        return {} if self.clock is None else dict(self.clock.seconds)
