"""Selection and merging: kernels/cuda/topk.cu, radix.cu, threshold.cu, chunks.cu, warp_chunks.cu and merge.cu."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from sparsecomm.backends.cuda.context import Arguments, CountedVector, ExecutionContext, Operand, ceil_div
from sparsecomm.backends.cuda.modules import merge_definitions, selection_definitions
from sparsecomm.backends.cuda.runtime import Launch, OnStream, refuse_capture
from sparsecomm.tensors.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, DType
from sparsecomm.tensors.interop import Tensor
from sparsecomm.tensors.sparse import INT64_SIZE, Array, DenseSum, SparseVector, index_dtype

_ABOVE_ALL = 2**64 - 1  # above every key
_MAX_CANDIDATES = 2**31 - 1  # `emit` keeps two counts in one 64-bit word
# The key of infinity: see kernels/formats.hpp.
_INFINITY = {FLOAT16: 0x7C00, BFLOAT16: 0x7F80, FLOAT32: 0x7F800000, FLOAT64: 0x7FF0000000000000}


class _Candidates(NamedTuple):
    """Addresses of room for ``capacity`` candidates."""

    capacity: int
    indices: int
    bits: int
    memory: Array | None  # of both; keep it until the kernels have been started

    @classmethod
    def room(cls, context: ExecutionContext, capacity: int, size: int, value_bytes: int) -> _Candidates:
        """Return room for work on the current stream."""
        length = 16 * ceil_div(capacity * value_bytes, 16)
        memory = context.workspace().room(length + capacity * index_dtype(size).itemsize)
        bits = context.runtime.address(memory)
        return cls(capacity, bits + length, bits, memory)

    @property
    def arguments(self) -> Arguments:
        """The arguments of a kernel that writes or reads candidates."""
        return {"capacity": self.capacity, "indices": self.indices, "bits": self.bits}


class _Sample(NamedTuple):
    """The size of a sample, and the number of its elements that should reach the threshold (``wanted``)."""

    sectors: int
    elements: int
    wanted: int
    candidates: int  # expected at most in the whole vector

    @staticmethod
    @lru_cache
    def of(n: int, itemsize: int, k: int, max_sectors: int) -> _Sample:
        sector = 32 // itemsize
        sectors = min(max_sectors, n // sector)
        elements = max(1, sectors * sector)
        # One of millions of calls finds too few candidates; one of millions finds too many, if few elements are equal.
        wanted = _at_most(elements * k / n)
        # The threshold is the lowest key of a bin, so a few more elements reach it.
        return _Sample(sectors, elements, wanted, math.ceil(1.5 * _at_most(wanted) * n / elements))


_NO_CANDIDATES = _Candidates(0, 0, 0, None)


class Selection(ExecutionContext):
    """The methods of `sparsecomm.backends.base.Backend` that select or merge entries."""

    def topk(self, x: Tensor, k: int, residual: Tensor | None) -> SparseVector:
        k = min(k, x.size)
        entries, key = self._room_for(k, x), ("topk", *_kind(x, residual), k)
        if k == 0:  # no elements
            entries.host_count = 0
            return entries
        sample = _Sample.of(x.size, x.dtype.itemsize, k, self.tuning.sample_sectors)
        capacity = min(x.size, sample.candidates + self.tuning.spare_candidates)
        if x.size <= self.tuning.radix_max_size or capacity > _MAX_CANDIDATES:
            make = lambda: [self._radix(x, residual, k, entries, _NO_CANDIDATES)]  # noqa: E731
            self.start_plan(key, (x, residual, entries.memory), make, [entries])
        else:
            candidates = _Candidates.room(self, capacity, x.size, (residual or x).dtype.itemsize)
            memory = x, residual, entries.memory, candidates.memory
            self.start_plan(key, memory, lambda: self._sampled(x, residual, k, sample, entries, candidates), [entries])
        return entries

    def topk_by_chunk(self, x: Tensor, k: int, chunk: int, residual: Tensor | None, decay: float = 1.0) -> SparseVector:
        tile = self.tuning.by_chunk_threads * self.tuning.by_chunk_items
        if k >= chunk:  # all nonzero elements, whatever the chunks are
            k = chunk = tile
        chunk = min(chunk, max(x.size, 1))
        k = min(k, chunk)
        num_full, rest = divmod(x.size, chunk)
        entries = self._room_for(num_full * k + min(k, rest), x)
        if not x.size:
            entries.host_count = 0
        else:
            key, memory = ("chunk", *_kind(x, residual), k, chunk, decay), (x, residual, entries.memory)
            self.start_plan(key, memory, lambda: [self._by_chunk(x, k, chunk, residual, decay, entries)], [entries])
        return entries

    def _by_chunk(
        self, x: Tensor, k: int, chunk: int, residual: Tensor | None, decay: float, entries: CountedVector
    ) -> Launch:
        """Return the launch of warp_chunks.cu or chunks.cu."""
        size, tile, num_full = self.tuning, self.tuning.by_chunk_threads * self.tuning.by_chunk_items, x.size // chunk
        arguments = _dense(x, residual) | {"k": k, "chunk": chunk}
        # Warps select alone, unless chunks are so long and few that most warps would be idle.
        many_chunks = num_full >= 16 * self.runtime.multiprocessors
        suits_warps = size.by_warp_min_chunk <= chunk <= (1 << 15 if many_chunks else tile)
        if suits_warps and k <= size.by_warp_max_k:
            per_warp = max(1, min(size.by_warp_part // chunk, size.by_warp_max_k // k))
            name, threads = "warp_chunks", size.by_warp_threads
            tiles, max_blocks = ceil_div(x.size, threads // 32 * per_warp * chunk), size.by_warp_blocks
            arguments |= {"chunks_per_warp": per_warp, "wanted": _quads_wanted(k, chunk, x.dtype.itemsize)}
        else:
            per_tile = max(1, tile // chunk)
            name, threads = "chunks", size.by_chunk_threads
            tiles, max_blocks = ceil_div(x.size, per_tile * chunk), size.by_chunk_blocks
            arguments |= {"chunks_per_tile": per_tile}
        arguments |= {"decay": x.dtype.accumulator.type(decay), "aligned": _aligned(x, residual)}
        arguments |= {"indices": entries.room[0], "values": entries.room[1], "count": entries.counter}
        arguments |= {"look_back": self.workspace().look_back(tiles)}
        blocks = self._num_blocks(tiles, max_blocks)
        return self.prepare(f"{name}.cu", name, _definitions_of(x, residual), blocks, threads, arguments)

    def add_into(self, x: Tensor, residual: Tensor) -> None:
        self._above(x, x, residual, _ABOVE_ALL, 0)  # needs no memory, which may have run out

    def threshold(self, x: Tensor, tau: float, residual: Tensor | None) -> SparseVector:
        refuse_capture(self.runtime, "threshold(), which waits for the number of entries")
        key = _min_key(tau, (residual or x).dtype)
        capacity = max(1024, x.size // 64)
        parts: list[SparseVector] = []
        rest: Tensor | None = x
        while True:
            entries = self._above(rest, x, residual, key, min(capacity, max(x.size, 1)))
            count = entries.nnz
            if residual is None and count > capacity:  # repeat with room for all
                capacity = count
                continue
            stored = min(count, capacity)
            parts.append(SparseVector.trusted(entries.room[0][:stored], entries.room[1][:stored], x.size, x.shape))
            if count == stored:
                return self.concatenate_entries(parts)
            rest, capacity = None, count - stored  # other entries are still in the residual, at higher indices

    def nonzeros(self, dense: Array, shape: tuple[int, ...]) -> SparseVector:
        def find(dense: Array) -> tuple[Array, Array]:
            backend = type(self)(self.runtime, self.tuning)  # a new one, because any thread may call this at any time
            with OnStream(self.runtime, None, lambda: self.runtime.follow(written)):
                entries = backend.threshold(backend.as_tensor(dense, dense.shape), 0.0, None)
                return entries.indices, entries.values

        written = self.runtime.record()
        return DenseSum(dense, shape, find)

    def merge(self, a: SparseVector, b: SparseVector) -> SparseVector:
        return self.merge_topk(a, b, Operand.of(a).max_count + Operand.of(b).max_count)[0]

    def merge_topk(self, a: SparseVector, b: SparseVector, k: int) -> tuple[SparseVector, SparseVector]:
        size, accumulator = self.tuning, a._accumulator
        left, right = Operand.of(a), Operand.of(b)
        max_count = left.max_count + right.max_count
        selected, rejected = (self.counted(n, accumulator, a.size, a.shape) for n in (min(k, max_count), max_count))
        definitions = merge_definitions(accumulator.itemsize == 8, a.size >= INT64_SIZE)
        candidates = _Candidates.room(self, max_count, a.size, accumulator.itemsize)
        tiles = max(1, ceil_div(max_count, size.merge_threads * size.merge_items))
        arguments = left.arguments("a_") | right.arguments("b_") | {"k": k}
        arguments |= {"indices": candidates.indices, "bits": candidates.bits}
        arguments |= {"look_back": self._look_back(tiles, max_count), "selection": self.workspace().state("SELECTION")}
        union = self.prepare("merge.cu", "merge", definitions, tiles, size.merge_threads, arguments)
        emit = self._emit("merge.cu", definitions, candidates, selected, rejected)
        self.start(union, emit, writes=[selected, rejected])
        return selected, rejected

    # -- launches -----------------------------------------------------------------------------------------------------

    def _sampled(
        self,
        x: Tensor,
        residual: Tensor | None,
        k: int,
        sample: _Sample,
        entries: CountedVector,
        candidates: _Candidates,
    ) -> list[Launch]:
        """Return the launches of topk.cu, and of radix.cu, which selects if the sample was unlucky."""
        size, work, definitions = self.tuning, self.workspace(), _definitions_of(x, residual)
        arguments = _dense(x, residual) | {"aligned": _aligned(x, residual)}
        arguments |= {"sectors": sample.sectors, "wanted": sample.wanted}
        arguments |= {"state": work.state("SAMPLE"), "selection": work.state("SELECTION")}
        blocks = min(ceil_div(sample.sectors, size.sample_threads), 4 * self.runtime.multiprocessors)
        sampling = self.prepare("topk.cu", "sample", definitions, blocks, size.sample_threads, arguments)
        rounds = self._filter_rounds(x, sample.wanted / sample.elements)
        tiles = self._filter_tiles(x, rounds)
        arguments = _dense(x, residual) | {"k": k, "aligned": _aligned(x, residual), "capacity": candidates.capacity}
        arguments |= {"rounds": np.uint32(rounds), "indices": candidates.indices, "bits": candidates.bits}
        arguments |= {"look_back": self._look_back(tiles, candidates.capacity), "selection": work.state("SELECTION")}
        blocks = self._num_blocks(tiles, size.filter_blocks)
        filter_ = self.prepare("topk.cu", "filter", definitions, blocks, size.filter_threads, arguments)
        emit = self._emit("topk.cu", definitions, candidates, entries, residual=residual)
        return [sampling, filter_, emit, self._radix(x, residual, k, entries, candidates)]

    def _radix(
        self, x: Tensor, residual: Tensor | None, k: int, entries: CountedVector, candidates: _Candidates
    ) -> Launch:
        """Return the launch of radix.cu. With candidates, it does nothing unless these were too few or too many."""
        work, threads = self.workspace(), self.tuning.radix_threads
        rows = ceil_div(x.size, threads * (16 // x.dtype.itemsize))
        blocks = min(rows, 2 * self.runtime.multiprocessors)  # in most calls they only read one flag
        arguments = _dense(x, residual) | {"k": k, "aligned": _aligned(x, residual)}
        arguments |= {"from_start": candidates is _NO_CANDIDATES, **candidates.arguments}
        arguments |= {"kept_indices": entries.room[0], "kept_values": entries.room[1], "kept_count": entries.counter}
        arguments |= {"state": work.state("RADIX", 16 * blocks), "selection": work.state("SELECTION")}
        return self.prepare("radix.cu", "radix", _definitions_of(x, residual), blocks, threads, arguments)

    def _above(self, rest: Tensor | None, x: Tensor, residual: Tensor | None, key: int, capacity: int) -> CountedVector:
        """Run threshold.cu. ``rest``: x, or None to search only the residual."""
        entries, tiles = self._room_for(capacity, x), self._filter_tiles(x, self.tuning.filter_rounds)
        self.runtime.clear(entries.counter)
        if tiles:
            arguments = _dense(x, residual) | {"x": rest, "aligned": _aligned(x, residual), "threshold": key}
            arguments |= {"capacity": capacity, "indices": entries.room[0], "values": entries.room[1]}
            arguments |= {"count": entries.counter, "look_back": self.workspace().look_back(tiles)}
            types, threads = _definitions_of(x, residual), self.tuning.filter_threads
            blocks = self._num_blocks(tiles, self.tuning.filter_blocks)
            self.start(self.prepare("threshold.cu", "threshold", types, blocks, threads, arguments))
        return entries

    def _emit(
        self,
        file: str,
        definitions: tuple[str, ...],
        candidates: _Candidates,
        selected: CountedVector,
        rejected: CountedVector | None = None,
        residual: Tensor | None = None,
    ) -> Launch:
        """Return the launch of emit.cuh, which ``file`` includes. Other entries go to ``rejected`` or ``residual``."""
        size, work, tiles = self.tuning, self.workspace(), self._emit_tiles(candidates.capacity)
        indices, values, count = (None, None, None) if rejected is None else (*rejected.room, rejected.counter)
        arguments: Arguments = {"indices": candidates.indices, "bits": candidates.bits}
        arguments |= {"kept_indices": selected.room[0], "kept_values": selected.room[1]}
        arguments |= {"lost_indices": indices, "lost_values": values, "residual": residual}
        arguments |= {"kept_count": selected.counter, "lost_count": count}
        arguments |= {"look_back": work.look_back(tiles), "selection": work.state("SELECTION")}
        blocks = self._num_blocks(tiles, size.tail_blocks)
        return self.prepare(file, "emit", definitions, blocks, size.emit_threads, arguments)

    def _look_back(self, tiles: int, capacity: int) -> int:
        """Return the address of a look-back over ``tiles`` and later over the tiles of `emit`, which reuses it."""
        return self.workspace().look_back(max(tiles, self._emit_tiles(capacity)))

    def _emit_tiles(self, capacity: int) -> int:
        return max(1, ceil_div(capacity, self.tuning.emit_threads * self.tuning.emit_items))

    def _filter_rounds(self, x: Tensor, density: float) -> int:
        """Return the largest number of rounds for which a warp's entries of a tile fit into shared memory."""
        size = self.tuning
        elements = 32 * size.filter_vectors * (16 // x.dtype.itemsize)  # of a round
        room = size.filter_rounds * elements * 5 // 64  # ROOM of filter.cuh
        # Mean of the entries. If all parts are alike, one of about a million has 5 standard deviations more: the room.
        mean = (math.sqrt(room + 6.25) - 2.5) ** 2
        return max(1, min(size.filter_rounds, int(mean / (elements * density))))

    def _filter_tiles(self, x: Tensor, rounds: int) -> int:
        size = self.tuning
        return ceil_div(x.size, size.filter_threads * rounds * size.filter_vectors * (16 // x.dtype.itemsize))

    def _num_blocks(self, tiles: int, per_multiprocessor: int) -> int:
        """Return the number of blocks for ``tiles``: at least one, and at most ``per_multiprocessor``."""
        return max(1, min(tiles, per_multiprocessor * self.runtime.multiprocessors))

    def _room_for(self, count: int, x: Tensor) -> CountedVector:
        return self.counted(count, x.dtype.accumulator, x.size, x.shape)


def _at_most(expected: float) -> int:
    """Return 5 standard deviations more than an expected number."""
    return math.ceil(expected + 5 * math.sqrt(expected) + 5)


def _quads_wanted(k: int, chunk: int, itemsize: int) -> int:
    """Return how many quads of a round of warp_chunks.cu should reach the threshold, or 0 if a sample is useless."""
    row = 32 * 16 // itemsize
    sampled = min(chunk, row * (4 if itemsize == 4 else 2))
    quads = sampled // min(4, 16 // itemsize)
    expected = sampled * k / chunk
    # With this margin, one of about 500 chunks has too few candidates.
    wanted = expected + 3.2 * math.sqrt(expected * (1 - sampled / chunk)) + 2
    reach = round(quads * (1 - (1 - 1 / quads) ** wanted))  # some quads have several of these elements
    return reach if reach < 0.8 * quads else 0


def _dense(x: Tensor, residual: Tensor | None) -> Arguments:
    """Return the first arguments of selection kernels."""
    return {"x": x, "residual": residual, "n": x.size}


def _kind(x: Tensor, residual: Tensor | None) -> tuple[int, int, int, bool]:
    """Return what the launches of a selection depend on, except for addresses."""
    return x.dtype.code, residual.dtype.code if residual else -1, x.size, _aligned(x, residual)


def _definitions_of(x: Tensor, residual: Tensor | None) -> tuple[str, ...]:
    return selection_definitions(x.dtype, residual.dtype if residual else None, x.size >= INT64_SIZE)


def _aligned(x: Tensor, residual: Tensor | None) -> bool:
    """Return whether the addresses are multiples of 16 bytes."""
    return x.pointer % 16 == 0 and (residual is None or residual.pointer % 16 == 0)


def _min_key(tau: float, dtype: DType) -> int:
    """Return the smallest key whose value is at least ``tau``; at least 1, because zeros are never selected."""
    if tau == math.inf:
        return _INFINITY[dtype]
    low, high = 1, _INFINITY[dtype]
    while low < high:  # bisect: values increase with their bits
        middle = (low + high) // 2
        if _value(middle, dtype) >= tau:
            high = middle
        else:
            low = middle + 1
    return low


def _value(bits: int, dtype: DType) -> float:
    if dtype is BFLOAT16:
        return float(np.array(bits << 16, np.uint32).view(np.float32))
    return float(np.array(bits, f"u{dtype.itemsize}").view(dtype.view))
