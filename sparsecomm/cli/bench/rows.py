"""Measures the time, bytes and correctness of one row.

The result must equal the oracle's result. If values are rounded, all ranks must have the same result instead, and the
result plus the sum of the new residuals must equal the sum of the inputs.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from sparsecomm.testing.oracles import Vector, expected_sum
from sparsecomm.tools.check import Check
from sparsecomm.tools.timing import CommonStart, Ours, Vectors, inputs, quiet_barrier, uninterrupted
from sparsecomm.tools.world import World
from sparsecomm.tracing.observers import PARTS
from sparsecomm.wire import EXACT

Row = dict[str, Any]  # of the table and of the JSON file


class Bench:
    """Measures all rows of one vector size. The rows share this rank's vectors."""

    def __init__(self, grid: argparse.Namespace, n: int, comm: World, start: CommonStart) -> None:
        self._grid, self._comm, self.n, self._start = grid, comm, n, start
        self._dtype, self._accumulator = np.dtype(grid.dtype.name), grid.dtype.accumulator
        gradient, residual = inputs(n, self._dtype, self._accumulator, comm.Get_rank())
        self._vectors = Vectors(comm, gradient, residual, grid.device)

    def measure(self, k: int, density: float, algorithm: str, wire: str) -> Row:
        """Make the calls of a row, and check them with ``--check``. Collective; the row is the same on all ranks.

        Bytes are per call, on the rank with the most bytes. As in nccl-tests, algbw is dense bytes / median time, and
        busbw is the bandwidth that a dense ring all-reduce with this median time would use on each link.
        """
        grid, comm, vectors, P = self._grid, self._comm, self._vectors, self._comm.Get_size()
        runner = Ours(algorithm, vectors, k, wire, grid.dtype.name, grid.breakdown)
        check, wrong = self._check(runner) if grid.check else None, 0
        times = []
        with uninterrupted():
            for call in range(-grid.warmup, grid.iterations):
                if call == 0:
                    before = runner.moved()
                runner.reset()
                quiet_barrier(comm)
                self._start.wait()
                began = time.perf_counter()
                result = runner.step()
                vectors.memory.wait()
                seconds = time.perf_counter() - began
                if call >= 0:
                    times.append([seconds, *(runner.clock.seconds.values() if runner.clock is not None else ())])
                if check is not None:
                    arrays = result.indices, result.values, vectors.out, vectors.residual
                    wrong += check.wrong(*map(vectors.memory.fetch, arrays))
                del result
        moved = np.subtract(runner.moved(), before)
        all_times, all_moved = map(np.array, zip(*comm.allgather((times, moved)), strict=True))
        slowest = all_times[:, :, 0].max(axis=0)
        shortest, median, p99, longest = (1e6 * float(v) for v in np.percentile(slowest, (0, 50, 99, 100)))
        sent, received = (int(nbytes / grid.iterations) for nbytes in all_moved.max(axis=0))
        size = self.n * grid.dtype.itemsize
        return {
            "size_bytes": size,
            "count": self.n,
            "k": k,
            "density": density,
            "algorithm": algorithm,
            "wire": wire,
            "algorithm_taken": runner.taken.algorithm.name,  # differs from "algorithm" for "auto"
            "wire_taken": runner.taken.wire.name,
            "time_min_us": shortest,
            "time_median_us": median,
            "time_p99_us": p99,
            "time_max_us": longest,
            "wire_bytes_per_rank": max(sent, received),
            "sent_bytes_per_rank": sent,
            "received_bytes_per_rank": received,
            "algbw_gb_per_s": size / median / 1e3,
            "busbw_gb_per_s": size / median / 1e3 * 2 * (P - 1) / P,
            "wrong": sum(comm.allgather(wrong)) if grid.check else None,  # elements, over all ranks and calls
            "breakdown_us": _breakdown(all_times, median) if grid.breakdown else None,  # adds up to the median
        }

    def _check(self, runner: Ours) -> Check:
        """Return the check of a row, with the oracle's result if no values are rounded."""
        name, comm, memory = runner.taken.algorithm.name, self._comm, self._vectors.memory
        accumulated = memory.fetch(self._vectors.x).astype(self._accumulator) + memory.fetch(self._vectors.before)
        if runner.taken.wire.kind != EXACT and name != "dense":
            return Check(comm, accumulated, None)
        entries = None
        if comm.Get_rank() == 0:
            pairs = (inputs(self.n, self._dtype, self._accumulator, rank) for rank in range(comm.Get_size()))
            vectors = [x.astype(self._accumulator) + residual for x, residual in pairs]
            total = expected_sum(name, vectors, runner.k, runner.transport.node_of_rank)
            indices = np.flatnonzero(total)
            entries = indices, total[indices]
        indices, values = comm.bcast(entries)
        expected = np.zeros(self.n, self._accumulator)
        expected[indices] = values
        return Check(comm, accumulated, expected)


def _breakdown(times: Vector, median_us: float) -> dict[str, float]:
    """Split the median time into parts, in the mean proportions of the calls with times near the median.

    ``times`` are the seconds of calls and of their parts, by rank and call. Of each call, the slowest rank counts.
    """
    seconds = times[:, :, 0]
    calls = np.argsort(seconds.max(axis=0))
    calls = calls[len(calls) // 4 : len(calls) - len(calls) // 4]  # the middle half: a single call is noise
    total, *parts = times[seconds[:, calls].argmax(axis=0), calls].sum(axis=0)
    split = {name: median_us * float(part / total) for name, part in zip(PARTS, parts, strict=True)}
    return {**split, "other": median_us - sum(split.values())}
