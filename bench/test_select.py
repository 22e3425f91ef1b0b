"""Selection: plain, with the residual added in the same pass, and by threshold.

``floor_gb_per_s`` counts the bytes that any implementation must move: every element read once, the residual read and
written once, the entries written once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc

Measure = Callable[..., Any]
Normal = Callable[[int, np.dtype[Any]], np.ndarray]

density = pytest.mark.parametrize("density", [0.0001, 0.001, 0.01, 0.05], ids=lambda d: f"density={d:g}")


def entry_bytes(result: sc.SparseVector) -> int:
    return int(result.indices.nbytes + result.values.nbytes)


@pytest.mark.benchmark(group="topk")
@density
def test_topk(measure: Measure, normal: Normal, n: int, density: float, dtype: np.dtype[Any]) -> None:
    x = normal(n, dtype)
    k = round(n * density)
    result = measure(sc.topk, x, k, read=x.nbytes, written=entry_bytes(sc.topk(x, k)))
    assert result.nnz == k


@pytest.mark.benchmark(group="topk with residual")
@pytest.mark.parametrize("int64_indices", [False, True], ids=["residual=x", "residual=float32"])
def test_topk_with_residual(
    measure: Measure, normal: Normal, n: int, dtype: np.dtype[Any], int64_indices: bool
) -> None:
    if int64_indices and dtype.itemsize != 2:
        pytest.skip("float32 beside 16-bit gradients only")
    x, k = normal(n, dtype), round(n * 0.001)
    residual = np.zeros(n, np.float32 if int64_indices else dtype)  # it fills up from round to round, as in training
    written = residual.nbytes + entry_bytes(sc.topk(x, k))
    result = measure(lambda: sc.topk(x, k, residual=residual), read=x.nbytes + residual.nbytes, written=written)
    assert result.nnz == k


@pytest.mark.benchmark(group="threshold")
def test_threshold(measure: Measure, normal: Normal, n: int, dtype: np.dtype[Any]) -> None:
    x, tau = normal(n, dtype), 3.29  # about one normal number in a thousand is so far from zero
    result = measure(sc.threshold, x, tau, read=x.nbytes, written=entry_bytes(sc.threshold(x, tau)))
    assert 0 < result.nnz < 0.002 * n
