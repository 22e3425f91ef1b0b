"""Time, bytes and results of one row. Every rank measures; all end with the same figures.

Results are checked against the oracle, or where values are rounded, against what went in.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from sparsecomm.cli.bench.runners import Ours, Vectors, inputs
from sparsecomm.cli.bench.timing import CommonStart, Timer, Timing, uninterrupted
from sparsecomm.cli.oracles import Vector, oracle
from sparsecomm.cli.world import World
from sparsecomm.tracing.observers import PARTS
from sparsecomm.wire import EXACT

__all__ = ["Bench", "Check", "Row"]

Row = dict[str, Any]  # of the table and of the JSON file


class Bench:
    """The vectors of one size on this rank, for all its rows."""

    def __init__(self, asked: argparse.Namespace, n: int, comm: World, start: CommonStart) -> None:
        self._asked, self._comm, self.n, self._start = asked, comm, n, start
        self._dtype, self._accumulator = np.dtype(asked.dtype.name), asked.dtype.accumulator
        gradient, residual = inputs(n, self._dtype, self._accumulator, comm.Get_rank())
        self._vectors = Vectors(comm, gradient, residual, asked.device)

    def measure(self, k: int, density: float, algorithm: str, wire: str) -> Row:
        """Make the calls of a row, and check them if that is asked for. Collective.

        The time of a call is that of the rank which took longest. Bytes are per call, of the rank that has most; on the
        wire, the greater of what it sends and what it receives. As in nccl-tests, algbw is dense bytes per median time,
        and busbw what a ring that sums dense gradients as fast sends on each link.
        """
        asked, comm, vectors, P = self._asked, self._comm, self._vectors, self._comm.Get_size()
        runner = Ours(algorithm, vectors, k, wire, asked.dtype.name, asked.breakdown)
        check, wrong = self._check(runner) if asked.check else None, 0
        timer = Timer(comm, runner, "step", asked.iterations, ready=self._start.wait)
        with uninterrupted():
            for call in range(-asked.warmup, asked.iterations):
                result = timer.run(call)
                if check is not None:
                    found = result.indices, result.values, vectors.out, vectors.residual
                    wrong += check.wrong(*map(vectors.memory.fetch, found))
                del result
        timing = timer.timing()
        shortest, median, p99, longest = (1e6 * float(v) for v in np.percentile(timing.slowest, (0, 50, 99, 100)))
        sent, received = map(int, timing.traffic.max(axis=0))
        size = self.n * asked.dtype.itemsize
        return {
            "size_bytes": size,
            "count": self.n,
            "k": k,
            "density": density,
            "algorithm": algorithm,
            "wire": wire,
            "algorithm_taken": runner.taken.algorithm.name,  # also where "auto" was asked for
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
            "wrong": sum(comm.allgather(wrong)) if asked.check else None,  # elements, over all ranks and calls
            "breakdown_us": _shares(timing, median) if asked.breakdown else None,  # parts that add up to the median
        }

    def _check(self, runner: Ours) -> Check:
        """Return the check of a row. If nothing is rounded the oracle knows the result."""
        name, comm = runner.taken.algorithm.name, self._comm
        given = self._vectors.given(self._accumulator)
        if runner.taken.wire.kind != EXACT and name != "dense":
            return Check(comm, given, None)
        entries = None
        if comm.Get_rank() == 0:
            everyones = (inputs(self.n, self._dtype, self._accumulator, r) for r in range(comm.Get_size()))
            whole = [x.astype(self._accumulator) + residual for x, residual in everyones]
            total = oracle(name)(whole, runner.k, runner.transport.node_of_rank)
            indices = np.flatnonzero(total)
            entries = indices, total[indices]
        indices, values = comm.bcast(entries)
        expected = np.zeros(self.n, self._accumulator)
        expected[indices] = values
        return Check(comm, given, expected)


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


class Check:
    """Counts wrong elements in the calls of one contender. Collective.

    All calls give and leave the same where the result is known. Where values are rounded, each call is checked by
    itself: an algorithm may round otherwise by what it keeps from the call before.
    """

    at = slice(None)  # the elements whose sums over all ranks are compared

    def __init__(self, comm: World, given: Vector, expected: Vector | None) -> None:
        """
        Args:
            given: this rank's residual + x.
            expected: the dense result; ``None``: it is not known, and must be the same everywhere.
        """
        self.comm, self.given, self.expected, self._known = comm, given, expected, expected is not None
        self._left: Vector | None = None  # the residual after the first call

    def wrong(self, indices: Vector | None, values: Vector | None, out: Vector, residual: Vector | None) -> int:
        """Count wrong elements of a call on this rank: of its entries, of ``out`` and of its residual.

        Without ``indices`` and ``values`` the call gave no entries, and without ``residual`` it keeps none.
        """
        if not self._known:
            self.expected = self._left = None
        wrong = self.different(indices, values, out)
        if residual is None:
            return wrong
        if self._left is None:
            self._left = residual.copy()
            wrong += self._lost(out if indices is None or self.expected is None else self.expected, residual)
        return wrong + int(np.count_nonzero(residual != self._left))

    def different(self, indices: Vector | None, values: Vector | None, out: Vector) -> int:
        """Count elements of the entries and of ``out`` that are not to the bit what is expected."""
        if self.expected is None:
            self.expected = np.zeros_like(self.given)
            there, its = self.comm.bcast((indices, values))
            self.expected[there] = its
        sparse = np.zeros_like(self.expected)
        sparse[indices] = values
        expected = self.expected.astype(out.dtype)
        return int(np.count_nonzero(out != expected) + np.count_nonzero(sparse != self.expected))

    def _lost(self, result: Vector, residual: Vector) -> int:
        """Count elements of which a part is neither in the result nor in a residual, beyond rounding. On rank 0."""
        whole, left = self.summed(self.given), self.summed(residual)
        rounding = 4 * self.comm.Get_size() * np.finfo(result.dtype).eps * np.abs(whole).max(initial=1)
        lost = int(np.count_nonzero(np.abs(left + result[self.at] - whole) > rounding))
        return lost if self.comm.Get_rank() == 0 else 0

    def summed(self, vector: Vector) -> Vector:
        """Return the sum over all ranks in float64, at the places that are compared."""
        mine = vector[self.at].astype(np.float64)
        total = np.empty_like(mine)
        self.comm.Allreduce(mine, total)
        return total
