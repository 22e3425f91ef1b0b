"""Every algorithm of `sparse_allreduce`, and the quick ones of other ways, between the ranks of one machine.

    mpirun -n 2 python -m pytest bench/test_collectives.py

All ranks begin a round together, and its time is that of the rank which takes longest. Between ranks of one machine
bytes travel through memory. ``bytes_sent`` is the payload per call of the rank that sends most, as counted by the
transport.
"""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from bench.compare.contenders import CONTENDERS, Contender, Ours
from sparsecomm import transport
from sparsecomm.cli.bench.timing import Vectors

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
        """Wait for all ranks before a round; also after one that raised."""
        self._start = None
        COMM.Barrier()


CLOCK = Slowest()


QUICK = [c for c in CONTENDERS.values() if c.kind == "ours" or not c.slow]


@pytest.mark.benchmark(group="sparse_allreduce", timer=CLOCK)
@pytest.mark.parametrize("contender", QUICK, ids=lambda contender: contender.name)
@pytest.mark.parametrize("density", [0.001, 0.01], ids=lambda d: f"density={d:g}")
def test_sparse_allreduce(benchmark: Any, n: int, density: float, contender: Contender) -> None:
    k = max(1, round(n * density))
    vectors = Vectors(COMM, np.random.default_rng(COMM.rank).standard_normal(n, dtype=np.float32))
    runner = contender.make(vectors, k, "auto")
    counters = transport.transport_of(COMM).counters
    sent, messages = runner.traffic()[0], counters.messages_sent
    runner.step()
    sent, messages = runner.traffic()[0] - sent, counters.messages_sent - messages
    ours = isinstance(runner, Ours)
    benchmark.extra_info |= {
        "wire": runner.taken.wire.name if ours else None,
        "P": COMM.size,
        "n": n,
        "k": k,
        "bytes_sent": None if math.isnan(sent) else COMM.allreduce(int(sent), op=MPI.MAX),
        "messages_sent": COMM.allreduce(messages, op=MPI.MAX) if ours else None,
    }
    benchmark.pedantic(runner.step, setup=CLOCK.begin, rounds=ROUNDS, warmup_rounds=WARMUP)
    assert len(set(COMM.allgather(vectors.out.tobytes()))) == 1
