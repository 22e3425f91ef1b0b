"""The density at which a method sends as many bytes as Top-k, so that methods can be compared at equal bytes."""

from __future__ import annotations

import math
import os
from functools import cache, lru_cache
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

import sparsecomm as sc
from bench.experiments.convergence.training import METHODS
from bench.experiments.tasks import weights_of
from sparsecomm.transport import Transport, simulated

NEAR = 0.005  # relative error in bytes that ends the search
TOLERANCE, MIN_RATIO = 0.02, 0.8  # relative excess, and ratio, that are accepted if bytes jump
STEPS = 4  # with residuals, on which the bytes of `split` depend


def equal_density(model: str, P: int, method: str, wire: str, density: float) -> float | None:
    """Return the density at which ``method`` sends as many bytes as Top-k at ``density``, or ``None``.

    Bytes are per step, of the rank that sends most on ``P`` ranks, in the same wire format.
    """
    if method == "allgather":
        return density
    k = _equal_k(weights_of(model), P, method, wire, density)
    return None if k is None else k / weights_of(model)


@cache
def _equal_k(n: int, P: int, method: str, wire: str, density: float) -> int | None:
    """Return the nearest k with three significant digits.

    The bytes of some methods jump as k grows. Without a near k, the result sends fewer bytes, not more.
    """
    if P == 1:
        return None
    k = max(1, round(density * n))
    wanted = _sent(n, P, "allgather", wire, k)
    ratios: dict[int, float] = {}  # of the bytes wanted, by k
    low, high = 0, n
    while (k := _rounded(k)) not in (low, high):
        ratios[k] = _sent(n, P, method, wire, k) / wanted
        if abs(ratios[k] - 1) <= NEAR:
            return k
        low, high = (k, high) if ratios[k] < 1 else (low, k)
        k = round(k / ratios[k])  # bytes are about proportional to k
        if len(ratios) > 3 or not low < _rounded(k) < high:
            k = math.isqrt(max(low, 1) * high)  # bisection, of digits
    near = any(abs(ratio - 1) <= TOLERANCE for ratio in ratios.values())
    for step in range(-12, 13):  # a jump: search around it, since bytes may also fall as k grows
        k = _rounded(round(max(low, 1) * 1.15**step))
        if not near and 0 < k < n:
            ratios[k] = _sent(n, P, method, wire, k) / wanted
    fitting = {k: ratio for k, ratio in ratios.items() if MIN_RATIO <= ratio <= 1 + TOLERANCE}
    return min(fitting, key=lambda k: abs(fitting[k] - 1), default=None)


def _rounded(k: int) -> int:
    """Return ``k`` rounded down to three significant digits."""
    unit = 10 ** max(0, len(str(k)) - 3)
    return k // unit * unit


@cache
def _sent(n: int, P: int, method: str, wire: str, k: int) -> int:
    """Return the bytes of the rank that sends most."""
    algorithm = (METHODS[method][1] or {}).get("algorithm", "auto")

    def program(transport: Transport) -> None:
        residual = np.zeros(n, np.float32)
        for gradient in _gradients(n, P)[transport.rank]:
            sc.sparse_allreduce(gradient, k, comm=transport, residual=residual, wire=wire, algorithm=algorithm)

    with mock.patch.dict(os.environ, SPARSECOMM_PROFILE="none"):  # measure no links
        return max(result.counters.bytes_sent for result in simulated.run(P, program))


@lru_cache(1)
def _gradients(n: int, P: int) -> list[npt.NDArray[Any]]:
    """Return heavy-tailed gradients of each rank."""
    random = np.random.default_rng(0)
    return [random.standard_normal((STEPS, n), dtype=np.float32) ** 3 for _ in range(P)]
