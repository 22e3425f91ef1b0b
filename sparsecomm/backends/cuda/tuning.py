"""Sizes of the CUDA kernels and of their launches, in one table: the kernels get theirs as macros."""

from __future__ import annotations

from dataclasses import dataclass, fields

__all__ = ["TUNING", "Tuning"]

_LAUNCH_ONLY = {"sample_sectors", "radix_max_size", "spare_candidates"}


@dataclass(frozen=True)
class Tuning:
    """Sizes chosen such that no kernel spills registers on compute capability 9.0, and that 512 to 1,536 threads stay
    resident on a multiprocessor (tests/kernels/test_cuda_compile.py). None was measured on a GPU yet.
    """

    sample_threads: int = 256  # of a block
    sample_bins: int = 8192  # of the sample's histogram, over the whole range of keys
    filter_threads: int = 256
    filter_vectors: int = 4  # of 16 bytes, that each thread holds
    bins: int = 4096  # of the candidates' histogram
    refine_threads: int = 256
    emit_threads: int = 256
    emit_items: int = 8  # candidates per thread
    radix_threads: int = 512
    radix_bits: int = 11  # of a key, decided by each pass
    merge_threads: int = 256
    merge_items: int = 8  # entries of both vectors together, per thread
    by_chunk_threads: int = 256  # of a block that selects by chunk
    by_chunk_items: int = 16  # elements per thread, in shared memory
    dense_threads: int = 256
    densify_tile: int = 4096  # elements that are written at once
    packed_threads: int = 256  # of a block that packs or unpacks; of unpack also words of a tile

    # Of the launch code alone.
    sample_sectors: int = 65536  # of 32 bytes, that are looked at, at most
    radix_max_size: int = 1 << 16  # elements up to which one launch of `radix` does it all
    spare_candidates: int = 1 << 20  # room beyond 2 k: for what an unlucky sample lets through

    @property
    def definitions(self) -> tuple[str, ...]:
        """``NAME=value`` for each size that kernels are compiled for."""
        names = (field.name for field in fields(self) if field.name not in _LAUNCH_ONLY)
        return tuple(f"{name.upper()}={getattr(self, name)}u" for name in names)


TUNING = Tuning()
