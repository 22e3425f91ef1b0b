"""Archives of plain values: `write` and `read` store them as .npz files, and `checksum` compares them between ranks.

A plain value is ``None``, a bool, a number, a string, an array, or a list, tuple or dictionary of plain values. An
archive stores each array as a member, and everything else as one JSON member. It contains no pickles, so reading an
archive never runs code.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO, TypeAlias

import numpy as np

from sparsecomm.backends import _codec
from sparsecomm.errors import InvalidInputError
from sparsecomm.tensors import interop
from sparsecomm.tensors.arrays import Array, Bytes

_JSON = "values"  # the name of the JSON member
_DTYPES = {np.dtype(code).name for code in ("?", *"bhiqBHIQefdFD")}
_MAX_DEPTH = 32
_INT_LIMIT = 1 << 64
_PlacedArray: TypeAlias = tuple[str, str, Array]  # the name of its dtype, its place in the value, its elements


def write(file: BinaryIO, value: object) -> None:
    """Write a plain value to a file. All of it is checked before the first byte is written.

    Arrays belong to NumPy or have ``__dlpack__``. Dictionary keys are strings or integers.
    """
    tree, arrays = _flatten(value)
    for name, place, _ in arrays:
        _named_dtype(name, place)
    members: dict[str, Any] = {_JSON: np.frombuffer(tree, np.uint8)}
    members |= {str(i): array for i, (_, _, array) in enumerate(arrays)}
    np.savez(file, **members)


def read(file: BinaryIO, *, arrays: bool = True) -> Any:
    """Return the value that `write` stored. Without ``arrays``, each array is returned as ``None``.

    Arrays are new and in the native byte order.
    """
    try:
        with np.load(file, allow_pickle=False) as archive:
            return _unflatten(json.loads(bytes(archive[_JSON])), archive if arrays else None)
    except Exception as error:  # parsers raise many types for foreign bytes
        raise InvalidInputError(f"cannot read an archive of values: {type(error).__name__}: {error}") from error


def to_bytes(value: object) -> Bytes:
    """Return the bytes that `write` would write."""
    buffer = io.BytesIO()
    write(buffer, value)
    return np.frombuffer(buffer.getbuffer(), np.uint8)


def from_bytes(data: Bytes) -> Any:
    """Return the value that `to_bytes` converted."""
    return read(io.BytesIO(data.tobytes()))


def checksum(value: object) -> int:
    """Return a 64-bit checksum of a plain value, with arrays of any dtype, memory layout or byte order."""
    tree, arrays = _flatten(value)
    return digest([np.frombuffer(tree, np.uint8), *(array for _, _, array in arrays)])


def digest(arrays: Iterable[Array]) -> int:
    """Return a 64-bit checksum of the bytes of contiguous arrays, as fast as host memory can be read."""
    on_host = (array if isinstance(array, np.ndarray) else interop.to_host(array) for array in arrays)
    digests = [_codec.digest(interop.host_tensor(array.reshape(-1).view(np.uint8))) for array in on_host]
    return digests[0] if len(digests) == 1 else digest([np.array(digests, "<u8")])


def _flatten(value: object) -> tuple[bytes, list[_PlacedArray]]:
    arrays: list[_PlacedArray] = []
    return json.dumps(_tree(value, arrays, "", 0), separators=(",", ":")).encode(), arrays


def _tree(value: Any, arrays: list[_PlacedArray], path: str, depth: int) -> object:
    """Return a value as JSON can store it. Append its arrays to ``arrays``."""
    place = path[:80] or "the top level"
    if depth > _MAX_DEPTH:
        raise InvalidInputError(f"values are nested more than {_MAX_DEPTH} levels deep at {place}")
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, np.ndarray | np.generic) or hasattr(value, "__dlpack__"):
        dtype, shape, array = _array(value, place)
        arrays.append((dtype, place, array))
        return {"array": [len(arrays) - 1, dtype, shape]}
    if isinstance(value, float) or (isinstance(value, int) and -_INT_LIMIT < value < _INT_LIMIT):
        return value
    if isinstance(value, Mapping):
        items: list[object] = []
        for key in value:
            if isinstance(key, bool) or not isinstance(key, (str, int)):
                raise InvalidInputError(f"got a key of type {type(key).__name__} at {place}; expected a string")
            plain_key = int(key) if isinstance(key, int) else str(key)
            items.append([plain_key, _tree(value[key], arrays, f"{path}[{plain_key!r}]", depth + 1)])
        return {"dict": items}
    if isinstance(value, (list, tuple)):
        items = [_tree(item, arrays, f"{path}[{i}]", depth + 1) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    raise InvalidInputError(
        f"got {type(value).__name__} at {place}; expected None, bools, integers below 2^64, floats, strings, arrays, "
        "or lists, tuples and dictionaries of them"
    )


def _array(value: Any, place: str) -> tuple[str, list[int], Array]:
    """Return the dtype's name, the shape, and the little-endian elements, as flat bytes if NumPy lacks the dtype."""
    if isinstance(value, np.ndarray | np.generic):
        dtype = value.dtype
        if dtype.hasobject or dtype.names or dtype.char in "gG" or isinstance(value, np.ma.MaskedArray):
            raise InvalidInputError(
                f"got a {type(value).__name__} of type {dtype} at {place}; expected an array of numbers"
            )
        value = np.asarray(value, dtype.newbyteorder("<"))
    value = getattr(value, "to_local", lambda: value)()  # this rank's shard of a DTensor
    described, data = interop.content(value, place)
    name, shape = described.partition(" ")[0], [int(n) for n in value.shape]
    return name, shape, data.view(np.dtype(name).newbyteorder("<")).reshape(shape) if name in _DTYPES else data


def _named_dtype(name: str, place: str) -> np.dtype[Any]:
    """Return the little-endian dtype of an array at a place, if NumPy has it."""
    if name not in _DTYPES and name != "bfloat16":
        raise InvalidInputError(f"got an array of type {name} at {place}; expected numbers")
    try:
        dtype: np.dtype[Any] = np.dtype(name).newbyteorder("<")
        return dtype
    except TypeError:
        raise InvalidInputError(
            f"got an array of bfloat16 at {place}, which NumPy cannot store: install and import ml_dtypes, or convert "
            "the array to float32"
        ) from None


def _unflatten(tree: Any, archive: Mapping[str, Array] | None, depth: int = 0) -> Any:
    """Return the value of a JSON tree; without an archive, ``None`` replaces each array."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"more than {_MAX_DEPTH} levels")
    if isinstance(tree, list):
        return [_unflatten(item, archive, depth + 1) for item in tree]
    if not isinstance(tree, dict):
        if isinstance(tree, int) and abs(tree) >= _INT_LIMIT:
            raise ValueError("an integer of more than 64 bits")
        return tree
    ((kind, content),) = tree.items()
    if kind == "tuple":
        return tuple(_unflatten(item, archive, depth + 1) for item in content)
    if kind == "dict":
        if not all(type(key) in (str, int) for key, _ in content):
            raise ValueError("a key that is neither a string nor an integer")
        return {key: _unflatten(item, archive, depth + 1) for key, item in content}
    if kind != "array":
        raise ValueError(f"an entry of kind {kind[:20]!r}")
    number, name, shape = content
    if archive is None:
        return None
    array, dtype = archive[str(number)], _named_dtype(name, f"member {number}")
    if name not in _DTYPES:
        array = array.view(dtype).reshape(shape)
    if array.dtype != dtype or list(array.shape) != shape:
        raise ValueError(f"array {number} is {array.dtype} {array.shape} instead of {name} {tuple(shape)}")
    return array.astype(dtype.newbyteorder("="), copy=False)
