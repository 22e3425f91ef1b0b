"""Plain values and named arrays as bytes, and back: what ranks tell each other of a state is never unpickled.

    8 bytes   the length of the description, little-endian
    JSON      the description: None, bools, texts and whole numbers as they are; of all else an object of one entry
    bytes     the elements of all arrays, in order of the description, little-endian and without gaps

The objects are ``{"float": hex}``, ``{"list": [...]}``, ``{"tuple": [...]}``, ``{"dict": [[key, value], ...]}`` and
``{"array": [dtype, [shape]]}``. The same values have the same bytes, whatever their layout and byte order in memory.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from sparsecomm.errors import InvalidInputError
from sparsecomm.tensors import interop
from sparsecomm.tensors.arrays import Array, Bytes

__all__ = ["checksum", "decode", "encode"]

_DTYPES = {np.dtype(code).name for code in ("?", *"bhiqBHIQefdFD")} | {"bfloat16"}
_MAX_DEPTH = 32  # of lists and dictionaries within each other
_MAX_NUMBER = 1 << 64
_HEADER = 8  # bytes


def encode(value: object) -> Bytes:
    """Return plain values as bytes.

    Args:
        value: ``None``, a bool, number, text, array, or a list, tuple or dictionary of such; keys are texts and whole
            numbers. Arrays are NumPy's, or have ``__dlpack__``.

    Raises:
        InvalidInputError: something in it is of another type, or nested too deeply; the message names the place.
    """
    described, arrays = _described(value)
    for name, _ in arrays:
        if name not in _DTYPES:
            known = ", ".join(sorted(_DTYPES))
            raise InvalidInputError(f"got an array of type {name}, which cannot be sent; expected {known}")
    header = np.frombuffer(len(described).to_bytes(_HEADER, "little"), np.uint8)
    return np.concatenate([header, np.frombuffer(described, np.uint8), *(data for _, data in arrays)])


def checksum(value: object) -> int:
    """Return a checksum of plain values, of 64 bits; arrays may be of any type that has one.

    Raises:
        InvalidInputError: as `encode`.
    """
    described, arrays = _described(value)
    sums = zlib.crc32(described), zlib.adler32(described)
    for _, data in arrays:
        sums = zlib.crc32(data.data, sums[0]), zlib.adler32(data.data, sums[1])
    return sums[0] << 32 | sums[1]


def decode(data: Bytes) -> Any:
    """Return what `encode` has made bytes of. Arrays are new.

    Raises:
        InvalidInputError: the bytes are no such values. Nothing in them is evaluated.
    """
    try:
        raw = np.ascontiguousarray(data).data.cast("B")
        end = _HEADER + int.from_bytes(raw[:_HEADER], "little")
        if end > len(raw):
            raise ValueError(f"{len(raw)} bytes, of which {end} are to describe the values")
        reader = _Reader(raw, end)
        value = reader.value(json.loads(bytes(raw[_HEADER:end]), parse_constant=_refuse, parse_float=_refuse), 0)
        if reader.position != len(raw):
            raise ValueError(f"{len(raw) - reader.position} bytes too many")
        return value
    except Exception as error:  # whatever a library says about bytes that anybody can have sent
        raise InvalidInputError(f"{len(data)} bytes that are no values: {error}; expected those of `encode`") from error


# -- values to bytes --------------------------------------------------------------------------------------------------


def _described(value: object) -> tuple[bytes, list[tuple[str, Bytes]]]:
    """Return the description of values, and the types and bytes of their arrays."""
    arrays: list[tuple[str, Bytes]] = []
    return json.dumps(_description(value, arrays, "", 0), separators=(",", ":")).encode(), arrays


def _description(value: Any, arrays: list[tuple[str, Bytes]], place: str, depth: int) -> object:
    if depth > _MAX_DEPTH:
        raise InvalidInputError(f"values are nested more than {_MAX_DEPTH} deep at {place[:80]}; expected fewer levels")
    if value is None or isinstance(value, (bool, str)):
        return value if value is None or isinstance(value, bool) else str(value)
    if isinstance(value, np.ndarray | np.generic) or hasattr(value, "__dlpack__"):
        return {"array": _array(value, arrays, place)}
    if isinstance(value, int) and -_MAX_NUMBER < value < _MAX_NUMBER:
        return int(value)
    if isinstance(value, float):
        return {"float": float(value).hex()}
    if isinstance(value, Mapping):
        pairs = []
        for key in value:
            if not isinstance(key, (str, int)):
                raise InvalidInputError(
                    f"got a key of type {type(key).__name__} at {place or 'the top'}; expected a text"
                )
            inner = f"{place}[{key!r}]"
            pairs.append([_description(key, arrays, inner, depth), _description(value[key], arrays, inner, depth + 1)])
        return {"dict": pairs}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_description(each, arrays, f"{place}[{i}]", depth + 1) for i, each in enumerate(value)]}
    raise InvalidInputError(
        f"got {type(value).__name__} at {place or 'the top'}; expected None, bools, numbers of 64 bits, texts, arrays, "
        "and lists and dictionaries of such"
    )


def _array(value: Any, arrays: list[tuple[str, Bytes]], place: str) -> list[object]:
    """Return type and shape of an array; append type and bytes."""
    if isinstance(value, np.ndarray | np.generic):
        value = np.asarray(value)
        if value.dtype.hasobject or value.dtype.names or value.dtype.char in "gG":  # which have bytes of no meaning
            raise InvalidInputError(f"got an array of type {value.dtype} at {place or 'the top'}; expected numbers")
        value = value.astype(value.dtype.newbyteorder("<"), copy=False)
    what, data = interop.content(value, place or "state")
    name = what.partition(" ")[0]
    arrays.append((name, data))
    return [name, [int(n) for n in value.shape]]


# -- and back ---------------------------------------------------------------------------------------------------------


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"a number {text[:20]}")


class _Reader:
    """Makes values of a description, and takes the arrays' bytes one after another."""

    def __init__(self, raw: memoryview, position: int) -> None:
        self._raw, self.position = raw, position

    def value(self, described: object, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise ValueError(f"more than {_MAX_DEPTH} levels")
        if not isinstance(described, dict):
            if isinstance(described, list) or (isinstance(described, int) and abs(described) >= _MAX_NUMBER):
                raise ValueError(f"{type(described).__name__} where a value should be")
            return described
        ((kind, inner),) = described.items()
        if kind == "float":
            return float.fromhex(inner)
        if kind == "array":
            return self._array(*inner)
        if kind not in ("list", "tuple", "dict") or not isinstance(inner, list):
            raise ValueError(f"a value of kind {kind[:20]!r}")
        if kind == "dict":
            if not all(isinstance(key, (str, int)) for key, _ in inner):
                raise ValueError("a key that is neither a text nor a number")
            return {key: self.value(each, depth + 1) for key, each in inner}
        found = [self.value(each, depth + 1) for each in inner]
        return found if kind == "list" else tuple(found)

    def _array(self, name: str, shape: list[int]) -> Array:
        if name not in _DTYPES or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError("an array of unknown type or shape")
        dtype = np.dtype(name).newbyteorder("<")
        begin, count = self.position, math.prod(shape)
        self.position += count * dtype.itemsize
        if self.position > len(self._raw):
            raise ValueError(f"an array of {count} elements, which are not there")
        flat = np.frombuffer(self._raw, dtype, count, begin) if count else np.zeros(0, dtype)
        return flat.reshape(shape).astype(np.dtype(name), copy=True)
