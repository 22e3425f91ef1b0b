"""The packed format: entries to bytes and back, and the rounding of values before. Beside the time of a call stand the
nanoseconds and the bytes of one entry.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sparsecomm.backends import _cpu

Measure = Callable[..., Any]
KINDS = {"exact": 0, "bfloat16": 1, "float16": 2, "int8": 3}

count = pytest.mark.parametrize("k", [25_600, 262_144], ids=lambda k: f"k={k}")
with_kinds = pytest.mark.parametrize("kind", KINDS)


def entries(k: int, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """k indices at density 0.001, and values that need no more rounding."""
    rng = np.random.default_rng(k)
    indices = np.sort(rng.permutation(np.unique(rng.integers(0, 1000 * k, 2 * k)))[:k]).astype(np.int32)
    values = rng.standard_normal(k, dtype=np.float32)
    values += np.copysign(np.float32(3), values)
    return indices, _cpu.quantize_values(values, KINDS[kind])[0] if KINDS[kind] else values


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


@pytest.mark.benchmark(group="pack")
@count
@with_kinds
def test_pack(per_entry: Measure, k: int, kind: str) -> None:
    indices, values = entries(k, kind)
    size = _cpu.pack(indices, values, KINDS[kind], False, False).nbytes
    read = indices.nbytes + values.nbytes
    sent = per_entry(_cpu.pack, indices, values, KINDS[kind], False, False, k=k, packed=size, read=read, written=size)
    assert sent.nbytes == size


@pytest.mark.benchmark(group="unpack")
@count
@with_kinds
def test_unpack(per_entry: Measure, k: int, kind: str) -> None:
    indices, values = entries(k, kind)
    sent = _cpu.pack(indices, values, KINDS[kind], False, False)
    written = indices.nbytes + values.nbytes
    back = per_entry(
        _cpu.unpack,
        sent,
        k,
        1000 * k,
        KINDS[kind],
        False,
        False,
        k=k,
        packed=sent.nbytes,
        read=sent.nbytes,
        written=written,
    )
    np.testing.assert_array_equal(back[0], indices)
    np.testing.assert_array_equal(back[1], values)


@pytest.mark.benchmark(group="quantize_values")
@count
@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind]])
def test_round_values(per_entry: Measure, k: int, kind: str) -> None:
    indices, _ = entries(k, kind)
    _, values = entries(k, "exact")
    rounded = _cpu.quantize_values(values, KINDS[kind])[0]
    size = _cpu.pack(indices, rounded, KINDS[kind], False, False).nbytes
    again, _, zeros = per_entry(
        _cpu.quantize_values, values, KINDS[kind], k=k, packed=size, read=values.nbytes, written=2 * values.nbytes
    )
    np.testing.assert_array_equal(again, rounded)
    assert zeros == 0
