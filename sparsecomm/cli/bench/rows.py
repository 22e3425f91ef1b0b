"""Measures the time, bytes and correctness of one row.

The result must equal the oracle's result. If values are rounded, all ranks must have the same result instead, and the
result plus the sum of the new residuals must equal the sum of the inputs.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from sparsecomm.cli.bench.timing import CommonStart, Ours, Vectors, inputs, quiet_barrier, uninterrupted
from sparsecomm.cli.oracles import Vector, oracle
from sparsecomm.cli.world import World
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
            total = oracle(name)(vectors, runner.k, runner.transport.node_of_rank)
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
    split = {part: median_us * float(its / total) for part, its in zip(PARTS, parts, strict=True)}
    return {**split, "other": median_us - sum(split.values())}


class Check:
    """Counts wrong elements in the calls of an algorithm, or of another library. Collective.

    If the result is known, all calls must have this result and leave the same residual. If values are rounded, each
    call is checked by itself, because rounding may depend on earlier calls.
    """

    at = slice(None)  # elements at which `lost` compares sums over all ranks; all by default

    def __init__(self, comm: World, accumulated: Vector, expected: Vector | None) -> None:
        """``accumulated`` is this rank's residual + x, ``expected`` the dense result or, if unknown, ``None``."""
        self.comm, self.accumulated, self.expected, self._known = comm, accumulated, expected, expected is not None
        self._first_residual: Vector | None = None  # the residual after the first call

    def wrong(self, indices: Vector, values: Vector, out: Vector, residual: Vector) -> int:
        """Count the wrong elements of a call on this rank: of its entries, of ``out`` and of its residual."""
        if not self._known:
            self.expected = self._first_residual = None
        wrong = self.different(indices, values, out)
        if self._first_residual is None:
            self._first_residual = residual.copy()
            wrong += self.lost(out, residual)
        return wrong + int(np.count_nonzero(residual != self._first_residual))

    def different(self, indices: Vector | None, values: Vector | None, out: Vector) -> int:
        """Count elements of the entries and of ``out`` that differ in any bit from the expected result."""
        if self.expected is None:
            self.expected = np.zeros_like(self.accumulated)
            first_indices, first_values = self.comm.bcast((indices, values))
            self.expected[first_indices] = first_values
        sparse = np.zeros_like(self.expected)
        sparse[indices] = values
        expected = self.expected.astype(out.dtype)
        return int(np.count_nonzero(out != expected) + np.count_nonzero(sparse != self.expected))

    def lost(self, out: Vector, residual: Vector) -> int:
        """Count elements at which result + residuals differ from the sum of the inputs by more than rounding.

        Return the number on rank 0, and 0 on other ranks.
        """
        result = out if self.expected is None else self.expected
        total, left = self.summed(self.accumulated), self.summed(residual)
        rounding = 4 * self.comm.Get_size() * np.finfo(result.dtype).eps * np.abs(total).max(initial=1)
        lost = int(np.count_nonzero(np.abs(left + result[self.at] - total) > rounding))
        return lost if self.comm.Get_rank() == 0 else 0

    def summed(self, vector: Vector) -> Vector:
        """Return the sum over all ranks in float64, at the elements ``at``."""
        mine = vector[self.at].astype(np.float64)
        total = np.empty_like(mine)
        self.comm.Allreduce(mine, total)
        return total
