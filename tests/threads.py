"""Threads that make calls at the same time, each on its own communicator, with the results of one thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, TypeVar

import numpy as np

import sparsecomm as sc
from tests.waiting import SOON

__all__ = ["at_once", "calls"]

T = TypeVar("T")
SIZE = 100_000  # elements: enough for several kernel threads and for scratch memory to grow
CALLS = [
    ("butterfly", "packed_bfloat16", "float32", 100),
    ("split", "packed", "float64", 1000),
    ("double", "packed_int4", "float32", 500),
    ("allgather", "plain", "float16", 50),
    ("dense", "plain", "float32", 200),
]


def at_once(works: Sequence[Callable[[], T]]) -> list[T]:
    """Run each function in a thread, all starting together, and return their results in order."""
    barrier = Barrier(len(works))

    def begun(work: Callable[[], T]) -> T:
        barrier.wait(SOON)
        return work()

    with ThreadPoolExecutor(len(works)) as pool:
        return [done.result() for done in [pool.submit(begun, work) for work in works]]


def calls(comm: Any, rank: int, seed: int, rounds: int = 3) -> list[bytes]:
    """Make calls of several kinds, half of them in the background; return the bits of results and residuals."""
    outputs: list[bytes] = []
    x = np.random.default_rng([rank, seed]).standard_normal(SIZE)
    for algorithm, wire, dtype, k in CALLS:
        gradient = x.astype(dtype)
        residual = np.zeros(SIZE, np.float32 if dtype == "float16" else dtype)
        out = np.empty_like(gradient)
        for number in range(rounds):
            options: dict[str, Any] = {"algorithm": algorithm, "wire": wire, "residual": residual, "comm": comm}
            if number % 2:
                options["out"] = out
                result = sc.isparse_allreduce(gradient, k, **options).wait()
            else:
                result = sc.sparse_allreduce(gradient, k, **options)
            dense = result.to_dense()
            outputs += [np.asarray(array).tobytes() for array in (dense, residual)]
            if number % 2:
                assert np.array_equal(out, dense.astype(dtype))
    return outputs
