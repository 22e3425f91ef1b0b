"""Calls over more than 2^31 elements, whose indices need 64 bits. NumPy's zeros take no memory until written."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests.thinning import exhaustive

N = 2**31 + 11
INDICES = np.array([0, 5, 2**30, 2**31 - 1, 2**31, N - 2, N - 1])
WIRES = exhaustive("plain"), exhaustive("packed"), exhaustive("packed_int8")


@pytest.fixture(scope="module")
def gradient() -> np.ndarray:
    x = np.zeros(N, np.float16)
    x[INDICES] = [1, -2, 3, -4, 5, -6, 7]
    return x


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("algorithm", sorted(set(sc.algorithms()) - {"dense"}))
def test_sums_over_more_than_2_31_elements(gradient: np.ndarray, algorithm: str, wire: str) -> None:
    def program(transport: simulated.SimulatedTransport) -> sc.SparseVector:
        return sc.sparse_allreduce(gradient, len(INDICES), comm=transport, algorithm=algorithm, wire=wire)

    for outcome in simulated.run(2, program):
        assert outcome.value.size == N
        np.testing.assert_array_equal(outcome.value.indices, INDICES)
        np.testing.assert_allclose(outcome.value.values, 2.0 * gradient[INDICES], rtol=0.01 if "int" in wire else 0)


@pytest.mark.exhaustive
def test_a_residual_of_more_than_2_31_elements(gradient: np.ndarray) -> None:
    available = int(re.findall(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())[0])
    if available < 10 * 2**20:
        pytest.skip("needs 10 GiB of memory")
    residual = np.zeros(N, np.float32)
    update = sc.sparse_allreduce(gradient, 3, residual=residual)
    np.testing.assert_array_equal(update.indices, INDICES[-3:])
    np.testing.assert_array_equal(update.values, gradient[INDICES[-3:]])
    np.testing.assert_array_equal(residual[INDICES], [*gradient[INDICES[:-3]], 0, 0, 0])
    assert np.count_nonzero(residual) == len(INDICES) - 3
