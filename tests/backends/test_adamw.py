"""AdamW on some weights: quotients into residuals, and as many steps at each entry as it waited for."""

from __future__ import annotations

import numpy as np
import pytest

from sparsecomm.backends.adamw import Moments, unit_dtype, unit_exponents, units
from tests import data, reference
from tests.backends.devices import Device

EPS = 1e-8


def carried_by(dtype: str) -> type[np.floating]:
    return reference.widened(np.zeros(1, data.DTYPES[dtype])).dtype.type


def bias(real: type[np.floating]) -> int:
    return np.finfo(real).maxexp - 1


def exponents_of(n: int, real: type[np.floating], seed: int) -> np.ndarray:
    """Exponents of units from 2^-20 to 2^20."""
    return (np.random.default_rng(seed).integers(-20, 21, n) + bias(real)).astype(unit_dtype(real))


def powers(exponents: np.ndarray, real: type[np.floating]) -> np.ndarray:
    return np.ldexp(real(1), exponents.astype(np.int64) - bias(real))


@pytest.mark.parametrize("real", [np.float32, np.float64])
def test_units_are_powers_of_two(real: type[np.floating]) -> None:
    """The largest that are at most sqrt(v) + eps, from the smallest normal number to the largest."""
    finfo = np.finfo(real)
    squares = np.concatenate([10.0 ** np.arange(-30, 30), [0, finfo.max, finfo.tiny]]).astype(real)
    for eps in (real(EPS), finfo.tiny, real(1)):
        root, exponents = np.sqrt(squares) + eps, unit_exponents(np, squares, eps)
        assert exponents.dtype == (np.uint16 if real is np.float64 else np.uint8)
        assert data.same_bits(units(exponents, real), np.ldexp(np.ones_like(root), np.frexp(root)[1] - 1))
        assert data.same_bits(units(exponents, real), powers(exponents, real))


@pytest.mark.parametrize("dtype", data.DTYPES)
@pytest.mark.parametrize("if_finite", [False, True])
def test_add_quotient(device: Device, dtype: str, if_finite: bool) -> None:
    """Each operation is rounded; where a quotient is not finite all of it is added, or nothing."""
    real = carried_by(dtype)
    for n, scale in ((0, 1.0), (1, 0.5), (5000, 1.0), (70_001, 1 / 3)):
        x, r = data.gradient("normal", n, dtype), data.gradient("normal", n, real.__name__, 1)
        exponents = exponents_of(n, real, n)
        for bad in (None, np.nan, np.inf, "overflow") if n else (None,):
            if bad == "overflow":
                x[n // 3], exponents[n // 3] = (6e4 if dtype == "float16" else 3e38), 1
            elif bad is not None:
                x[n // 3] = bad
            with np.errstate(all="ignore"):
                quotient = real(scale) * reference.widened(x) / powers(exponents, real)
                expected = r + quotient
            added = not if_finite or bool(np.isfinite(quotient).all())
            assert added or bad is not None
            kept, before = r.copy(), x.copy()
            with np.errstate(all="ignore"):
                arguments = device.tensor(x), device.array(exponents), scale, device.tensor(kept), if_finite
                assert device.backend.add_quotient(*arguments) is added
            device.wait()
            np.testing.assert_array_equal(kept, expected if added else r)
            assert data.same_bits(x, before)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", data.DTYPES)
@pytest.mark.parametrize("density", [0.0, 0.01, 0.3, 1.0, "dense"])
def test_adamw(device: Device, dtype: str, density: float | str) -> None:
    """Against the rule, weight by weight. A dense sum has an entry for all weights. No argument changes."""
    real, rng, eps = carried_by(dtype), np.random.default_rng(3), carried_by(dtype)(EPS / 3)
    for n, step, rows in ((1, 1, 2), (700, 5, 6), (3001, 40, 16), (3001, 2**31 - 1, 3)):
        chosen = np.flatnonzero(rng.random(n) < (1 if density == "dense" else density)).astype(np.int32)
        values = rng.standard_normal(len(chosen)).astype(real)
        if density == "dense":
            values[rng.random(n) < 0.2] = 0
        weights = data.gradient("normal", n, dtype, 4)
        mean, exponents = data.gradient("normal", n, real.__name__, 5), exponents_of(n, real, 7)
        squares = np.square(powers(exponents_of(n, real, 6), real) * real(1.3))
        squares[rng.random(n) < 0.05] = 0
        last = rng.integers(max(0, step - 30), step, n).astype(np.int32)
        last[rng.random(n) < 0.1] = 0
        table = rng.random((rows, 6)).astype(real)
        lost = None if n == 700 else data.gradient("normal", n, real.__name__, 8) * real(0.01)

        wanted = np.empty((3, len(chosen)), real)
        for j, (i, value) in enumerate(zip(chosen, values, strict=True)):
            kept_mean, new_mean, kept_squares, new_squares, rate, decay = table[min(step - last[i], rows - 1)]
            g = value * powers(exponents[i], real)
            m = kept_mean * mean[i] + new_mean * g
            v = kept_squares * squares[i] + new_squares * (g * g)
            w = reference.widened(weights[i : i + 1])[0]
            w = w if lost is None else w + lost[i]
            wanted[:, j] = decay * w - rate * (m / (np.sqrt(v) + eps)), m, v

        arrays = weights, mean, squares, last, exponents
        before = [array.copy() for array in arrays]
        kept = None if lost is None else device.array(lost)
        moments = Moments(device.array(mean), device.array(squares), device.array(last), kept)
        if density == "dense":
            means = device.backend.nonzeros(device.array(values), (n,))
        else:
            means = device.entries(chosen, values, n)
        found = device.backend.adamw(device.tensor(weights), moments, device.array(exponents), means, table, eps, step)
        device.wait()
        for theirs, ours in zip((*found, *arrays), (*wanted, *before), strict=True):
            assert data.same_bits(np.asarray(theirs), ours)


@pytest.mark.parametrize("dtype", data.DTYPES)
def test_put_and_values_of(device: Device, dtype: str) -> None:
    """Some elements of a tensor or all, rounded to nearest even to its dtype."""
    real, n = carried_by(dtype), 1000
    index = np.flatnonzero(np.random.default_rng(1).random(n) < 0.3)
    for where in (slice(None), device.array(index)):
        x, values = data.gradient("normal", n, dtype, 2), data.gradient("normal", n, real.__name__, 3)
        values[:3] = np.inf, 1 + 2.0**-9, 1e-30
        at = where if isinstance(where, slice) else index
        expected, new = x.copy(), values[at]
        with np.errstate(over="ignore"):
            expected[at] = new.astype(expected.dtype)
        device.backend.put(device.tensor(x), where, device.array(new))
        device.wait()
        assert data.same_bits(x, expected)
        found = device.backend.values_of(device.tensor(x), where)
        device.wait()
        assert data.same_bits(np.asarray(found), reference.widened(expected)[at])
