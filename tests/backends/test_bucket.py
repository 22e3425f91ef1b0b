"""Operations on all tensors of a bucket: gradients are added to the residual, results are written to the tensors."""

from __future__ import annotations

import math
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest

from sparsecomm.backends.adamw import unit_dtype
from sparsecomm.backends.base import Addend, Segment
from sparsecomm.tensors.sparse import Array
from tests import data, reference
from tests.backends.devices import Device

SIZES = [1, 5000, 3, 4096, 9001]
DTYPES = {"float32": ["float32", "float16", "bfloat16", "float32", "float16"], "float64": 5 * ["float64"]}


def gradients(real: str, seed: int) -> list[np.ndarray]:
    of = enumerate(zip(SIZES, DTYPES[real], strict=True))
    return [data.gradient("normal", size, dtype, seed + i) for i, (size, dtype) in of]


def added(device: Device, addends: list[Addend], *arguments: Any) -> set[int]:
    """Add all addends, and return the positions of those left out."""
    left_out, begin = set(), 0
    while begin < len(addends):
        count, flags = device.backend.add_first(addends[begin:], *arguments)
        left_out |= {begin + i for i in device.backend.wait_for((), flags)}
        begin += count
    return left_out


@pytest.mark.covering(1)
@pytest.mark.parametrize("real", DTYPES)
@pytest.mark.parametrize("if_finite", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.7])
@pytest.mark.parametrize("kind", ["gradient", "scaled", "quotient", "difference"])
@pytest.mark.parametrize("bad", [None, np.nan, np.inf, "large"])
def test_gradients_are_added(
    device: Device, real: str, if_finite: bool, momentum: float, kind: str, bad: float | str | None
) -> None:
    """Each operation is rounded. A tensor is added as a whole or left out."""
    if kind == "quotient" and momentum:
        pytest.skip("no optimizer needs it")
    carried, n, rng = np.dtype(real).type, sum(SIZES), np.random.default_rng(1)
    decay, scale = (1.0 if kind == "quotient" else 0.8), {"scaled": 1 / 3, "quotient": 0.3}.get(kind, 1.0)
    residual, velocity, minuend = (data.gradient("normal", n, real, seed) for seed in (1, 2, 3))
    bias = np.finfo(carried).maxexp - 1
    exponents = (rng.integers(-20, 21, n) + bias).astype(unit_dtype(carried))
    bounds = [*pairwise(accumulate(SIZES, initial=0))]
    xs = gradients(real, 4)
    if bad == "large":  # only the quotient or the square overflows, or the difference
        xs[1][7], xs[3][99] = (6e4 if real == "float32" else 1e200), (-3e38 if real == "float32" else -1e308)
        exponents[bounds[1][0] + 7], minuend[bounds[3][0] + 99] = 1, np.finfo(carried).max
    elif bad is not None:
        xs[1][7] = bad
    addends, expected, moving, left_out = [], residual.copy(), velocity.copy(), set()
    for i, (x, (begin, end)) in enumerate(zip(xs, bounds, strict=True)):
        part, widened = slice(begin, end), reference.widened(x)
        with np.errstate(all="ignore"):
            scaled = carried(scale) * widened
            value = scaled
            if kind == "quotient":
                value = scaled / np.ldexp(carried(1), exponents[part].astype(np.int64) - bias)
            if kind == "difference":
                value = minuend[part] - widened
            fine = np.isfinite(value).all() and (kind != "quotient" or np.isfinite(scaled * scaled).all())
            if fine or not if_finite:
                if momentum:
                    moving[part] = carried(momentum) * moving[part] + value
                expected[part] = carried(decay) * expected[part] + (moving[part] if momentum else value)
            else:
                left_out.add(i)
        units = device.array(exponents[part]) if kind == "quotient" else None
        subtracted_from = device.array(minuend[part]) if kind == "difference" else None
        addends.append(Addend(begin, device.tensor(x), scale, units, subtracted_from))
    on_device, velocity_on_device = device.array(residual), device.array(velocity)
    copies = [x.copy() for x in xs]
    with np.errstate(all="ignore"):
        skipped = added(
            device, addends, on_device, velocity_on_device if momentum else None, decay, momentum, if_finite
        )
    device.wait()
    assert skipped == left_out
    assert (bad is None) or not if_finite or left_out or kind in ("gradient", "scaled")
    np.testing.assert_array_equal(np.asarray(on_device), expected)
    np.testing.assert_array_equal(np.asarray(velocity_on_device), moving)
    assert all(data.same_bits(x, copied) for x, copied in zip(xs, copies, strict=True))


@pytest.mark.parametrize("dtype", data.DTYPES)
def test_sums_of_squares_have_the_same_bits_on_any_device(device: Device, dtype: str) -> None:
    """256 lanes each add every 256th element of a tile and are then added in pairs; tiles are added exactly."""
    xs = [data.gradient("normal", n, dtype, n) for n in (0, 1, 4095, 4096, 70_001)]
    expected = []
    for x in xs:
        sums = []
        for begin in range(0, len(x), 4096):
            lanes = np.zeros(256)
            for i, value in enumerate(reference.widened(x)[begin : begin + 4096].astype(np.float64)):
                lanes[i % 256] += value * value
            while len(lanes) > 1:
                lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
            sums.append(float(lanes[0]))
        expected.append(math.fsum(sums))
    assert device.backend.sums_of_squares([device.tensor(x) for x in xs]) == expected
    x = np.zeros(9000, data.DTYPES[dtype])
    x[::4096] = 1.2e154 if dtype == "float64" else np.inf  # each tile is finite, and their sum overflows
    assert device.backend.sums_of_squares([device.tensor(x)]) == [math.inf]


@pytest.mark.parametrize("real", DTYPES)
@pytest.mark.parametrize("gap", [None, 0, 1, 4])
@pytest.mark.parametrize("dense", [False, True])
def test_results_are_written_and_added(device: Device, real: str, gap: int | None, dense: bool) -> None:
    """Results are rounded to the dtype of each tensor; a tensor outside the segments does not change."""
    n, rng, bounds = sum(SIZES), np.random.default_rng(2), [*pairwise(accumulate(SIZES, initial=0))]
    indices = np.flatnonzero(rng.random(n) < 0.2).astype(np.int32)
    values = data.gradient("normal", len(indices), real, 3)
    values[:2] = np.inf, np.nan
    total = reference.dense((indices, values), n)
    entries = device.backend.nonzeros(device.array(total), (n,)) if dense else device.entries(indices, values, n)
    for add in (False, True)[: 1 if dense else 2]:
        xs = gradients(real, 0)
        expected = [x.copy() for x in xs]
        for i, (x, (begin, end)) in enumerate(zip(expected, bounds, strict=True)):
            if i != gap:
                with np.errstate(all="ignore"):
                    new, old = total[begin:end], reference.widened(x)
                    x[...] = np.where(new != 0, old + new, old).astype(x.dtype) if add else new.astype(x.dtype)
        segments = [
            Segment(begin, device.tensor(x))
            for i, (x, (begin, _)) in enumerate(zip(xs, bounds, strict=True))
            if i != gap
        ]
        (device.backend.add_entries if add else device.backend.write)(segments, entries)
        device.wait()
        for x, wanted in zip(xs, expected, strict=True):
            np.testing.assert_array_equal(reference.widened(x), reference.widened(wanted))


def test_one_wait_finds_all_numbers_of_entries(device: Device) -> None:
    """It also finds the gradients that were left out."""
    x, y = (data.gradient("normal", n, "float32") for n in (900, 700))
    y[5] = np.nan
    residual: Array = device.array(np.zeros(1600, np.float32))
    addends = [Addend(0, device.tensor(x)), Addend(900, device.tensor(y))]
    flags = []
    while addends:
        count, more = device.backend.add_first(addends, residual, None, 1.0, 0.0, True)
        flags.append(more)
        del addends[:count]
    first, second = (device.backend.topk(device.tensor(array), 50, None) for array in (x, y))
    assert sum(len(device.backend.wait_for([first, second], flag)) for flag in flags) == 1
    assert (first.nnz, second.nnz) == (50, 50)
