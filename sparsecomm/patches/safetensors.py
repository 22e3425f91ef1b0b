"""Safetensors files: uncompressed ones, mapped into memory, and anchors, which gzip compresses in pieces.

The format (https://github.com/huggingface/safetensors, "Format"): the length of a JSON header as u64, the header with
the dtype, the shape and the offsets of each tensor, and the tensors' bytes.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np

from sparsecomm import config
from sparsecomm.checks import quote
from sparsecomm.errors import InvalidInputError, PatchError
from sparsecomm.patches.codec import check_weights
from sparsecomm.patches.elements import DTYPES, Weight, bytes_of
from sparsecomm.tensors.arrays import Array
from sparsecomm.tensors.interop import Tensor, host_tensor

_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "complex64": "C64",
    "bool": "BOOL",
    **{f"{sign}int{bits}": f"{letter}{bits}" for bits in (8, 16, 32, 64) for sign, letter in (("", "I"), ("u", "U"))},
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_METADATA = "__metadata__"  # not a tensor, but texts from the writer
_MAX_HEADER_BYTES = 100_000_000  # as in safetensors
_PIECE = 1 << 23  # bytes that are compressed together


class Entry(NamedTuple):
    """A tensor in a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int  # of its bytes, after the header
    nbytes: int


def read_header(file: BinaryIO, what: str) -> dict[str, Entry]:
    """Read the header of a file called ``what``; return its tensors by name, in the order of their bytes.

    Raises:
        PatchError: the header is damaged, or has a dtype that is not supported.
    """
    length = int.from_bytes(file.read(8), "little")
    try:
        if length > _MAX_HEADER_BYTES or len(text := file.read(length)) != length:
            raise ValueError(f"a header of {length} bytes")
        entries = []
        for name, tensor in json.loads(text).items():
            if name == _METADATA:
                continue
            (begin, end), shape, dtype = tensor["data_offsets"], tuple(tensor["shape"]), _DTYPES[tensor["dtype"]]
            if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)):
                raise ValueError(f"{quote(tensor)} describes no tensor")
            if end - begin != math.prod(shape) * DTYPES[dtype].itemsize:
                raise ValueError(f"the offsets of {quote(name)} do not match its shape")
            entries.append(Entry(name, dtype, shape, begin, end - begin))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise PatchError(
            f"{what} is not a file of safetensors, or is damaged: {type(error).__name__}: {error}"
        ) from error
    at = 0
    entries.sort(key=lambda entry: (entry.begin, entry.nbytes))  # a tensor without elements ends where it begins
    for entry in entries:
        if entry.begin != at:
            raise PatchError(f"{what} is damaged: the bytes of {entry.name!r} begin at {entry.begin}; expected {at}")
        at += entry.nbytes
    return {entry.name: entry for entry in entries}


def map_weights(path: str | os.PathLike[str], *, writable: bool = False) -> dict[str, Weight]:
    """Return the tensors of an uncompressed file as weights in mapped memory.

    Raises:
        PatchError: the file is damaged, or has a dtype that is not supported.
        OSError: it cannot be opened.
    """
    with open(path, "rb") as file:
        entries = read_header(file, str(path))
        start, size = file.seek(0, os.SEEK_CUR), os.fstat(file.fileno()).st_size
    if size != start + sum(entry.nbytes for entry in entries.values()):
        raise PatchError(f"{path} is damaged: it has {size} bytes, and its header describes another number")
    data: Array = np.memmap(path, np.uint8, "r+" if writable else "r") if size else np.empty(0, np.uint8)
    weights = {}
    for name, (_, dtype, shape, begin, nbytes) in entries.items():
        part = host_tensor(data[start + begin :][:nbytes])
        t = Tensor(part.pointer, math.prod(shape), shape, DTYPES[dtype], part.device, not writable, part.owner)
        weights[name] = Weight(name, dtype, shape, t)
    return weights


def check_names_and_dtypes(weights: Mapping[str, Weight]) -> None:
    """Raise `InvalidInputError` if there is no weight, or a file cannot hold a weight's name or dtype."""
    if not weights:
        raise InvalidInputError("tensors: must contain at least one tensor")
    for weight in weights.values():
        if weight.name == _METADATA:
            raise InvalidInputError(f"{weight.name}: files of safetensors cannot have a tensor of this name; rename it")
        if weight.dtype not in _NAMES:
            raise InvalidInputError(
                f"{weight.name or 'tensor'}: files of safetensors cannot have {weight.dtype} tensors; convert it"
            )


def _header(weights: Mapping[str, Weight], metadata: Mapping[str, str]) -> bytes:
    """Return the beginning of a file, up to the tensors' bytes."""
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    at = 0
    for weight in weights.values():
        end = at + weight.tensor.nbytes
        header[weight.name] = {"dtype": _NAMES[weight.dtype], "shape": weight.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # aligns the tensors
    return len(text).to_bytes(8, "little") + text


def write_file(path: str | os.PathLike[str], weights: Mapping[str, Weight]) -> None:
    """Write weights to an uncompressed file."""
    with open(path, "wb") as file:
        file.write(_header(weights, {}))
        for weight in weights.values():
            file.write(bytes_of(weight.tensor).data)


def compressed(weights: Mapping[str, Weight], metadata: Mapping[str, str]) -> Iterator[bytes]:
    """Return the pieces of a file with the weights, each compressed by gzip in a thread."""
    yield _gzip(_header(weights, metadata))
    with ThreadPoolExecutor(config.threads()) as pool:
        running: deque[Future[bytes]] = deque()
        for weight in weights.values():
            data = bytes_of(weight.tensor)
            for i in range(0, len(data), _PIECE):
                running.append(pool.submit(_gzip, data[i : i + _PIECE].data))
                if len(running) > 2 * config.threads():
                    yield running.popleft().result()
        while running:
            yield running.popleft().result()


def _gzip(data: bytes | memoryview) -> bytes:
    # Strings hardly repeat in weights. Looking only for runs, zlib compresses as well, and 3 times as fast.
    pack = zlib.compressobj(1, zlib.DEFLATED, 31, 9, zlib.Z_RLE)
    return pack.compress(data) + pack.flush()


def read_compressed(file: BinaryIO, weights: Mapping[str, Weight], what: str) -> dict[str, Array]:
    """Return the tensors of a compressed file called ``what`` as bytes. Allocates memory only if they fit ``weights``.

    Raises:
        PatchError: the file is damaged.
        InvalidInputError: names, shapes or dtypes differ from those of ``weights``.
    """
    try:
        with gzip.GzipFile(fileobj=file, mode="rb") as unpacked:
            entries = read_header(cast(BinaryIO, unpacked), what)
            unpacked.peek(1)  # checks the header's checksum, so that a damaged name does not look like another model's
            check_weights(entries, weights)
            data: dict[str, Array] = {}  # by name
            for name, entry in entries.items():
                data[name] = rest = np.empty(entry.nbytes, np.uint8)
                while len(rest):
                    if not (count := unpacked.readinto(rest.data)):
                        raise EOFError(f"the bytes of {name!r} are incomplete")
                    rest = rest[count:]
            if unpacked.read(1):
                raise ValueError("it has more bytes than its header describes")
    except InvalidInputError:
        raise
    except (EOFError, ValueError, zlib.error, gzip.BadGzipFile) as error:
        raise PatchError(f"{what} is damaged: {error}") from error
    return data
