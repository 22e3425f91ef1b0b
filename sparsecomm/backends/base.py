"""The arithmetic of one device: all that algorithms ask of it.

A method that changes a dense tensor either raises and has changed nothing, or returns and has changed it. A caller that
is compiled notes the change in its next statement, and no signal handler runs between the two. For this a backend is
compiled itself, and changes the tensor last: what may fail or run bytecode, such as allocating memory or compiling a
kernel, comes before.
"""

# mypy: disable-error-code="empty-body, no-any-return"

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import DTypeLike

from sparsecomm.tensors.interop import Tensor
from sparsecomm.tensors.kinds import ValueKind
from sparsecomm.tensors.sparse import Array, DenseSum, SparseVector, index_dtype
from sparsecomm.transport.memory import MessageMemory

__all__ = ["Backend", "Moments", "Timeline", "adamw_step", "unit"]

_FEW = 8  # places in an order, for which it need not be found whole


class Timeline(Protocol):
    """The order of all work on some memory of a device: one piece after another, whichever streams they are given to.

    It serves one thread at a time.
    """

    def on_stream(self, x: Tensor | None) -> AbstractContextManager[object]:
        """Do as `Backend.on_stream`; what is started within comes after all that was started within before."""

    def wait(self) -> None:
        """Wait until all of it is done, so that the memory may be freed."""


class Moments(NamedTuple):
    """What AdamW keeps of the weights of a tensor: flat arrays of their number, on their device.

    Attributes:
        mean, squares: averages of gradients, and of their squares, in the accumulator's type.
        last: int32, the number of the step that has updated each weight last; 0: none has.
    """

    mean: Array
    squares: Array
    last: Array


def unit(xp: Any, squares: Array, eps: Any) -> Array:
    """Return the units in which AdamW exchanges gradients: sqrt(squares) + eps, rounded down to a power of two.

    So a gradient is divided by its unit, and a sum multiplied by it, without rounding.

    Args:
        xp: the library: numpy, cupy or jax.numpy.
        squares: second moments, in float32 or float64.
        eps: a normal number of that type.
    """
    root = xp.sqrt(squares) + eps
    word, exponent = (np.int64, 0x7FF << 52) if root.dtype.itemsize == 8 else (np.int32, 0x7F8 << 20)
    power: Array = (root.view(word) & word(exponent)).view(root.dtype)
    return power


def adamw_step(
    xp: Any,
    weight: Array,
    quotient: Array,
    mean: Array,
    squares: Array,
    first: Array,
    coefficients: Sequence[Array],
    unit_eps: Any,
    eps: Any,
) -> tuple[Array, Array, Array, Array]:
    """Return what steps of AdamW change, element by element, for any library of arrays.

    With the coefficients c0 to c5 of `sparsecomm.optimizers.rule.coefficients`:

        g       = quotient * unit(squares)
        mean    = c0 * mean + c1 * g
        squares = c2 * squares + c3 * g^2               with squares = 0 on the right where ``first``
        weight  = c5 * weight - c4 * mean / (sqrt(squares) + eps)

    Args:
        xp: the library: numpy, cupy or jax.numpy.
        weight, quotient, mean, squares: arrays of one shape and type.
        first: whether this is an element's first update. Until then ``squares`` only sets the unit.
        coefficients: six arrays of that shape, or numbers.
        unit_eps, eps: numbers of that type.

    Returns:
        The change of the weight, the new mean and squares, and the factor by which a residual in units changes.
    """
    kept_mean, new_mean, kept_squares, new_squares, rate, decay = coefficients
    before = unit(xp, squares, unit_eps)
    g = quotient * before
    m = kept_mean * mean + new_mean * g
    v = kept_squares * xp.where(first, xp.zeros_like(squares), squares) + new_squares * (g * g)
    root = xp.sqrt(v)
    return (decay * weight - rate * (m / (root + eps))) - weight, m, v, before / unit(xp, v, unit_eps)


class Backend:
    """The arithmetic of a device: selection, merging, dense sums. Results are the same, bit for bit, on every device.

    A backend implements the methods that have no body here. Those that have one are the same text for NumPy's arrays
    and CuPy's; most of them do work by k entries, not by n elements.

    The order of selection is (|v| descending, index ascending), NaN above infinity, zeros never selected.

    ``Tensor`` arguments are contiguous, on this device, of any of the four types. Arrays are flat NumPy arrays, or CuPy
    arrays on a CUDA device. Results are new arrays, unless a method says that they share memory. Sums and values are in
    the accumulator's type: float64 for float64 gradients, else float32. A ``residual`` has x's size, and its type or
    float32 beside a 16-bit x; it is updated in place. Two vectors of one call have one size and one type of values.
    Every method raises `MemoryError` (CuPy's on a CUDA device) where there is too little memory.

    A backend serves one thread at a time, who owns it: see `sparsecomm.backends.Backends`.
    """

    def on_stream(self, x: Tensor | None) -> AbstractContextManager[object]:
        """Return a context within which work is done on this device, on the stream of ``x`` if given.

        Every other method is called within one. It may be entered more than once, though not within itself.
        """

    def side_stream(self) -> AbstractContextManager[object]:
        """Return a context, as `on_stream` does, within which work is done on a stream of the backend's own.

        The work comes after what the stream that is current now has been given by now. Leaving the context waits for
        all of it. Any thread may ask for the context; the one that the backend then serves enters it.
        """

    def timeline(self) -> Timeline:
        """Return the order of work on memory that is used from several streams. Nothing is in it yet."""

    def memory(self, direct: bool) -> MessageMemory:
        """Return memory for the messages of one call; ``direct``: the transport takes memory of the device.

        Raises:
            InvalidInputError: the current stream is being captured into a CUDA graph.
        """

    def zeros(self, count: int, dtype: DTypeLike) -> Array:
        """Return an array of ``count`` zeros."""

    def as_tensor(self, array: Array, shape: tuple[int, ...]) -> Tensor:
        """Return a flat array of float32 or float64 as a tensor of that shape. It shares memory, and is writable."""

    def memory_of(self, tensor: Tensor) -> Array:
        """Return the elements of a tensor of this device as a flat array, bfloat16 as uint16. It shares memory."""

    # -- dense tensors ------------------------------------------------------------------------------------------------

    def topk(self, x: Tensor, k: int, residual: Tensor | None) -> SparseVector:
        """Return the first k entries of x, or of residual + x, in the order of selection; fewer if there are fewer.

        Then residual = residual + x, rounded to its type, with 0 at those entries. If memory runs out, the residual is
        as it was.
        """

    def take_topk(self, x: Tensor, k: int) -> SparseVector:
        """Return the first k entries of x, as `topk`, which has zeros there afterwards.

        If memory runs out, x is as it was.
        """
        entries = self.topk(x, k, None)
        self.clear(x, entries)
        return entries

    def topk_by_chunk(self, x: Tensor, k: int, chunk: int, residual: Tensor | None, decay: float = 1.0) -> SparseVector:
        """Return the first k entries of every chunk of x, or of decay * residual + x, in the order of selection.

        Chunks are ``chunk`` elements of the flat x each, from its first one on; the last may be shorter. Of a chunk of
        fewer than k elements that are not zero these are returned. Then the residual is decay * residual + x, with 0
        at the entries: in the accumulator's type, the product rounded, then the sum, and that to the residual's type.
        With a decay of 1 it is what `topk` makes of it. Reads and writes the data once. If memory runs out, the
        residual is as it was.

        Args:
            x, residual: as in `topk`.
            k: from 1 to ``chunk``.
            chunk: at least 1; above x's size there is one chunk.
            decay: in (0, 1]; without a residual it is not looked at.
        """

    def threshold(self, x: Tensor, tau: float, residual: Tensor | None) -> SparseVector:
        """Return every entry of x, or of residual + x, with |v| >= tau, and NaN. The residual is as in `topk`."""

    def finite(self, x: Tensor) -> bool:
        """Return whether x holds neither NaN nor infinity."""
        return self.threshold(x, np.inf, None).nnz == 0

    def largest(self, x: Tensor) -> float:
        """Return the largest magnitude in x; NaN if there is one, and 0 of no elements."""
        values = self.memory_of(x) if x.dtype.itemsize > 2 else self.accumulate(x, None)
        return float(abs(values).max()) if x.size else 0.0

    def add_into(self, x: Tensor, residual: Tensor) -> None:
        """Set residual = residual + x, rounded as in `topk`."""

    def add_difference(self, minuend: Array, x: Tensor, residual: Tensor, decay: float, if_finite: bool) -> bool:
        """Set residual = decay * residual + (minuend - x); each of the three operations is rounded.

        Args:
            minuend: shape ``(size,)``, in the accumulator's type.
            x: what is subtracted.
            residual: in the accumulator's type.
            decay: in (0, 1].
            if_finite: change nothing if a difference is NaN or infinite.

        Returns:
            Whether the residual was changed.
        """
        difference = minuend - self.accumulate(x, None)
        if if_finite and x.size and not self.finite(self.as_tensor(difference, x.shape)):
            return False
        kept = self.memory_of(residual)
        if decay < 1:
            kept *= decay
        kept += difference
        return True

    def add_quotient(
        self, x: Tensor, squares: Array, eps: float, scale: float, residual: Tensor, if_finite: bool
    ) -> bool:
        """Set residual = residual + scale * x / `unit`; each operation is rounded.

        Args:
            x: the dividend.
            squares: shape ``(size,)``, in the accumulator's type.
            eps, scale: numbers, rounded to that type.
            residual: in that type.
            if_finite: change nothing if a quotient, or the square of scale * x, is NaN or infinite.

        Returns:
            Whether the residual was changed.
        """
        xp = _library(squares)
        quotient = self.accumulate(x, None)
        quotient *= quotient.dtype.type(scale)
        if if_finite and x.size and not self.finite(self.as_tensor(quotient * quotient, x.shape)):
            return False
        quotient /= unit(xp, squares, quotient.dtype.type(eps))
        if if_finite and x.size and not self.finite(self.as_tensor(quotient, x.shape)):
            return False
        kept = self.memory_of(residual)
        kept += quotient
        return True

    def adamw(
        self,
        weights: Tensor,
        moments: Moments,
        residual: Array,
        entries: SparseVector,
        table: Array,
        unit_eps: float,
        eps: float,
        step: int,
    ) -> None:
        """Make the steps of AdamW that weights have waited for, by `adamw_step`. Each operation is rounded.

        A residual that would become infinite in its new unit becomes the largest finite number.

        Args:
            weights: changed in place, rounded to their type.
            moments: changed in place; ``last`` becomes ``step``.
            residual: shape ``(size,)``, changed in place.
            entries: the quotients. A weight without an entry stays as it is; a `DenseSum` has one for every weight.
            table: shape ``(rows, 6)``, on the host, in the accumulator's type: the coefficients for a weight that was
                updated last so many steps ago. The last row also stands for all longer waits.
            unit_eps, eps: numbers, rounded to that type.
            step: the number of this step, at least 1.
        """
        xp, (mean, squares, last) = _library(moments.mean), moments
        index, before, (change, m, v, factor) = self._adamw(weights, moments, entries, table, unit_eps, eps, step)
        max_ = xp.finfo(m.dtype).max
        kept = xp.clip(residual[index] * xp.minimum(factor, max_), -max_, max_)
        if isinstance(entries, DenseSum):
            self.cast_into(before + change, weights)
        else:
            self.scatter_add(weights, SparseVector.trusted(index, change, entries.size, entries.shape))
        mean[index], squares[index], last[index], residual[index] = m, v, step, kept

    def adamw_overflows(
        self,
        weights: Tensor,
        moments: Moments,
        entries: SparseVector,
        table: Array,
        unit_eps: float,
        eps: float,
        step: int,
    ) -> Array:
        """Return the indices of weights which `adamw` would make infinite or NaN, or their moments. Nothing changes.

        A weight that is not finite now is not among them, unless its moments would not be finite.

        Args:
            weights, moments, entries, table, unit_eps, eps, step: as of `adamw`.
        """
        xp = _library(moments.mean)
        with np.errstate(over="ignore", invalid="ignore"):
            index, before, (change, m, v, _) = self._adamw(weights, moments, entries, table, unit_eps, eps, step)
            fits = abs(before[index] + change) < weights.dtype.rounds_to_infinity
        bad = ~(xp.isfinite(m) & xp.isfinite(v) & (fits | ~xp.isfinite(before[index])))
        positions = xp.flatnonzero(bad)
        return positions if isinstance(entries, DenseSum) else entries.indices[positions]

    def _adamw(
        self,
        weights: Tensor,
        moments: Moments,
        entries: SparseVector,
        table: Array,
        unit_eps: float,
        eps: float,
        step: int,
    ) -> tuple[Any, Array, tuple[Array, Array, Array, Array]]:
        """Return the indices of entries, all weights in the accumulator's type, and what `adamw_step` returns."""
        xp, (mean, squares, last) = _library(moments.mean), moments
        real, index, quotient = mean.dtype.type, slice(None), None  # type: Any, Any, Any
        if isinstance(entries, DenseSum):
            quotient = entries.dense
        else:
            index, quotient = entries.indices, entries.values
        rows = xp.asarray(table)[xp.minimum(xp.maximum(step - last[index], 0), len(table) - 1)]
        before = self.memory_of(weights) if weights.dtype.itemsize > 2 else self.accumulate(weights, None)
        made = adamw_step(
            xp,
            before[index],
            quotient,
            mean[index],
            squares[index],
            last[index] == 0,
            [rows[:, j] for j in range(6)],
            real(unit_eps),
            real(eps),
        )
        return index, before, made

    def scale(self, dense: Tensor, factor: float) -> None:
        """Set dense = factor * dense: in the accumulator's type, rounded to that of ``dense``.

        A backend has this in `sparsecomm.backends.default_float_mode`.
        """
        if dense.dtype.itemsize > 2:
            memory = self.memory_of(dense)
            memory *= factor
            return
        values = self.accumulate(dense, None)
        values *= factor
        self.cast_into(values, dense)

    def cast_into(self, values: Array | None, out: Tensor) -> None:
        """Set out = values, rounded to nearest even to its type; ``None`` stands for zeros."""

    def scatter_add(self, dense: Tensor, entries: SparseVector) -> None:
        """Set dense[indices] += values, rounded once to the type of ``dense``."""

    def scatter_add_where(self, dense: Tensor, entries: SparseVector, others: SparseVector, present: bool) -> None:
        """Do as `scatter_add`, for the entries alone whose index is among those of ``others``, or is not.

        Args:
            dense: is changed.
            entries, others: of its size; the values of ``others`` are not looked at.
            present: whether the index of an entry that is added is among those of ``others``.
        """

    def densify(self, out: Tensor, entries: SparseVector) -> None:
        """Set out = 0, then out[indices] = values, rounded to nearest even to its type."""

    def clear(self, dense: Tensor, entries: SparseVector) -> None:
        """Set dense[indices] = 0. The entries of a `DenseSum` are not looked for."""
        self.memory_of(dense)[self.not_zero(entries.dense) if isinstance(entries, DenseSum) else entries.indices] = 0

    # -- dense sums ---------------------------------------------------------------------------------------------------

    def accumulate(self, x: Tensor, residual: Tensor | None) -> Array:
        """Return x, or residual + x rounded as in `topk`, in the accumulator's type, shape ``(size,)``."""

    def mixed(self, x: Tensor, values: Array, weight: float) -> Array:
        """Return weight * x + (1 - weight) * values, in the accumulator's type; each operation is rounded."""
        mixed = self.accumulate(x, None)
        mixed *= weight
        mixed += (1 - weight) * values
        return mixed

    def mix_into(self, x: Tensor, values: Array, weight: float) -> None:
        """Set x to what `mixed` returns, rounded to its type."""
        self.cast_into(self.mixed(x, values, weight), x)

    def add(self, total: Array, addend: Array) -> None:
        """Set total += addend; both of one length, in the accumulator's type."""

    def nonzeros(self, dense: Array, shape: tuple[int, ...]) -> SparseVector:
        """Return the entries of ``dense`` that are not zero. They share its memory: it may not change any more."""

    # -- sparse vectors -----------------------------------------------------------------------------------------------

    def merge(self, a: SparseVector, b: SparseVector) -> SparseVector:
        """Return a + b. Values at equal indices are added as a's + b's; sums that are zero are dropped."""

    def sum_in_pairs(self, vectors: list[SparseVector]) -> SparseVector:
        """Return the sum of vectors, neighbours first: the order decides how sums are rounded, so it is fixed."""
        while len(vectors) > 1:
            pairs = [self.merge(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=False)]
            vectors = pairs + vectors[len(vectors) // 2 * 2 :]
        return vectors[0]

    def sum_and_count(self, vectors: list[SparseVector]) -> tuple[SparseVector, SparseVector]:
        """Return what `sum_in_pairs` does, and how many vectors have an entry at each of its indices."""
        sums, counted = self.sum_in_pairs(vectors), self.sum_in_pairs([self._ones_like(vector) for vector in vectors])
        return sums, SparseVector.trusted(sums.indices, self.values_at(counted, sums), sums.size, sums.shape)

    def merge_topk(self, a: SparseVector, b: SparseVector, k: int) -> tuple[SparseVector, SparseVector]:
        """Return the first k entries of a + b in the order of selection, and all its others."""

    def divide(self, entries: SparseVector, divisor: int) -> SparseVector:
        """Return the entries with every value divided. Indices may be shared."""

    def well_formed(self, entries: SparseVector, begin: int = 0, end: int | None = None) -> bool:
        """Return whether indices increase strictly within [begin, end) and no value is zero.

        Args:
            entries: of any contents.
            begin, end: 0 <= begin <= end <= size; ``end`` defaults to the size.
        """

    # Positions, indices, keys and counts of the methods below are the host's. Keys are magnitudes as integers that
    # order as selection does: the bits of a value without the sign, of a NaN those of infinity and one more.

    def empty_like(self, entries: SparseVector) -> SparseVector:
        """Return a vector of the same size, shape and types without entries."""
        return entries.part(0, 0)

    def with_values(self, entries: SparseVector, values: Array) -> SparseVector:
        """Return the same indices with other values, shape ``(nnz,)``, without those whose value is zero."""
        xp = _library(values)
        found = xp.where(xp.isnan(values), values.dtype.type(np.nan), values)
        return _where(SparseVector.trusted(entries.indices, found, entries.size, entries.shape), self.not_zero(found))

    def not_zero(self, values: Array) -> Array:
        """Return a mask of the values that are not zero, however small."""
        mask: Array = values != 0
        return mask

    def _ones_like(self, entries: SparseVector) -> SparseVector:
        """Return a vector with the same indices, and the value 1 at each."""
        values = entries.values
        ones = _library(values).zeros(entries.nnz, values.dtype) + values.dtype.type(1)
        return SparseVector.trusted(entries.indices, ones, entries.size, entries.shape)

    def means(self, entries: SparseVector, counts: Array) -> SparseVector:
        """Return entries, each divided by its count; ``counts``: shape ``(nnz,)``. Quotients that are 0 are dropped."""
        return self.with_values(entries, entries.values / counts)

    def values_at(self, entries: SparseVector, others: SparseVector) -> Array:
        """Return the values of ``entries`` at the indices of ``others``; 0 where it has none."""
        xp, indices, values = _library(entries.values), entries.indices, entries.values
        if not entries.nnz:
            return xp.zeros(others.nnz, values.dtype)
        positions = xp.minimum(xp.searchsorted(indices, others.indices), entries.nnz - 1)
        return xp.where(indices[positions] == others.indices, values[positions], values.dtype.type(0))

    def remainder(self, entries: SparseVector, counts: Array, quotients: SparseVector) -> SparseVector:
        """Return entries - counts * quotients, without zeros; nothing where that is not finite.

        Args:
            entries: with ``counts``, shape ``(nnz,)``.
            quotients: at some of their indices; elsewhere they are zero.
        """
        xp = _library(entries.values)
        values = entries.values - counts * self.values_at(quotients, entries)
        return self.with_values(entries, xp.where(xp.isfinite(values), values, values.dtype.type(0)))

    def concatenate_entries(self, vectors: list[SparseVector]) -> SparseVector:
        """Return one vector of several of one size, of which each ends before the next begins; one alone as it is."""
        xp, first = _library(vectors[0].values), vectors[0]
        if len(vectors) == 1:
            return first
        indices = xp.concatenate([v.indices for v in vectors])
        return SparseVector.trusted(indices, xp.concatenate([v.values for v in vectors]), first.size, first.shape)

    def searchsorted(self, entries: SparseVector, boundaries: list[int]) -> list[int]:
        """Return for each of ascending boundaries how many indices are below it."""
        xp, indices = _library(entries.indices), entries.indices
        found: list[int] = xp.searchsorted(indices, xp.asarray(np.array(boundaries, indices.dtype))).tolist()
        return found

    def split_at_indices(self, entries: SparseVector, boundaries: list[int]) -> list[SparseVector]:
        """Return for each range between two of ascending boundaries its entries, as a flat vector of the range.

        Values may be shared.
        """
        ranges = list(pairwise(boundaries))
        if isinstance(entries, DenseSum):
            return [self.nonzeros(entries.dense[begin:end], (end - begin,)) for begin, end in ranges]
        positions = pairwise(self.searchsorted(entries, boundaries))
        found = []
        for (begin, end), (first, last) in zip(ranges, positions, strict=True):
            indices = (entries.indices[first:last] - begin).astype(index_dtype(end - begin), copy=False)
            found.append(SparseVector.trusted(indices, entries.values[first:last], end - begin, (end - begin,)))
        return found

    def indices_at(self, entries: SparseVector, positions: list[int]) -> list[int]:
        """Return the indices of the entries at these positions, from 0 to nnz - 1."""
        xp, indices = _library(entries.indices), entries.indices
        found: list[int] = indices[xp.asarray(np.array(positions, np.int64))].tolist()
        return found

    def entries_at(self, entries: SparseVector, positions: list[int] | Array) -> SparseVector:
        """Return the entries at these ascending positions, from 0 to nnz - 1."""
        return _where(entries, _library(entries.indices).asarray(np.array(positions, np.int64)))

    def max_key(self, entries: SparseVector) -> int:
        """Return the largest key that a value of that type can have: that of NaN."""
        return (0x7FF << 52 if entries.values.itemsize == 8 else 0xFF << 23) + 1

    def nth_keys(self, entries: SparseVector, numbers: list[int]) -> list[int]:
        """Return the keys of the n-th largest entries, for n of ``numbers``, from 1 to nnz."""
        xp = _library(entries.values)
        keys, positions = _keys(entries.values), entries.nnz - np.array(numbers, np.int64)
        few = xp is np and len(numbers) <= _FEW
        keys = np.partition(keys, positions) if few else xp.sort(keys)
        found: list[int] = keys[xp.asarray(positions)].tolist()
        return found

    def scaled_key(self, entries: SparseVector, key: int, before: list[int], now: list[int]) -> int:
        """Return the key of a magnitude that has grown as the sum of others has, of entries of that type.

        ``before``, ``now``: the keys of the others. Where their sums are not finite, or zero, or ``key`` is above all
        keys, it is ``key`` itself.
        """
        values = np.dtype(entries.values.dtype.name)
        if key >= self.max_key(entries):
            return key
        magnitude, old, new = (
            sum(np.array(keys, f"u{values.itemsize}").view(values).tolist()) for keys in ([key], before, now)
        )
        if not (0 < old < np.inf and 0 < new < np.inf and magnitude < np.inf):
            return key
        scaled = np.array([min(magnitude * (new / old), float(np.finfo(values).max))], np.float64).astype(values)
        return int(scaled.view(f"u{values.itemsize}")[0])

    def largest_keys(self, keys: list[int], numbers: list[int]) -> tuple[Array, list[int]]:
        """Return where the largest keys are, ascending, so many as the first of ``numbers``; of equals the first.

        And the n-th largest keys, for n of the other numbers, from 1 to as many as there are.
        """
        upside_down = ~np.array(keys, np.uint64)
        ordered = np.partition(upside_down, [number - 1 for number in numbers])
        lowest = ordered[numbers[0] - 1]
        larger, equal = np.flatnonzero(upside_down < lowest), np.flatnonzero(upside_down == lowest)
        positions = np.sort(np.concatenate([larger, equal[: numbers[0] - len(larger)]]))
        return positions, [int(~ordered[number - 1]) for number in numbers[1:]]

    def keys_at(self, entries: SparseVector, others: SparseVector) -> list[int]:
        """Return the keys of ``entries`` at the indices of ``others``, all of which it has."""
        found: list[int] = _keys(self.values_at(entries, others)).tolist()
        return found

    def split_by_key(self, entries: SparseVector, low: int, high: int | None) -> tuple[SparseVector, SparseVector]:
        """Return the entries whose key is at least ``high``, and the others whose key is at least ``low``.

        ``high``: above ``low``; ``None`` is above all keys.
        """
        keys = _keys(entries.values)
        largest = int(np.iinfo(keys.dtype).max)
        reach = keys >= keys.dtype.type(min(low, largest))
        if high is None:
            return self.empty_like(entries), _where(entries, reach)
        sure = keys >= keys.dtype.type(min(high, largest))
        return _where(entries, sure), _where(entries, reach & ~sure)

    # -- packed entries: sparsecomm/wire/formats.py -------------------------------------------------------------------

    def quantize(self, entries: SparseVector, kind: ValueKind) -> tuple[SparseVector, SparseVector]:
        """Return the entries with values rounded to that kind, and what rounding took away, both without zeros."""
        rounded, errors, zeros = self.quantize_values(entries.values, kind)
        narrow = SparseVector.trusted(entries.indices, rounded, entries.size, entries.shape)
        lost = SparseVector.trusted(entries.indices, errors, entries.size, entries.shape)
        positions = None  # of the entries that remain
        while zeros:  # they are dropped, and of int8 the others then share their exponents with others
            kept = _library(rounded).flatnonzero(self.not_zero(narrow.values))
            positions = kept if positions is None else positions[kept]
            narrow = SparseVector.trusted(narrow.indices[kept], narrow.values[kept], narrow.size, narrow.shape)
            rounded, more, zeros = self.quantize_values(narrow.values, kind)
            narrow.values = rounded
            errors[positions] += more
        present = self.not_zero(errors)
        return narrow, lost if present.all() else _where(lost, present)

    def quantize_values(self, values: Array, kind: ValueKind) -> tuple[Array, Array, int]:
        """Return rounded values, values - rounded (0 beside what is not finite), and how many of rounded are zero."""

    def pack(self, entries: SparseVector, kind: ValueKind) -> Array:
        """Return the bytes, as uint8, of entries whose values are rounded to that kind."""

    def unpack(
        self, data: Array, head: bytes, count: int, n: int, kind: ValueKind, float64_values: bool
    ) -> tuple[Array, Array]:
        """Return the indices and values of ``count`` entries of a vector of ``n`` elements.

        ``data``: bytes of the device, which need not be trusted; ``head``: the first 16 of them, on the host. Whether
        the entries are well formed is left to `well_formed`.

        Raises:
            ValueError: these are not the bytes of so many entries.
        """


def _library(array: Array) -> Any:
    """Return the library of an array: NumPy or CuPy."""
    return sys.modules[type(array).__module__.partition(".")[0]]


def _keys(values: Array) -> Array:
    float64 = values.itemsize == 8
    sign, infinity = (2**63, 0x7FF << 52) if float64 else (2**31, 0xFF << 23)  # as in `Backend.max_key`
    unsigned = np.uint64 if float64 else np.uint32
    return _library(values).minimum(values.view(unsigned) & unsigned(sign - 1), unsigned(infinity + 1))


def _where(entries: SparseVector, mask: Array) -> SparseVector:
    return SparseVector.trusted(entries.indices[mask], entries.values[mask], entries.size, entries.shape)
