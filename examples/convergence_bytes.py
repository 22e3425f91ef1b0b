"""The density at which a method sends as many bytes as Top-k: the currency in which methods can be compared.

A density is none: at density d, Top-k applies up to P d n entries per step, and gTop-k d n.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from convergence_tasks import weights_of
from convergence_training import METHODS

import sparsecomm as sc
from sparsecomm.transport import Transport, simulated

__all__ = ["equal_density"]

TOLERANCE = 0.02  # of the bytes of Top-k
LEAST = 0.8  # of the bytes of Top-k, below a jump
DRAWS = 4  # gradients of a rank, over which the bytes are summed


def equal_density(model: str, P: int, method: str, wire: str, density: float) -> float | None:
    """Return the density at which ``method`` sends what Top-k does at ``density``; ``None`` where there is none.

    Both are bytes per step of the rank that sends most, on ``P`` ranks, in the same wire format.
    """
    if method == "allgather":
        return density
    k = _equal_k(weights_of(model), P, method, wire, density)
    return None if k is None else k / weights_of(model)


@cache
def _equal_k(n: int, P: int, method: str, wire: str, density: float) -> int | None:
    """Return the k, of three significant digits, that comes nearest; found by bisection.

    The bytes of some methods jump as k grows. At a jump it is the k below.
    """
    if P == 1:
        return None
    wanted = _sent(n, P, "allgather", wire, max(1, round(density * n)))
    low, high = 0, n  # `low` sends too little, `high` too much, or neither is known
    while (middle := _rounded(_between(low, high))) not in (low, high):
        low, high = (middle, high) if _sent(n, P, method, wire, middle) < wanted else (low, middle)
    shares = {k: _sent(n, P, method, wire, k) / wanted for k in (low, high) if 0 < k < n}
    near = min(shares, key=lambda k: abs(shares[k] - 1))
    k = near if abs(shares[near] - 1) <= TOLERANCE else low
    return k if shares.get(k, 0.0) >= LEAST else None


def _between(low: int, high: int) -> int:
    """Return the geometric mean, since digits count; of neighbours, the lower."""
    return math.isqrt(max(low, 1) * high)


def _rounded(k: int) -> int:
    """Return ``k`` rounded down to three significant digits."""
    unit = 10 ** max(0, len(str(k)) - 3)
    return k // unit * unit


@cache
def _sent(n: int, P: int, method: str, wire: str, k: int) -> int:
    """Return the bytes that the rank sends that sends most."""
    options = {name: METHODS[method][1][name] for name in ("algorithm", "complete") if name in METHODS[method][1]}

    def program(ranks: Transport) -> None:
        for gradient in _gradients(n, P)[ranks.rank]:
            sc.sparse_allreduce(gradient, k, comm=ranks, wire=wire, **options)

    return max(result.counters.bytes_sent for result in simulated.run(P, program))


@cache
def _gradients(n: int, P: int) -> list[list[npt.NDArray[Any]]]:
    """Return the gradients of each rank: heavy-tailed, as gradients are."""
    random = np.random.default_rng(0)
    return [[random.standard_normal(n, dtype=np.float32) ** 3 for _ in range(DRAWS)] for _ in range(P)]
