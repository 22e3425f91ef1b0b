"""A slow reference of the packed format, which writes one bit at a time; entries to pack; and damaged bytes."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np

from sparsecomm.backends import Backend, CpuBackend
from sparsecomm.tensors.kinds import BFLOAT16, EXACT, FLOAT16, INT8, ValueKind
from sparsecomm.tensors.sparse import Array, SparseVector
from tests import data, reference
from tests.backends.devices import Device

VIEWS = {BFLOAT16: data.DTYPES["bfloat16"], FLOAT16: data.DTYPES["float16"]}


def exponents_of(values: np.ndarray) -> list[int]:
    """Return for each 64 values the smallest e for which no finite magnitude exceeds 126 * 2^e, without rounding."""
    exponents = []
    for begin in range(0, len(values), 64):
        block = values[begin : begin + 64]
        max_abs = max((abs(float(v)) for v in block if np.isfinite(v)), default=0.0)
        exponents.append(next(e for e in range(-126, 122) if max_abs <= 126 * 2.0**e or e == 121))
    return exponents


def quotient(v: float, e: int) -> int:
    if not math.isfinite(v):
        return -128 if math.isnan(v) else 127 if v > 0 else -127
    return max(-126, min(126, round(v / 2.0**e)))


def narrowed(values: np.ndarray, kind: ValueKind) -> np.ndarray:
    """Round to bfloat16 or float16. Finite values stay finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = values.astype(VIEWS[kind])
    bits = narrow.view(np.uint16)
    infinity = np.array(np.inf, VIEWS[kind]).view(np.uint16)
    bits[np.isfinite(values) & (bits & 0x7FFF == infinity)] -= 1
    bits[np.isnan(values)] = 0x7FC0 if kind == BFLOAT16 else 0x7E00
    return narrow


def quantized(values: np.ndarray, kind: ValueKind) -> np.ndarray:
    if kind == EXACT:
        return values
    if kind.planes:
        return reference.few_bits(values, kind.planes - 1)[0]
    if kind != INT8:
        rounded = narrowed(values, kind).astype(np.float32)
    else:
        shared = exponents_of(values)
        qs = [quotient(float(v), shared[i // 64]) for i, v in enumerate(values)]
        beyond = {-128: math.nan, -127: -math.inf, 127: math.inf}
        rounded = np.array([beyond.get(q, q * 2.0 ** shared[i // 64]) for i, q in enumerate(qs)], np.float32)
    rounded[rounded == 0] = 0
    rounded.view(np.uint32)[np.isnan(rounded)] = 0x7FC00000
    return rounded


def low_bits(count: int, span: int) -> int:
    return max(0, ((span + 1) // count).bit_length() - 1)


def areas(count: int, span: int, kind: ValueKind, float64_values: bool) -> list[tuple[str, int]]:
    """Return the names and the lengths in bytes of the areas of a message."""
    low = low_bits(count, span)
    blocks = -(-count // 64)
    values = 8 * kind.planes * blocks or count * (8 if float64_values else (4, 2, 2, 1)[kind.code])
    shared = {"int8": 1, "int4": 3, "int2": 3, "sign": 2}.get(kind.name, 0) * blocks
    return [
        ("head", 16),
        ("low", -(-count * low // 64) * 8),
        ("high", -(-((span >> low) + count) // 64) * 8),
        ("values", values),
        ("shared", shared),
        ("padding", -(values + shared) % 8),
    ]


def packed(indices: np.ndarray, values: np.ndarray, kind: ValueKind) -> bytes:
    """Return the message. Values are rounded to the kind."""
    if not len(indices):
        return b""
    first, last, count = int(indices[0]), int(indices[-1]), len(indices)
    if few := reference.few_bits_bytes(values, kind.planes - 1) if kind.planes else None:
        kind = EXACT if few[1] else kind
    length = dict(areas(count, last - first, kind, values.itemsize == 8))
    low, low_area, high_area = low_bits(count, last - first), 0, 0
    for i, index in enumerate(indices.tolist()):
        offset = index - first
        low_area |= (offset % 2**low) << (i * low)
        high_area |= 1 << ((offset >> low) + i)
    exponents = b""
    if few:
        sent = few[0]
    elif kind == EXACT:
        sent = values.tobytes()
    elif kind == INT8:
        shared = exponents_of(values)
        sent = np.array([quotient(float(v), shared[i // 64]) for i, v in enumerate(values)], np.int8).tobytes()
        exponents = bytes(e + 126 for e in shared)
    else:
        sent = narrowed(values, kind).tobytes()
    parts = [
        struct.pack("<QQ", first, last - first | (few[1] if few else False) << 63),
        low_area.to_bytes(length["low"], "little"),
        high_area.to_bytes(length["high"], "little"),
        sent,
        exponents,
        bytes(length["padding"]),
    ]
    return b"".join(parts)


# -- entries -----------------------------------------------------------------------------------------------------------


def indices_of(shape: str, count: int, n: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng([seed, count])
    gaps = {
        "spread": lambda: rng.integers(1, max(2, n // (count + 1)), count),
        "dense": lambda: np.ones(count, np.int64),
        "every other": lambda: np.full(count, 2),
        "clustered": lambda: np.where(rng.random(count) < 0.01, max(1, n // (count + 1)), 1),
        "far end": lambda: np.where(np.arange(count) == count - 1, n - 2 * count - 10, 1),
        "far": lambda: np.where(np.arange(count) == 0, n - 2 * count - 10, 1),
    }[shape]()
    dtype = np.int64 if n >= 2**31 else np.int32
    return (np.cumsum(gaps) + (0 if shape == "dense" else 5)).astype(dtype)


SHAPES = ("spread", "dense", "every other", "clustered", "far end", "far")


def values_of(count: int, kind: ValueKind, float64_values: bool, seed: int, name: str = "normal") -> np.ndarray:
    """Return values that the kind represents exactly, none of them zero."""
    values = data.gradient(name, count, "float64" if float64_values else "float32", seed)
    values[values == 0] = 1
    values = quantized(values, kind)
    values[values == 0] = 1
    return quantized(values, kind)


def entries_of(
    shape: str, count: int, n: int, kind: ValueKind, float64_values: bool, seed: int, name: str = "normal"
) -> SparseVector:
    indices, values = indices_of(shape, count, n, seed), values_of(count, kind, float64_values, seed, name)
    return SparseVector.trusted(indices, values, n, (n,))


def unpacked(
    backend: Backend, message: bytes, count: int, n: int, kind: ValueKind, float64_values: bool = False
) -> tuple[Array, Array]:
    buffer = np.frombuffer(message, np.uint8).copy()
    if not isinstance(backend, CpuBackend):
        there: Any = backend.runtime.empty(len(message), np.uint8)  # type: ignore[attr-defined]
        there[:] = buffer
        buffer = there
    return backend.unpack(buffer, message[:16], count, n, kind, float64_values)


def check_both_ways(device: Device, entries: SparseVector, kind: ValueKind) -> None:
    message = packed(entries.indices, entries.values, kind)
    buffer = device.backend.pack(entries, kind)
    assert buffer.dtype == np.uint8
    assert buffer.tobytes() == message
    float64_values = entries.values.itemsize == 8
    indices, values = unpacked(device.backend, message, entries.nnz, entries.size, kind, float64_values)
    assert (indices.dtype, values.dtype) == (entries.indices.dtype, entries.values.dtype)
    np.testing.assert_array_equal(indices, entries.indices)
    assert data.same_bits(np.asarray(values), entries.values)


def check_rounding(device: Device, values: np.ndarray, kind: ValueKind) -> None:
    expected = quantized(values, kind)
    with np.errstate(invalid="ignore"):
        lost = np.where(np.isfinite(values), values - expected, np.float32(0))
    rounded, errors, zeros = device.backend.quantize_values(device.array(values), kind)
    np.testing.assert_array_equal(np.asarray(rounded).view(np.uint32), expected.view(np.uint32))
    np.testing.assert_array_equal(np.asarray(errors).view(np.uint32), lost.view(np.uint32))
    assert zeros == np.count_nonzero(expected == 0)
    if not zeros:  # rounding again changes nothing
        again, errors, _ = device.backend.quantize_values(rounded, kind)
        assert data.same_bits(np.asarray(again), np.asarray(rounded))
        assert not np.any(errors)


# -- damaged bytes -----------------------------------------------------------------------------------------------------


def flipped(message: bytes, bit: int) -> bytes:
    wrong = bytearray(message)
    wrong[bit // 8] ^= 1 << bit % 8
    return bytes(wrong)


def place_of(name: str, lengths: list[tuple[str, int]]) -> tuple[int, int]:
    begin = 0
    for area, length in lengths:
        if area == name:
            return begin, begin + length
        begin += length
    raise KeyError(name)


def end_of(name: str, message: bytes, count: int, kind: ValueKind) -> int:
    return place_of(name, areas(count, int.from_bytes(message[8:16], "little"), kind, False))[1]
