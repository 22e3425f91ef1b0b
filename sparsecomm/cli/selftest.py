"""Check that this installation keeps the library's guarantees on these nodes. Run it alone, or under mpirun,
srun or torchrun.

The command calls every algorithm with every dtype and with difficult inputs. Every rank compares its result with an
oracle in plain NumPy, which shares no code with the library. The command also checks that all ranks have the same bits,
that no gradient is lost, that inputs are not changed, and that all ranks raise an error if their calls differ. The exit
status is 0 if all checks passed on all ranks, and 1 if a check failed or the ranks cannot reach each other.
"""

from __future__ import annotations

import argparse
import os
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

import sparsecomm as sc
from sparsecomm.errors import InvalidInputError
from sparsecomm.tensors.arrays import ArrayDType
from sparsecomm.testing.oracles import Vector, expected_sum, num_contributors
from sparsecomm.tools import devices
from sparsecomm.tools.world import World, transport_of, world
from sparsecomm.wire import Op

HELP = "check every algorithm: on this node, or on all ranks of a launcher such as mpirun"


# -- inputs -----------------------------------------------------------------------------------------------------------


def _special(rng: np.random.Generator, shape: tuple[int, ...]) -> Vector:
    special = rng.choice([np.nan, np.inf, -np.inf, -0.0, 6e-8], shape)  # 6e-8 is subnormal in float16
    return np.where(rng.random(shape) < 0.02, special, rng.standard_normal(shape))


INPUTS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], Vector]] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "ties": lambda rng, shape: rng.integers(-4, 5, shape),
    "zeros": lambda rng, shape: rng.integers(1, 9, shape) * (rng.random(shape) < 0.003),
    "special": _special,
}
EXACT = ("ties", "zeros")  # small integers: sums are exact, and so is the conservation of gradients
SIZES = ((1, 1), (7, 3), (1000, 10), (1000, 1000), (4099, 41))


def _dtypes(device: str) -> list[ArrayDType]:
    names = ["float16", "float32", "float64"]
    with suppress(ImportError, InvalidInputError):
        import ml_dtypes  # noqa: F401 - teaches NumPy the name

        devices.check(device, "bfloat16")
        names.append("bfloat16")
    return [np.dtype(name) for name in names]


@dataclass(frozen=True)
class Case:
    """The inputs of a checked call."""

    dtype: ArrayDType
    n: int
    k: int
    content: str
    residual: bool

    @property
    def accumulator(self) -> ArrayDType:
        """The accumulator dtype."""
        return np.dtype(np.float64 if self.dtype.itemsize == 8 else np.float32)

    def data(self, P: int) -> tuple[Vector, Vector]:
        """Return the gradients and residuals of all ranks: two arrays of shape (P, n), the same on every rank."""
        rng = np.random.default_rng([self.n, self.k, *self.content.encode()])
        x, residual = INPUTS[self.content](rng, (2, P, self.n))
        return x.astype(self.dtype), residual.astype(self.accumulator)

    def __str__(self) -> str:
        return f"{self.dtype} n={self.n} k={self.k} {self.content}" + " residual" * self.residual


# -- the checks -------------------------------------------------------------------------------------------------------


class Checks:
    """The checks of an algorithm on this rank, and their failures."""

    def __init__(self, name: str, comm: World, memory: devices.DeviceMemory) -> None:
        self.name, self.algorithm, self.comm, self.memory = name, sc.algorithms()[name], comm, memory
        self.rank, self.size, self.transport = comm.Get_rank(), comm.Get_size(), transport_of(comm)
        self.count, self.failures = 0, list[str]()

    def check(self, holds: object, what: str) -> None:
        """Count a check, and record the failure ``what`` unless it holds."""
        self.count += 1
        if not holds:
            self.failures.append(what)

    def results(self, device: str) -> None:
        """Check all cases with all ops."""
        combinations = product(_dtypes(device), SIZES, INPUTS, (False, True))
        cases = [Case(dtype, n, k, content, residual) for dtype, (n, k), content, residual in combinations]
        bits = [self._case(case) for case in cases]
        for case, own, first in zip(cases, bits, self.comm.bcast(bits), strict=True):
            self.check(own == first, f"{case}: other bits than on rank 0")

    def _case(self, case: Case) -> int:
        """Check the calls of a case; return a checksum of their entries."""
        checksum = 0
        gradients, residuals = case.data(self.size)
        accumulated = gradients.astype(case.accumulator) + (residuals if case.residual else 0)
        total = expected_sum(self.name, list(accumulated), case.k, self.transport.node_of_rank)
        expected: dict[Op, Vector] = {"sum": total}
        if case.residual and case.content not in EXACT:
            expected["mean"] = total / self.size
            if not self.algorithm.cannot_count_contributors:
                divisor = num_contributors(list(accumulated), case.k)
                expected["mean_of_contributors"] = (total / divisor).astype(total.dtype)
        for op, dense in expected.items():
            memory, what = self.memory, f"{case} op={op}"
            x, residual, out = map(
                memory.put, (gradients[self.rank], residuals[self.rank], np.empty_like(gradients[self.rank]))
            )
            entries = None
            try:
                options: dict[str, Any] = {"residual": residual if case.residual else None, "out": out, "op": op}
                result = sc.sparse_allreduce(x, case.k, comm=self.transport, algorithm=self.algorithm, **options)
                entries = memory.fetch(result.indices), memory.fetch(result.values)
            except Exception as error:
                self.check(False, f"{what}: {type(error).__name__}: {error}")
            if entries is not None:
                checksum = zlib.crc32(entries[1].tobytes(), zlib.crc32(entries[0].tobytes(), checksum))
                indices = np.flatnonzero(total)
                self.check(np.array_equal(entries[0], indices), f"{what}: wrong indices")
                self.check(_same(entries[1], dense[indices]), f"{what}: wrong values")
                self.check(_same(memory.fetch(out), dense.astype(case.dtype)), f"{what}: wrong dense result")
                self.check(_same(memory.fetch(x), gradients[self.rank]), f"{what}: the input was written")
            if case.residual and case.content in EXACT and op == "sum":
                left = np.empty(case.n)
                self.comm.Allreduce(memory.fetch(residual).astype(np.float64), left)  # even after an error
                if entries is not None:
                    left[entries[0]] += entries[1]
                    self.check(_same(left, accumulated.sum(0, np.float64)), f"{what}: gradient was lost or made")
        return checksum

    def mismatches(self) -> None:
        """Check that all ranks raise, and lose no gradient, if the last rank makes a different call."""
        other = next(name for name in sc.algorithms() if name != self.name)
        for what, value in {"n": 65, "k": 5, "dtype": "float64", "op": "mean", "algorithm": other}.items():
            call: dict[str, Any] = {"n": 64, "k": 4, "dtype": "float32", "op": "sum", "algorithm": self.name}
            if self.rank == self.size - 1:
                call[what] = value
            x = np.arange(1, 1 + call.pop("n")).astype(call.pop("dtype"))
            residual, outcome = self.memory.put(np.ones_like(x)), "nothing was raised"
            try:
                sc.sparse_allreduce(self.memory.put(x), comm=self.transport, residual=residual, **call)
            except sc.CollectiveMismatchError:
                outcome = ""
            except Exception as error:
                outcome = f"{type(error).__name__}: {error}"
            what = f"calls that differ in {what}"
            self.check(not outcome, f"{what}: expected CollectiveMismatchError, but {outcome}")
            unchanged = _same(self.memory.fetch(residual), x + 1)
            self.check(unchanged, f"{what}: the residual does not hold the gradient")


def _same(a: Vector, b: Vector) -> bool:
    """Compare as float64, which holds every value of the other dtypes (NumPy has no bfloat16). NaN equals NaN."""
    return np.array_equal(a.astype(np.float64), b.astype(np.float64), equal_nan=True)


# -- the command ------------------------------------------------------------------------------------------------------

_MAX_FAILURES = 10  # printed per algorithm


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    devices.add_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run all checks and print a line per algorithm; return 0 if all passed on all ranks, otherwise 1."""
    os.environ.setdefault("SPARSECOMM_TIMEOUT", "30")  # fail within seconds, not minutes
    device: str = arguments.device
    devices.check(device, "float32")
    memory, comm = devices.DEVICES[device](), world()
    P, is_first = comm.Get_size(), comm.Get_rank() == 0
    ranks = f"{P} rank{'s' * (P > 1)}"
    width = max(map(len, sc.algorithms()))
    if is_first:
        print(f"sparsecomm {sc.__version__} on {ranks}; {', '.join(map(str, _dtypes(device)))} on {memory.name}\n")
        print(f"{'algorithm':<{width}}{'checks':>9}{'failures':>10}", flush=True)

    failed = 0
    for algorithm in sc.algorithms():
        checks = Checks(algorithm, comm, memory)
        with np.errstate(all="ignore"):  # inputs contain infinities
            checks.results(device)
        if P > 1:
            checks.mismatches()
        by_rank = comm.allgather((checks.count, checks.failures))
        failures = [f"  rank {rank}: {text}" for rank, (_, texts) in enumerate(by_rank) for text in texts]
        failed += len(failures)
        if is_first:
            total = sum(count for count, _ in by_rank)
            print(f"{algorithm:<{width}}{total:>9}{len(failures):>10}")
            more = [f"  ... and {len(failures) - _MAX_FAILURES} more"] if len(failures) > _MAX_FAILURES else []
            print(*(f"{line}\n" for line in failures[:_MAX_FAILURES] + more), sep="", end="", flush=True)
    comm.Free()

    if is_first:
        print(f"\n{f'FAILED: {failed} checks' if failed else 'All passed'} on {ranks}.", flush=True)
    return 1 if failed else 0
