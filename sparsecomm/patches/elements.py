"""Weights: their dtypes (`DTYPES`), their memory and copies of it, and how the codec reads their elements."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from sparsecomm.backends import _codec
from sparsecomm.errors import InvalidInputError, listed
from sparsecomm.patches import cuda
from sparsecomm.tensors import _dlpack, interop
from sparsecomm.tensors.arrays import Array
from sparsecomm.tensors.dtypes import DTYPES as OF_GRADIENTS
from sparsecomm.tensors.dtypes import DType
from sparsecomm.tensors.interop import CPU, Tensor, host_tensor

_SAMPLE = 4096  # number of elements from which `lowest_class` is computed
# Position and width of the exponent, by dtype; the sign is the highest bit.
_EXPONENTS = {
    "float16": (10, 5),
    "bfloat16": (7, 8),
    "float32": (23, 8),
    "float64": (52, 11),
    "float8_e4m3fn": (3, 4),
    "float8_e4m3fnuz": (3, 4),
    "float8_e4m3b11fnuz": (3, 4),
    "float8_e5m2": (2, 5),
    "float8_e5m2fnuz": (2, 5),
}
_ITEMSIZES = {
    **dict.fromkeys((name for name in _EXPONENTS if name.startswith("float8")), 1),
    **{f"{sign}int{8 * size}": size for size in (1, 2, 4, 8) for sign in ("", "u")},
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}
_PARTS = {"complex64": "float32", "complex128": "float64"}  # dtypes with two parts
DTYPES: Mapping[str, DType] = OF_GRADIENTS | {
    name: DType(name, -1, itemsize, "<u1") for name, itemsize in _ITEMSIZES.items()
}


class Weight(NamedTuple):
    """A named tensor. ``dtype`` names the type of its elements; the tensor itself may have unsigned integers."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    tensor: Tensor


def tensor_of(obj: Any, name: str, *, writable: bool = False) -> Tensor:
    """Return an array with one of `DTYPES` as a tensor; raise `InvalidInputError` if it cannot be used."""
    obj = getattr(obj, "detach", lambda: obj)()  # a parameter of PyTorch
    return interop.tensor(obj, name, writable=writable, dtypes=DTYPES)


def weights_of(tensors: object, *, writable: bool = False) -> dict[str, Weight]:
    """Return the weights in a mapping or in pairs of names and tensors, or a single tensor, named ""."""
    pairs = [("", tensors)] if interop.is_tensor(tensors) else interop.named(tensors)
    weights = {}
    for name, obj in pairs:
        t = tensor_of(obj, name or "tensor", writable=writable)
        if name in weights:
            raise InvalidInputError(f"tensors: the name {name!r} appears twice; names must be unique")
        weights[name] = Weight(name, t.dtype.name, t.shape, t)
    return weights


def check_names(expected: Mapping[str, object], actual: Mapping[str, object], what: str) -> None:
    """Raise `InvalidInputError` unless two mappings have the same names."""
    if expected.keys() != actual.keys():
        parts = {"missing": expected.keys() - actual.keys(), "not expected:": actual.keys() - expected.keys()}
        seen = "; ".join(f"{part} {listed(sorted(names))}" for part, names in parts.items() if names)
        raise InvalidInputError(f"{what}: {seen}. Pass the same tensors, with the same names")


def same_kinds(weights: Mapping[str, Weight], others: Mapping[str, Weight]) -> bool:
    """Return whether weights have equal names, dtypes and shapes."""
    return {name: weight[1:3] for name, weight in weights.items()} == {name: w[1:3] for name, w in others.items()}


def updated(copies: dict[str, Weight], weights: Mapping[str, Weight], *, on_host: bool) -> dict[str, Weight]:
    """Copy weights into ``copies`` if names, dtypes and shapes match, else into new memory; return the copies."""
    if not same_kinds(copies, weights):
        copies = {name: weight._replace(tensor=_empty_like(weight.tensor, on_host)) for name, weight in weights.items()}
    for name, weight in weights.items():
        copy_tensor(weight.tensor, copies[name].tensor)
    return copies


def _empty_like(t: Tensor, on_host: bool) -> Tensor:
    if on_gpu(t) and not on_host:
        return cuda.empty_like(t)
    memory = np.empty(t.nbytes, np.uint8)
    return Tensor(_dlpack.address(memory), t.size, t.shape, t.dtype, CPU, False, memory)


def on_gpu(*tensors: Tensor) -> bool:
    """Return whether any of the tensors is on a GPU."""
    return any(t.device.kind == "cuda" for t in tensors)


def bytes_of(t: Tensor) -> Array:
    """Return the bytes of a tensor in host memory: a view, or a copy of a GPU's."""
    if not on_gpu(t):
        return host_view(t)
    copied = np.empty(t.nbytes, np.uint8)
    cuda.copy(t, host_tensor(copied))
    return copied


def host_view(t: Tensor) -> Array:
    """Return the bytes of a tensor in host memory, without a copy."""
    array: Array = _dlpack.view(t.pointer, t.nbytes, np.dtype(np.uint8), t.readonly, t)
    return array


def copy_tensor(source: Tensor, target: Tensor) -> None:
    """Copy a tensor to another one with as many bytes, on any devices."""
    if on_gpu(source, target):
        cuda.copy(source, target)
    else:
        host_view(target)[:] = host_view(source)


def layout(dtype: str, lowest: int) -> _codec.Layout:
    """Return how to read elements of a dtype. ``lowest``: see `lowest_class`."""
    part = _PARTS.get(dtype, dtype)
    shift, bits = _EXPONENTS.get(part, (1, 0))
    return _codec.Layout(DTYPES[part].itemsize, shift, 2**bits - 1, lowest, bits > 0, 2 if part != dtype else 1)


def lowest_class(dtype: str, t: Tensor) -> int:
    """Return the exponent of the lowest class, so that about 1 in 128 elements lie above the highest class's exponent.

    Elements above or below the range of classes join the highest or the lowest class: large weights rarely change, and
    small ones often, whatever their exponent.
    """
    part = _PARTS.get(dtype, dtype)
    if part not in _EXPONENTS or not t.size:
        return 0
    (shift, bits), itemsize = _EXPONENTS[part], DTYPES[part].itemsize
    if on_gpu(t):
        sample = cuda.sample(t, itemsize, _SAMPLE)
    else:
        elements = host_view(t).view(f"<u{itemsize}")
        sample = elements[:: max(1, len(elements) // _SAMPLE)].astype(np.int64)
    exponents = np.sort((sample >> shift) & (2**bits - 1))
    return max(0, int(exponents[len(exponents) * 127 // 128]) - (_codec.CLASSES - 1))
