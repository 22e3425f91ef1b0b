"""Random elements and changes for every layout, and a check that a codec agrees with the CPU's."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from sparsecomm.backends import _codec
from sparsecomm.tensors.dtypes import DType
from sparsecomm.tensors.interop import CPU, Device, Tensor

__all__ = ["LAYOUTS", "changed", "check", "elements", "host_tensor", "layout_of", "tensor_of"]

# By layout: bytes of an element, position and largest value of the exponent, lowest class, whether it is a float.
LAYOUTS = {
    "float8_e4m3": (1, 3, 15, 0, True),
    "float8_e5m2": (1, 2, 31, 9, True),
    "uint8": (1, 1, 0, 0, False),
    "bfloat16": (2, 7, 255, 108, True),
    "float16": (2, 10, 31, 5, True),
    "int16": (2, 1, 0, 0, False),
    "float32": (4, 23, 255, 112, True),
    "int32": (4, 1, 0, 0, False),
    "float64": (8, 52, 2047, 1010, True),
    "complex128": (8, 52, 2047, 1010, True),
    "int64": (8, 1, 0, 0, False),
}


def per_item(name: str) -> int:
    return 2 if name.startswith("complex") else 1


def layout_of(name: str) -> _codec.Layout:
    return _codec.Layout(*LAYOUTS[name], per_item(name))


def elements(name: str, n: int, seed: int) -> np.ndarray:
    """Return the bits of numbers of many magnitudes, with zeros of both signs, infinities and NaNs with payloads."""
    rng, (itemsize, shift, mask, low, is_float) = np.random.default_rng(seed), LAYOUTS[name]
    unsigned = np.dtype(f"u{itemsize}")
    bits = rng.integers(0, 2**64, n, np.uint64).astype(unsigned)
    if not is_float:
        return bits
    exponents = np.clip(low + 12 - rng.geometric(0.3, n), 0, mask).astype(unsigned)  # most are in the range of classes
    near = bits & ~(unsigned.type(mask) << unsigned.type(shift)) | exponents << unsigned.type(shift)
    bits = np.where(rng.random(n) < 0.9, near, bits)
    for special in (0, 1 << (8 * itemsize - 1), mask << shift, (mask << shift) + 1):
        bits[rng.random(n) < 0.01] = special
    return bits


def changed(name: str, old: np.ndarray, density: float, seed: int) -> np.ndarray:
    """Return a copy of ``old`` where each element has changed with probability ``density``, mostly by a few steps."""
    rng = np.random.default_rng(seed)
    where = rng.random(len(old)) < density
    steps = np.where(rng.random(len(old)) < 0.9, rng.integers(-3, 4, len(old)), 0).astype(old.dtype)
    new = np.where(where, old + steps, old)
    return np.where(where & (new == old), elements(name, len(old), seed + 1), new)


def tensor_of(address: int, nbytes: int, name: str, device: Device, owner: object, stream: int | None = None) -> Tensor:
    itemsize = LAYOUTS[name][0] * per_item(name)
    shape = (nbytes // itemsize,)
    return Tensor(address, *shape, shape, DType(name, -1, itemsize, "<u1"), device, False, owner, stream)


def host_tensor(array: np.ndarray, name: str) -> Tensor:
    return tensor_of(array.ctypes.data, array.nbytes, name, CPU, array)


def check(codec: ModuleType, name: str, old: np.ndarray, new: np.ndarray, before: Tensor, after: Tensor) -> None:
    """Check that a codec gives the same results as the CPU's for two versions of a tensor.

    The tensors ``before`` and ``after`` hold the elements ``old`` and ``new``. At the end, both hold the new ones.
    """
    layout, host = layout_of(name), host_tensor(old, name)
    expected = _codec.diff(host, host_tensor(new, name), layout)
    assert codec.diff(before, after, layout) == expected
    coded, _, *digests = expected
    assert [codec.digest(before), codec.digest(after)] == digests
    located = codec.locate(before, layout, coded)
    assert located is not None
    assert [located.before, located.after] == digests
    assert codec.digest(before) == digests[0]  # nothing is written
    located.write(before)
    assert codec.digest(before) == digests[1]
