"""The measuring core of all benchmarks: vectors, calls on them, clocks, and a common start on all ranks."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import numpy as np

import sparsecomm as sc
from sparsecomm.calls.measurement import measured_links
from sparsecomm.calls.queue import queue_of
from sparsecomm.primitives.costs import log2_ceil
from sparsecomm.tensors.arrays import Array, ArrayDType
from sparsecomm.tools.devices import DEVICES
from sparsecomm.tools.world import ProcessGroupWorld, World, transport_of
from sparsecomm.tracing.observers import PARTS
from sparsecomm.transport import Transport
from sparsecomm.tuning import clocks

_SECONDS = 0.2  # budget of the measurement of links
_LONG, _MARGIN = 1e-3, 0.01  # seconds: minimum trip of a long link; margin of a common start


def quiet_barrier(comm: World) -> None:
    """Wait for all ranks, leaving the cores to ranks that still work."""
    if not isinstance(comm, ProcessGroupWorld):  # its barrier sleeps anyway
        request = comm.Ibarrier()
        while not request.Test():
            time.sleep(100e-6)
    comm.Barrier()  # all ranks have arrived; this barrier makes them leave at about the same time


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Keep Python's garbage collector from running."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class CommonStart:
    """Starts calls on all ranks at one moment. All methods are collective.

    Over a long link, ranks leave a barrier several trips apart. On short links a barrier is precise enough.
    """

    def __init__(self, comm: World, transport: Transport) -> None:
        self._comm, self._clock, links = comm, transport.clock, measured_links(transport, _SECONDS)
        self._offset = clocks.offsets(range(transport.size), links.fastest)[transport.rank].seconds
        alpha = links.slowest.alpha
        self._pause = 4 * log2_ceil(transport.size) * alpha + _MARGIN if transport.size > 1 and alpha > _LONG else 0.0

    def wait(self) -> None:
        """Return at the time that rank 0 chooses and sends to all ranks."""
        if self._pause:
            moment = self._comm.bcast(self._clock() + self._pause) + self._offset
            time.sleep(max(0.0, moment - self._clock()))


def inputs(n: int, dtype: ArrayDType, accumulator: ArrayDType, rank: int) -> tuple[Array, Array]:
    """Return a rank's normally distributed gradient and residual, the same on every machine."""
    rng = np.random.default_rng([n, rank])
    real = np.dtype(np.float64) if accumulator.itemsize == 8 else np.dtype(np.float32)
    x, residual = (rng.standard_normal(n, dtype=real.type) for _ in range(2))
    return x.astype(dtype, copy=False), residual


class Vectors:
    """Flat gradient, residual and output of this rank in a device's memory."""

    def __init__(self, comm: World, gradient: Array, residual: Array, device: str = "cpu") -> None:
        self.comm, self.memory, self.n = comm, DEVICES[device](), int(gradient.size)
        self.x, self.before, self.residual, self.out = map(
            self.memory.put, (gradient, residual, residual, np.zeros_like(gradient))
        )

    def reset(self) -> None:
        """Restore the residual before a call."""
        self.residual[...] = self.before
        self.memory.wait()


class Clock:
    """Observes calls and counts the seconds of each part since the last `reset`.

    ``wait`` waits for the work that a part has started on a CUDA device; this time counts in that part.
    """

    def __init__(self, wait: Callable[[], None] = lambda: None) -> None:
        self._wait = wait
        self.reset()

    @classmethod
    def of(cls, transport: Transport, wait: Callable[[], None]) -> Clock:
        """Return the clock of all calls on a transport."""
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


class Ours:
    """An algorithm of sparsecomm: a step is a call of `sparse_allreduce` with a residual and a dense result."""

    def __init__(
        self, name: str, vectors: Vectors, k: int, wire: str = "auto", dtype: str = "float32", breakdown: bool = False
    ) -> None:
        self.vectors, self.k = vectors, k
        self._options: dict[str, Any] = {"algorithm": name, "wire": wire}
        self.transport = transport_of(vectors.comm)
        options: dict[str, Any] = {"dtype": dtype, **self._options}
        self.explained = sc.explain(vectors.n, k, comm=self.transport, **options)
        self.taken = self.explained.candidates[0]  # algorithm and wire format, which "auto" may have chosen
        self.clock = Clock.of(self.transport, vectors.memory.wait) if breakdown else None

    def reset(self) -> None:
        """Restore the residual and the clock before a step."""
        self.vectors.reset()
        if self.clock is not None:
            self.clock.reset()

    def step(self) -> sc.SparseVector:
        v = self.vectors
        return sc.sparse_allreduce(v.x, self.k, comm=self.transport, residual=v.residual, out=v.out, **self._options)

    def moved(self) -> tuple[int, int]:
        """Return the bytes that this rank has sent, and received, so far."""
        return self.transport.counters.bytes_sent, self.transport.counters.bytes_received
