"""Work on all tensors of a bucket in one launch: kernels/cuda/bucket.cu."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, cast

import numpy as np

from sparsecomm.backends.adamw import AdamWPart, AdamWStep
from sparsecomm.backends.base import SQUARES_TILE, Addend, Flags, Segment, sum_of_tiles
from sparsecomm.backends.cuda.context import Arguments, CountedVector, ExecutionContext, Operand, ceil_div
from sparsecomm.backends.cuda.modules import bucket_definitions
from sparsecomm.backends.cuda.runtime import Launch, fetch
from sparsecomm.tensors.arrays import ArrayDType
from sparsecomm.tensors.interop import Tensor
from sparsecomm.tensors.sparse import INT64_SIZE, Array, DenseSum, SparseVector

# Rows of tables: the structures of bucket.cu.
_SOURCE = np.dtype(
    {
        "names": ["begin", "size", "first_tile", "x", "minuend", "exponents", "scale", "type"],
        "formats": [*6 * ["u8"], "f8", "u8"],
    }
)
_POINTERS = ["x", "mean", "squares", "last", "compensation", "rows"]
_PART = np.dtype(
    {
        "names": ["begin", "size", *_POINTERS, "num_rows", "unit_eps", "eps", "limit", "step", "type"],
        "formats": [*9 * ["u8"], *3 * ["f8"], "i8", "u8"],
    }
)


class BucketWork(ExecutionContext):
    """The methods of `sparsecomm.backends.base.Backend` on the tensors of a bucket."""

    def add_first(
        self,
        addends: Sequence[Addend],
        residual: Array,
        velocity: Array | None,
        decay: float,
        momentum: float,
        if_finite: bool,
    ) -> tuple[int, Flags]:
        real, flags = residual.dtype, self.zeros(len(addends), np.uint32) if if_finite else None
        arguments, tiles = self._sources(addends)
        arguments["flags"] = flags
        check = [self._by_tile("check_addends", tiles, real, arguments)] if if_finite else []
        arguments = arguments | {"decay": real.type(decay), "momentum": real.type(momentum)}
        arguments |= {"residual": residual, "velocity": velocity}
        self.start(*check, self._by_tile("add_addends", tiles, real, arguments))
        return len(addends), () if flags is None else flags

    def wait_for(self, vectors: Sequence[SparseVector], flags: Flags = ()) -> list[int]:
        unknown = [vector for vector in vectors if isinstance(vector, CountedVector) and vector.host_count is None]
        arrays = [vector.counter for vector in unknown] + ([cast(Array, flags)] if len(flags) else [])
        if not arrays:
            return []
        words = fetch(self.runtime, *[(self.runtime.address(array), array.nbytes) for array in arrays])
        for vector, count in zip(unknown, words[: 8 * len(unknown)].view(np.uint64).tolist(), strict=True):
            vector.host_count = count
        left_out: list[int] = np.flatnonzero(words[8 * len(unknown) :].view(np.uint32)).tolist()
        return left_out

    def sums_of_squares(self, tensors: Sequence[Tensor]) -> list[float]:
        ends, tile_sums = [0, *accumulate(ceil_div(tensor.size, SQUARES_TILE) for tensor in tensors)], []
        if filled := [Addend(0, tensor) for tensor in tensors if tensor.size]:
            arguments, tiles = self._sources(filled)
            arguments["sums"] = sums = self.runtime.empty(tiles, np.float64)
            self.start(self._by_tile("sum_squares", tiles, filled[0].x.dtype.accumulator, arguments))
            tile_sums = fetch(self.runtime, (self.runtime.address(sums), sums.nbytes)).view(np.float64).tolist()
        return [sum_of_tiles(tile_sums[begin:end]) for begin, end in pairwise(ends)]

    def write(self, segments: Sequence[Segment], entries: SparseVector) -> None:
        arguments, tiles = self._sources([Addend(*segment) for segment in segments if segment.tensor.size])
        if tiles:
            dense = entries.dense if isinstance(entries, DenseSum) else None
            added = Operand.of(entries) if dense is None else Operand(dense, dense, 0, 0, None)
            arguments |= {"dense": dense, **added.arguments()}
            self.start(self._by_tile("write_entries", tiles, added.values.dtype, arguments, entries.size))

    def add_entries(self, segments: Sequence[Segment], entries: SparseVector) -> None:
        table, tiles = self._sources([Addend(*segment) for segment in segments if segment.tensor.size])
        added = Operand.of(entries)
        if tiles and added.max_count:
            arguments: Arguments = {"sources": table["sources"], "count": table["count"], **added.arguments()}
            self.start(self._by_entry("add_entries", added.max_count, added.values.dtype, arguments, entries.size))

    # -- AdamW --------------------------------------------------------------------------------------------------------

    def adamw(
        self, parts: Sequence[AdamWPart], exponents: Array, sums: SparseVector, margin: float, keep_changes: bool
    ) -> AdamWStep:
        return self._adamw(parts, exponents, sums, Operand.of(sums), 0, margin, None)

    def adamw_dense(self, parts: Sequence[AdamWPart], exponents: Array, sums: Array, begin: int) -> AdamWStep:
        return self._adamw(parts, exponents, None, Operand(sums, sums, len(sums), len(sums), None), begin, 0, sums)

    def _adamw(
        self,
        parts: Sequence[AdamWPart],
        exponents: Array,
        sums: SparseVector | None,
        operand: Operand,
        begin: int,
        margin: float,
        rounded: Array | None,
    ) -> AdamWStep:
        count, real = operand.max_count, operand.values.dtype
        weights, mean, squares, changes = (self.runtime.empty(count, real) for _ in range(4))
        results = _Results(sums, begin, count, weights, mean, squares, changes, self.runtime.empty(count, np.int8))
        flags, faults = self.zeros(2, np.uint32), list[int]()
        if count and parts:
            arguments = {**self._parts(parts), "exponents": exponents, **operand.arguments(), "begin": begin}
            arguments |= {"margin": real.type(margin), **results.arrays, "rounded": rounded, "faults": flags}
            arguments["indices"] = None if sums is None else operand.indices
            self.start(self._by_entry("adamw", count, real, arguments, 0 if sums is None else sums.size))
            faults = self.wait_for([] if sums is None else [sums], flags)
        nnz = count if sums is None else sums.nnz
        return AdamWStep(results.changes[:nnz], results.jumps[:nnz], bool(faults), 1 not in faults, results)

    def store_adamw(self, parts: Sequence[AdamWPart], exponents: Array | None, step: AdamWStep, write: bool) -> None:
        results: _Results = step.results
        if results.room and parts:
            arguments = {**self._parts(parts, False), "exponents": exponents, **results.entries, "begin": results.begin}
            arguments |= {**results.arrays, "write": write}
            size = 0 if results.sums is None else results.sums.size
            self.start(self._by_entry("store_adamw", results.room, results.changes.dtype, arguments, size))

    def change_units(self, residual: Tensor, exponents: Array, changes: SparseVector) -> None:
        added, real = Operand.of(changes), residual.dtype.accumulator
        if added.max_count:
            arguments: Arguments = {"residual": residual, "exponents": exponents, **added.arguments()}
            self.start(self._by_entry("change_units", added.max_count, real, arguments, changes.size))

    # -- tables and launches ------------------------------------------------------------------------------------------

    def _sources(self, addends: Sequence[Addend]) -> tuple[Arguments, int]:
        """Copy a table of tensors to the device. Return it as arguments, and the number of its tiles."""
        address, first, rows = self._address, 0, []
        for begin, x, scale, exponents, minuend in addends:
            rows.append((begin, x.size, first, x.pointer, address(minuend), address(exponents), scale, x.dtype.code))
            first += ceil_div(x.size, SQUARES_TILE)
        return {"sources": self._sent(np.array(rows, _SOURCE)), "count": len(rows), "tiles": first}, first

    def _parts(self, parts: Sequence[AdamWPart], with_coefficients: bool = True) -> Arguments:
        """Copy a table, followed by the coefficients, to the device. Return it as arguments."""
        tables = {id(part.table): part.table for part in parts} if with_coefficients else {}
        ends = [*accumulate((table.nbytes for table in tables.values()), initial=len(parts) * _PART.itemsize)]
        memory, address = self.runtime.empty(ends[-1], np.uint8), self._address
        coefficients = dict(zip(tables, (address(memory) + end for end in ends), strict=False))
        rows = []
        for begin, x, moments, table, unit_eps, eps, step in parts:
            numbers = unit_eps, eps, x.dtype.rounds_to_infinity, step, x.dtype.code
            arrays = *map(address, moments), coefficients.get(id(table), 0), len(table)
            rows.append((begin, x.size, x.pointer, *arrays, *numbers))
        self._send(memory, np.array(rows, _PART), *tables.values())
        return {"parts": memory, "count": len(rows)}

    def _sent(self, array: Array) -> Array:
        """Return a copy of an array of the host on the device."""
        memory = self.runtime.empty(array.nbytes, np.uint8)
        self._send(memory, array)
        return memory

    def _send(self, memory: Array, *arrays: Array) -> None:
        """Copy arrays of the host to memory of the device, one behind the other."""
        sent, begin = self.runtime.pinned(memory.nbytes), 0
        for array in arrays:
            sent[begin : begin + array.nbytes] = array.reshape(-1).view(np.uint8)
            begin += array.nbytes
        self.runtime.copy(self.runtime.address(memory), sent.ctypes.data, begin)
        self.in_use.keep(sent, self.runtime.record())

    def _by_tile(self, name: str, tiles: int, real: ArrayDType, arguments: Arguments, size: int = 0) -> Launch:
        """Return a launch with one block per tile, but at most 16 per multiprocessor. Indices are below ``size``."""
        threads, blocks = self.tuning.dense_threads, min(tiles, 16 * self.runtime.multiprocessors)
        types = bucket_definitions(real, int64_indices=size >= INT64_SIZE)
        return self.prepare("bucket.cu", name, types, blocks, threads, arguments)

    def _by_entry(self, name: str, count: int, real: ArrayDType, arguments: Arguments, size: int) -> Launch:
        """Return a launch with about one thread per entry. ``size``: as in `_by_tile`."""
        types, threads = bucket_definitions(real, int64_indices=size >= INT64_SIZE), self.tuning.dense_threads
        return self.prepare("bucket.cu", name, types, self.spread(count, threads), threads, arguments)


class _Results(NamedTuple):
    """Results of the kernel `adamw`, for sums with indices, or for all elements from ``begin`` on."""

    sums: SparseVector | None
    begin: int
    room: int  # the maximum number of entries
    weights: Array
    mean: Array
    squares: Array
    changes: Array
    jumps: Array

    @property
    def arrays(self) -> Arguments:
        """The arguments of a kernel that writes or reads results."""
        new: Arguments = {"new_weights": self.weights, "new_mean": self.mean, "new_squares": self.squares}
        return new | {"changes": self.changes, "jumps": self.jumps}

    @property
    def entries(self) -> Arguments:
        if self.sums is None:
            return {"indices": None, "host_count": self.room, "device_count": None}
        arguments = Operand.of(self.sums).arguments()
        del arguments["values"]
        return arguments
