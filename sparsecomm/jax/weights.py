"""The check that all ranks hold the same parameters, eagerly or traced."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from sparsecomm.api import check_weights
from sparsecomm.jax import staged
from sparsecomm.jax.exchange import Comm
from sparsecomm.jax.trees import PyTree
from sparsecomm.tensors.sparse import Array

__all__ = ["check_parameters"]


def check_parameters(params: PyTree, step: int | jax.Array, every: int, *, comm: Comm) -> None:
    """Check that all ranks have the same parameters, in steps whose number ``every`` divides; 0: in step 0 only.

    Raises:
        SparseCommError: as `sparsecomm.check_weights`, where the check is made at once.
    """
    found = jax.tree_util.tree_flatten_with_path(params)[0]
    names, leaves = ["params" + jax.tree_util.keystr(path) for path, _ in found], [leaf for _, leaf in found]
    due = step % every == 0 if every else step == 0

    def host(*arrays: Array) -> list[Array]:
        check_weights(list(zip(names, arrays, strict=True)), comm=comm)
        return []

    if not any(isinstance(a, jax.core.Tracer) for a in (step, *leaves)):
        if due:
            jax.effects_barrier()  # type: ignore[no-untyped-call]  # calls under way in jitted functions come first
            host(*leaves)
        return
    jax.lax.cond(due, lambda operands: staged.call(host, [], *operands), lambda _: [], list(map(jnp.asarray, leaves)))
