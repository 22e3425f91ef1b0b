"""Calls of `sparse_allreduce` as benchmarks make them: the vectors, and a runner for each algorithm."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np

import sparsecomm as sc
from sparsecomm import transport
from sparsecomm.calls.queue import queue_of
from sparsecomm.cli.bench.timing import Runner
from sparsecomm.cli.devices import DEVICES
from sparsecomm.cli.world import World, comm_of
from sparsecomm.tensors.arrays import Array, ArrayDType
from sparsecomm.tracing.observers import PARTS
from sparsecomm.transport import Transport

__all__ = ["Clock", "Ours", "Vectors", "inputs"]


class Clock:
    """Observes calls and counts the seconds of each part since the last `reset`.

    Args:
        wait: returns when the work that a part started on a CUDA device is done; the wait counts in that part.
    """

    def __init__(self, wait: Callable[[], None] = lambda: None) -> None:
        self._wait = wait
        self.reset()

    @classmethod
    def of(cls, transport: Transport, wait: Callable[[], None]) -> Clock:
        """Return the clock of the calls on a transport, which all runners share."""
        queue = queue_of(transport)
        clock = next((observer for observer in queue.observers if isinstance(observer, Clock)), None)
        if clock is None:
            clock = cls(wait)
            queue.observe(transport, clock)
        return clock

    def reset(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)

    def around(self, part: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function`` with its time counted in ``part``."""

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._wait()
                self.seconds[part] += time.perf_counter() - start

        return timed


def inputs(n: int, dtype: ArrayDType, accumulator: ArrayDType, rank: int) -> tuple[Array, Array]:
    """Return a rank's normally distributed gradient and residual, the same on every machine."""
    rng = np.random.default_rng([n, rank])
    real = np.dtype(np.float64) if accumulator.itemsize == 8 else np.dtype(np.float32)
    x, residual = (rng.standard_normal(n, dtype=real.type) for _ in range(2))
    return x.astype(dtype, copy=False), residual


class Vectors:
    """Gradient, residual and output of this rank, shared by all contenders.

    Attributes:
        gradient, initial: in host memory, the gradient and the residual before each call.
        x, before, residual, out: in the device's memory; ``before`` is a copy of ``initial``.
    """

    def __init__(self, comm: World, gradient: Array, residual: Array | None = None, device: str = "cpu") -> None:
        """Use a flat gradient. Without ``residual`` it is zero before each call, and x may alias ``gradient``."""
        self.comm, self.memory, self.gradient, self.initial = comm, DEVICES[device](), gradient, residual
        self.n: int = gradient.size
        if residual is None:
            self.x, self.before = gradient, None
            self.residual, self.out = np.zeros_like(gradient), np.zeros_like(gradient)
        else:
            self.x, self.before, self.residual, self.out = map(
                self.memory.put, (gradient, residual, residual, np.zeros_like(gradient))
            )

    def accumulated(self, accumulator: ArrayDType) -> Array:
        """Return residual + gradient, in host memory."""
        gradient = self.gradient.astype(accumulator)
        return gradient if self.initial is None else gradient + self.initial

    def reset(self) -> None:
        """Restore the initial residual."""
        if self.before is None:
            self.residual.fill(0)
        else:
            self.memory.assign(self.residual, self.before)
            self.memory.wait()


class Ours(Runner):
    """An algorithm of sparsecomm: a step is a call of `sparse_allreduce` with a residual and a dense result.

    Attributes:
        taken: algorithm and wire format of the calls, also if "auto" was asked for.
    """

    def __init__(
        self, name: str, vectors: Vectors, k: int, wire: str = "auto", dtype: str = "float32", breakdown: bool = False
    ) -> None:
        self.vectors, self.k = vectors, k
        self._options: dict[str, Any] = {"algorithm": name, "wire": wire}
        self.transport = transport.transport_of(comm_of(vectors.comm))
        options: dict[str, Any] = {"dtype": dtype, **self._options}
        self.explained = sc.explain(vectors.n, k, comm=self.transport, **options)
        self.taken = self.explained.candidates[0]
        self.clock = Clock.of(self.transport, vectors.memory.wait) if breakdown else None

    def before(self, action: str) -> None:
        self.vectors.reset()
        if self.clock is not None:
            self.clock.reset()

    def step(self) -> sc.SparseVector:
        v = self.vectors
        return sc.sparse_allreduce(v.x, self.k, comm=self.transport, residual=v.residual, out=v.out, **self._options)

    def wait(self) -> None:
        self.vectors.memory.wait()

    def traffic(self) -> Sequence[float]:
        return self.transport.counters.bytes_sent, self.transport.counters.bytes_received

    def parts(self) -> dict[str, float]:
        return {} if self.clock is None else dict(self.clock.seconds)
