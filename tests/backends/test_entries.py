"""Operations of algorithms on entries, on every device, against plain NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
