"""AdamW on some weights: the missed steps of each entry are made up for, and units change."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from sparsecomm.backends.adamw import MAX_JUMP, OVERFLOWS, AdamWPart, Moments, unit_dtype, unit_exponents, units
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
    """Return whether two arrays have the same bits, except the bits of NaN."""
    return data.same_bits(
        np.where(np.isnan(x), x.dtype.type(0), x), np.where(np.isnan(y), y.dtype.type(0), y)
    ) and bool(np.array_equal(np.isnan(x), np.isnan(y)))


def powers(exponents: np.ndarray, real: type[np.floating]) -> np.ndarray:
    return np.ldexp(real(1), exponents.astype(np.int64) - bias(real))


@pytest.mark.parametrize("real", [np.float32, np.float64])
def test_units_are_powers_of_two(real: type[np.floating]) -> None:
    """A unit is the largest power of two that is at most sqrt(v) + eps and is a normal number."""
    finfo = np.finfo(real)
    squares = np.concatenate([10.0 ** np.arange(-30, 30), [0, finfo.max, finfo.tiny]]).astype(real)
    for eps in (real(EPS), finfo.tiny, real(1)):
        root, exponents = np.sqrt(squares) + eps, unit_exponents(np, squares, eps)
        assert exponents.dtype == (np.uint16 if real is np.float64 else np.uint8)
        assert data.same_bits(units(exponents, real), np.ldexp(np.ones_like(root), np.frexp(root)[1] - 1))
        assert data.same_bits(units(exponents, real), powers(exponents, real))


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", data.DTYPES)
@pytest.mark.parametrize("density", [0.0, 0.01, 0.3, 1.0, "dense"])
@pytest.mark.parametrize("number", [1, 3])
def test_adamw(device: Device, dtype: str, density: float | str, number: int) -> None:
    """Compare with the rule, weight by weight, for one or several parts of a bucket.

    `adamw` changes no argument; `store_adamw` changes only weights with an entry. A dense sum has an entry for every
    weight and is overwritten with the new weights. Some weights and moments overflow or start out not finite.
    """
    real, rng, backend, dense = carried_by(dtype), np.random.default_rng(3), device.backend, density == "dense"
    unit_eps, largest = real(EPS), np.finfo(real).max
    for n, step, rows in ((1, 1, 2), (700, 5, 6), (3001, 40, 16), (3001, 2**31 - 1, 3)):
        before_all, bounds = 50, [n * i // number for i in range(number + 1)]  # elements of the bucket before the parts
        chosen = np.flatnonzero(rng.random(n) < (1 if dense else density)).astype(np.int32)
        values = rng.standard_normal(len(chosen)).astype(real)
        margin, keep_changes, write = 0 if dense else 4 * (n % 2), step < 9, step != 40
        exponents = exponents_of(before_all + n, real, 7)
        x, mean = data.gradient("normal", n, dtype, 4), data.gradient("normal", n, real.__name__, 5)
        squares = np.square(powers(exponents_of(n, real, 6), real) * real(1.3))
        huge = {"float16": 65504, "float64": largest}.get(dtype, 3.38e38)
        if dense:
            values[rng.random(n) < 0.2] = 0
        for array, value in ((squares, 0), (squares, largest), (mean, np.inf), (x, np.inf), (x, huge)):
            array[rng.random(n) < 0.05] = value
        last = rng.integers(max(0, step - 30), step, n).astype(np.int32)
        last[rng.random(n) < 0.1] = 0
        lost = None if n == 700 else data.gradient("normal", n, real.__name__, 8) * real(0.01)
        tables = [rng.random((rows + i, 6)).astype(real) * real(1.1) for i in range(number)]
        epsilons = [real(EPS / (3 + i)) for i in range(number)]
        part_of = np.searchsorted(bounds, np.arange(n), "right") - 1

        passed = [min(step - int(last[i]), len(tables[part_of[i]]) - 1) for i in chosen]
        rule = np.array([tables[part_of[i]][wait] for i, wait in zip(chosen, passed, strict=True)], real).reshape(-1, 6)
        eps = np.array([epsilons[part_of[i]] for i in chosen], real)
        unit, before = powers(exponents[before_all:], real)[chosen], reference.widened(x)[chosen]
        with np.errstate(all="ignore"):
            g = values * unit
            m = rule[:, 0] * mean[chosen] + rule[:, 1] * g
            v = rule[:, 2] * squares[chosen] + rule[:, 3] * (g * g)
            w = rule[:, 5] * (before if lost is None else before + lost[chosen]) - rule[:, 4] * (m / (np.sqrt(v) + eps))
            change, root = w - before, np.sqrt(v) + unit_eps
            up, down = (np.frexp(root * real(factor))[1] - np.frexp(unit)[1] for factor in (0.75, 1.5))
            jumps = np.clip(np.where(up > 0, up, np.minimum(down, 0)), -MAX_JUMP, MAX_JUMP).astype(np.int8)
            limit = device.tensor(x).dtype.rounds_to_infinity
            fits = (abs(w) + real(margin) * abs(change) < limit) | ~np.isfinite(before)
            jumps[~(np.isfinite(m) & np.isfinite(v) & fits)] = OVERFLOWS

        arrays = x, mean, squares, last, exponents
        rest_before = None if lost is None else lost.copy()
        on_device = [None if a is None else device.array(a) for a in (mean, squares, last, rest_before)]
        copies = [array.copy() for array in arrays]
        to, units, parts = device.tensor(x), device.array(exponents), []
        for i, (begin, end) in enumerate(pairwise(bounds)):
            moments = Moments(*(None if a is None else a[begin:end] for a in on_device))
            numbers = tables[i], unit_eps, epsilons[i], step
            parts.append(AdamWPart(before_all + begin, to.part(begin, end), moments, *numbers))
        if dense:
            sums = device.array(values)
            adamw_step = backend.adamw_dense(parts, units, sums, before_all)
        else:
            entries = device.entries(chosen + np.int32(before_all), values, before_all + n)
            adamw_step = backend.adamw(parts, units, entries, margin, keep_changes)
        device.wait()
        if dense:
            with np.errstate(all="ignore"):
                rounded = reference.widened(w.astype(x.dtype))
            assert same(np.asarray(sums), np.where(jumps == OVERFLOWS, real(np.nan), rounded))
        else:
            assert same(np.asarray(adamw_step.changes), change)
            assert same(np.asarray(adamw_step.jumps), jumps)
        assert (adamw_step.overflows, adamw_step.finite) == (bool((jumps == OVERFLOWS).any()), True)
        assert all(data.same_bits(array, copied) for array, copied in zip(arrays, copies, strict=True))

        backend.store_adamw(parts, units if keep_changes and not dense else None, adamw_step, write)
        device.wait()
        if keep_changes and not dense:
            moved = copies[4][before_all + chosen] + np.where(change != 0, jumps, 0).astype(np.int64)
            copies[4][before_all + chosen] = np.clip(moved, 1, 2 * bias(real))
        assert data.same_bits(np.asarray(units), copies[4])
        with np.errstate(all="ignore"):
            copies[0][chosen] = w.astype(x.dtype) if write else x[chosen]
            rest = w - reference.widened(copies[0])[chosen]
        for array, new in zip(copies[1:4], (m, v, step), strict=True):
            array[chosen] = new
        if lost is not None:
            lost[chosen] = np.where(np.isfinite(rest), rest, 0)
            assert same(np.asarray(on_device[3]), lost)
        for expected, array in zip(copies[:4], (x, *on_device[:3]), strict=True):
            assert same(np.asarray(array), expected)


def test_a_sum_that_is_not_finite_is_reported(device: Device) -> None:
    n = 500
    x, ones, last = np.ones(n, np.float32), np.ones(n, np.float32), np.zeros(n, np.int32)
    moments = Moments(device.array(ones), device.array(ones), device.array(last), None)
    table = np.full((2, 6), 0.5, np.float32)
    for bad in (1.0, np.inf, np.nan):
        sums = np.ones(n, np.float32)
        sums[n // 2] = bad
        parts = [AdamWPart(0, device.tensor(x), moments, table, EPS, EPS, 1)]
        units, indices = device.array(np.full(n, 127, np.uint8)), np.arange(n, dtype=np.int32)
        results = [device.backend.adamw(parts, units, device.entries(indices, sums, n), 4, True)]
        results.append(device.backend.adamw_dense(parts, units, device.array(sums), 0))
        assert [(step.overflows, step.finite) for step in results] == 2 * [(bad != 1, bad == 1)]


@pytest.mark.parametrize("real", [np.float32, np.float64])
def test_change_units(device: Device, real: type[np.floating]) -> None:
    """Residuals keep their values unless these overflow. Changes are rounded, and exponents stay valid."""
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
def test_values_of(device: Device, dtype: str) -> None:
    """Read some elements of a tensor, or all."""
    n = 1000
    index, x = np.flatnonzero(np.random.default_rng(1).random(n) < 0.3), data.gradient("normal", n, dtype, 2)
    for where in (slice(None), device.array(index)):
        values = device.backend.values_of(device.tensor(x), where)
        device.wait()
        assert data.same_bits(np.asarray(values), reference.widened(x)[where if isinstance(where, slice) else index])
