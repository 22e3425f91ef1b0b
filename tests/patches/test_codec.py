"""`diff` and `apply` reproduce all dtypes bit for bit, and refused patches change nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsecomm.errors import InvalidInputError, PatchError
from sparsecomm.patches import apply, diff, read_patch
from sparsecomm.patches.codec import MAGIC, TensorPatch
from tests import data

NAMES = (
    "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool",
    "complex64", "complex128", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2",
    "float8_e5m2fnuz",
)  # fmt: skip
OF_ALL = [name for name in NAMES if name != "complex128" and not re.search("uint[136]|uz", name)]
DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in NAMES}
SIZES = (0, 1, 3, 63, 64, 65, 1000, 4097)
every_dtype = pytest.mark.parametrize("dtype", NAMES)


def random_bits(n: int, dtype: str, rng: np.random.Generator) -> np.ndarray:
    """Return random bits, with any values: NaNs of all payloads, both zeros, infinities and denormals."""
    if dtype == "bool":
        return rng.random(n) < 0.5
    return np.frombuffer(rng.bytes(n * DTYPES[dtype].itemsize), DTYPES[dtype]).copy()


def changed(old: np.ndarray, density: float, kind: str, rng: np.random.Generator) -> np.ndarray:
    """Return a copy with a share of changed elements: a step away, anything, or special values."""
    new = old.copy()
    at = np.flatnonzero(rng.random(old.size) < density)
    size = old.dtype.itemsize
    if kind == "step" and old.dtype != bool and size <= 8:
        new.view(f"u{size}")[at] += rng.choice(np.array([1, -1]), len(at)).astype(f"u{size}")
    elif kind == "special" and old.dtype.kind not in "iub":
        with np.errstate(all="ignore"):
            values = np.array([0.0, -0.0, np.nan, -np.nan, 3e38, -3e38, 1e-40]).astype(np.float32).astype(old.dtype)
        new[at] = rng.choice(values.view(np.uint8).reshape(7, -1), len(at)).reshape(-1).view(old.dtype)
    else:
        new[at] = random_bits(len(at), old.dtype.name, rng)
    return new


@every_dtype
def test_round_trips_are_exact(dtype: str) -> None:
    @settings(max_examples=25)
    @given(
        data.seeds,
        st.sampled_from(SIZES),
        st.sampled_from([0, 0.001, 0.03, 0.5, 0.9, 1]),
        st.sampled_from(["step", "any", "special"]),
        st.sampled_from(["bits", *data.KINDS]),
    )
    def check(seed: int, n: int, density: float, kind: str, old_kind: str) -> None:
        rng = np.random.default_rng(seed)
        old = random_bits(n, dtype, rng)
        if old_kind != "bits" and dtype in data.DTYPES:
            old = data.gradient(old_kind, n, dtype, seed)
        new = changed(old, density, kind, rng)
        patch = diff(old, new)
        described = read_patch(patch)
        parts = (2, -1) if dtype.startswith("complex") else (1, -1)
        as_bytes = [x.view(np.uint8).reshape(-1, x.dtype.itemsize // parts[0]) for x in (old, new)]
        assert described.changed == (as_bytes[0] != as_bytes[1]).any(axis=1).sum() if n else not described.changed
        assert (described.size, described.nbytes, list(described.tensors)) == (n, len(patch), [""])
        target = old.copy()
        apply(memoryview(patch), target)
        assert target.tobytes() == new.tobytes()
        if kind == "any" and old.dtype.itemsize <= 8:
            stand_in = old.copy().view(f"u{old.dtype.itemsize}")
            apply(bytearray(patch), stand_in)
            assert stand_in.tobytes() == new.tobytes()
        if old.tobytes() != new.tobytes():
            with pytest.raises(PatchError, match="other weights"):
                apply(patch, target)
            assert target.tobytes() == new.tobytes()

    check()


def test_mappings_and_shapes_and_names() -> None:
    rng = np.random.default_rng(2)
    shapes: list[tuple[int, ...]] = [(), (0,), (3, 0, 2), (1,), (7, 5), (2, 3, 4, 5)]
    old = {f'é{shape}\n"': np.asarray(rng.standard_normal(shape)) for shape in shapes}
    old[""] = np.arange(5)
    new = {name: np.asarray(x + i % 2) for i, (name, x) in enumerate(old.items())}
    patch = diff(old, dict(reversed(new.items())))
    target = {name: x.copy() for name, x in reversed(old.items())}
    apply(patch, target)
    assert all(target[name].tobytes() == new[name].tobytes() for name in new)
    assert {name: t.shape for name, t in read_patch(patch).tensors.items()} == {n: x.shape for n, x in old.items()}
    apply(diff({}, {}), {})
    first, then = diff(old, new), diff(new, old)
    assert (read_patch(first).before, read_patch(first).after) == (read_patch(then).after, read_patch(then).before)
    other = {"x" + name: x for name, x in old.items()}
    assert read_patch(diff(other, other)).before != read_patch(first).before


def test_arrays_of_pytorch_and_jax() -> None:
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    rng = np.random.default_rng(3)
    for name in OF_ALL:
        old = random_bits(600, name, rng).reshape(20, 30)
        new = changed(old.reshape(-1), 0.1, "any", rng).reshape(20, 30)
        of_torch = [torch.from_numpy(x.copy().view(np.uint8)).view(getattr(torch, name)) for x in (old, new)]
        patches = [diff(old, new), diff(*of_torch)]
        if "64" not in name or name == "complex64":  # which JAX turns into narrower types
            patches.append(diff({"": jax.numpy.asarray(old)}, {"": jax.numpy.asarray(new)}))
        for patch in patches:
            assert patch == patches[0]
        parameter = of_torch[0].clone()
        if parameter.is_floating_point():
            parameter = torch.nn.Parameter(parameter)
        apply(patches[0], parameter)
        assert bytes(parameter.detach().view(torch.uint8).numpy()) == new.tobytes()
    with pytest.raises(InvalidInputError, match="immutable"):
        apply(diff(np.zeros(3), np.zeros(3)), jax.numpy.zeros(3))


# Patches and tensors that are refused. Nothing changes.


def refuse(patch: Any, tensors: Any, error: Any, match: str | None = None) -> None:
    arrays = tensors.values() if isinstance(tensors, dict) else [tensors]
    before = [np.asarray(x).tobytes() for x in arrays]
    with pytest.raises(error, match=match):
        apply(patch, tensors)
    assert [np.asarray(x).tobytes() for x in arrays] == before


def small() -> tuple[dict[str, np.ndarray], bytes]:
    rng = np.random.default_rng(4)
    old = {"a": rng.standard_normal(50).astype(np.float32), "b": np.arange(40, dtype=np.uint8), "c": np.arange(9)}
    new = {name: x.copy() for name, x in old.items()}
    new["a"][[3, 7, 40]] += 1
    new["b"] = rng.integers(0, 2, 40).astype(np.uint8)
    patch = diff(old, new)
    assert {t.coding for t in read_patch(patch).tensors.values()} == {0, 1}  # both codings
    return old, patch


def test_every_damaged_byte_and_every_length_is_recognized() -> None:
    old, patch = small()
    for at in range(len(patch)):
        for mask in (1, 128, 255):
            refuse(patch[:at] + bytes([patch[at] ^ mask]) + patch[at + 1 :], old, PatchError)
        refuse(patch[:at], old, PatchError)
    for more in (b"\0", patch, b"x" * 1000):
        refuse(patch + more, old, PatchError, "another number")
    for wrong in (None, 5, "text", [1], np.zeros((3, 4))[:, 1]):
        refuse(wrong, old, InvalidInputError, "expected the bytes that diff")
    apply(patch, old)


def test_other_tensors_are_refused_and_none_is_written() -> None:
    old, patch = small()
    last = old["c"]
    for name, x in old.items():
        for index in (0, -1):
            wrong = {n: y.copy() for n, y in old.items()}
            wrong[name].reshape(-1)[index] += 1
            refuse(patch, wrong, PatchError, f"other weights .* in '{name}' of 3")
        for y in (x[:-1].copy(), x.reshape(1, -1), x.astype(np.int16), x.view(f"i{x.itemsize}").astype(">i2")):
            refuse(patch, old | {name: y}, InvalidInputError, name)
        frozen = x.copy()
        frozen.flags.writeable = False
        refuse(patch, old | {name: frozen}, InvalidInputError, "read-only")
        refuse(patch, old | {name: np.repeat(x, 2)[::2]}, InvalidInputError, "not contiguous")
        refuse(patch, {n: y for n, y in old.items() if n != name}, InvalidInputError, f"missing '{name}'")
    refuse(patch, old | {"more": last}, InvalidInputError, "not expected: 'more'")
    refuse(patch, last, InvalidInputError)
    for new in (old | {"c": last[1:]}, old | {"c": last.astype(np.float64)}, {"a": old["a"]}, last, 5, {"a": "x"}):
        with pytest.raises(InvalidInputError):
            diff(old, new)
    with pytest.raises(InvalidInputError, match="twice"):
        diff([("a", last), ("a", last)], [("a", last)])


def rewritten(patch: bytes, change: Callable[[list[Any]], object]) -> bytes:
    """Return a patch with a changed header whose checksums are right."""
    begin = len(MAGIC) + 8
    length = int.from_bytes(patch[len(MAGIC) : len(MAGIC) + 4], "little")
    header = json.loads(zlib.decompress(patch[begin : begin + length]))
    header = change(header) or header
    return with_header(zlib.compress(json.dumps(header).encode())) + patch[begin + length :]


def with_header(header: bytes) -> bytes:
    return MAGIC + len(header).to_bytes(4, "little") + zlib.crc32(header).to_bytes(4, "little") + header


FIELD = {name: i for i, name in enumerate(TensorPatch._fields)}


@pytest.mark.parametrize("value", [-1, 0, 1, 2, 1 << 31, 1 << 32, 1 << 64, 10**400, 1.0, None, "x", [], [5], {}, True])
def test_headers_with_other_values_are_refused(value: Any) -> None:
    old, patch = small()
    for field, at in FIELD.items():
        for tensor in range(3):

            def change(header: list[Any], at: int = at, tensor: int = tensor) -> None:
                header[1][tensor] += [0] * (len(FIELD) - len(header[1][tensor]))
                header[1][tensor][at] = value

            harmless = field == "lowest" and tensor != 0  # integers have one class
            harmless |= field == "changed" and tensor != 2 and type(value) is int and 0 < value < 1 << 64
            same = (field, value) in [("coding", 0), ("coding", 1), ("lowest", 0)] or value == 0
            if not harmless and not same and not (tensor == 2 and value == 0):
                refuse(rewritten(patch, change), old, (PatchError, InvalidInputError))
    for header in ([value], value, [value, []], ["", value], ["", [value]], [["x"], [], []]):
        refuse(rewritten(patch, lambda _, header=header: header or [header]), old, (PatchError, InvalidInputError))


def test_headers_with_huge_sizes_take_no_memory() -> None:
    old = {"a": np.zeros(50, np.float32)}
    huge = zlib.compress(b"[" + b" " * (1 << 28) + b"]", 1)
    claims = [
        with_header(huge),
        MAGIC + b"\xff\xff\xff\xff" * 2 + b"x" * 100,
        rewritten(diff(old, old), lambda header: header[1][0].__setitem__(2, [1 << 60])),
        rewritten(diff(old, old), lambda header: header[1][0].__setitem__(2, [1 << 30] * 30)),
        rewritten(diff(old, old), lambda header: header[1][0].extend([1, 1 << 60, 0])),
    ]
    body = zlib.compress(bytes(1 << 28), 1)  # instead of 200 bytes
    claims.append(
        rewritten(diff(old, old), lambda header: header[1][0].extend([50, len(body), zlib.crc32(body), 1])) + body
    )
    tracemalloc.start()
    try:
        for claim in claims:
            refuse(claim, old, (PatchError, InvalidInputError))
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()


# Sizes, threads, interrupts.


@pytest.mark.parametrize("density", [0.1, 1.0])
def test_patches_are_no_longer_than_the_compressed_tensors(density: float) -> None:
    """Allow for the header, and for the sample that predicts the size."""
    rng = np.random.default_rng(5)
    n = 300_000
    news = {
        "zeros": np.zeros(n, np.float32),
        "small integers": rng.integers(0, 4, n),
        "a ramp": np.arange(n, dtype=np.int32) // 1000,
        "random bits": random_bits(n, "float32", rng),
        "labels": np.repeat(rng.integers(0, 256, n // 100), 100).astype(np.uint8),
        "weights": (rng.standard_normal(n) * 0.02).astype(ml_dtypes.bfloat16),
    }
    for name, new in news.items():
        old = np.where(rng.random(n) < density, random_bits(n, new.dtype.name, rng), new)
        patch = diff(old, new)
        compressed = len(zlib.compress(new.tobytes(), 1))
        assert len(patch) <= max(1.1 * compressed, 1000) + 300, name
        assert len(patch) <= 1.01 * new.nbytes + 300, name
        apply(patch, old)
        assert old.tobytes() == new.tobytes()
        assert len(diff(old, new)) < 200, name
    one = news["weights"].copy()
    one[n // 2] = 1
    assert len(diff(news["weights"], one)) < 200


def test_the_module_imports_neither_mpi_nor_torch() -> None:
    code = "import sys, sparsecomm.patches; print(*{'mpi4py', 'torch', 'jax', 'cupy', 'greenlet'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.split() == []
