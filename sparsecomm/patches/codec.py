"""`diff` and `apply`, and the format of patches (`read_patch`, `Patch`)."""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from sparsecomm.backends import _codec
from sparsecomm.checks import quote
from sparsecomm.errors import InvalidInputError, PatchError, listed
from sparsecomm.patches import cuda, elements
from sparsecomm.patches.elements import DTYPES, Weight, weights_of
from sparsecomm.signals import deferred
from sparsecomm.tensors.arrays import Array
from sparsecomm.tensors.interop import Tensor, host_tensor

MAGIC = b"SPARSECOMM PATCH 1\n"
MAX_HEADER_BYTES = 1 << 26  # of the decompressed header: about a million tensors
_CHANGES, _WHOLE = 0, 1  # how a tensor is coded
_WORTH_TRYING = 1 / 64  # if changes take more than this share of a tensor's bytes, try to compress the whole tensor
_PIECE = 1 << 20  # elements that are compressed together
_SAMPLED_RUN, _SAMPLED_RUNS = 1024, 4  # elements per run, and runs, of the sample that predicts the compressed size


class TensorPatch(NamedTuple):
    """A tensor in a patch. The fields after ``before`` are 0 if it has not changed."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    before: int  # digest of the tensor to which the patch applies
    changed: int = 0  # number of changed elements
    nbytes: int = 0  # of the coded changes
    checksum: int = 0  # CRC-32 of the coded changes
    coding: int = _CHANGES
    lowest: int = 0  # see `lowest_class`

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Patch:
    """Description of a patch.

    Attributes:
        before: identifies the weights to which the patch applies, by a hash of all tensors.
        after: identifies the resulting weights.
        tensors: all tensors, by name.
        nbytes: size of the patch.
    """

    before: str
    after: str
    tensors: dict[str, TensorPatch]
    nbytes: int

    @property
    def changed(self) -> int:
        """Number of changed elements."""
        return sum(tensor.changed for tensor in self.tensors.values())

    @property
    def size(self) -> int:
        """Number of elements."""
        return sum(tensor.size for tensor in self.tensors.values())


class New(NamedTuple):
    """The new elements of a tensor, decoded but not written."""

    digest: int  # of the tensor with the new elements
    write: Callable[[], None]


def _codec_of(*tensors: Tensor) -> ModuleType:
    """Return the codec for the devices of tensors: a module with `diff`, `locate` and `digest`."""
    return cuda if elements.on_gpu(*tensors) else _codec


def digest(t: Tensor) -> int:
    """Return the 64-bit digest of a tensor's bytes."""
    number: int = _codec_of(t).digest(t)
    return number


def version_of(tensors: Mapping[str, tuple[Sequence[int], int]]) -> str:
    """Return the identity of weights: a hash of the shape and the digest of each, by name."""
    lines = (f"{json.dumps(name)} {list(shape)} {number:x}" for name, (shape, number) in sorted(tensors.items()))
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def version_of_weights(weights: Mapping[str, Weight]) -> str:
    """Return the identity of weights. Reads them once."""
    return version_of({name: (weight.shape, digest(weight.tensor)) for name, weight in weights.items()})


def diff(old: object, new: object) -> bytes:
    """Return a patch that turns ``old`` into ``new``, bit for bit.

    Args:
        old, new: an array, or a mapping of names to arrays (``model.state_dict()``), of NumPy, PyTorch, JAX, CuPy or
            any library with ``__dlpack__``, on a CPU or a CUDA GPU. Both must have the same names, shapes and dtypes:
            floats of 8 to 64 bits, integers, bool or complex numbers. Only changes leave the GPU.

    Raises:
        InvalidInputError: an array cannot be used, or ``old`` and ``new`` differ in names, shapes or dtypes.
    """
    return diff_weights(weights_of(old), weights_of(new))


def diff_weights(olds: Mapping[str, Weight], news: Mapping[str, Weight]) -> bytes:
    """Return a patch as `diff` does."""
    elements.check_names(olds, news, "new")
    for name, weight in news.items():
        if (weight.dtype, weight.shape) != olds[name][1:3]:
            seen, expected = f"{weight.dtype} {weight.shape}", f"{olds[name].dtype} {olds[name].shape}"
            raise InvalidInputError(f"new, {name or 'tensor'}: got {seen}; expected {expected}, as in old")
    tensors, sections, after = [], [], {}
    for name, weight in news.items():
        old, new = olds[name].tensor, weight.tensor
        lowest = elements.lowest_class(weight.dtype, old)
        coded, changed, before, now = _codec_of(old, new).diff(old, new, elements.layout(weight.dtype, lowest))
        coding = _CHANGES
        if len(coded) > _WORTH_TRYING * new.nbytes:
            compressed = _compress_below(len(coded), elements.bytes_of(new), new.dtype.itemsize)
            if compressed is not None:
                coded, coding = compressed, _WHOLE
        described = TensorPatch(
            name, weight.dtype, weight.shape, before, changed, len(coded), zlib.crc32(coded), coding, lowest
        )
        tensors.append(described if changed else described[:4])  # the other fields have their defaults
        after[name] = weight.shape, now
        sections.append(coded)
    header = zlib.compress(json.dumps([version_of(after), tensors], separators=(",", ":")).encode(), 9)
    lengths = np.array([len(header), zlib.crc32(header)], "<u4").tobytes()
    return b"".join([MAGIC, lengths, header, *sections])


def read_patch(patch: bytes) -> Patch:
    """Return the description of a patch, without decoding its changes.

    Raises:
        PatchError: ``patch`` is not a patch, or it is damaged.
        InvalidInputError: ``patch`` is not bytes.
    """
    return _parse(patch)[0]


def _parse(patch: bytes) -> tuple[Patch, memoryview]:
    """Return the description of a patch, and its coded changes."""
    try:
        data = memoryview(patch).cast("B")
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"patch: got {type(patch).__name__}; expected the bytes that diff() made") from error
    begin = len(MAGIC) + 8
    if data[: len(MAGIC)] != MAGIC or len(data) < begin:
        raise PatchError("this is not a patch that this version of sparsecomm can read: its first bytes differ")
    length, checksum = np.frombuffer(data[len(MAGIC) : begin], "<u4").tolist()
    header = data[begin : begin + length]
    if len(header) != length or zlib.crc32(header) != checksum:
        raise PatchError("the patch is damaged: its header is incomplete or has a wrong checksum")
    try:
        after, fields = json.loads(_unpacked(header, MAX_HEADER_BYTES))
        tensors = {name: TensorPatch(name, dtype, tuple(shape), *more) for name, dtype, shape, *more in fields}
        for t in tensors.values():
            numbers_fit = all(type(number) is int and 0 <= number < 1 << 64 for number in (*t.shape, *t[3:]))
            if not (numbers_fit and isinstance(t.name, str) and t.dtype in DTYPES and t.lowest < 1 << 32):
                raise ValueError(f"{quote(t)} describes no tensor")
            if t.coding not in (_CHANGES, _WHOLE) or (t.changed == 0) != (t.nbytes == 0):
                raise ValueError(f"{quote(t)} describes no changes")
        if len(tensors) != len(fields) or not isinstance(after, str):
            raise ValueError("a name appears twice, or the version is not text")
    except (ValueError, TypeError, zlib.error, RecursionError) as error:
        raise PatchError(f"the patch is damaged: its header cannot be read ({error})") from error
    before = version_of({t.name: (t.shape, t.before) for t in tensors.values()})
    body = data[begin + length :]
    if len(body) != sum(t.nbytes for t in tensors.values()):
        raise PatchError(f"the patch is damaged: it has {len(data)} bytes, and its header describes another number")
    return Patch(before, after, tensors, len(data)), body


def apply(patch: bytes, tensors: object) -> None:
    """Apply a patch to tensors, in place.

    All changes are decoded and checked before the first one is written, so an error leaves the tensors unchanged.

    Args:
        patch: what `diff` returned.
        tensors: an array, or a mapping of names to arrays, as for `diff`, with the names, shapes and dtypes of the
            patch; contiguous and writable. An array of unsigned integers may stand for any dtype of the same size.

    Raises:
        PatchError: the patch is damaged, or the tensors hold other weights than those for which it was made.
        InvalidInputError: a tensor cannot be used, or names, shapes or dtypes differ from the patch's.
    """
    apply_to(patch, weights_of(tensors, writable=True))


def apply_to(patch: bytes, weights: Mapping[str, Weight]) -> Patch:
    """Apply a patch to weights as `apply` does, and return its description."""
    description, body = _parse(patch)
    check_weights(description.tensors, weights)
    new: dict[str, New] = {}
    unexpected, begin = [], 0  # names of tensors with other weights; where a tensor's changes begin
    for name, described in description.tensors.items():
        coded = body[begin : begin + described.nbytes]
        begin += described.nbytes
        decoded = _decode(described, coded, weights[name].tensor)
        if decoded is None:
            unexpected.append(name or "tensor")
        else:
            new[name] = decoded
    if unexpected:
        raise PatchError(
            f"the tensors hold other weights than those for which the patch was made, in {listed(unexpected)} of "
            f"{len(description.tensors)} tensors; begin with the weights of version {description.before}"
        )
    write_all(new, weights, description.after)
    return description


def _decode(described: TensorPatch, coded: memoryview, t: Tensor) -> New | None:
    """Return the new elements, or ``None`` if the tensor does not hold the weights to which the changes apply."""
    if zlib.crc32(coded) != described.checksum:
        raise PatchError(f"the patch is damaged: the changes of {described.name or 'tensor'} have a wrong checksum")
    if described.coding == _CHANGES:
        located = _codec_of(t).locate(t, elements.layout(described.dtype, described.lowest), coded)
        before = digest(t) if located is None else located.before
        new = None if located is None else New(located.after, partial(located.write, t))
    else:
        data = _decompress(coded, t.nbytes, DTYPES[described.dtype].itemsize)
        before = digest(t)
        new = None if data is None else replacement(data, t)
    if before != described.before:
        return None
    if new is None:
        raise PatchError(f"the patch is damaged: the changes of {described.name or 'tensor'} cannot be decoded")
    return new


def replacement(data: Array, t: Tensor) -> New:
    """Return ``data``, bytes in host memory, as new elements for a whole tensor."""
    source = host_tensor(data)
    return New(digest(source), partial(elements.copy_tensor, source, t))


@deferred
def write_all(new: Mapping[str, New], weights: Mapping[str, Weight], version: str) -> None:
    """Write all new elements. Signal handlers run only afterwards.

    Raises:
        PatchError: the resulting weights do not have the identity ``version``.
        InvalidInputError: tensors share memory, as tied weights do, and their new elements differ.
    """
    if version_of({name: (weight.shape, new[name].digest) for name, weight in weights.items()}) != version:
        raise PatchError(f"the file is damaged: it leads to other weights than those of version {version}")
    in_memory = sorted(weights.values(), key=lambda weight: (weight.tensor.pointer, weight.tensor.nbytes))
    for one, other in pairwise(weight for weight in in_memory if weight.tensor.nbytes):
        is_tied = (one.tensor.pointer, one.tensor.nbytes) == (other.tensor.pointer, other.tensor.nbytes)
        overlap = other.tensor.pointer < one.tensor.pointer + one.tensor.nbytes
        if overlap and not (is_tied and new[one.name].digest == new[other.name].digest):
            raise InvalidInputError(
                f"{one.name} and {other.name} share memory, but the published ones differ, or they overlap only in "
                "part; pass separate tensors"
            )
    for replaced in new.values():
        replaced.write()


def check_weights(described: Mapping[str, Any], weights: Mapping[str, Weight]) -> None:
    """Raise `InvalidInputError` unless weights have the names, shapes and dtypes of a patch or an anchor."""
    elements.check_names(described, weights, "tensors")
    for name, t in described.items():
        weight = weights[name]
        itemsize = DTYPES[t.dtype].itemsize
        if weight.shape != t.shape or weight.dtype not in (t.dtype, f"uint{8 * itemsize}"):
            raise InvalidInputError(
                f"{name or 'tensor'}: got {weight.dtype} {weight.shape}; expected {t.dtype} {t.shape}, as published"
            )


def _compress_below(nbytes: int, data: Array, itemsize: int) -> bytes | None:
    """Return compressed elements, or ``None`` if they would not be shorter than ``nbytes``: a sample is tried first."""
    run = _SAMPLED_RUN * itemsize
    step = max(run, len(data) // (_SAMPLED_RUNS * itemsize) * itemsize)
    sample = np.concatenate([data[i : i + run] for i in range(0, len(data), step)])
    if len(_compress(sample, itemsize)) * len(data) >= 1.05 * nbytes * len(sample):
        return None
    compressed = _compress(data, itemsize)
    return compressed if len(compressed) < nbytes else None


def _compress(data: Array, itemsize: int) -> bytes:
    """Compress elements in pieces: the first bytes of all elements of a piece, then the second bytes, and so on."""
    packed = zlib.compressobj(1, zlib.DEFLATED, 15, 9, zlib.Z_RLE)
    parts = [
        packed.compress(np.ascontiguousarray(data[i : i + _PIECE * itemsize].reshape(-1, itemsize).T).data)
        for i in range(0, len(data), _PIECE * itemsize)
    ]
    return b"".join([*parts, packed.flush()])


def _decompress(coded: memoryview, nbytes: int, itemsize: int) -> Array | None:
    """Return the ``nbytes`` bytes that `_compress` compressed, or ``None`` if they are damaged."""
    try:
        data = np.frombuffer(_unpacked(coded, nbytes), np.uint8)
    except zlib.error:
        return None
    if len(data) != nbytes:
        return None
    restored = np.empty(nbytes, np.uint8)
    for i in range(0, nbytes, _PIECE * itemsize):
        piece = data[i : i + _PIECE * itemsize]
        restored[i : i + len(piece)] = piece.reshape(itemsize, -1).T.ravel()
    return restored


def _unpacked(data: bytes | memoryview, max_bytes: int) -> bytes:
    """Return decompressed data; raise `zlib.error` if it is damaged or longer than ``max_bytes``."""
    unpack = zlib.decompressobj()
    out = unpack.decompress(data, max_bytes + 1)
    if len(out) > max_bytes or not unpack.eof or unpack.unused_data:
        raise zlib.error(f"not the zlib data of at most {max_bytes} bytes")
    return out
