"""AdamW on some weights: quotients into residuals, and as many steps at each entry as it waited for."""

from __future__ import annotations

import numpy as np
import pytest

from sparsecomm.backends.adamw import Moments
from tests import data, reference
from tests.backends.devices import Device

EPS = 1e-8


def carried_by(dtype: str) -> type[np.floating]:
    return reference.widened(np.zeros(1, data.DTYPES[dtype])).dtype.type


def power_of_two(x: np.ndarray) -> np.ndarray:
    """Round down to a power of two."""
    return np.ldexp(np.ones_like(x), np.frexp(x)[1] - 1)


def magnitudes(n: int, real: type[np.floating], seed: int) -> np.ndarray:
    """Squares of sizes from 1e-6 to 1e6, and zeros among them."""
    rng = np.random.default_rng(seed)
    found = (10.0 ** rng.uniform(-12, 12, n)).astype(real)
    found[rng.random(n) < 0.05] = 0
    return found


@pytest.mark.parametrize("dtype", data.DTYPES)
@pytest.mark.parametrize("if_finite", [False, True])
def test_add_quotient(device: Device, dtype: str, if_finite: bool) -> None:
    """Each operation is rounded; where a quotient is not finite all of it is added, or nothing."""
    real = carried_by(dtype)
    for n, scale in ((0, 1.0), (1, 0.5), (5000, 1.0), (70_001, 1 / 3)):
        x, r = data.gradient("normal", n, dtype), data.gradient("normal", n, real.__name__, 1)
        squares = magnitudes(n, real, n)
        for bad in (None, np.nan, np.inf, "overflow") if n else (None,):
            if bad == "overflow":
                x[n // 3], squares[n // 3] = (6e4 if dtype == "float16" else 3e38), 0
            elif bad is not None:
                x[n // 3] = bad
            eps = 1e-300 if real is np.float64 and bad == "overflow" else 1e-34 if bad == "overflow" else EPS
            with np.errstate(all="ignore"):
                quotient = real(scale) * reference.widened(x) / power_of_two(np.sqrt(squares) + real(eps))
                expected = r + quotient
            added = not if_finite or bool(np.isfinite(quotient).all())
            assert added or bad is not None
            kept, before = r.copy(), x.copy()
            with np.errstate(all="ignore"):
                arguments = device.tensor(x), device.array(squares), eps, scale, device.tensor(kept), if_finite
                assert device.backend.add_quotient(*arguments) is added
            device.wait()
            np.testing.assert_array_equal(kept, expected if added else r)
            assert data.same_bits(x, before)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", data.DTYPES)
@pytest.mark.parametrize("density", [0.0, 0.01, 0.3, 1.0, "dense"])
def test_adamw(device: Device, dtype: str, density: float | str) -> None:
    """Against the rule, weight by weight; weights without an entry do not change. A dense sum updates all weights."""
    real, rng = carried_by(dtype), np.random.default_rng(3)
    unit_eps, eps = real(EPS), real(EPS / 3)
    for n, step, rows in ((1, 1, 2), (700, 5, 6), (3001, 40, 16), (3001, 2**31 - 1, 3)):
        chosen = np.flatnonzero(rng.random(n) < (1 if density == "dense" else density)).astype(np.int32)
        values = rng.standard_normal(len(chosen)).astype(real)
        if density == "dense":
            values[rng.random(n) < 0.2] = 0
        weights = data.gradient("normal", n, dtype, 4)
        mean, squares = data.gradient("normal", n, real.__name__, 5), magnitudes(n, real, 6)
        last = rng.integers(max(0, step - 30), step, n).astype(np.int32)
        last[rng.random(n) < 0.1] = 0
        mean[(last == 0) & (rng.random(n) < 0.5)] = 0  # not updated yet
        table, residual = rng.random((rows, 6)).astype(real), data.gradient("normal", n, real.__name__, 8)

        wanted = weights.copy(), residual.copy(), mean.copy(), squares.copy(), last.copy()
        for i, value in zip(chosen, values, strict=True):
            kept_mean, new_mean, kept_squares, new_squares, rate, decay = table[min(step - last[i], rows - 1)]
            unit = power_of_two(np.sqrt(squares[i]) + unit_eps)
            g = value * unit
            m = kept_mean * mean[i] + new_mean * g
            v = kept_squares * (squares[i] if last[i] or mean[i] else real(0)) + new_squares * (g * g)
            w = reference.widened(weights[i : i + 1])[0]
            change = (decay * w - rate * (m / (np.sqrt(v) + eps))) - w
            with np.errstate(over="ignore"):
                wanted[0][i], wanted[1][i] = w + change, residual[i] * (unit / power_of_two(np.sqrt(v) + unit_eps))
                wanted[2][i], wanted[3][i], wanted[4][i] = m, v, step

        moments = Moments(*(device.array(each) for each in (mean, squares, last)))
        waiting = device.array(residual)
        if density == "dense":
            means = device.backend.nonzeros(device.array(values), (n,))
        else:
            means = device.entries(chosen, values, n)
        device.backend.adamw(device.tensor(weights), moments, waiting, means, table, unit_eps, eps, step)
        device.wait()
        found = weights, *(np.asarray(each) for each in (waiting, *moments))
        for theirs, ours in zip(found, wanted, strict=True):
            assert data.same_bits(theirs, ours)
