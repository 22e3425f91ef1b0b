"""The kernels of the CPU: selection, arithmetic on entries, and the packed format. ``make bench`` runs them.

Each time comes with the bytes that any implementation must move: a selection reads every element once, reads and writes
the residual once, and writes the entries once. The packed format also has the nanoseconds and bytes of an entry.
``BENCH_N`` sets the number of elements of the long vectors.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.backends import CpuBackend
from sparsecomm.tensors import interop, kinds

Measure = Callable[..., Any]
N = int(float(os.environ.get("BENCH_N") or 1 << 22))
DTYPES = [np.dtype(kind) for kind in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)]
KINDS = {kind.name: kind for kind in kinds.KINDS}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Use long vectors, and short ones that fit into the caches."""
    if "n" in metafunc.fixturenames:
        metafunc.parametrize("n", sorted({65_536, N}), ids=lambda n: f"n={n}")
    if "dtype" in metafunc.fixturenames:
        metafunc.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture
def measure(benchmark: Any) -> Measure:
    """Time a function; report the bytes that it has to move, and at what rate."""

    def run(function: Callable[..., Any], *args: Any, read: int, written: int) -> Any:
        result = benchmark(function, *args)
        benchmark.extra_info |= {"bytes_read": read, "bytes_written": written}
        if benchmark.stats is not None:  # None with --benchmark-disable
            benchmark.extra_info["floor_gb_per_s"] = (read + written) / benchmark.stats.stats.median / 1e9
        return result

    return run


def normal(n: int, dtype: np.dtype[Any]) -> np.ndarray:
    return np.random.default_rng(n).standard_normal(n, dtype=np.float32).astype(dtype)


def with_k(*counts: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("k", counts, ids=lambda k: f"k={k}")


with_density = pytest.mark.parametrize("density", [0.0001, 0.001, 0.01, 0.05], ids=lambda d: f"density={d:g}")
with_common = pytest.mark.parametrize("common", [0.0, 0.5], ids=lambda s: f"shared={s:g}")
with_kind = pytest.mark.parametrize("kind", KINDS)


def pair(k: int, common: float) -> tuple[sc.SparseVector, sc.SparseVector]:
    """Return two vectors of k entries at density 0.001, which have a part of their indices in common."""
    rng = np.random.default_rng(k)
    n, both = 1000 * k, round(k * common)
    indices = rng.permutation(np.unique(rng.integers(0, n, 3 * k)))[: 2 * k - both].astype(np.int32)
    values = rng.standard_normal((2, k), dtype=np.float32)
    values += np.copysign(np.float32(3), values)
    first, second = np.sort(indices[:k]), np.sort(indices[k - both :])
    return sc.SparseVector(first, values[0], n), sc.SparseVector(second, values[1], n)


def entry_bytes(*vectors: sc.SparseVector) -> int:
    return sum(int(v.indices.nbytes + v.values.nbytes) for v in vectors)


# -- selection --------------------------------------------------------------------------------------------------------


@pytest.mark.benchmark(group="topk")
@with_density
def test_topk(measure: Measure, n: int, density: float, dtype: np.dtype[Any]) -> None:
    x = normal(n, dtype)
    k = round(n * density)
    result = measure(sc.topk, x, k, read=x.nbytes, written=entry_bytes(sc.topk(x, k)))
    assert result.nnz == k


@pytest.mark.benchmark(group="topk with residual")
@pytest.mark.parametrize("wider", [False, True], ids=["residual=x", "residual=float32"])
def test_topk_with_residual(measure: Measure, n: int, dtype: np.dtype[Any], wider: bool) -> None:
    if wider and dtype.itemsize != 2:
        pytest.skip("float32 beside 16-bit gradients only")
    x, k = normal(n, dtype), round(n * 0.001)
    residual = np.zeros(n, np.float32 if wider else dtype)  # it fills up from round to round, as in training
    written = residual.nbytes + entry_bytes(sc.topk(x, k))
    result = measure(lambda: sc.topk(x, k, residual=residual), read=x.nbytes + residual.nbytes, written=written)
    assert result.nnz == k


@pytest.mark.benchmark(group="topk by chunk with residual and decay")
@pytest.mark.parametrize(("k", "chunk"), [(64, 4096), (8, 512), (16, 16384)], ids=lambda value: str(value))
def test_topk_by_chunk(measure: Measure, n: int, dtype: np.dtype[Any], k: int, chunk: int) -> None:
    x = normal(n, dtype)
    residual = np.zeros(n, np.float64 if dtype.itemsize == 8 else np.float32)
    arguments = interop.tensor(x, "x"), k, chunk, interop.tensor(residual, "r", writable=True), 0.95
    count = n // chunk * k + min(k, n % chunk)
    written = residual.nbytes + count * (4 + residual.itemsize)
    result = measure(CpuBackend().topk_by_chunk, *arguments, read=x.nbytes + residual.nbytes, written=written)
    assert result.nnz == count


@pytest.mark.benchmark(group="threshold")
def test_threshold(measure: Measure, n: int, dtype: np.dtype[Any]) -> None:
    x, tau = normal(n, dtype), 3.29  # about one normal number in a thousand is so far from zero
    result = measure(sc.threshold, x, tau, read=x.nbytes, written=entry_bytes(sc.threshold(x, tau)))
    assert 0 < result.nnz < 0.002 * n


# -- merging, and to and from dense vectors ---------------------------------------------------------------------------


@pytest.mark.benchmark(group="merge")
@with_k(1_000, 25_600, 262_144)
@with_common
def test_merge(measure: Measure, k: int, common: float) -> None:
    backend, (a, b) = CpuBackend(), pair(k, common)
    result = measure(backend.merge, a, b, read=entry_bytes(a, b), written=entry_bytes(backend.merge(a, b)))
    assert result.nnz == 2 * k - round(k * common)


@pytest.mark.benchmark(group="merge_topk")
@with_k(1_000, 25_600, 262_144)
@with_common
def test_merge_topk(measure: Measure, k: int, common: float) -> None:
    backend, (a, b) = CpuBackend(), pair(k, common)
    written = entry_bytes(*backend.merge_topk(a, b, k))
    kept, rejected = measure(backend.merge_topk, a, b, k, read=entry_bytes(a, b), written=written)
    assert (kept.nnz, rejected.nnz) == (k, k - round(k * common))


@pytest.mark.benchmark(group="scatter_add")
@with_k(1_000, 25_600, 262_144)
def test_scatter_add(measure: Measure, k: int) -> None:
    entries, _ = pair(k, 0)
    dense = np.zeros(entries.size, np.float32)
    target = interop.tensor(dense, "dense", writable=True)
    touched = k * dense.itemsize
    measure(CpuBackend().scatter_add, target, entries, read=entry_bytes(entries) + touched, written=touched)
    assert np.count_nonzero(dense) == k


@pytest.mark.benchmark(group="scatter_add_where")
@with_k(1_000, 25_600, 262_144)
@pytest.mark.parametrize("present", [True, False])
def test_scatter_add_where(measure: Measure, k: int, present: bool) -> None:
    entries, others = pair(k, 0.5)
    dense = np.zeros(entries.size, np.float32)
    target = interop.tensor(dense, "dense", writable=True)
    touched, read = k // 2 * dense.itemsize, entry_bytes(entries) + others.indices.nbytes
    measure(CpuBackend().scatter_add_where, target, entries, others, present, read=read + touched, written=touched)
    assert np.count_nonzero(dense) == k // 2


@pytest.mark.benchmark(group="densify")
@with_k(1_000, 25_600)
def test_densify(measure: Measure, k: int) -> None:
    entries, _ = pair(k, 0)
    out = np.empty(entries.size, np.float32)
    measure(entries.to_dense, out, read=entry_bytes(entries), written=out.nbytes)
    assert np.count_nonzero(out) == k


# -- the packed format ------------------------------------------------------------------------------------------------


@pytest.fixture
def per_entry(measure: Measure, benchmark: Any) -> Measure:
    """`measure`, of functions of so many entries in so many bytes."""

    def run(function: Callable[..., Any], *args: Any, k: int, packed: int, read: int, written: int) -> Any:
        result = measure(function, *args, read=read, written=written)
        benchmark.extra_info["bytes_per_entry"] = packed / k
        if benchmark.stats is not None:  # None with --benchmark-disable
            benchmark.extra_info["ns_per_entry"] = benchmark.stats.stats.median / k * 1e9
        return result

    return run


def rounded(k: int, kind: str) -> tuple[sc.SparseVector, np.ndarray]:
    """Return entries whose values need no more rounding, and them packed."""
    entries, _ = pair(k, 0)
    exact = KINDS[kind] is kinds.EXACT
    values = entries.values if exact else CpuBackend().quantize_values(entries.values, KINDS[kind])[0]
    made = sc.SparseVector(entries.indices, values, entries.size)
    return made, CpuBackend().pack(made, KINDS[kind])


@pytest.mark.benchmark(group="pack")
@with_k(25_600, 262_144)
@with_kind
def test_pack(per_entry: Measure, k: int, kind: str) -> None:
    entries, packed = rounded(k, kind)
    args, size = (entries, KINDS[kind]), packed.nbytes
    sent = per_entry(CpuBackend().pack, *args, k=k, packed=size, read=entry_bytes(entries), written=size)
    np.testing.assert_array_equal(sent, packed)


@pytest.mark.benchmark(group="unpack")
@with_k(25_600, 262_144)
@with_kind
def test_unpack(per_entry: Measure, k: int, kind: str) -> None:
    entries, packed = rounded(k, kind)
    args, size = (packed, b"", k, entries.size, KINDS[kind], False), packed.nbytes
    back = per_entry(CpuBackend().unpack, *args, k=k, packed=size, read=size, written=entry_bytes(entries))
    np.testing.assert_array_equal(back[0], entries.indices)
    np.testing.assert_array_equal(back[1], entries.values)


@pytest.mark.benchmark(group="quantize_values")
@with_k(25_600, 262_144)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind] is not kinds.EXACT])
def test_quantize_values(per_entry: Measure, k: int, kind: str) -> None:
    values, (expected, packed) = pair(k, 0)[0].values, rounded(k, kind)
    read, written = values.nbytes, 2 * values.nbytes
    args = values, KINDS[kind]
    quantize = CpuBackend().quantize_values
    quantized, _, zeros = per_entry(quantize, *args, k=k, packed=packed.nbytes, read=read, written=written)
    np.testing.assert_array_equal(quantized, expected.values)
    assert zeros == 0
