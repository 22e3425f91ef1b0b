"""The codec of patches for tensors of CUDA devices (kernels/cuda/patches.cu), with the interface of `_codec`.

The device compares and changes elements. The host codes and decodes changes; nothing else is copied between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import DTypeLike

from sparsecomm import backends
from sparsecomm.backends import _codec
from sparsecomm.backends.cuda import CudaBackend
from sparsecomm.backends.cuda.context import Arguments, ceil_div
from sparsecomm.backends.cuda.modules import patch_definitions
from sparsecomm.backends.cuda.runtime import fetch, refuse_capture
from sparsecomm.tensors.arrays import Array
from sparsecomm.tensors.interop import Device, Tensor

Layout: TypeAlias = _codec.Layout
BLOCK, CLASSES, PIECE = _codec.BLOCK, _codec.CLASSES, _codec.PIECE
_PIECES = 16  # compared or located at once; limits the memory
_WARP, _BYTES = 32, Layout(1, 0, 0, 0, False, 1)
_PARAMETERS = {  # of the kernels
    "compare": "before after n first_block shift mask low ranks changes sums",
    "offsets": "blocks ranks changes members starts look_back",
    "list_changes": "before after n shift mask low is_float ranks changes starts label rank distance",
    "place_changes": "begin ranges count members rank distance placed",
    "find_changes": "before n first_block shift mask low is_float ranks members placed position value sums look_back",
    "write_changes": "data count position value",
}


class Located:
    """The new elements of a tensor, decoded but not written: like `_codec.Located`."""

    def __init__(self, layout: Layout, parts: list[tuple[int, Array, Array]], before: int, after: int) -> None:
        """``parts``: for each part of the tensor, its first element, and positions and values of new elements."""
        self.before, self.after = before, after
        self._layout, self._parts = layout, parts

    def write(self, tensor: Tensor) -> None:
        """Write the new elements to a tensor with the shape and dtype of the one they were decoded for."""
        with _on(tensor) as backend:
            for begin, position, value in self._parts:
                arguments: Arguments = {"data": tensor.pointer + begin * self._layout.itemsize, "count": len(position)}
                arguments |= {"position": position, "value": value}
                _start(backend, "write_changes", self._layout, arguments, threads=len(position))
            backend.runtime.synchronize()  # before another stream reuses the memory of positions and values


def digest(tensor: Tensor) -> int:
    """Return the digest of a tensor's bytes."""
    with _on(tensor) as backend:
        sums = backend.zeros(2, np.uint64)
        arguments: Arguments = {"before": tensor, "after": None, "n": tensor.nbytes, "first_block": 0, "sums": sums}
        arguments |= {"ranks": None, "changes": None}
        _start(backend, "compare", _BYTES, arguments, threads=_WARP * ceil_div(tensor.nbytes, BLOCK))
        return _digest_of(_fetched(backend, sums)[0][0], tensor)


def diff(old: Tensor, new: Tensor, layout: Layout) -> tuple[bytes, int, int, int]:
    """Return the coded changes of a tensor, their number, and the digests of both versions.

    One version may be in host memory or on another device.
    """
    tensor, other = (new, old) if new.device.kind == "cuda" else (old, new)
    coder, totals, changed = _codec.Coder(), np.zeros(3, np.uint64), 0
    with _on(tensor, other) as backend:
        for begin, size in _parts(tensor.size * layout.per_item):
            part = _Part(backend, layout, begin, size, old, new)
            members, starts, sums = _fetched(backend, part.members, part.starts, part.sums)
            coder.add(members, starts, *part.changes(int(starts[-1])))
            totals, changed = totals + sums, changed + int(starts[-1])
    return coder.coded(), changed, _digest_of(totals[0], tensor), _digest_of(totals[1], tensor)


def locate(tensor: Tensor, layout: Layout, coded: bytes | memoryview) -> Located | None:
    """Decode what `diff` returned. Return None if it does not fit the tensor."""
    totals, parts, n = np.zeros(3, np.uint64), [], tensor.size * layout.per_item
    with _on(tensor) as backend:
        for begin, size in _parts(n):
            if (decoded := _codec.decode(coded, n, begin // PIECE, ceil_div(size, PIECE))) is None:
                return None
            counts, known, rank, distance = decoded
            part = _Part(backend, layout, begin, size, tensor, None)
            if len(rank):
                parts.append((begin, *part.find(counts, rank, distance)))
            members, sums = _fetched(backend, part.members, part.sums)
            if sums[2] != len(rank) or ((known != 0) & (known != members.reshape(known.shape))).any():
                return None
            sums[1] = sums[1 if len(rank) else 0]
            totals += sums
    return Located(layout, parts, _digest_of(totals[0], tensor), _digest_of(totals[1], tensor))


def sample(tensor: Tensor, itemsize: int, count: int) -> Array:
    """Return the bits of about ``count`` evenly spaced elements of ``itemsize`` bytes, as int64 in host memory."""
    with _on(tensor) as backend:
        n = tensor.nbytes // itemsize
        elements: Any = backend.runtime.view(tensor.pointer, n, f"<u{itemsize}", tensor)
        sampled: Array = elements[:: max(1, n // count)].get().astype(np.int64)
        return sampled


def empty_like(tensor: Tensor) -> Tensor:
    """Return new, uninitialised memory for a tensor, on its device."""
    with _on(tensor) as backend:
        memory = backend.runtime.empty(tensor.nbytes, np.uint8)
        pointer = backend.runtime.address(memory)
    return Tensor(pointer, tensor.size, tensor.shape, tensor.dtype, tensor.device, False, memory, tensor.stream)


def copy(source: Tensor, target: Tensor) -> None:
    """Copy a tensor to another one with as many bytes; at least one is on a CUDA device."""
    tensor, other = (target, source) if target.device.kind == "cuda" else (source, target)
    with _on(tensor, other) as backend:
        if source.nbytes:
            backend.runtime.copy(target.pointer, source.pointer, source.nbytes)
            backend.runtime.synchronize()


class _Part:
    """Some pieces of a tensor, counted by class and compared, on the current stream.

    Attributes:
        members: number of elements of each class in each piece.
        starts: number of changes before each piece; the last entry counts all changes.
        sums: the sums of the hashes of both versions, and the number of changes that `find` has found.
    """

    def __init__(
        self, backend: CudaBackend, layout: Layout, begin: int, size: int, old: Tensor, new: Tensor | None
    ) -> None:
        empty, first, nbytes = backend.runtime.empty, begin * layout.itemsize, size * layout.itemsize
        self._backend, self._layout, self._nbytes = backend, layout, nbytes
        self._blocks, pieces = ceil_div(nbytes, BLOCK), ceil_div(size, PIECE)
        self.members, self.starts = empty(pieces * CLASSES, np.uint32), empty(pieces + 1, np.uint64)
        self.sums = backend.zeros(3, np.uint64)
        before, after = (None if t is None else _here(backend, t, first, nbytes) for t in (old, new))
        ranks, changes = empty(self._blocks * CLASSES, np.uint32), empty(self._blocks, np.uint32)
        self._arguments: Arguments = {"before": before, "after": after, "n": size, "first_block": first // BLOCK}
        self._arguments |= {"blocks": self._blocks, "members": self.members, "starts": self.starts, "sums": self.sums}
        self._arguments |= {"ranks": ranks, "changes": changes}
        _start(backend, "compare", layout, self._arguments, threads=_WARP * self._blocks)
        _start(backend, "offsets", layout, self._arguments, tiles=pieces)

    def changes(self, count: int) -> tuple[Array, Array, Array]:
        """Return classes, ranks and distances of the ``count`` changes, by position, in host memory."""
        if not count:
            return np.empty(0, np.uint8), np.empty(0, np.uint32), np.empty(0, np.uint64)
        dtypes = {"distance": np.uint64, "rank": np.uint32, "label": np.uint8}
        outputs = {name: self._backend.runtime.empty(count, dtype) for name, dtype in dtypes.items()}
        arguments = self._arguments | outputs
        _start(self._backend, "list_changes", self._layout, arguments, threads=_WARP * self._blocks)
        distance, rank, label = _fetched(self._backend, *outputs.values())
        return label, rank, distance

    def find(self, counts: Array, rank: Array, distance: Array) -> tuple[Array, Array]:
        """Find decoded changes. Return their positions and new elements; add the new version's hashes to ``sums``."""
        backend, layout = self._backend, self._layout
        self._read = {"begin": np.cumsum(counts, dtype=np.uint32) - counts.ravel(), "rank": rank, "distance": distance}
        arguments = self._arguments | {"ranges": counts.size, "count": len(rank)}
        arguments |= {name: _sent(backend, x.ctypes.data, len(x), x.dtype) for name, x in self._read.items()}
        position = backend.runtime.empty(len(rank), np.uint32)
        value = backend.runtime.empty(len(rank) * layout.itemsize, np.uint8)
        arguments |= {"position": position, "value": value, "placed": backend.zeros(self._nbytes, np.uint8)}
        _start(backend, "place_changes", layout, arguments, threads=len(rank))
        tiles = ceil_div(self._blocks, backend.tuning.patch_threads // _WARP)
        _start(backend, "find_changes", layout, arguments, tiles=tiles)
        return position, value


@contextmanager
def _on(tensor: Tensor, other: Tensor | None = None) -> Iterator[CudaBackend]:
    """Work on the stream of a tensor, after waiting for the stream of another."""
    streams = [(t.device, t.stream) for t in (tensor, other) if t is not None and t.device.kind == "cuda"]
    if other is not None and len(set(streams)) > 1:
        with _on(other) as backend:
            backend.runtime.synchronize()
    backend = cast(CudaBackend, backends.of(tensor.device))
    with backend.on_stream(tensor):
        refuse_capture(backend.runtime, "patches of weights")
        yield backend


def _parts(n: int) -> Iterator[tuple[int, int]]:
    """Yield the first element and the size of each part of ``n`` elements."""
    for begin in range(0, n, _PIECES * PIECE):
        yield begin, min(_PIECES * PIECE, n - begin)


def _here(backend: CudaBackend, tensor: Tensor, begin: int, nbytes: int) -> Array | int:
    """Return bytes of a tensor on the backend's device: an address, or a copy."""
    is_here = tensor.device == Device("cuda", backend.runtime.device)
    return tensor.pointer + begin if is_here else _sent(backend, tensor.pointer + begin, nbytes, np.uint8)


def _start(
    backend: CudaBackend, name: str, layout: Layout, arguments: Arguments, *, threads: int = 0, tiles: int = 0
) -> None:
    """Start a kernel, which takes its `_PARAMETERS` from ``arguments``. Pass the number of threads, or of tiles."""
    in_block = backend.tuning.patch_threads
    if tiles:
        arguments = arguments | {"look_back": backend.workspace().look_back(tiles)}
    arguments = arguments | {field: np.uint32(getattr(layout, field)) for field in ("shift", "mask", "low")}
    arguments |= {"is_float": layout.is_float}
    chosen = {parameter: arguments[parameter] for parameter in _PARAMETERS[name].split()}
    if grid := tiles or backend.spread(threads, in_block):
        backend.start(backend.prepare("patches.cu", name, patch_definitions(layout.itemsize), grid, in_block, chosen))


def _sent(backend: CudaBackend, source: int, count: int, dtype: DTypeLike) -> Array:
    """Copy memory to the backend's device. Do not change it until the current stream has made the copy."""
    sent = backend.runtime.empty(count, dtype)
    backend.runtime.copy(backend.runtime.address(sent), source, sent.nbytes)
    return sent


def _fetched(backend: CudaBackend, *arrays: Array) -> list[Array]:
    """Wait for the current stream, and return arrays in host memory, one after another. Each must stay aligned."""
    fetched = fetch(backend.runtime, *((backend.runtime.address(array), array.nbytes) for array in arrays))
    ends = np.cumsum([array.nbytes for array in arrays])
    return [fetched[end - array.nbytes : end].view(array.dtype) for array, end in zip(arrays, ends, strict=True)]


def _digest_of(total: np.uint64, tensor: Tensor) -> int:
    return _codec.digest_of(int(total), tensor.nbytes)
