"""The calls for the leaves of a tree, and how they are made on arrays in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import jax
import numpy as np

from sparsecomm import api
from sparsecomm.backends import default_float_mode
from sparsecomm.calls import arguments
from sparsecomm.calls.arguments import Comm
from sparsecomm.calls.options import Options
from sparsecomm.reducer import schedule
from sparsecomm.tensors.sparse import Array, SparseVector

if TYPE_CHECKING:
    from numpy.typing import DTypeLike


__all__ = ["Comm", "Density", "Exchange", "LeafBucket", "accumulator_dtype", "density_of", "split"]

Density: TypeAlias = float | Callable[[int], float]
_AnyArray = TypeVar("_AnyArray", Array, jax.Array)

_ALIGNMENT = 64  # bytes: JAX takes over host memory that is aligned so, and copies other


def accumulator_dtype(dtype: DTypeLike) -> np.dtype:
    """Return the type in which gradients of a type are summed, which is also that of their residuals."""
    return np.dtype(np.float64 if np.dtype(dtype).itemsize == 8 else np.float32)


@dataclass(frozen=True)
class LeafBucket:
    """The leaves that one `sparsecomm.sparse_allreduce` sends, one after another in one vector.

    Attributes:
        leaves: their numbers.
        dtype: of the vector.
        dense: whether they are sent whole.
        label: of the call: their shapes, on which the ranks must agree.
    """

    leaves: tuple[int, ...]
    dtype: np.dtype
    dense: bool
    label: str


@dataclass(frozen=True, eq=False)
class Exchange:
    """All calls for a tree. Calling it makes them, on the host: arrays in, NumPy arrays out.

    XLA may be calling: this must not compute with JAX, which could wait for the thread that it is on.

    Attributes:
        k: as in `sparsecomm.sparse_allreduce`, or a function from the step to a density.
        chunk: as in `sparsecomm.sparse_allreduce`, of what is not sent whole.
    """

    buckets: tuple[LeafBucket, ...]
    k: int | Density
    comm: Comm
    options: Options
    chunk: int | None = None

    @default_float_mode  # XLA's threads flush denormals
    def __call__(
        self, step: int | Array, leaves: Sequence[object], residuals: Sequence[object]
    ) -> tuple[list[Array], list[Array]]:
        """Return the results and the new residuals, of the shapes and types of what goes in.

        Args:
            step: a number, or an array of no dimension.
            leaves: arrays whose memory is on the host.
            residuals: one for each leaf, or none at all.
        """
        k = self.k_at(step)
        xs, olds = [np.asarray(x) for x in leaves], [np.asarray(r) for r in residuals]  # views of memory on the host
        results, kept = [np.empty(0)] * len(xs), [np.empty(0)] * len(olds)
        for bucket in self.buckets:
            parts = [xs[i] for i in bucket.leaves]
            x = parts[0].reshape(-1) if len(parts) == 1 else _concatenated(parts, bucket.dtype)
            residual = None
            if olds:
                residual = _concatenated([olds[i] for i in bucket.leaves], accumulator_dtype(bucket.dtype))
            out = _empty(x.size, bucket.dtype)
            self.sum(bucket, k, x, residual, out)
            split(bucket, out, xs, results)
            if residual is not None:
                split(bucket, residual, olds, kept)
        return results, kept

    def k_at(self, step: int | Array) -> int | float:
        """Return the k of a step.

        Raises:
            InvalidInputError: the function gives no density.
        """
        if not callable(self.k):
            return self.k
        return _density_at(self.k, int(step), comm=self.comm)

    def sum(self, bucket: LeafBucket, k: float, x: object, residual: object, out: object = None) -> SparseVector:
        """Make the call of a bucket: ``residual`` is updated and ``out`` overwritten."""
        options = self.options.whole() if bucket.dense else self.options
        k = 1.0 if bucket.dense else k
        chunk = None if bucket.dense else self.chunk
        return api.sparse_allreduce(
            x, k, comm=self.comm, residual=residual, out=out, chunk=chunk, label=bucket.label, **asdict(options)
        )


@arguments.naming_rank
def density_of(value: object, *, comm: Comm) -> float:
    """Do as `sparsecomm.reducer.schedule.density_at`."""
    return schedule.density_at(value)


@arguments.naming_rank
def _density_at(density: Density, step: int, *, comm: Comm) -> float:
    return schedule.density_at(density, step)


def split(bucket: LeafBucket, flat: _AnyArray, like: Sequence[_AnyArray], into: list[_AnyArray]) -> None:
    """Put the parts of ``flat`` into a list of all leaves, each in the shape and type of its leaf in ``like``."""
    begin = 0
    for i in bucket.leaves:
        part = flat[begin : begin + like[i].size].reshape(like[i].shape)
        with np.errstate(over="ignore"):  # a sum may exceed float16: infinity, as `out` of sparse_allreduce has it
            into[i] = part.astype(like[i].dtype, copy=False)
        begin += like[i].size


def _concatenated(arrays: Sequence[Array], dtype: DTypeLike) -> Array:
    """Return a flat copy."""
    flat = _empty(sum(a.size for a in arrays), dtype)
    np.concatenate([a.reshape(-1) for a in arrays], out=flat)
    return flat


def _empty(size: int, dtype: DTypeLike) -> Array:
    nbytes = size * np.dtype(dtype).itemsize
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + nbytes].view(dtype)
