"""Arithmetic on entries: merging, with and without selecting again, and to and from dense vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.backends import CpuBackend
from sparsecomm.tensors import interop

Measure = Callable[..., Any]

count = pytest.mark.parametrize("k", [1_000, 25_600, 262_144], ids=lambda k: f"k={k}")
shared = pytest.mark.parametrize("shared", [0.0, 0.5], ids=lambda s: f"shared={s:g}")


def pair(k: int, shared: float) -> tuple[sc.SparseVector, sc.SparseVector]:
    """Two vectors of k entries at density 0.001, of whose indices a share is the same."""
    rng = np.random.default_rng(k)
    n, both = 1000 * k, round(k * shared)
    indices = rng.permutation(np.unique(rng.integers(0, n, 3 * k)))[: 2 * k - both]
    values = rng.standard_normal((2, k), dtype=np.float32)
    values += np.copysign(np.float32(3), values)
    first, second = np.sort(indices[:k]), np.sort(indices[k - both :])
    return sc.SparseVector(first, values[0], n), sc.SparseVector(second, values[1], n)


def entry_bytes(*vectors: sc.SparseVector) -> int:
    return sum(v.indices.nbytes + v.values.nbytes for v in vectors)


@pytest.mark.benchmark(group="merge")
@count
@shared
def test_merge(measure: Measure, k: int, shared: float) -> None:
    backend, (a, b) = CpuBackend(), pair(k, shared)
    result = measure(backend.merge, a, b, read=entry_bytes(a, b), written=entry_bytes(backend.merge(a, b)))
    assert result.nnz == 2 * k - round(k * shared)


@pytest.mark.benchmark(group="merge_topk")
@count
@shared
def test_merge_topk(measure: Measure, k: int, shared: float) -> None:
    backend, (a, b) = CpuBackend(), pair(k, shared)
    written = entry_bytes(*backend.merge_topk(a, b, k))
    kept, rejected = measure(backend.merge_topk, a, b, k, read=entry_bytes(a, b), written=written)
    assert (kept.nnz, rejected.nnz) == (k, k - round(k * shared))


@pytest.mark.benchmark(group="scatter_add")
@count
def test_scatter_add(measure: Measure, k: int) -> None:
    entries, _ = pair(k, 0)
    dense = np.zeros(entries.size, np.float32)
    target = interop.tensor(dense, "dense", writable=True)
    touched = k * dense.itemsize
    measure(CpuBackend().scatter_add, target, entries, read=entry_bytes(entries) + touched, written=touched)
    assert np.count_nonzero(dense) == k


@pytest.mark.benchmark(group="densify")
@pytest.mark.parametrize("k", [1_000, 25_600], ids=lambda k: f"k={k}")
def test_densify(measure: Measure, k: int) -> None:
    entries, _ = pair(k, 0)
    out = np.empty(entries.size, np.float32)
    measure(entries.to_dense, out, read=entry_bytes(entries), written=out.nbytes)
    assert np.count_nonzero(out) == k
