"""Plain values and arrays, stored as NumPy's .npz archives.

A value is ``None``, a bool, a number, a string, an array, or a list, tuple or dictionary of values. An archive holds
each array as a member, and everything else as one member of JSON. Nothing is pickled, so loading never runs code.
"""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np

from sparsecomm.errors import InvalidInputError
from sparsecomm.tensors import interop
from sparsecomm.tensors.arrays import Array, Bytes

__all__ = ["checksum", "from_bytes", "read", "to_bytes", "write"]

_TREE = "values"  # the archive's member of JSON
_DTYPES = {np.dtype(code).name for code in ("?", *"bhiqBHIQefdFD")}
_MAX_DEPTH = 32
_MAX_INT = 1 << 64


def write(file: BinaryIO, value: object) -> None:
    """Write a value to a file. Everything is checked before the first byte is written.

    Args:
        file: opened for writing in binary mode.
        value: see above. Arrays are NumPy's or have ``__dlpack__``; keys of dictionaries are strings and integers.

    Raises:
        InvalidInputError: the value contains another type, a type that could not be read back, or too many levels.
    """
    tree, arrays = _flatten(value)
    members: dict[str, Any] = {_TREE: np.frombuffer(tree, np.uint8)}
    members |= {str(i): array for i, array in enumerate(arrays)}
    np.savez(file, **members)


def read(file: BinaryIO, *, verify: bool = False) -> Any:
    """Return the value that `write` has written. Arrays are new and in this machine's byte order.

    Args:
        file: opened for reading in binary mode.
        verify: read each array, but return ``None`` in its place, so that all of them need not fit into memory.

    Raises:
        InvalidInputError: the file is not such an archive, or is damaged.
    """
    try:
        with np.load(file, allow_pickle=False) as archive:
            return _unflatten(json.loads(bytes(archive[_TREE])), archive, 0, verify)
    except Exception as error:  # anything that a parser raises for foreign bytes
        raise InvalidInputError(f"cannot read an archive of values: {type(error).__name__}: {error}") from error


def to_bytes(value: object) -> Bytes:
    """Return the bytes that `write` would write.

    Raises:
        InvalidInputError: as `write`.
    """
    buffer = io.BytesIO()
    write(buffer, value)
    return np.frombuffer(buffer.getbuffer(), np.uint8)


def from_bytes(data: Bytes) -> Any:
    """Return the value of which `to_bytes` has returned the bytes.

    Raises:
        InvalidInputError: as `read`.
    """
    return read(io.BytesIO(data.tobytes()))


def checksum(value: object) -> int:
    """Return a 64-bit checksum of a value: CRC-32 and Adler-32. It does not depend on memory layout or byte order.

    Raises:
        InvalidInputError: as `write`.
    """
    tree, arrays = _flatten(value, load_back=False)
    crc, adler = zlib.crc32(tree), zlib.adler32(tree)
    for array in arrays:
        data = array.reshape(-1).view(np.uint8).data
        crc, adler = zlib.crc32(data, crc), zlib.adler32(data, adler)
    return crc << 32 | adler


# -- values to JSON and arrays ----------------------------------------------------------------------------------------


def _flatten(value: object, *, load_back: bool = True) -> tuple[bytes, list[Array]]:
    """Return a value as JSON, and its arrays in order: contiguous and little-endian.

    Args:
        value: the value.
        load_back: refuse types that NumPy cannot read back.
    """
    arrays: list[Array] = []
    return json.dumps(_tree(value, arrays, "", 0, load_back), separators=(",", ":")).encode(), arrays


def _tree(value: Any, arrays: list[Array], path: str, depth: int, load_back: bool) -> object:
    at = path[:80] or "the top level"
    if depth > _MAX_DEPTH:
        raise InvalidInputError(f"values are nested more than {_MAX_DEPTH} levels deep at {at}")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, np.ndarray | np.generic) or hasattr(value, "__dlpack__"):
        dtype, shape, array = _array(value, at, load_back)
        arrays.append(array)
        return {"array": [len(arrays) - 1, dtype, shape]}
    if isinstance(value, int) and -_MAX_INT < value < _MAX_INT:
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        items: list[object] = []
        for key in value:
            if isinstance(key, bool) or not isinstance(key, (str, int)):
                raise InvalidInputError(f"got a key of type {type(key).__name__} at {at}; expected a string")
            key = int(key) if isinstance(key, int) else str(key)
            items.append([key, _tree(value[key], arrays, f"{path}[{key!r}]", depth + 1, load_back)])
        return {"dict": items}
    if isinstance(value, (list, tuple)):
        items = [_tree(each, arrays, f"{path}[{i}]", depth + 1, load_back) for i, each in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    raise InvalidInputError(
        f"got {type(value).__name__} at {at}; expected None, bools, integers below 2^64, floats, strings, arrays, and "
        "lists, tuples and dictionaries of them"
    )


def _array(value: Any, at: str, load_back: bool) -> tuple[str, list[int], Array]:
    """Return the name of an array's type, its shape, and its elements: little-endian, or as flat bytes."""
    if isinstance(value, np.ndarray | np.generic):
        if (
            value.dtype.hasobject
            or value.dtype.names
            or value.dtype.char in "gG"
            or isinstance(value, np.ma.MaskedArray)
        ):
            raise InvalidInputError(
                f"got a {type(value).__name__} of type {value.dtype} at {at}; expected an array of numbers"
            )
        value = np.asarray(value, value.dtype.newbyteorder("<"))
    value = getattr(value, "to_local", lambda: value)()  # of a DTensor, this rank's shard
    described, data = interop.content(value, at)
    name = described.partition(" ")[0]
    if load_back and name not in _DTYPES:
        _extension_dtype(name, at)
    shape = [int(n) for n in value.shape]
    return name, shape, data.view(np.dtype(name).newbyteorder("<")).reshape(shape) if name in _DTYPES else data


def _named_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(name)


def _extension_dtype(name: str, at: str) -> np.dtype[Any]:
    """Return a type that NumPy knows only by an extension: bfloat16."""
    try:
        if name == "bfloat16":
            return _named_dtype(name)
    except TypeError:
        raise InvalidInputError(
            f"got an array of bfloat16 at {at}, which NumPy cannot hold: install and import ml_dtypes, or convert the "
            "array to float32"
        ) from None
    raise InvalidInputError(f"got an array of type {name} at {at}; expected {', '.join(sorted(_DTYPES))} or bfloat16")


# -- and back ---------------------------------------------------------------------------------------------------------


def _unflatten(tree: Any, archive: Mapping[str, Array], depth: int, verify: bool) -> Any:
    if depth > _MAX_DEPTH:
        raise ValueError(f"more than {_MAX_DEPTH} levels")
    if isinstance(tree, list):
        return [_unflatten(each, archive, depth + 1, verify) for each in tree]
    if not isinstance(tree, dict):
        if isinstance(tree, int) and abs(tree) >= _MAX_INT:
            raise ValueError("an integer of more than 64 bits")
        return tree
    ((kind, inner),) = tree.items()
    if kind == "tuple":
        return tuple(_unflatten(each, archive, depth + 1, verify) for each in inner)
    if kind == "dict":
        if not all(type(key) in (str, int) for key, _ in inner):
            raise ValueError("a key that is neither a string nor an integer")
        return {key: _unflatten(each, archive, depth + 1, verify) for key, each in inner}
    if kind != "array":
        raise ValueError(f"an entry of kind {kind[:20]!r}")
    number, name, shape = inner
    array = archive[str(number)]
    dtype = np.dtype(name).newbyteorder("<") if name in _DTYPES else _extension_dtype(name, "an array")
    if name not in _DTYPES:
        array = array.view(dtype).reshape(shape)
    if array.dtype != dtype or list(array.shape) != shape:
        raise ValueError(f"array {number} is {array.dtype} {array.shape} instead of {name} {tuple(shape)}")
    return None if verify else array.astype(dtype.newbyteorder("="), copy=False)
