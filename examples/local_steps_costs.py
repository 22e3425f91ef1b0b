"""What a round costs a model of 25.6 million weights, in bytes and seconds, on simulated ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import numpy as np

import sparsecomm as sc
from sparsecomm.transport import Transport, simulated
from sparsecomm.transport.memory import Bytes
from sparsecomm.wire import HEADER_BYTES

__all__ = ["LARGE", "RATES", "Cost", "cost_of"]

LARGE = 25_600_000  # weights, as many as ResNet-50 has
PART = 20  # of which one part is exchanged, and each byte counts so many times
ALPHA = 100e-6  # seconds per message
RATES = {"100 Mb/s": 100e6, "1 Gb/s": 1e9}


@dataclass(frozen=True)
class Cost:
    """The cost of a round: bytes that the busiest rank sends and receives, and seconds at each of `RATES`."""

    sent: int
    received: int
    seconds: tuple[float, ...]


@cache
def cost_of(ranks: int, k: int | float, options: tuple[tuple[str, Any], ...]) -> Cost:
    """Return what a round costs.

    Args:
        ranks: how many.
        k: entries that each selects, as `sparsecomm.sparse_allreduce` takes it.
        options: of `sparsecomm.sparse_allreduce`.
    """

    def program(comm: Transport) -> None:
        x = np.random.default_rng(comm.rank).standard_normal(LARGE // PART, np.float32)
        sc.sparse_allreduce(x, k, comm=comm, out=x, **dict(options))

    def weigh(message: Bytes) -> int:
        return HEADER_BYTES + PART * max(0, len(message) - HEADER_BYTES)

    seconds = []
    for rate in RATES.values():
        with mock.patch.dict(os.environ, SPARSECOMM_PROFILE="none"):  # so that no links are measured
            results = simulated.run(ranks, program, alpha=ALPHA, beta=8 / rate, weigh=weigh)
        seconds.append(max(result.seconds for result in results))
    busiest = max((r.counters for r in results), key=lambda counted: counted.bytes_sent + counted.bytes_received)
    return Cost(busiest.bytes_sent, busiest.bytes_received, tuple(seconds))
