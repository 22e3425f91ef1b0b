"""AdamW on some weights: quotients into residuals, and as many steps at each entry as it waited for."""

from __future__ import annotations

import numpy as np
import pytest

from sparsecomm.backends.adamw import MAX_JUMP, OVERFLOWS, Moments, unit_dtype, unit_exponents, units
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


def same(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether two arrays have the same bits, except those of NaN."""
    return data.same_bits(
        np.where(np.isnan(x), x.dtype.type(0), x), np.where(np.isnan(y), y.dtype.type(0), y)
    ) and bool(np.array_equal(np.isnan(x), np.isnan(y)))


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
    """Against the rule, weight by weight. `adamw` changes no argument, and `store_adamw` only weights with an entry.

    A dense sum has an entry for all weights. Some weights and moments overflow, or are not finite from the beginning.
    """
    real, rng, backend = carried_by(dtype), np.random.default_rng(3), device.backend
    unit_eps, eps, largest = real(EPS), real(EPS / 3), np.finfo(real).max
    huge = {"float16": 65504, "float64": largest}.get(dtype, 3.38e38)
    for n, step, rows in ((1, 1, 2), (700, 5, 6), (3001, 40, 16), (3001, 2**31 - 1, 3)):
        chosen = np.flatnonzero(rng.random(n) < (1 if density == "dense" else density)).astype(np.int32)
        values = rng.standard_normal(len(chosen)).astype(real)
        if density == "dense":
            values[rng.random(n) < 0.2] = 0
        x, margin, with_changes, write = data.gradient("normal", n, dtype, 4), 4 * (n % 2), step < 9, step != 40
        mean, exponents = data.gradient("normal", n, real.__name__, 5), exponents_of(n, real, 7)
        squares = np.square(powers(exponents_of(n, real, 6), real) * real(1.3))
        for array, value in ((squares, 0), (squares, largest), (mean, np.inf), (x, np.inf), (x, huge)):
            array[rng.random(n) < 0.05] = value
        last = rng.integers(max(0, step - 30), step, n).astype(np.int32)
        last[rng.random(n) < 0.1] = 0
        table = rng.random((rows, 6)).astype(real) * real(1.1)
        lost = None if n == 700 else data.gradient("normal", n, real.__name__, 8) * real(0.01)

        rule, wanted = table[np.minimum(step - last, rows - 1)][chosen], [each[chosen] for each in (mean, squares)]
        unit, before = powers(exponents, real)[chosen], reference.widened(x)[chosen]
        with np.errstate(all="ignore"):
            g = values * unit
            m, v = rule[:, 0] * wanted[0] + rule[:, 1] * g, rule[:, 2] * wanted[1] + rule[:, 3] * (g * g)
            w = rule[:, 5] * (before if lost is None else before + lost[chosen]) - rule[:, 4] * (m / (np.sqrt(v) + eps))
            change, root = w - before, np.sqrt(v) + unit_eps
            up, down = (np.frexp(root * real(each))[1] - np.frexp(unit)[1] for each in (0.75, 1.5))
            jumps = np.clip(np.where(up > 0, up, np.minimum(down, 0)), -MAX_JUMP, MAX_JUMP).astype(np.int8)
            limit = device.tensor(x).dtype.rounds_to_infinity
            fits = (abs(w) + real(margin) * abs(change) < limit) | ~np.isfinite(before)
            jumps[~(np.isfinite(m) & np.isfinite(v) & fits)] = OVERFLOWS

        arrays = x, mean, squares, last, exponents
        kept = None if lost is None else lost.copy()
        theirs = [None if each is None else device.array(each) for each in (mean, squares, last, kept)]
        if density == "dense":
            means = backend.nonzeros(device.array(values), (n,))
        else:
            means = device.entries(chosen, values, n)
        copies = [array.copy() for array in arrays]
        moments, to = Moments(*theirs), device.tensor(x)
        found = backend.adamw(
            to, moments, device.array(exponents), means, table, unit_eps, eps, step, with_changes, margin
        )
        device.wait()
        for ours, theirs in zip((w, m, v, change if with_changes else None, jumps), found[:-1], strict=True):
            assert (ours is None and theirs is None) or same(np.asarray(theirs), ours)
        assert found.overflows == (jumps == OVERFLOWS).sum()
        assert all(data.same_bits(array, copied) for array, copied in zip(arrays, copies, strict=True))

        units = device.array(exponents) if with_changes else None
        backend.store_adamw(to, moments, units, means, found, step, write)
        device.wait()
        if units is not None:
            moved = copies[4][chosen] + np.where(change != 0, jumps, 0).astype(np.int64)
            copies[4][chosen] = np.clip(moved, 1, 2 * bias(real))
            assert data.same_bits(np.asarray(units), copies[4])
        with np.errstate(all="ignore"):
            copies[0][chosen] = w.astype(x.dtype) if write else x[chosen]
            rest = w - reference.widened(copies[0])[chosen]
        for array, new in zip(copies[1:4], (m, v, step), strict=True):
            array[chosen] = new
        if lost is not None:
            lost[chosen] = np.where(np.isfinite(rest), rest, 0)
            assert same(np.asarray(moments.compensation), lost)
        for ours, theirs in zip(copies[:4], (x, *moments[:3]), strict=True):
            assert same(np.asarray(theirs), ours)


@pytest.mark.parametrize("real", [np.float32, np.float64])
def test_change_units(device: Device, real: type[np.floating]) -> None:
    """Residuals keep their values, if they do not overflow. Changes are rounded, and exponents stay valid."""
    rng, largest = np.random.default_rng(2), np.finfo(real).max
    for n in (1, 5000):
        index = np.flatnonzero(rng.random(n) < 0.4).astype(np.int32)
        changes = rng.choice([-1.8, -0.996, 0.3, 1.494, 4, 5.6], len(index)).astype(real)
        exponents, r = exponents_of(n, real, 5), data.gradient("normal", n, real.__name__, 6)
        exponents[rng.random(n) < 0.1] = 1
        exponents[rng.random(n) < 0.1] = 2 * bias(real)
        for value in (0, largest, -largest, np.finfo(real).tiny):
            r[rng.random(n) < 0.1] = value
        expected = r.copy(), exponents.copy()
        jumps = np.clip(np.rint(changes), -MAX_JUMP, MAX_JUMP).astype(np.int64)
        new = np.clip(exponents[index] + jumps, 1, 2 * bias(real))
        with np.errstate(over="ignore"):
            converted = np.ldexp(r[index], exponents[index] - new)
        expected[0][index], expected[1][index] = np.clip(converted, -largest, largest), new
        units = device.array(exponents)
        device.backend.change_units(device.tensor(r), units, device.entries(index, changes, n))
        device.wait()
        assert data.same_bits(r, expected[0])
        assert data.same_bits(np.asarray(units), expected[1])


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
