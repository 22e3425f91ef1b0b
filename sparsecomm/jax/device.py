"""The exchange of arrays in the memory of a GPU, without a way through the host: by DLPack, and CuPy."""

from __future__ import annotations

import importlib

import jax
import jax.numpy as jnp

from sparsecomm.errors import InvalidInputError
from sparsecomm.hints import pip_install
from sparsecomm.jax.exchange import Exchange, split

__all__ = ["exchange"]


def exchange(
    plan: Exchange, leaves: list[jax.Array], residuals: list[jax.Array], step: int, arrays: str = "cupy"
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Do what calling ``plan`` does, in device memory.

    Args:
        arrays: the library whose arrays can be written on that device.

    Raises:
        InvalidInputError: the library is not installed.
    """
    try:
        writable = importlib.import_module(arrays)
    except ImportError as error:
        raise InvalidInputError(
            f"arrays on a GPU need CuPy ({error}): {pip_install('cuda13x')} (or [cuda12x], to match the driver), or "
            "move them to the host first"
        ) from error
    k = plan.k_at(step)
    results, kept = list(leaves), list(residuals)
    for bucket in plan.buckets:
        x = jnp.concatenate([leaves[i].reshape(-1).astype(bucket.dtype) for i in bucket.leaves])
        residual = None
        if residuals:
            # CuPy knows no bfloat16, but residuals are float32 or float64. The copy is this function's own.
            residual = writable.from_dlpack(jnp.concatenate([residuals[i].reshape(-1) for i in bucket.leaves])).copy()
        total = plan.sum(bucket, k, x, residual).to_dense()
        split(bucket, jnp.from_dlpack(total), leaves, results)
        if residual is not None:
            split(bucket, jnp.from_dlpack(residual), residuals, kept)
    return results, kept
