"""Operations of algorithms on entries, on every device, against plain NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsecomm.backends import keys as selection_keys
from sparsecomm.tensors.dtypes import BFLOAT16, FLOAT16, DType
from sparsecomm.tensors.kinds import KINDS, ValueKind
from sparsecomm.tensors.sparse import SparseVector
from tests import data, reference
from tests.backends.devices import Device, same

check = settings(max_examples=40)
lengths = st.sampled_from([0, 1, 2, 5, 64, 65, 300])
pytestmark = pytest.mark.parametrize("device", ["portable", "cuda"], indirect=True)


def put(device: Device, entries: SparseVector) -> SparseVector:
    return device.entries(entries.indices, entries.values, entries.size)


def vector(nnz: int, seed: int, *, kind: str = "normal", float64_values: bool = False) -> SparseVector:
    indices = np.sort(np.random.default_rng(seed).choice(1000, nnz, replace=False)).astype(np.int32)
    values = data.gradient(kind, nnz, "float64" if float64_values else "float32", seed)
    values[values == 0] = 1
    return SparseVector.trusted(indices, values, 1000, (1000,))


def key(value: float, float64_values: bool) -> int:
    """Return the key that orders magnitudes: the bits without the sign, and for NaN one more than infinity."""
    float_, unsigned = (np.float64, np.uint64) if float64_values else (np.float32, np.uint32)
    bits = np.abs(np.array(value, float_)).view(unsigned)
    infinity = (0x7FF << 52) if float64_values else (0xFF << 23)
    return infinity + 1 if np.isnan(value) else int(bits)


def order(v: SparseVector, float64_values: bool) -> list[int]:
    return sorted((key(x, float64_values) for x in v.values), reverse=True)


@pytest.mark.parametrize("float64_values", [False, True])
@pytest.mark.parametrize("kind", ["normal", "few values", "all equal", "NaN and infinities", "denormals"])
def test_sums_and_means_of_contributors(device: Device, float64_values: bool, kind: str) -> None:
    backend, n = device.backend, 1000

    @check
    @given(st.lists(lengths, min_size=1, max_size=9), data.seeds, st.booleans())
    def run(sizes: list[int], seed: int, opposite: bool) -> None:
        vectors = [vector(nnz, seed + i, kind=kind, float64_values=float64_values) for i, nnz in enumerate(sizes)]
        if opposite:  # the first two cancel, and still count as contributors
            first = vectors[0]
            vectors.insert(1, SparseVector.trusted(first.indices, reference.canonical(-first.values), n, (n,)))
        counts, sums = np.zeros(n, vectors[0].values.dtype), []
        for v in vectors:
            counts[v.indices] += 1
            sums.append(np.zeros(n, v.values.dtype))
            sums[-1][v.indices] = v.values
        with np.errstate(invalid="ignore", over="ignore"):
            while len(sums) > 1:
                odd = sums[len(sums) // 2 * 2 :]
                sums = [reference.canonical(a + b) for a, b in zip(sums[::2], sums[1::2], strict=False)] + odd
        expected = sums[0]
        total, counted = backend.sum_and_count([put(device, v) for v in vectors])
        same(total, (np.flatnonzero(expected), expected[expected != 0]))
        same(counted, (np.flatnonzero(expected), counts[expected != 0]))
        means = reference.canonical(np.divide(expected, counts, out=np.zeros_like(expected), where=expected != 0))
        same(backend.means(total, counted.values), (np.flatnonzero(means), means[means != 0]))

    run()


@pytest.mark.parametrize("float64_values", [False, True])
@pytest.mark.parametrize("kind", ["normal", "few values", "NaN and infinities", "huge range", "denormals"])
def test_keys(device: Device, float64_values: bool, kind: str) -> None:
    backend = device.backend

    @check
    @given(lengths, data.seeds, st.integers(1, 310), st.sampled_from([1, 3, 2**16, 2**30, 2**62]))
    def run(nnz: int, seed: int, nth: int, above: int) -> None:
        v = vector(nnz, seed, kind=kind, float64_values=float64_values)
        keys, there = order(v, float64_values), put(device, v)
        largest_few = [n for n in (1, nth, nth, nnz) if 1 <= n <= nnz]
        assert selection_keys.nth_keys(there, largest_few) == [keys[n - 1] for n in largest_few]
        low = keys[nnz // 2] if nnz else 5
        own_keys = np.array([key(x, float64_values) for x in v.values], np.uint64)
        near, sure = own_keys >= low, own_keys >= low + above
        for high, expected in ((None, np.zeros(nnz, bool)), (low + above, sure)):
            largest, others = selection_keys.split_by_key(there, low, high)
            same(largest, (v.indices[expected], v.values[expected]))
            same(others, (v.indices[near & ~expected], v.values[near & ~expected]))
            assert selection_keys.keys_of(backend.values_at(there, others)) == own_keys[near & ~expected].tolist()
        assert selection_keys.scaled_key(there, low, [0], keys[:1]) == low
        assert selection_keys.scaled_key(there, low, keys[:1], [0]) == low
        one, two = (key(np.float64(x) if float64_values else np.float32(x), float64_values) for x in (1, 2))
        assert selection_keys.scaled_key(there, one, [one, one], [two, two]) == two
        assert selection_keys.scaled_key(there, two, [two], [one]) == one
        for above in (2**63, 2**64, 2**70):  # a bound that nothing reaches
            assert selection_keys.scaled_key(there, above, [one], [two]) == above
        for number in largest_few[1:2]:
            first = sorted(range(nnz), key=lambda i: -int(own_keys[i]))[:number]  # ties go to the lower index
            chosen, chosen_keys = selection_keys.largest_keys(own_keys.tolist(), number, [1, nnz, number])
            assert (chosen.tolist(), chosen_keys) == (sorted(first), [keys[0], keys[-1], keys[number - 1]])
        positions = list(range(0, nnz, 3))
        same(backend.entries_at(there, positions), (v.indices[positions], v.values[positions]))

    run()


@pytest.mark.parametrize("kind", KINDS[1:], ids=lambda kind: kind.name)
@pytest.mark.parametrize("values", ["normal", "NaN and infinities", "huge range", "denormals"])
def test_rounded_values_and_errors_add_up(device: Device, kind: ValueKind, values: str) -> None:
    backend = device.backend

    @check
    @given(lengths, data.seeds)
    def run(nnz: int, seed: int) -> None:
        v = vector(nnz, seed, kind=values)
        narrow, lost = backend.quantize(put(device, v), kind)
        again, nothing = backend.quantize(narrow, kind)
        same(again, (narrow.indices, narrow.values))
        assert not np.asarray(nothing.values).any()
        assert not (np.asarray(narrow.values) == 0).any()
        same(lost, (v.indices, lost.values))
        exact, restored = np.zeros(v.size, np.float64), np.zeros(v.size, np.float64)
        exact[v.indices] = v.values
        restored[np.array(narrow.indices)] = narrow.values
        restored[np.array(lost.indices)] += np.array(lost.values)
        finite = np.isfinite(exact)
        error = np.abs(restored[finite] - exact[finite])
        arrived = np.zeros(v.size, np.float64)  # few bits may round a value up
        arrived[np.array(narrow.indices)] = narrow.values if kind.planes else 0
        assert np.all(error <= 1e-45 + 3e-7 * np.maximum(np.abs(exact), np.abs(arrived))[finite])
        assert np.isnan(restored[np.isnan(exact)]).all()
        assert not np.isfinite(restored[np.isinf(exact)]).any()

    run()


@pytest.mark.parametrize("dtype", data.DTYPES)
def test_clear(device: Device, dtype: str) -> None:
    @check
    @given(lengths, data.seeds)
    def run(nnz: int, seed: int) -> None:
        v, dense = vector(nnz, seed), data.gradient("NaN and infinities", 1000, dtype, seed)
        expected = dense.copy()
        expected[v.indices] = 0
        device.backend.clear(device.tensor(dense), put(device, v))
        device.wait()
        assert data.same_bits(dense, expected)

    run()


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16])
@pytest.mark.parametrize("kind", ["normal", "NaN and infinities", "huge range", "denormals"])
def test_rounded_sums(device: Device, kind: str, dtype: DType, dense: bool) -> None:
    """Sums are rounded to the dtype, and zeros are dropped."""
    v = vector(300, 7, kind=kind)
    total = np.zeros(1000, np.float32)
    total[v.indices] = v.values
    with np.errstate(over="ignore", invalid="ignore"):
        expected = reference.canonical(total.astype(data.DTYPES[dtype.name]).astype(np.float32))
    entries = device.backend.nonzeros(device.array(total), (1000,)) if dense else put(device, v)
    result = device.backend.rounded(entries, dtype)
    device.wait()
    same(result, (np.flatnonzero(expected), expected[expected != 0]))
