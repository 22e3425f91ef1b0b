"""Every device's arithmetic against the oracle, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparsecomm.backends import CpuBackend
from sparsecomm.tensors import interop
from sparsecomm.tensors.sparse import SparseVector
from tests import data, reference
from tests.backends.devices import Device, Emulated, same, selection_state

CASES = [(x, r) for x in data.DTYPES for r in (None, x, "float32") if r != "float32" or data.DTYPES[x].itemsize <= 4]
CASES = sorted(set(CASES), key=str)
with_types = pytest.mark.parametrize(("dtype", "residual_dtype"), CASES)


def check(device: Device) -> settings:
    """Return the settings of a property: the emulated device is a hundred times slower, so it runs fewer examples."""
    return settings(max_examples=5 if device.name == "cuda" else 30)


def shorter(device: Device, n: int) -> int:
    """Return a length that the emulated device handles in time: at most three tiles."""
    return n % 10_001 if device.name == "cuda" else n


def accumulated(x: np.ndarray, r: np.ndarray | None, decay: float = 1.0) -> np.ndarray:
    """Return decay * residual + x, rounded as it is stored."""
    return x if r is None else reference.accumulated(x, r, decay)


def same_residual(r: np.ndarray, acc: np.ndarray, taken: np.ndarray) -> None:
    left = acc.copy()
    left[taken] = 0
    np.testing.assert_array_equal(reference.widened(r), reference.widened(left))


@with_types
def test_topk(device: Device, dtype: str, residual_dtype: str | None) -> None:
    @check(device)
    @given(st.data(), data.sizes, data.kinds, data.seeds)
    def run(draw: st.DataObject, n: int, kind: str, seed: int) -> None:
        n = shorter(device, n)
        x = data.gradient(kind, n, dtype, seed)
        k = draw.draw(data.counts(n)) if n else 0
        r = None if residual_dtype is None else data.gradient(kind, n, residual_dtype, seed + 1)
        acc, before = accumulated(x, r), x.copy()
        entries = device.backend.topk(device.tensor(x), k, None if r is None else device.tensor(r))
        expected = reference.topk(reference.widened(acc), k)
        same(entries, expected)
        assert data.same_bits(x, before)
        if r is not None:
            same_residual(r, acc, expected[0])
        else:
            same(device.backend.take_topk(device.tensor(x), k), expected)
            same_residual(x, before, expected[0])

    run()


chunk_lengths = st.one_of(st.integers(1, 200), st.sampled_from([64, 999, 4096, 4097, 9000, 70_001, 10**6]))
decays = st.sampled_from([1.0, 0.95, 0.3])


@with_types
def test_topk_by_chunk(device: Device, dtype: str, residual_dtype: str | None) -> None:
    @check(device)
    @given(st.data(), data.sizes, data.kinds, data.seeds, chunk_lengths, decays)
    @example(None, 70_001, "ascending", 0, 9000, 0.3)  # the first elements of a chunk are smaller than the rest
    @example(None, 20_000, "scales by layer", 0, 97, 0.95)  # neighbouring chunks have different magnitudes
    def run(draw: st.DataObject | None, n: int, kind: str, seed: int, chunk: int, decay: float) -> None:
        n = shorter(device, n)
        k = max(1, chunk // 12) if draw is None else draw.draw(data.counts(chunk))
        x = data.gradient(kind, n, dtype, seed)
        r = None if residual_dtype is None else data.gradient(kind, n, residual_dtype, seed + 1)
        acc, before = accumulated(x, r, decay), x.copy()
        entries = device.backend.topk_by_chunk(
            device.tensor(x), k, chunk, None if r is None else device.tensor(r), decay
        )
        expected = reference.topk_by_chunk(reference.widened(acc), k, chunk)
        same(entries, expected)
        assert data.same_bits(x, before)
        if r is not None:
            same_residual(r, acc, expected[0])

    run()


@with_types
def test_threshold(device: Device, dtype: str, residual_dtype: str | None) -> None:
    @check(device)
    @given(data.sizes, data.kinds, data.seeds, st.sampled_from([0.0, 1e-42, 0.1, 1.0, 1.5, 2.7, 1e38, float("inf")]))
    @example(70_001, "all equal", 0, 1.5)
    def run(n: int, kind: str, seed: int, tau: float) -> None:
        n = shorter(device, n)
        x = data.gradient(kind, n, dtype, seed)
        r = None if residual_dtype is None else data.gradient(kind, n, residual_dtype, seed + 1)
        acc = accumulated(x, r)
        entries = device.backend.threshold(device.tensor(x), tau, None if r is None else device.tensor(r))
        expected = reference.threshold(reference.widened(acc), tau)
        same(entries, expected)
        if r is not None:
            same_residual(r, acc, expected[0])

    run()


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", data.DTYPES)
@pytest.mark.parametrize("kind", data.KINDS)
@pytest.mark.parametrize("density", [1e-5, 1e-3, 0.05, 0.7])
def test_topk_at_sizes_that_threads_share(device: Device, dtype: str, kind: str, density: float) -> None:
    n = {"threads": 1_000_003, "cuda": 20_011}.get(device.name, 150_001)
    x, k = data.gradient(kind, n, dtype), max(1, int(n * density))
    before = data.gradient("normal", n, dtype, seed=1)
    same(device.backend.topk(device.tensor(x), k, None), reference.topk(reference.widened(x), k))
    acc, r = accumulated(x, before), before.copy()
    expected = reference.topk(reference.widened(acc), k)
    same(device.backend.topk(device.tensor(x), k, device.tensor(r)), expected)
    same_residual(r, acc, expected[0])
    gradient = acc.copy()
    same(device.backend.take_topk(device.tensor(gradient), k), expected)
    same_residual(gradient, acc, expected[0])
    acc, r = accumulated(x, before, 0.95), before.copy()
    expected = reference.topk_by_chunk(reference.widened(acc), 64, 4096)
    same(device.backend.topk_by_chunk(device.tensor(x), 64, 4096, device.tensor(r), 0.95), expected)
    same_residual(r, acc, expected[0])


@with_types
def test_add_into(device: Device, dtype: str, residual_dtype: str | None) -> None:
    """The residual has the gradient's type, or a wider one."""
    for n in (0, 1, 7, 5000) if residual_dtype is not None else ():
        x, r = data.gradient("normal", n, dtype), data.gradient("normal", n, residual_dtype, 1)
        acc, before = accumulated(x, r), x.copy()
        device.backend.add_into(device.tensor(x), device.tensor(r))
        device.wait()
        assert data.same_bits(r, acc)
        assert data.same_bits(x, before)


@pytest.mark.parametrize("dtype", data.DTYPES)
@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_mixed(device: Device, dtype: str, weight: float) -> None:
    for n in (0, 1, 5000):
        x = data.gradient("normal", n, dtype)
        carried = reference.widened(x).dtype.type
        values = data.gradient("normal", n, carried.__name__, 1)
        expected = carried(weight) * reference.widened(x) + carried(1 - weight) * values
        np.testing.assert_array_equal(device.backend.mixed(device.tensor(x), device.array(values), weight), expected)
        written = device.tensor(x)
        device.backend.mix_into(written, device.array(values), weight)
        device.wait()
        assert data.same_bits(x, expected.astype(x.dtype))


@pytest.mark.parametrize("dtype", data.DTYPES)
def test_finite(device: Device, dtype: str) -> None:
    for n in (0, 1, 5, 4097):
        x = data.gradient("normal", n, dtype)
        if n:
            x[0] = np.finfo(np.float16).max if dtype == "float16" else 3e38  # large, and finite
        assert device.backend.finite(device.tensor(x))
        for position in {0, n // 2, n - 1} if n else ():
            for bad in (np.nan, -np.nan, np.inf, -np.inf):
                other = x.copy()
                other[position] = bad
                assert not device.backend.finite(device.tensor(other)), (n, position, bad)


def sampled_on_cpu(n: int, itemsize: int) -> np.ndarray:
    """Return the positions that `sample` of kernels/cpu/topk.cpp reads: 16 neighbours in each stratum."""
    lines = min(1 << 16, n // 16) // 16
    line, stride = np.arange(lines, dtype=np.uint64), np.uint64(n // lines)
    hashed, half = line * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(32), np.uint64(32)
    start = line * stride + (hashed * (stride - np.uint64(15)) >> half)
    return start.astype(np.int64)[:, None] + np.arange(16)


def sampled_on_cuda(n: int, itemsize: int) -> np.ndarray:
    """Return the positions that `sample` of kernels/cuda/topk.cu reads: 32 aligned bytes in each stratum."""
    sector, step, starts = 32 // itemsize, n // SAMPLE_SECTORS, []
    for i in range(SAMPLE_SECTORS):
        z = (i + 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        position = i * step + (z ^ z >> 31) % (step - sector + 1)
        starts.append(position - position % sector)
    return np.array(starts)[:, None] + np.arange(sector)


SAMPLE_SECTORS = 256


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", data.DTYPES)
@pytest.mark.parametrize("only_there", [True, False])
def test_a_misleading_sample_costs_time_only(device: Device, dtype: str, only_there: bool) -> None:
    """Large values are only in the sample (the threshold is too high), or only outside it (it is far too low)."""
    on_cuda = device.name == "cuda"
    if on_cuda:
        device = Emulated(sample_sectors=SAMPLE_SECTORS, filter_rounds=1)
    n, ks = (20_000, (40, 2600, 9000)) if on_cuda else (1 << 18, (30, 5000, 40_000))
    x, there, retried = data.gradient("normal", n, dtype), np.zeros(n, bool), 0
    there[(sampled_on_cuda if on_cuda else sampled_on_cpu)(n, x.itemsize)] = True
    x[there != only_there] *= 2.0**-10
    best = reference.order(reference.widened(x))
    for k in ks:
        expected, r = reference.select(reference.widened(x), best[:k]), np.zeros_like(x)
        same(device.backend.topk(device.tensor(x), k, None), expected)
        same(device.backend.topk(device.tensor(x), k, device.tensor(r)), expected)
        same_residual(r, x, expected[0])
        gradient = x.copy()
        same(device.backend.take_topk(device.tensor(gradient), k), expected)
        same_residual(gradient, x, expected[0])
        retried += int(selection_state(device.backend)["retry"][0]) if on_cuda else 1
    assert retried


def vectors(dtype: type, seed: int, n: int, nnz: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return indices and values of entries, none zero."""
    rng = np.random.default_rng(seed)
    indices = np.sort(rng.choice(n, min(nnz, n), replace=False)).astype(np.int32)
    values = data.gradient(kind, len(indices), "float32", seed).astype(dtype)
    values[values == 0] = 1
    return indices, reference.canonical(values)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_merge_and_reselect(device: Device, dtype: type) -> None:
    @check(device)
    @given(
        data.seeds,
        st.integers(1, 3000),
        st.integers(0, 500),
        st.integers(0, 500),
        st.integers(1, 1200),
        data.kinds,
        st.booleans(),
    )
    def run(seed: int, n: int, a_nnz: int, b_nnz: int, k: int, kind: str, cancel: bool) -> None:
        a = vectors(dtype, seed, n, a_nnz, kind)
        b = (a[0][::2], -a[1][::2]) if cancel else vectors(dtype, seed + 1, n, b_nnz, kind)
        b = (b[0], reference.canonical(b[1]))
        left, right = SparseVector(*a, n), SparseVector(*b, n)
        same(device.backend.merge(left, right), reference.merge(a, b))
        expected, rejected = reference.merge_topk(a, b, k)
        out = device.backend.merge_topk(left, right, k)
        same(out[0], expected)
        same(out[1], rejected)
        assert device.backend.well_formed(out[0])

    run()


def test_indices_of_64_bits(device: Device) -> None:
    n = 2**31 + 10
    a = np.array([3, 2**31 - 1, 2**31 + 5]), np.array([1.0, 2.0, 3.0], np.float32)
    b = np.array([3, 2**31 + 4, 2**31 + 5]), np.array([4.0, -6.0, 0.5], np.float32)
    left, right = SparseVector(*a, n), SparseVector(*b, n)
    for result, expected in zip(device.backend.merge_topk(left, right, 2), reference.merge_topk(a, b, 2), strict=True):
        same(result, expected)
    same(device.backend.merge(left, right), reference.merge(a, b))
    low, high = device.backend.split_at_indices(left, [0, 2**31 - 1, n])
    assert (low.indices.tolist(), high.indices.tolist()) == ([3], [0, 6])
    assert high.indices.dtype == np.int32


@pytest.mark.parametrize("dtype", data.DTYPES)
@pytest.mark.parametrize("int64_indices", [False, True])
def test_scattering(device: Device, dtype: str, int64_indices: bool) -> None:
    """Scatter all entries, or only entries at indices that another vector has, or does not have."""
    counts = st.one_of(st.integers(0, 3), st.integers(0, 40), st.integers(200, 2500))

    @check(device)
    @given(
        data.seeds, st.integers(1, 4000), counts, counts, st.sampled_from(["any", "same", "disjoint"]), st.booleans()
    )
    def run(seed: int, n: int, nnz: int, other_nnz: int, common: str, present: bool) -> None:
        rng, size = np.random.default_rng(seed), n + (2**31 if int64_indices else 0)
        kind = "NaN and infinities" if seed % 3 == 0 else "normal"
        indices, values = vectors(reference.ACCUMULATOR[dtype], seed, n, nnz, kind)
        if common == "same":
            others = indices
        else:
            free = np.setdiff1d(np.arange(n), indices) if common == "disjoint" else np.arange(n)
            others = np.sort(rng.choice(free, min(other_nnz, len(free)), replace=False))
        if int64_indices:
            others = np.append(others, n + 2**30)  # beyond the entries, and within the size
        entries = SparseVector(indices, values, size)
        among = SparseVector(others, np.full(len(others), np.nan, values.dtype), size)
        before = data.gradient(kind, n, dtype, seed + 1)
        for everywhere in (False, True):
            chosen = (np.isin(indices, others) == present) | everywhere
            dense, expected, at = before.copy(), before.copy(), indices[chosen]
            with np.errstate(invalid="ignore"):
                total = reference.widened(before)[at] + values[chosen]
            expected[at] = reference.canonical(total.astype(dense.dtype))
            if everywhere:
                device.backend.scatter_add(device.tensor(dense), entries)
            else:
                device.backend.scatter_add_where(device.tensor(dense), entries, among, present)
            device.wait()
            assert data.same_bits(dense, expected)
        if not int64_indices:
            device.backend.densify(device.tensor(dense), entries)
            device.wait()
            assert data.same_bits(dense, reference.dense((indices, values), n).astype(dense.dtype))

    run()


@pytest.mark.parametrize("dtype", data.DTYPES)
@pytest.mark.parametrize("kind", ["normal", "denormals", "huge range", "NaN and infinities"])
def test_dense_arithmetic(device: Device, dtype: str, kind: str) -> None:
    n = 3001
    x, r = data.gradient(kind, n, dtype, 1), data.gradient(kind, n, dtype, 2)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(device.backend.accumulate(device.tensor(x), None), reference.widened(x))
        total = device.backend.accumulate(device.tensor(x), device.tensor(r))
        np.testing.assert_array_equal(total, reference.widened(accumulated(x, r)))
        wider = data.gradient(kind, n, "float32", 3)
        if x.dtype.itemsize == 2:
            both = device.backend.accumulate(device.tensor(x), device.tensor(wider))
            np.testing.assert_array_equal(both, wider + reference.widened(x))
        addend = np.array(total)[::-1].copy()
        expected = np.array(total) + addend
        device.backend.add(total, device.array(addend))
        np.testing.assert_array_equal(total, expected)
        device.backend.cast_into(total, device.tensor(x))
        device.wait()
        np.testing.assert_array_equal(reference.widened(x), reference.widened(np.array(total).astype(x.dtype)))
        device.backend.cast_into(None, device.tensor(x))
        device.wait()
        assert not np.any(x)
        same(device.backend.nonzeros(total, (n,)), reference.threshold(np.array(total), 0.0))


def test_well_formed(device: Device) -> None:
    def entries(indices: list[int], values: list[float]) -> SparseVector:
        return SparseVector.trusted(np.array(indices, np.int32), np.array(values, np.float32), 10, (10,))

    assert device.backend.well_formed(entries([], []))
    assert device.backend.well_formed(entries([0, 9], [1, np.nan]))
    for bad in (([0, 0], [1, 1]), ([3, 2], [1, 1]), ([-1, 2], [1, 1]), ([2, 10], [1, 1]), ([2, 3], [0, 1])):
        assert not device.backend.well_formed(entries(*bad)), bad
    for begin, end, good in ((2, 6, True), (0, 10, True), (3, 6, False), (2, 5, False), (4, 4, False)):
        assert device.backend.well_formed(entries([2, 3, 5], [1, 1, 1]), begin, end) == good
    assert device.backend.well_formed(entries([], []), 4, 4)


@pytest.mark.slow
def test_more_elements_than_31_bits_count() -> None:
    """Most pages are untouched zeros, so the 4 GiB of address space take little memory."""
    n = 2**31 + 1000
    x = np.zeros(n, np.float16)
    indices = np.array([0, 7, 2**20, 2**31 - 2, 2**31 - 1, 2**31, n - 1])
    x[indices] = [1, -5, 3, 2, 4, -4, 6]
    tensor = interop.tensor(x, "x")
    entries = CpuBackend(2).topk(tensor, 4, None)
    assert entries.indices.dtype == np.int64
    assert entries.indices.tolist() == [7, 2**31 - 1, 2**31, n - 1]
    assert entries.values.tolist() == [-5, 4, -4, 6]
    assert CpuBackend(1).threshold(tensor, 2, None).indices.tolist() == [7, 2**20, *indices[3:]]
    assert CpuBackend(1).topk(tensor, 10, None).nnz == 7
