"""Time, bytes and results of one row. Every rank measures; all end with the same figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsecomm.cli.bench.check import Check
from sparsecomm.cli.bench.clocks import PARTS
from sparsecomm.cli.bench.contenders import Ours, Vectors, inputs
from sparsecomm.cli.bench.sweep import Point, Sweep
from sparsecomm.cli.bench.timing import Timer, Timing, uninterrupted
from sparsecomm.cli.oracles import oracle
from sparsecomm.cli.world import World
from sparsecomm.wire import EXACT

__all__ = ["Bench", "Row"]

Vector = NDArray[Any]


@dataclass(frozen=True)
class Row:
    """A row of the table: what was found for a point, under the names that it has in the JSON file.

    The time of a call is that of the rank which took longest. Bytes are per call, of the rank that has most.
    """

    size_bytes: int
    count: int
    k: int
    density: float
    algorithm: str
    wire: str
    algorithm_taken: str  # of the call, also where "auto" was asked for
    wire_taken: str
    time_min_us: float
    time_median_us: float
    time_p99_us: float
    time_max_us: float
    wire_bytes_per_rank: int  # the greater of what it sends and what it receives
    sent_bytes_per_rank: int
    received_bytes_per_rank: int
    algbw_gb_per_s: float  # dense bytes per median time
    busbw_gb_per_s: float  # 2 (P - 1) / P of that: what a ring that sums dense gradients as fast sends on each link
    wrong: int | None  # of elements, over all ranks and calls; None if it was not checked
    breakdown_us: dict[str, float] | None  # the parts, which add up to the median


class Bench:
    """The vectors of one size on this rank, for all its rows."""

    def __init__(self, sweep: Sweep, n: int, comm: World) -> None:
        self._sweep, self._comm, self.n = sweep, comm, n
        self._dtype, self._accumulator = sweep.numpy_dtype, sweep.dtype.accumulator
        gradient, residual = inputs(n, self._dtype, self._accumulator, comm.Get_rank())
        self._vectors = Vectors(comm, gradient, residual, sweep.device)

    def measure(self, point: Point) -> Row:
        """Make the calls of a row, and check them if that is asked for. Collective."""
        sweep, comm, vectors = self._sweep, self._comm, self._vectors
        runner = Ours(
            point.algorithm,
            vectors,
            point.k,
            point.wire,
            dtype=sweep.dtype.name,
            complete=sweep.complete,
            breakdown=sweep.breakdown,
        )
        check, wrong = self._check(runner) if sweep.check else None, 0
        timer = Timer(comm, runner, "step", sweep.iterations)
        with uninterrupted():
            for call in range(-sweep.warmup, sweep.iterations):
                result = timer.run(call)
                if check is not None:
                    found = result.indices, result.values, vectors.out, vectors.residual
                    wrong += check.wrong(*map(vectors.memory.fetch, found))
                del result
        timing = timer.timing()
        shortest, median, p99, longest = (1e6 * float(v) for v in np.percentile(timing.slowest, (0, 50, 99, 100)))
        sent, received = timing.traffic.max(axis=0)
        algbw, P = point.n * sweep.dtype.itemsize / median / 1e3, comm.Get_size()
        return Row(
            size_bytes=point.n * sweep.dtype.itemsize,
            count=point.n,
            k=point.k,
            density=point.density,
            algorithm=point.algorithm,
            wire=point.wire,
            algorithm_taken=runner.taken.algorithm.name,
            wire_taken=runner.taken.wire.name,
            time_min_us=shortest,
            time_median_us=median,
            time_p99_us=p99,
            time_max_us=longest,
            wire_bytes_per_rank=int(timing.traffic.max()),
            sent_bytes_per_rank=int(sent),
            received_bytes_per_rank=int(received),
            algbw_gb_per_s=algbw,
            busbw_gb_per_s=algbw * 2 * (P - 1) / P,
            wrong=int(comm.allreduce(wrong)) if sweep.check else None,
            breakdown_us=_shares(timing, median) if sweep.breakdown else None,
        )

    def _check(self, runner: Ours) -> Check:
        """Return the check of a row.

        If nothing is rounded the oracle knows the result, or, of a complete one, the indices of its entries.
        """
        complete, name, comm = self._sweep.complete, runner.taken.algorithm.name, self._comm
        given = self._vectors.given(self._accumulator)
        if runner.taken.wire.kind != EXACT and name != "dense":
            return Check(comm, given, expected=None, complete=complete)
        entries = None
        if comm.Get_rank() == 0:
            everyones = (inputs(self.n, self._dtype, self._accumulator, r) for r in range(comm.Get_size()))
            whole = [x.astype(self._accumulator) + residual for x, residual in everyones]
            total = oracle(name)(whole, runner.k, runner.ranks.node_of_rank)
            indices = np.flatnonzero(total)
            entries = indices, total[indices]
        indices, values = comm.bcast(entries)
        if complete:
            return Check(comm, given, expected=None, voted=indices, complete=True)
        expected = np.zeros(self.n, self._accumulator)
        expected[indices] = values
        return Check(comm, given, expected=expected)


def _shares(timing: Timing, median_us: float) -> dict[str, float]:
    """Return the median time, shared out as are the parts of the calls near it, on the rank that took longest."""
    seconds, parts = timing.seconds, np.stack([timing.parts[part] for part in PARTS], axis=-1)
    calls = np.argsort(seconds.max(axis=0))
    calls = calls[len(calls) // 4 : len(calls) - len(calls) // 4]  # the middle half: one call alone is noise
    slowest = seconds[:, calls].argmax(axis=0)
    whole = seconds[slowest, calls].sum()
    fractions = parts[slowest, calls].sum(axis=0) / whole
    shared = {part: median_us * float(fraction) for part, fraction in zip(PARTS, fractions, strict=True)}
    return {**shared, "other": median_us * float(1 - fractions.sum())}
