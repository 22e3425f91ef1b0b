"""The calls for the leaves of a tree, made at once, or by XLA when it has the values."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from sparsecomm.backends import default_float_mode
from sparsecomm.calls.plan import Options
from sparsecomm.calls.sparse import sparse_allreduce
from sparsecomm.errors import InvalidInputError, pip_install
from sparsecomm.jax import staged
from sparsecomm.reducer.options import training_options
from sparsecomm.reducer.schedule import density_at
from sparsecomm.tensors.sparse import Array, SparseVector
from sparsecomm.transport import Comm

if TYPE_CHECKING:
    from numpy.typing import DTypeLike


__all__ = ["Comm", "Density", "Exchange", "LeafBucket", "accumulator_dtype"]

Density: TypeAlias = float | Callable[[int], float]
_AnyArray = TypeVar("_AnyArray", Array, jax.Array)

_ALIGNMENT = 64  # bytes: JAX takes over host memory with this alignment, and copies other memory


def accumulator_dtype(dtype: DTypeLike) -> np.dtype:
    """Return the type in which gradients of a type are summed, which is also that of their residuals."""
    return np.dtype(np.float64 if np.dtype(dtype).itemsize == 8 else np.float32)


@dataclass(frozen=True)
class LeafBucket:
    """The leaves that one `sparsecomm.sparse_allreduce` sends, one after another in one vector.

    Attributes:
        leaves: positions of the leaves.
        dtype: of the vector.
        dense: whether the leaves are summed whole.
        label: of the call: the shapes, which must be the same on all ranks.
    """

    leaves: tuple[int, ...]
    dtype: np.dtype
    dense: bool
    label: str


@dataclass(frozen=True, eq=False)
class Exchange:
    """All calls for a tree.

    Attributes:
        buckets: one per call.
        k: as in `sparsecomm.sparse_allreduce`, or a function from the step to a density.
        comm, options: as in `sparsecomm.sparse_allreduce`.
        chunk: as in `sparsecomm.sparse_allreduce`, for buckets that are not dense.
        training: whether "auto" is the recommended setting for training, and density 1.0 a dense sum.
    """

    buckets: tuple[LeafBucket, ...]
    k: int | Density
    comm: Comm
    options: Options
    chunk: int | None = None
    training: bool = False

    def run(
        self, leaves: list[jax.Array], residuals: list[jax.Array], step: int | jax.Array = 0
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return the results and the new residuals as JAX arrays, also while JAX is tracing.

        Raises:
            SparseCommError: as `sparsecomm.sparse_allreduce`, if the calls are made at once.
        """
        if any(isinstance(a, jax.core.Tracer) for a in (step, *leaves, *residuals)):
            return self._stage(leaves, residuals, step)
        jax.effects_barrier()  # type: ignore[no-untyped-call]  # calls in flight in jitted functions come first
        (device,) = {d for a in (*leaves, *residuals) for d in a.devices()}
        if device.platform in ("gpu", "cuda"):
            return self.on_device(int(step), leaves, residuals)
        results, kept = self.on_host(int(step), leaves, residuals)
        return jax.device_put(results, device), jax.device_put(kept, device)

    def _stage(
        self, leaves: list[jax.Array], residuals: list[jax.Array], step: int | jax.Array
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Let XLA call `on_host`."""
        with suppress(ImportError, RuntimeError):  # without MPI, the call itself raises
            import mpi4py.MPI  # noqa: F401  # starts MPI on this thread, which also ends it, not on a thread of XLA
        count = len(leaves)

        def host(step: Array, *arrays: Array) -> list[Array]:
            results, kept = self.on_host(step, arrays[:count], arrays[count:])
            return results + kept

        outputs = staged.call(host, leaves + residuals, jnp.asarray(step), *leaves, *residuals)
        return outputs[:count], outputs[count:]

    @default_float_mode  # XLA's threads flush denormals
    def on_host(
        self, step: int | Array, leaves: Sequence[object], residuals: Sequence[object]
    ) -> tuple[list[Array], list[Array]]:
        """Make all calls in host memory. Return the results and the new residuals, in the shapes and types of these.

        XLA may be the caller: this must not compute with JAX, which could wait for the thread that it runs on.

        Args:
            step: a number, or an array of shape ().
            leaves: arrays in host memory.
            residuals: one for each leaf, or none.
        """
        k = self._k_at(step)
        xs, olds = [np.asarray(x) for x in leaves], [np.asarray(r) for r in residuals]  # views
        results, kept = [np.empty(0)] * len(xs), [np.empty(0)] * len(olds)
        for bucket in self.buckets:
            parts = [xs[i] for i in bucket.leaves]
            x = parts[0].reshape(-1) if len(parts) == 1 else _concatenated(parts, bucket.dtype)
            residual = None
            if olds:
                residual = _concatenated([olds[i] for i in bucket.leaves], accumulator_dtype(bucket.dtype))
            out = _empty(x.size, bucket.dtype)
            self._sum(bucket, k, x, residual, out)
            _split(bucket, out, xs, results)
            if residual is not None:
                _split(bucket, residual, olds, kept)
        return results, kept

    def on_device(
        self, step: int, leaves: list[jax.Array], residuals: list[jax.Array], arrays: str = "cupy"
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Do the same in the memory of a GPU, through DLPack and CuPy.

        Args:
            step, leaves, residuals: as in `on_host`.
            arrays: the library whose arrays can be written on the device.

        Raises:
            InvalidInputError: the library is not installed.
        """
        try:
            writable: Any = importlib.import_module(arrays)
        except ImportError as error:
            raise InvalidInputError(
                f"arrays on a GPU need CuPy ({error}): {pip_install('cuda13x')} (or [cuda12x], to match the driver), "
                "or move them to the host first"
            ) from error
        k = self._k_at(step)
        results, kept = list(leaves), list(residuals)
        for bucket in self.buckets:
            x = jnp.concatenate([leaves[i].reshape(-1).astype(bucket.dtype) for i in bucket.leaves])
            residual = None
            if residuals:  # in float32 or float64, since CuPy has no bfloat16
                flat = jnp.concatenate([residuals[i].reshape(-1) for i in bucket.leaves])
                residual = writable.from_dlpack(flat).copy()
            total = self._sum(bucket, k, x, residual).to_dense()
            _split(bucket, jnp.from_dlpack(total), leaves, results)
            if residual is not None:
                _split(bucket, jnp.from_dlpack(residual), residuals, kept)
        return results, kept

    def _k_at(self, step: int | Array) -> int | float:
        return density_at(self.k, int(step)) if callable(self.k) else self.k

    def _sum(self, bucket: LeafBucket, k: float, x: object, residual: object, out: object = None) -> SparseVector:
        """Make the call of a bucket, which updates ``residual`` and overwrites ``out``."""
        chunk, options = self.chunk, self.options
        if bucket.dense or (self.training and k == 1.0):
            k, chunk, options = 1.0, None, options.whole()
        elif self.training:
            options = training_options(options, bucket.dtype.name, by_chunk=chunk is not None)
        return sparse_allreduce(
            x, k, comm=self.comm, residual=residual, out=out, chunk=chunk, label=bucket.label, **asdict(options)
        )


def _split(bucket: LeafBucket, flat: _AnyArray, like: Sequence[_AnyArray], into: list[_AnyArray]) -> None:
    """Put the parts of ``flat`` into a list of all leaves, each in the shape and type of its leaf in ``like``."""
    begin = 0
    for i in bucket.leaves:
        part = flat[begin : begin + like[i].size].reshape(like[i].shape)
        with np.errstate(over="ignore"):  # a sum too large for float16 is infinite, as in `out` of sparse_allreduce
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
