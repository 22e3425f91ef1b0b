"""The density at which a method sends as many bytes as Top-k: the currency in which methods can be compared.

A density is none: at density d, Top-k applies up to P d n entries per step, and gTop-k d n.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from convergence_tasks import weights_of
from convergence_training import METHODS

import sparsecomm as sc
from sparsecomm.transport import Transport, simulated

__all__ = ["equal_density"]

NEAR = 0.005  # of the bytes of Top-k: near enough to look no further
TOLERANCE = 0.02  # of the bytes of Top-k: near enough where they jump
LEAST = 0.8  # of the bytes of Top-k, below a jump
STEPS = 6  # of which bytes are counted in the last ones: the residuals have grown then, on which `split` depends
COUNTED = 4


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
    """Return the k, of three significant digits, that comes nearest.

    The bytes of some methods jump as k grows. At a jump it is the k below.
    """
    if P == 1:
        return None
    k = max(1, round(density * n))
    wanted = _sent(n, P, "allgather", wire, k)
    shares: dict[int, float] = {}  # of the bytes wanted, by k
    low, high = 0, n  # too few and too many, if anything is
    while (k := _rounded(k)) not in (low, high):
        shares[k] = _sent(n, P, method, wire, k) / wanted
        if abs(shares[k] - 1) <= NEAR:
            return k
        low, high = (k, high) if shares[k] < 1 else (low, k)
        k = round(k / shares[k])  # bytes are about proportional to k
        if len(shares) > 3 or not low < _rounded(k) < high:
            k = math.isqrt(max(low, 1) * high)  # bisection, of digits
    if not shares:
        return None
    near = min(shares, key=lambda k: abs(shares[k] - 1))
    k = near if abs(shares[near] - 1) <= TOLERANCE else low
    return k if shares.get(k, 0.0) >= LEAST else None


def _rounded(k: int) -> int:
    """Return ``k`` rounded down to three significant digits."""
    unit = 10 ** max(0, len(str(k)) - 3)
    return k // unit * unit


@cache
def _sent(n: int, P: int, method: str, wire: str, k: int) -> int:
    """Return the bytes that the rank sends that sends most."""
    options = {name: METHODS[method][1][name] for name in ("algorithm", "complete") if name in METHODS[method][1]}

    def program(ranks: Transport) -> int:
        residual = np.zeros(n, np.float32)
        before = 0
        for step in range(STEPS):
            if step == STEPS - COUNTED:
                before = ranks.counters.bytes_sent
            gradient = _gradients(n, P)[ranks.rank][step % COUNTED]
            sc.sparse_allreduce(gradient, k, comm=ranks, residual=residual, wire=wire, **options)
        return ranks.counters.bytes_sent - before

    return max(result.value or 0 for result in simulated.run(P, program))


@lru_cache(1)
def _gradients(n: int, P: int) -> list[npt.NDArray[Any]]:
    """Return the gradients of each rank: heavy-tailed, as gradients are."""
    random = np.random.default_rng(0)
    return [random.standard_normal((COUNTED, n), dtype=np.float32) ** 3 for _ in range(P)]
