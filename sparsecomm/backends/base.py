"""`Backend`: the arithmetic of one device, which algorithms and calls use.

A method that changes a dense tensor either returns, or raises and has changed nothing. So it changes the tensor last,
after operations that may fail, such as allocating memory or compiling a kernel. The caller records the change in its
next statement; no signal handler runs in between (`sparsecomm.signals`).
"""

# mypy: disable-error-code="empty-body, no-any-return"

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import DTypeLike

from sparsecomm.backends import keys
from sparsecomm.backends.adamw import AdamWPart, AdamWStep
from sparsecomm.tensors.dtypes import DType
from sparsecomm.tensors.interop import Tensor, library_of
from sparsecomm.tensors.kinds import ValueKind
from sparsecomm.tensors.sparse import Array, DenseSum, SparseVector, index_dtype
from sparsecomm.transport.base import MessageMemory


class Timeline(Protocol):
    """Orders all work on memory that several streams use. Use it from one thread at a time."""

    def on_stream(self, x: Tensor | None) -> AbstractContextManager[object]:
        """Return a context like `Backend.on_stream`, whose work runs after the work of all earlier contexts."""

    def join(self, former: Tensor | None, x: Tensor) -> None:
        """Let all later work also wait for the stream of ``former``.

        Raises:
            InvalidInputError: the stream of ``x`` is being captured into a CUDA graph.
        """

    def wait(self) -> None:
        """Wait until all work is complete, so that the memory may be freed."""


@contextmanager
def on_streams(contexts: Iterable[AbstractContextManager[object]]) -> Iterator[None]:
    """Enter several contexts of `Timeline.on_stream`, for work with memory of several timelines."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


SQUARES_TILE, LANES = 4096, 256


def sum_of_tiles(sums: Iterable[float]) -> float:
    """Return the sum of positive numbers, rounded once; infinity if it overflows."""
    try:
        return math.fsum(sums)
    except OverflowError:
        return math.inf


def value_bytes(kind: ValueKind, count: int, accumulator_itemsize: int) -> int:
    """Return the bytes of ``count`` values of a kind in a message, without padding."""
    blocks = -(-count // kind.block) if kind.block else 0
    values = 8 * kind.planes * blocks if kind.planes else count * (kind.itemsize or accumulator_itemsize)
    return values + kind.shared * blocks


class Segment(NamedTuple):
    """A tensor whose elements have the indices from ``begin`` on in the vectors of a bucket."""

    begin: int
    tensor: Tensor


Flags: TypeAlias = Sequence[int] | Array  # of addends that `Backend.add_first` left out, for `Backend.wait_for`


class Addend(NamedTuple):
    """What `Backend.add_first` adds to a residual: scale * x, scale * x / units, or minuend - x.

    Attributes:
        begin: where the elements begin in the residual.
        x: a tensor of at least one element.
        scale: rounded to the accumulator dtype; 1 with a minuend.
        exponents: of the units, one per element: see `sparsecomm.backends.adamw.unit_exponents`. Only with a
            decay of 1, and without momentum.
        minuend: in the accumulator dtype.
    """

    begin: int
    x: Tensor
    scale: float = 1.0
    exponents: Array | None = None
    minuend: Array | None = None


class Backend:
    """The arithmetic of a device: selection, merging, dense sums. Results are bit-identical on every device.

    A backend implements the methods without a body. The other methods work with NumPy and CuPy arrays; most of them
    take time proportional to k, not to n.

    The order of selection is (|v| descending, index ascending), with NaN above infinity. Zeros are never selected.

    ``Tensor`` arguments are contiguous, on this device, and of any of the four dtypes. Arrays are flat NumPy arrays, or
    CuPy arrays on a CUDA device. Results are new arrays, unless the method says that they share memory. Sums and values
    have the accumulator dtype: float64 for float64 gradients, else float32. A ``residual`` has the size of x, and its
    dtype or, for a 16-bit x, also float32. It is updated in place. Vectors passed to one method have the same size and
    value dtype. Every method raises `MemoryError` (on a CUDA device, CuPy's or PyTorch's) if memory runs out.

    A backend wraps inherited methods that compute in `default_float_mode`, unless all callers are wrapped.

    A backend has one owner and serves one thread at a time: see `sparsecomm.backends.Backends`.
    """

    def on_stream(self, x: Tensor | None) -> AbstractContextManager[object]:
        """Return a context for work on this device, on the stream of ``x`` if given.

        Call all other methods in such a context. It can be entered repeatedly, but not nested.
        """

    def side_stream(self, *, wait: bool = True) -> AbstractContextManager[object]:
        """Return a context like `on_stream` for work on a separate stream of the backend.

        Its work runs after the work submitted so far to the current stream. On leaving the context, the host waits for
        its work; without ``wait``, only the current stream does. Any thread may request the context and enter it.
        """

    def timeline(self) -> Timeline:
        """Return a new, empty timeline."""

    def memory(self, direct: bool) -> MessageMemory:
        """Return memory for the messages of one call. ``direct``: the transport accepts device memory.

        Raises:
            InvalidInputError: the current stream is being captured into a CUDA graph.
        """

    def zeros(self, count: int, dtype: DTypeLike) -> Array:
        """Return an array of ``count`` zeros."""

    def empty(self, count: int, like: Array) -> Array:
        """Return an uninitialized array of the dtype of ``like``, in memory that is reused if possible."""
        return np.empty_like(like, shape=count)  # dispatches to CuPy

    def as_tensor(self, array: Array, shape: tuple[int, ...], dtype: DType | None = None) -> Tensor:
        """Return a flat array as a writable tensor of ``shape``. Shares memory.

        ``dtype``: of a 16-bit array; float32 and float64 arrays do not need it.
        """

    def memory_of(self, tensor: Tensor) -> Array:
        """Return the elements of a tensor of this device as a flat array, bfloat16 as uint16. Shares memory."""

    # -- selection ----------------------------------------------------------------------------------------------------

    def topk(self, x: Tensor, k: int, residual: Tensor | None) -> SparseVector:
        """Return the first k entries of x, or of residual + x, in the order of selection; fewer if there are fewer.

        Sets residual = residual + x, rounded to its dtype, with 0 at those entries. If memory runs out, the residual is
        unchanged.
        """

    def take_topk(self, x: Tensor, k: int) -> SparseVector:
        """Return the first k entries of x, as `topk`, and set x to 0 there. If memory runs out, x is unchanged."""
        entries = self.topk(x, k, None)
        self.clear(x, entries)
        return entries

    def topk_by_chunk(self, x: Tensor, k: int, chunk: int, residual: Tensor | None, decay: float = 1.0) -> SparseVector:
        """Return the first k entries of every chunk of x, or of decay * residual + x, in the order of selection.

        Chunks are ``chunk`` consecutive elements of the flat x; the last may be shorter. A chunk with fewer than k
        nonzero elements contributes all of them; k is at most ``chunk``. Sets residual = decay * residual + x, with 0
        at the entries. Rounds the product and the sum to the accumulator dtype, then to the residual's dtype. If memory
        runs out, the residual is unchanged.
        """

    def threshold(self, x: Tensor, tau: float, residual: Tensor | None) -> SparseVector:
        """Return every entry of x, or of residual + x, with |v| >= tau or NaN. Sets the residual as `topk`."""

    # -- dense tensors ------------------------------------------------------------------------------------------------

    def finite(self, x: Tensor) -> bool:
        """Return whether x contains neither NaN nor infinity."""
        return self.threshold(x, np.inf, None).nnz == 0

    def largest(self, x: Tensor) -> float:
        """Return the largest magnitude in x; NaN if x contains one; 0 if x is empty."""
        values = self.memory_of(x) if x.dtype.itemsize > 2 else self.accumulate(x, None)
        return float(abs(values).max()) if x.size else 0.0

    def add_into(self, x: Tensor, residual: Tensor) -> None:
        """Set residual = residual + x, rounded as in `topk`."""

    def scale(self, dense: Tensor, factor: float) -> None:
        """Set dense = factor * dense, rounded once."""
        if dense.dtype.itemsize > 2:
            memory = self.memory_of(dense)
            memory *= factor
            return
        values = self.accumulate(dense, None)
        values *= factor
        self.cast_into(values, dense)

    def cast_into(self, values: Array | None, out: Tensor) -> None:
        """Set out = values, rounded to nearest even to its dtype; ``None`` stands for zeros."""

    def scatter_add(self, dense: Tensor, entries: SparseVector) -> None:
        """Set dense[indices] += values, rounded once to the dtype of ``dense``."""

    def scatter_add_where(self, dense: Tensor, entries: SparseVector, others: SparseVector, present: bool) -> None:
        """Call `scatter_add` with the entries whose indices are in ``others`` (if ``present``), or are not in it."""

    def densify(self, out: Tensor, entries: SparseVector) -> None:
        """Set out = 0, then out[indices] = values, rounded to nearest even to its dtype."""

    def rounded(self, entries: SparseVector, dtype: DType) -> SparseVector:
        """Return the sum that `densify` writes to a tensor of a 16-bit dtype."""
        narrow = self.as_tensor(self.zeros(entries.size, dtype.view), entries.shape, dtype)
        self.densify(narrow, entries)
        return self.nonzeros(self.accumulate(narrow, None), entries.shape)

    def clear(self, dense: Tensor, entries: SparseVector) -> None:
        """Set dense[indices] = 0, without finding the entries of a `DenseSum`."""
        self.memory_of(dense)[self.not_zero(entries.dense) if isinstance(entries, DenseSum) else entries.indices] = 0

    def accumulate(self, x: Tensor, residual: Tensor | None) -> Array:
        """Return x, or residual + x rounded as in `topk`, in the accumulator dtype, shape ``(size,)``."""

    def mixed(self, x: Tensor, values: Array, weight: float) -> Array:
        """Return weight * x + (1 - weight) * values in the accumulator dtype. Rounds each operation."""
        mixed = self.accumulate(x, None)
        mixed *= weight
        mixed += (1 - weight) * values
        return mixed

    def mix_into(self, x: Tensor, values: Array, weight: float) -> None:
        """Set x to the result of `mixed`, rounded to its dtype."""
        self.cast_into(self.mixed(x, values, weight), x)

    def add(self, total: Array, addend: Array) -> None:
        """Set total += addend; both have the same length and the accumulator dtype."""

    def nonzeros(self, dense: Array, shape: tuple[int, ...]) -> SparseVector:
        """Return the nonzero entries of ``dense``. Shares its memory, which must not change afterwards."""

    # -- buckets: vectors with the elements of several tensors --------------------------------------------------------

    def add_first(
        self,
        addends: Sequence[Addend],
        residual: Array,
        velocity: Array | None,
        decay: float,
        momentum: float,
        if_finite: bool,
    ) -> tuple[int, Flags]:
        """Add the first addends to a residual: on a GPU all of them, on a CPU one.

        With v as in `Addend`, sets residual = decay * residual + v, or with a velocity, velocity = momentum * velocity
        + v, then residual = decay * residual + velocity. Rounds each operation.

        Args:
            residual, velocity: flat, in the accumulator dtype.
            if_finite: leave out addends with a value that is NaN or infinite. With units, (scale * x)^2 must also be
                finite.

        Returns:
            The number of these addends, left out or not, and what `wait_for` needs to find those left out.
        """

    def flat(
        self, size: int, dtype: DTypeLike, addends: Sequence[Addend], if_finite: bool
    ) -> tuple[Array, list[tuple[Sequence[int], Flags]]]:
        """Return an array of ``size`` elements with the values of addends, not divided by units, and zeros elsewhere.

        Also return positions of addends, with what `wait_for` needs to find those that ``if_finite`` left out.
        """
        array, done = self.zeros(size, dtype), 0
        flags: list[tuple[Sequence[int], Flags]] = []
        values = [addend._replace(exponents=None) for addend in addends]
        while done < len(values):
            count, first_flags = self.add_first(values[done:], array, None, 1.0, 0.0, if_finite)
            flags.append((range(done, done + count), first_flags))
            done += count
        return array, flags

    def wait_for(self, vectors: Sequence[SparseVector], flags: Flags = ()) -> list[int]:
        """Wait, once, for the number of entries of vectors, and for the positions of addends that were left out.

        ``flags``: from `add_first`.
        """
        return list(flags)

    def sums_of_squares(self, tensors: Sequence[Tensor]) -> list[float]:
        """Return for each tensor the sum of the squares of its elements, in float64, with the same bits on any device.

        In each tile of `SQUARES_TILE` elements, lane i adds the elements i, i + `LANES` ... in order. Then the second
        half of the lanes is added to the first until one is left. `math.fsum` adds the tiles.
        """
        return [sum_of_tiles(self._squares(tensor)) for tensor in tensors]

    def _squares(self, x: Tensor) -> Iterator[float]:
        """Yield the sum of the squares of each tile."""
        memory, block = self.accumulate(x, None), 256 * SQUARES_TILE
        for begin in range(0, x.size, block):
            part = memory[begin : begin + block]
            squares = np.zeros(-(-len(part) // SQUARES_TILE) * SQUARES_TILE)
            np.multiply(part, part, out=squares[: len(part)], dtype=np.float64)
            rows = squares.reshape(-1, SQUARES_TILE // LANES, LANES).swapaxes(0, 1)
            lanes = rows[0]
            for row in rows[1:]:
                lanes = lanes + row
            while lanes.shape[1] > 1:
                lanes = lanes[:, : lanes.shape[1] // 2] + lanes[:, lanes.shape[1] // 2 :]
            yield from lanes[:, 0].tolist()

    def write(self, segments: Sequence[Segment], entries: SparseVector) -> None:
        """Call `densify` for each segment with its part of the entries, whose indices are those of the bucket."""
        for (_, out), part in zip(segments, self._parts_of(segments, entries), strict=True):
            self.densify(out, part)

    def add_entries(self, segments: Sequence[Segment], entries: SparseVector) -> None:
        """Call `scatter_add` for each segment with its part of the entries, whose indices are those of the bucket."""
        for (_, dense), part in zip(segments, self._parts_of(segments, entries), strict=True):
            self.scatter_add(dense, part)

    def _parts_of(self, segments: Sequence[Segment], entries: SparseVector) -> list[SparseVector]:
        """Return each segment's part of the entries. Finds all before anything changes, because memory may run out."""
        ends = {begin: begin + t.size for begin, t in segments}
        if [*ends.items()] == [(0, entries.size)]:
            return [entries]
        bounds = sorted({*ends, *ends.values()})
        parts = dict(zip(bounds, self.split_at_indices(entries, bounds), strict=False)) if bounds else {}
        return [parts[begin] if t.size else self.split_at_indices(entries, [begin, begin])[0] for begin, t in segments]

    # -- AdamW --------------------------------------------------------------------------------------------------------

    def adamw(
        self, parts: Sequence[AdamWPart], exponents: Array, sums: SparseVector, margin: float, keep_changes: bool
    ) -> AdamWStep:
        """Make all AdamW steps of some weights since their last update: see `AdamWStep`. Changes no argument.

        Rounds each operation. A weight that is not finite overflows only if its moments do. A unit changes where
        sqrt(squares) + eps is at least 8/3 of it, or below 2/3 of it, so that few units switch back and forth.

        Args:
            parts: ascending, without gaps between the first and the last.
            exponents: of the units of all weights of the bucket: see `sparsecomm.backends.adamw.unit_exponents`.
            sums: gradients, divided by the units, with indices of the bucket that are in the parts.
            margin: an entry also overflows if abs(weight) + margin * abs(change) rounds to infinity.
            keep_changes: whether `store_adamw` will change units, too.
        """

    def adamw_dense(self, parts: Sequence[AdamWPart], exponents: Array, sums: Array, begin: int) -> AdamWStep:
        """Make a step of AdamW for all weights of some parts, as `adamw` does.

        ``sums`` has one element for each weight from index ``begin`` on. They are replaced by the new weights, rounded
        to their dtype, and by NaN where the step overflows. Elements that are in no part do not change.
        """

    def store_adamw(self, parts: Sequence[AdamWPart], exponents: Array | None, step: AdamWStep, write: bool) -> None:
        """Store the results of ``step`` for the same parts: moments, and with ``write`` also new weights, rounded.

        The compensation becomes the difference between the new weights and the weights in ``parts``. ``exponents``: of
        the units, which jump where the weight changes; ``None``: units stay.
        """

    def change_units(self, residual: Tensor, exponents: Array, changes: SparseVector) -> None:
        """Add changes, rounded to integers of at most `MAX_JUMP`, to exponents, and convert a residual.

        The residual has the accumulator dtype. Values that would become infinite become the largest finite number.
        """

    def values_of(self, x: Tensor, index: Any) -> Array:
        """Return elements of a flat view of x in the accumulator dtype."""
        memory = self.memory_of(x)[index]
        return memory if x.dtype.itemsize > 2 else self.accumulate(self.as_tensor(memory, memory.shape, x.dtype), None)

    # -- sparse vectors: lists of positions, indices and counts are on the host ---------------------------------------

    def merge(self, a: SparseVector, b: SparseVector) -> SparseVector:
        """Return a + b without zeros. Values at equal indices are added as a's + b's."""

    def sum_in_pairs(self, vectors: list[SparseVector]) -> SparseVector:
        """Return the sum of vectors, added in pairs of neighbours, in an order that fixes the rounding."""
        while len(vectors) > 1:
            pairs = [self.merge(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=False)]
            vectors = pairs + vectors[len(vectors) // 2 * 2 :]
        return vectors[0]

    def sum_and_count(self, vectors: list[SparseVector]) -> tuple[SparseVector, SparseVector]:
        """Return the result of `sum_in_pairs`, and the number of vectors with an entry at each of its indices."""
        ones = [
            SparseVector.trusted(v.indices, library_of(v.values).zeros(v.nnz, v.values.dtype) + 1, v.size, v.shape)
            for v in vectors
        ]
        sums, counts = self.sum_in_pairs(vectors), self.sum_in_pairs(ones)
        return sums, SparseVector.trusted(sums.indices, self.values_at(counts, sums), sums.size, sums.shape)

    def merge_topk(self, a: SparseVector, b: SparseVector, k: int) -> tuple[SparseVector, SparseVector]:
        """Return the first k entries of a + b in the order of selection, and all its other entries."""

    def divide(self, entries: SparseVector, divisor: int) -> SparseVector:
        """Return the entries with every value divided. Indices may be shared."""

    def well_formed(self, entries: SparseVector, begin: int = 0, end: int | None = None) -> bool:
        """Return whether indices increase strictly within [begin, end) and no value is zero.

        ``entries`` may have any contents; ``end`` is at most their size, which is the default.
        """

    def with_values(self, entries: SparseVector, values: Array) -> SparseVector:
        """Return the same indices with other values, shape ``(nnz,)``. Omits values that are zero."""
        xp = library_of(values)
        values = xp.where(xp.isnan(values), values.dtype.type(np.nan), values)
        return SparseVector.trusted(entries.indices, values, entries.size, entries.shape).at(self.not_zero(values))

    def not_zero(self, values: Array) -> Array:
        """Return a mask of the values that are not zero, however small."""
        return values != 0

    def means(self, entries: SparseVector, counts: Array) -> SparseVector:
        """Return the entries divided by ``counts``, shape ``(nnz,)``. Omits quotients that are zero."""
        return self.with_values(entries, entries.values / counts)

    def values_at(self, entries: SparseVector, others: SparseVector) -> Array:
        """Return the values of ``entries`` at the indices of ``others``; 0 where there is no entry."""
        xp, indices, values = library_of(entries.values), entries.indices, entries.values
        if not entries.nnz:
            return xp.zeros(others.nnz, values.dtype)
        positions = xp.minimum(xp.searchsorted(indices, others.indices), entries.nnz - 1)
        return xp.where(indices[positions] == others.indices, values[positions], values.dtype.type(0))

    def remainder(self, entries: SparseVector, counts: Array, quotients: SparseVector) -> SparseVector:
        """Return entries - counts * quotients. Omits values that are zero or not finite.

        ``counts`` has the shape ``(nnz,)``. An index that ``quotients`` lacks counts as zero.
        """
        xp = library_of(entries.values)
        values = entries.values - counts * self.values_at(quotients, entries)
        return self.with_values(entries, xp.where(xp.isfinite(values), values, values.dtype.type(0)))

    def concatenate_entries(self, vectors: list[SparseVector]) -> SparseVector:
        """Concatenate vectors of one size, in the order of their indices. A single vector is returned unchanged."""
        xp, first = library_of(vectors[0].values), vectors[0]
        if len(vectors) == 1:
            return first
        indices = xp.concatenate([v.indices for v in vectors])
        return SparseVector.trusted(indices, xp.concatenate([v.values for v in vectors]), first.size, first.shape)

    def searchsorted(self, entries: SparseVector, boundaries: list[int]) -> list[int]:
        """Return, for each of the ascending boundaries, the number of indices below it."""
        xp, indices = library_of(entries.indices), entries.indices
        return xp.searchsorted(indices, xp.asarray(np.array(boundaries, indices.dtype))).tolist()

    def split_at_indices(self, entries: SparseVector, boundaries: list[int]) -> list[SparseVector]:
        """Return a flat vector for each range between two ascending boundaries. May share memory."""
        ranges = list(pairwise(boundaries))
        if isinstance(entries, DenseSum):
            return [self.nonzeros(entries.dense[begin:end], (end - begin,)) for begin, end in ranges]
        positions = self.searchsorted(entries, boundaries)
        parts = []
        for (begin, end), (first, last) in zip(ranges, pairwise(positions), strict=True):
            indices = self.empty(last - first, entries.indices)
            library_of(indices).subtract(entries.indices[first:last], indices.dtype.type(begin), out=indices)
            indices = indices.astype(index_dtype(end - begin), copy=False)
            parts.append(SparseVector.trusted(indices, entries.values[first:last], end - begin, (end - begin,)))
        return parts

    def indices_at(self, entries: SparseVector, positions: list[int]) -> list[int]:
        """Return the indices of the entries at positions from 0 to nnz - 1."""
        xp, indices = library_of(entries.indices), entries.indices
        return indices[xp.asarray(np.array(positions, np.int64))].tolist()

    def entries_at(self, entries: SparseVector, positions: Sequence[int] | Array) -> SparseVector:
        """Return the entries at ascending positions from 0 to nnz - 1."""
        return entries.at(library_of(entries.indices).asarray(np.array(positions, np.int64)))

    nth_keys = staticmethod(keys.nth_keys)
    split_by_key = staticmethod(keys.split_by_key)

    # -- packed entries: sparsecomm/wire/formats.py -------------------------------------------------------------------

    def quantize(self, entries: SparseVector, kind: ValueKind) -> tuple[SparseVector, SparseVector]:
        """Return the entries rounded to a kind, without zeros, and the rounding errors of all entries, also if zero."""
        rounded, errors, zeros = self.quantize_values(entries.values, kind)
        narrow = SparseVector.trusted(entries.indices, rounded, entries.size, entries.shape)
        lost = SparseVector.trusted(entries.indices, errors, entries.size, entries.shape)
        positions = None  # of the remaining entries
        while zeros:  # round again: without the zeros, blocks contain other values
            nonzero = library_of(rounded).flatnonzero(self.not_zero(narrow.values))
            positions = nonzero if positions is None else positions[nonzero]
            narrow = narrow.at(nonzero)
            rounded, new_errors, zeros = self.quantize_values(narrow.values, kind)
            narrow.values = rounded
            errors[positions] += new_errors
        return narrow, lost

    def quantize_values(self, values: Array, kind: ValueKind) -> tuple[Array, Array, int]:
        """Return rounded values, the errors (values - rounded; 0 if not finite), and the number of rounded zeros."""

    def pack(self, entries: SparseVector, kind: ValueKind) -> Array:
        """Encode entries whose values are rounded to a kind; return bytes as uint8."""

    def unpack(
        self, data: Array, head: bytes, count: int, n: int, kind: ValueKind, float64_values: bool
    ) -> tuple[Array, Array]:
        """Decode ``count`` entries of a vector of ``n`` elements; return indices and values for `well_formed` to check.

        Args:
            data: bytes on the device, which need not be valid.
            head: the first 16 bytes, in host memory.

        Raises:
            ValueError: ``data`` does not encode ``count`` entries.
        """
