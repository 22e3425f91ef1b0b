"""Time, bytes and results of one row. Every rank measures; all end with the same figures."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import sparsecomm as sc
from sparsecomm import backends, transport
from sparsecomm.calls.arguments import Arguments
from sparsecomm.calls.options import Options
from sparsecomm.calls.queue import queue_of
from sparsecomm.cli.bench.check import Check
from sparsecomm.cli.bench.clocks import PARTS, Clock, clocked_backend, clocked_transport
from sparsecomm.cli.bench.sweep import Point, Sweep
from sparsecomm.cli.devices import DEVICES
from sparsecomm.cli.oracles import oracle
from sparsecomm.tensors import interop
from sparsecomm.tuning.choice import Candidate
from sparsecomm.wire import EXACT

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Bench", "Row", "inputs"]

Vector = NDArray[Any]


@dataclass(frozen=True)
class Row:
    """What was found for a point. Times are in microseconds; of every call that of the rank which took longest."""

    point: Point
    algorithm: str  # of the call, also where "auto" was asked for
    wire: str
    size_bytes: int
    min_us: float
    median_us: float
    p99_us: float
    max_us: float
    sent_bytes: int  # per call, by the rank that sends most
    received_bytes: int  # per call, by the rank that receives most
    wire_bytes: int  # per call, by the rank that sends or receives most
    wrong: int | None  # of elements, over all ranks and calls; None if it was not checked
    parts_us: dict[str, float] | None  # they add up to the median

    @property
    def algbw(self) -> float:
        """Dense bytes per median time, in GB/s."""
        return self.size_bytes / self.median_us / 1e3


def inputs(n: int, dtype: np.dtype[Any], accumulator: np.dtype[Any], rank: int) -> tuple[Vector, Vector]:
    """A gradient and a residual of a rank, the same wherever they are made: normally distributed."""
    rng = np.random.default_rng([n, rank])
    real = np.dtype(np.float64) if accumulator.itemsize == 8 else np.dtype(np.float32)
    x, residual = (rng.standard_normal(n, dtype=real.type) for _ in range(2))
    return x.astype(dtype, copy=False), residual


class Bench:
    """The vectors of one size on this rank, for all its rows."""

    def __init__(self, sweep: Sweep, n: int, comm: MPI.Intracomm) -> None:
        self._sweep, self._n, self._comm = sweep, n, comm
        self._dtype, self._accumulator = sweep.numpy_dtype, sweep.dtype.accumulator
        self.x, self._kept = inputs(n, self._dtype, self._accumulator, comm.Get_rank())
        self._place = DEVICES[sweep.device]()
        self._x, self._before, self._residual, self._out = map(
            self._place.put, (self.x, self._kept, self._kept, np.zeros_like(self.x))
        )
        self._clock = Clock(self._place.wait)
        device = interop.tensor(self._x, "x").device
        self._clocked_backend = clocked_backend(backends.of(device), self._clock)
        self._clocked_transport = clocked_transport(transport.of(comm), self._clock)

    def measure(self, point: Point) -> Row:
        from mpi4py import MPI

        sweep, comm = self._sweep, self._comm
        taken, check = self._taken(point), self._check(point) if sweep.check else None
        wrong, seconds, parts = 0, [], []
        ranks = transport.of(comm)
        collecting = gc.isenabled()
        gc.collect()
        gc.disable()
        try:
            for call in range(-sweep.warmup, sweep.iterations):
                if call == 0:
                    before = ranks.counters.bytes_sent, ranks.counters.bytes_received
                self._place.assign(self._residual, self._before)
                self._place.wait()
                self._clock.reset()
                comm.Barrier()
                start = time.perf_counter()
                result = self._call(point)
                self._place.wait()
                elapsed = time.perf_counter() - start
                if call >= 0:
                    seconds.append(elapsed)
                    parts.append([self._clock.seconds[part] for part in PARTS])
                if check is not None:
                    found = result.indices, result.values, self._out, self._residual
                    wrong += check.wrong(*map(self._place.fetch, found))
                del result
        finally:
            if collecting:
                gc.enable()
        counters = ranks.counters
        sent, received = (
            (now - then) // sweep.iterations
            for now, then in zip((counters.bytes_sent, counters.bytes_received), before, strict=True)
        )
        figures = np.array([sent, received, max(sent, received)], np.int64)
        comm.Allreduce(MPI.IN_PLACE, figures, MPI.MAX)
        everyones = np.array(comm.allgather(seconds))  # rank, call
        slowest = everyones.max(axis=0)
        least, median, p99, most = (1e6 * float(v) for v in np.percentile(slowest, (0, 50, 99, 100)))
        return Row(
            point=point,
            algorithm=taken.algorithm.name,
            wire=taken.wire.name,
            size_bytes=point.n * sweep.dtype.itemsize,
            min_us=least,
            median_us=median,
            p99_us=p99,
            max_us=most,
            sent_bytes=int(figures[0]),
            received_bytes=int(figures[1]),
            wire_bytes=int(figures[2]),
            wrong=int(comm.allreduce(wrong)) if sweep.check else None,
            parts_us=_shares(everyones, np.array(comm.allgather(parts)), median) if sweep.breakdown else None,
        )

    def _call(self, point: Point) -> sc.SparseVector:
        """A step of training. With clocks it goes the same way, from where the arguments have been checked."""
        if not self._sweep.breakdown:
            return sc.sparse_allreduce(
                self._x,
                point.k,
                comm=self._comm,
                algorithm=point.algorithm,
                residual=self._residual,
                out=self._out,
                wire=point.wire,
                complete=self._sweep.complete,
            )
        options = Options(point.algorithm, "sum", point.wire, self._sweep.complete)
        arguments = Arguments.checked(self._x, point.k, self._residual, self._out, options)
        # A call looks them up; here it has the clocked ones instead.
        backends.of(arguments.x.device), transport.of(self._comm)
        ranks = self._clocked_transport
        return queue_of(ranks).call(arguments.collective(ranks, self._clocked_backend))

    # -- the results --------------------------------------------------------------------------------------------------

    def _check(self, point: Point) -> Check:
        """Where nothing is rounded the oracle knows the result, or, of a complete one, where it has entries."""
        sweep, taken = self._sweep, self._taken(point)
        given = self.x.astype(self._accumulator) + self._kept
        if taken.wire.kind is not EXACT and taken.algorithm.name != "dense":
            return Check(self._comm, given, expected=None, voted=None, complete=sweep.complete)
        entries = None
        if self._comm.Get_rank() == 0:
            everyones = (inputs(self._n, self._dtype, self._accumulator, r) for r in range(self._comm.Get_size()))
            whole = [x.astype(self._accumulator) + residual for x, residual in everyones]
            total = oracle(taken.algorithm.name)(whole, point.k, transport.of(self._comm).node_of_rank)
            indices = np.flatnonzero(total)
            entries = indices, total[indices]
        indices, values = self._comm.bcast(entries)
        if sweep.complete:
            return Check(self._comm, given, expected=None, voted=indices, complete=True)
        expected = np.zeros(self._n, self._accumulator)
        expected[indices] = values
        return Check(self._comm, given, expected=expected, voted=None, complete=False)

    def _taken(self, point: Point) -> Candidate:
        """The algorithm and the format that a call takes."""
        found = sc.explain(
            point.n,
            point.k,
            comm=self._comm,
            dtype=self._sweep.dtype.name,
            algorithm=point.algorithm,
            wire=point.wire,
            complete=self._sweep.complete,
        )
        return found.candidates[0]


def _shares(seconds: Vector, parts: Vector, median_us: float) -> dict[str, float]:
    """The median time, shared out in proportion to the parts of the calls near it, on the rank that took longest.

    Args:
        seconds: by rank and call.
        parts: by rank, call and part.
    """
    calls = np.argsort(seconds.max(axis=0))
    calls = calls[len(calls) // 4 : len(calls) - len(calls) // 4]  # the middle half: one call alone is noise
    slowest = seconds[:, calls].argmax(axis=0)
    whole = seconds[slowest, calls].sum()
    shares = parts[slowest, calls].sum(axis=0) / whole
    shared = {part: median_us * float(share) for part, share in zip(PARTS, shares, strict=True)}
    return {**shared, "other": median_us * float(1 - shares.sum())}
