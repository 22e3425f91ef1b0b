"""The exchange of arrays in the memory of a GPU, without a way through the host: by DLPack, and CuPy."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from sparsecomm.errors import InvalidInputError

if TYPE_CHECKING:
    from sparsecomm.jax.exchange import Exchange

__all__ = ["exchange"]


def exchange(
    plan: Exchange, leaves: list[Any], residuals: list[Any], step: Any, arrays: str = "cupy"
) -> tuple[list[Any], list[Any]]:
    """As calling ``plan``, with JAX arrays out. ``arrays``: the library whose arrays can be written on that device."""
    try:
        writable = importlib.import_module(arrays)
    except ImportError as error:
        raise InvalidInputError(
            f"arrays on a GPU need CuPy ({error}): pip install 'sparsecomm[cuda13x]', or move them to the host first"
        ) from error
    k = plan.k_at(step)
    results: list[Any] = [None] * len(leaves)
    kept: list[Any] = [None] * len(residuals)
    for call in plan.calls:
        x = _joined([leaves[i] for i in call.leaves], call.dtype)
        residual = None
        if residuals:
            # CuPy knows no bfloat16, but residuals are float32 or float64. The copy is this function's own.
            residual = writable.from_dlpack(jnp.concatenate([residuals[i].reshape(-1) for i in call.leaves])).copy()
        total = jnp.from_dlpack(plan.sum(call, k, x, residual).to_dense())
        _split(call.leaves, total, leaves, results)
        if residual is not None:
            _split(call.leaves, jnp.from_dlpack(residual), residuals, kept)
    return results, kept


def _joined(parts: list[Any], dtype: Any) -> Any:
    return jnp.concatenate([part.reshape(-1).astype(dtype) for part in parts])


def _split(places: tuple[int, ...], flat: Any, like: list[Any], into: list[Any]) -> None:
    begin = 0
    for i in places:
        into[i] = flat[begin : begin + like[i].size].reshape(like[i].shape).astype(like[i].dtype)
        begin += like[i].size
