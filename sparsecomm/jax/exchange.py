"""What is sent for the leaves of a tree, and by whom it is called: directly, or by XLA on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from sparsecomm import api
from sparsecomm.calls import arguments
from sparsecomm.calls.options import Options
from sparsecomm.errors import InvalidInputError
from sparsecomm.jax import device, staged
from sparsecomm.tensors.sparse import SparseVector

__all__ = ["Call", "Density", "Exchange", "accumulator", "density_of", "run"]

Density = float | Callable[[int], float]
Arrays = list[Any]

_ALIGNMENT = 64  # bytes: JAX takes over host memory that is aligned so, and copies other


def accumulator(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The type of the residual of a gradient in ``dtype``, in which sums are carried, too."""
    return np.dtype(np.float64 if dtype.itemsize == 8 else np.float32)


@dataclass(frozen=True)
class Call:
    """One `sparsecomm.sparse_allreduce`, of leaves one after the other, joined in ``dtype``."""

    leaves: tuple[int, ...]
    dtype: np.dtype[Any]
    dense: bool


@dataclass(frozen=True, eq=False)
class Exchange:
    """All calls for a tree. Calling it makes them, on the host: arrays in, NumPy arrays out.

    XLA may be calling: this must not compute with JAX, which could wait for the thread that it is on.

    Attributes:
        k: as in `sparsecomm.sparse_allreduce`, or a function from the step to a density.
    """

    calls: tuple[Call, ...]
    k: int | Density
    comm: Any
    options: Options

    def __call__(self, step: Any, leaves: Sequence[Any], residuals: Sequence[Any]) -> tuple[Arrays, Arrays]:
        """The results and the new residuals, of the shapes and types of what goes in. ``residuals`` may be empty."""
        k = self.k_at(step)
        xs, olds = [np.asarray(x) for x in leaves], [np.asarray(r) for r in residuals]  # views of memory on the host
        results: Arrays = [None] * len(xs)
        kept: Arrays = [None] * len(olds)
        for call in self.calls:
            mine = [xs[i] for i in call.leaves]
            x = mine[0].reshape(-1) if len(mine) == 1 else _joined(mine, call.dtype)
            residual = _joined([olds[i] for i in call.leaves], accumulator(call.dtype)) if olds else None
            out = _empty(x.size, call.dtype)
            self.sum(call, k, x, residual, out)
            _split(call, out, xs, results)
            if residual is not None:
                _split(call, residual, olds, kept)
        return results, kept

    def k_at(self, step: Any) -> int | float:
        if not callable(self.k):
            return self.k
        at = int(step)
        return density_of(self.k(at), f"the density of step {at}", comm=self.comm)

    def sum(self, call: Call, k: int | float, x: Any, residual: Any, out: Any = None) -> SparseVector:
        """``residual`` is updated and ``out`` overwritten."""
        if call.dense:
            return api.sparse_allreduce(
                x, 1.0, comm=self.comm, algorithm="dense", op=self.options.op, residual=residual, out=out, wire="plain"
            )
        return api.sparse_allreduce(
            x,
            k,
            comm=self.comm,
            algorithm=self.options.algorithm,
            op=self.options.op,
            residual=residual,
            out=out,
            wire=self.options.wire,
            complete=self.options.complete,
        )


@arguments.naming_rank
def density_of(value: Any, what: str, *, comm: Any) -> float:
    """A number in (0, 1], checked. ``1`` is all, unlike the k of `sparsecomm.sparse_allreduce`."""
    density = math.nan
    with suppress(TypeError, ValueError):
        density = float(value)
    if not 0 < density <= 1:
        raise InvalidInputError(f"{what} is {value!r}: expected a number in (0, 1]")
    return density


def run(exchange: Exchange, leaves: Arrays, residuals: Arrays, step: Any = 0) -> tuple[Arrays, Arrays]:
    """The results and the new residuals, as JAX arrays, also while JAX is tracing."""
    if any(isinstance(a, jax.core.Tracer) for a in (step, *leaves, *residuals)):
        return _staged(exchange, leaves, residuals, step)
    jax.effects_barrier()  # type: ignore[no-untyped-call]  # calls under way in jitted functions come first
    (where,) = {d for a in (*leaves, *residuals) for d in a.devices()}
    if where.platform in ("gpu", "cuda"):
        return device.exchange(exchange, leaves, residuals, step)
    results, kept = exchange(step, leaves, residuals)
    return jax.device_put(results, where), jax.device_put(kept, where)


def _staged(exchange: Exchange, leaves: Arrays, residuals: Arrays, step: Any) -> tuple[Arrays, Arrays]:
    """Leave it to XLA to call ``exchange`` when the values are there."""
    with suppress(ImportError, RuntimeError):  # without MPI, the call itself says what is missing
        import mpi4py.MPI  # noqa: F401  # starts MPI on this thread, which also ends it, and not on one of XLA's
    count = len(leaves)

    def host(step: Any, *arrays: Any) -> Arrays:
        results, kept = exchange(step, arrays[:count], arrays[count:])
        return results + kept

    made = staged.call(host, leaves + residuals, jnp.asarray(step), *leaves, *residuals)
    return made[:count], made[count:]


def _empty(size: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    memory = np.empty(size * dtype.itemsize + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + size * dtype.itemsize].view(dtype)


def _joined(arrays: list[NDArray[Any]], dtype: np.dtype[Any]) -> NDArray[Any]:
    """A flat copy."""
    flat = _empty(sum(a.size for a in arrays), dtype)
    np.concatenate([a.reshape(-1) for a in arrays], out=flat)
    return flat


def _split(call: Call, flat: NDArray[Any], like: list[NDArray[Any]], into: Arrays) -> None:
    """The parts of ``flat``, each in the shape and type of its leaf."""
    begin = 0
    for i in call.leaves:
        part = flat[begin : begin + like[i].size].reshape(like[i].shape)
        with np.errstate(over="ignore"):  # a sum may exceed float16: infinity, as `out` of sparse_allreduce has it
            into[i] = part.astype(like[i].dtype, copy=False)
        begin += like[i].size
