"""Every algorithm of `sparse_allreduce`, between the ranks of one machine.

    mpirun -n 2 python -m pytest bench/test_collectives.py

All ranks begin a round together, and its time is that of the rank which takes longest. Between ranks of one machine
bytes travel through memory: what a network makes of them is told by ``bytes_sent``, the payload that the rank which
sends most sends per call, as counted by the transport.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import sparsecomm as sc
from sparsecomm import transport

ROUNDS, WARMUP = 30, 3
COMM = MPI.COMM_WORLD


class Slowest:
    """A clock that is read before and after a round, and then tells how long the slowest rank took."""

    def __init__(self) -> None:
        self._start: float | None = None

    def __call__(self) -> float:
        now, start = time.perf_counter(), self._start
        if start is None:
            self._start = now
            return now
        self._start = None
        return start + COMM.allreduce(now - start, op=MPI.MAX)

    def begin(self) -> None:
        """Before every round; also after one that raised."""
        self._start = None
        COMM.Barrier()


CLOCK = Slowest()


@pytest.mark.benchmark(group="sparse_allreduce", timer=CLOCK)
@pytest.mark.parametrize("algorithm", sc.algorithms())
@pytest.mark.parametrize("density", [0.001, 0.01], ids=lambda d: f"density={d:g}")
def test_sparse_allreduce(benchmark: Any, n: int, density: float, algorithm: str) -> None:
    k = max(1, round(n * density))
    x = np.random.default_rng(COMM.rank).standard_normal(n, dtype=np.float32)
    residual = np.zeros_like(x)

    def call() -> sc.SparseVector:
        return sc.sparse_allreduce(x, k, algorithm=algorithm, residual=residual)

    counters = transport.of(COMM).counters
    bytes_before, messages_before = counters.bytes_sent, counters.messages_sent
    call()
    nbytes, messages = counters.bytes_sent - bytes_before, counters.messages_sent - messages_before
    benchmark.extra_info |= {
        "wire": sc.explain(n, k, algorithm=algorithm).candidates[0].wire.name,
        "P": COMM.size,
        "n": n,
        "k": k,
        "bytes_sent": COMM.allreduce(nbytes, op=MPI.MAX),
        "messages_sent": COMM.allreduce(messages, op=MPI.MAX),
    }
    result = benchmark.pedantic(call, setup=CLOCK.begin, rounds=ROUNDS, warmup_rounds=WARMUP)
    assert len(set(COMM.allgather((result.indices.tobytes(), result.values.tobytes())))) == 1
