"""AdamW as an optax transformation whose gradients are summed sparsely: see `sparsecomm.adamw`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparsecomm.adamw import DENSITY, FIRST, AdamWRule
from sparsecomm.calls.options import Options
from sparsecomm.calls.weights import check_every
from sparsecomm.errors import InvalidInputError
from sparsecomm.hints import pip_install
from sparsecomm.jax.exchange import Comm, Density, accumulator_dtype, density_of
from sparsecomm.jax.transform import check_parameters
from sparsecomm.jax.trees import PyTree, allreduce_tree, init_residuals, tree_step
from sparsecomm.wire import WireName

if TYPE_CHECKING:
    import optax  # type: ignore[import-untyped, import-not-found, unused-ignore]

__all__ = ["SparseAdamWState", "sparse_adamw"]


class SparseAdamWState(NamedTuple):
    """The state of `sparse_adamw`: the same on all ranks, but for the residuals.

    Attributes:
        step: how many steps were made; int32, of no dimension.
        mu, nu: averages of gradients and of their squares, in float32, or float64 beside it.
        last: int32, the number of the step that has updated each weight last; 0: none has.
        residuals: what waits on this rank, divided by the root of ``nu``.
    """

    step: jax.Array
    mu: PyTree
    nu: PyTree
    last: PyTree
    residuals: PyTree


def sparse_adamw(
    learning_rate: float | Callable[[Any], Any],
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    mask: PyTree | Callable[[PyTree], PyTree] | None = None,
    *,
    density: Density = DENSITY,
    comm: Comm = None,
    wire: WireName = "packed_int2",
    check_weights_every: int | None = 0,
) -> optax.GradientTransformation:
    """Do what ``optax.adamw`` does, and sum gradients over all ranks in 1/40 of the bytes: `sparsecomm.SparseAdamW`.

        optimizer = sparsecomm.jax.sparse_adamw(1e-3)

    It is the whole optimizer, and not a link before another: pass it gradients of this rank, and the parameters. All
    ranks make the same updates, bit for bit. ``update`` is collective.

    Args:
        learning_rate: a number, or a schedule of optax: a function of the step, from 0 on.
        b1, b2, eps, weight_decay, mask: as in ``optax.adamw``; ``mask`` says which leaves decay.
        density: of what is sent, both ways, as in `sparsify`.
        comm, wire: as in `sparsecomm.sparse_allreduce`. Of float64 leaves, ``wire="packed"``.
        check_weights_every: as in `sparsify`; moments are compared as well.

    Returns:
        A transformation whose state is `SparseAdamWState`, a pytree.

    Raises:
        ImportError: optax is not installed.
        InvalidInputError: an argument is out of range; ``update`` raises it where there are no parameters, and for all
            else as `allreduce_tree`.
    """
    try:
        import optax
    except ImportError as error:
        raise ImportError(f"sparse_adamw needs optax ({error}): {pip_install('jax')}") from error
    AdamWRule.of(0.0 if callable(learning_rate) else learning_rate, (b1, b2), eps, weight_decay)
    at = density if callable(density) else density_of(density, comm=comm)
    every = check_every(check_weights_every)
    options = Options("double", "mean", wire)

    def init(params: PyTree) -> SparseAdamWState:
        zeros = init_residuals(params)
        last = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.int32), params)
        return SparseAdamWState(jnp.zeros((), jnp.int32), zeros, zeros, last, zeros)

    def update(updates: PyTree, state: SparseAdamWState, params: PyTree = None) -> tuple[PyTree, SparseAdamWState]:
        if params is None:
            raise InvalidInputError("sparse_adamw: update got no parameters; expected update(gradients, state, params)")
        if every is not None:
            check_parameters({"params": params, "state": state[1:4]}, state.step, every, comm=comm)
        step = state.step + 1
        nu = _begun(updates, state, comm=comm)
        unit = jax.tree.map(lambda v: jnp.sqrt(v) + v.dtype.type(eps), nu)
        quotients = jax.tree.map(lambda g, u: g.astype(u.dtype) / u, updates, unit)
        means, residuals = tree_step(
            quotients, at, state.residuals, "model", 0, options, state.step, chunk=4096, comm=comm
        )
        rate = learning_rate(state.step) if callable(learning_rate) else learning_rate
        decayed = mask(params) if callable(mask) else mask
        decays = jax.tree.map(lambda on: weight_decay * on, decayed or jax.tree.map(lambda _: True, params))

        def leaf(p: Any, mean: Any, m: Any, v: Any, u: Any, last: Any, r: Any, decay: Any) -> tuple[Any, ...]:
            hit, real = mean != 0, v.dtype
            waited = jnp.where(hit, step - last, 1).astype(real)
            kept_mean, kept_square = jnp.power(real.type(b1), waited), jnp.power(real.type(b2), waited)
            g = mean * u
            new_m = kept_mean * m + (1 - kept_mean) / waited * g
            new_v = kept_square * v + (1 - kept_square) / waited * (g * g)
            new_u = jnp.sqrt(new_v) + real.type(eps)
            shrinks = jnp.expm1(waited * jnp.log1p(-jnp.asarray(rate * decay, real)))
            change = shrinks * p.astype(real) - jnp.asarray(rate, real) * waited * (new_m / new_u)
            return (
                jnp.where(hit, change, 0).astype(p.dtype),
                jnp.where(hit, new_m, m),
                jnp.where(hit, new_v, v),
                jnp.where(hit, step, last),
                jnp.where(hit, r * (u / new_u), r),
            )

        made = jax.tree.map(leaf, params, means, state.mu, nu, unit, state.last, residuals, decays)
        structure = jax.tree.structure(params)
        changes, mu, nu, last, residuals = jax.tree.transpose(structure, jax.tree.structure((0,) * 5), made)
        return changes, SparseAdamWState(step, mu, nu, last, residuals)

    return optax.GradientTransformation(init, update)


def _begun(grads: PyTree, state: SparseAdamWState, *, comm: Comm) -> PyTree:
    """Return second moments: those of the state, or in step 0 a part of the mean squares of all ranks' gradients."""
    leaves, structure = jax.tree.flatten(grads)

    def first(_: Any) -> list[jax.Array]:
        squares = jnp.stack([_mean_square(leaf) for leaf in leaves])
        means = allreduce_tree(squares, 1.0, comm=comm, algorithm="dense", wire="plain", dense_below=0)
        sizes = jnp.array([leaf.size for leaf in leaves], squares.dtype)
        overall = (means * sizes).sum() / jnp.maximum(sizes.sum(), 1)
        found = []
        for leaf, mean in zip(leaves, means, strict=True):
            dtype = accumulator_dtype(leaf.dtype)
            value = jnp.maximum((FIRST * jnp.where(mean > 0, mean, overall)).astype(dtype), float(np.finfo(dtype).tiny))
            found.append(jnp.full(leaf.shape, value))
        return found

    kept = jax.tree.leaves(state.nu)
    if isinstance(state.step, jax.core.Tracer):
        found = jax.lax.cond(state.step == 0, first, lambda _: kept, None)
    else:
        found = first(None) if state.step == 0 else kept
    return jax.tree.unflatten(structure, found)


def _mean_square(leaf: jax.Array) -> jax.Array:
    if not leaf.size:
        return jnp.zeros((), jnp.float32)
    return jnp.square(leaf.astype(accumulator_dtype(leaf.dtype))).mean().astype(jnp.float32)
