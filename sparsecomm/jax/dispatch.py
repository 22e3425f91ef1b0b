"""The calls for a tree, made at once, or by XLA when it has the values."""

from __future__ import annotations

from contextlib import suppress

import jax
import jax.numpy as jnp

from sparsecomm.jax import device, staged
from sparsecomm.jax.exchange import Exchange
from sparsecomm.tensors.sparse import Array

__all__ = ["run"]


def run(
    exchange: Exchange, leaves: list[jax.Array], residuals: list[jax.Array], step: int | jax.Array = 0
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Return the results and the new residuals, as JAX arrays, also while JAX is tracing.

    Raises:
        SparseCommError: as `sparsecomm.sparse_allreduce`, where the calls are made at once.
    """
    if any(isinstance(a, jax.core.Tracer) for a in (step, *leaves, *residuals)):
        return _staged(exchange, leaves, residuals, step)
    jax.effects_barrier()  # type: ignore[no-untyped-call]  # calls under way in jitted functions come first
    (where,) = {d for a in (*leaves, *residuals) for d in a.devices()}
    if where.platform in ("gpu", "cuda"):
        return device.exchange(exchange, leaves, residuals, int(step))
    results, kept = exchange(int(step), leaves, residuals)
    return jax.device_put(results, where), jax.device_put(kept, where)


def _staged(
    exchange: Exchange, leaves: list[jax.Array], residuals: list[jax.Array], step: int | jax.Array
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Leave it to XLA to call ``exchange``."""
    with suppress(ImportError, RuntimeError):  # without MPI, the call itself says what is missing
        import mpi4py.MPI  # noqa: F401  # starts MPI on this thread, which also ends it, and not on one of XLA's
    count = len(leaves)

    def host(step: Array, *arrays: Array) -> list[Array]:
        results, kept = exchange(step, arrays[:count], arrays[count:])
        return results + kept

    outputs = staged.call(host, leaves + residuals, jnp.asarray(step), *leaves, *residuals)
    return outputs[:count], outputs[count:]
