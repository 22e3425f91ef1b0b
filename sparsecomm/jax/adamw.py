"""`sparse_adamw`, an optax transformation by the rule of `sparsecomm.optimizers.adamw`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparsecomm.backends.adamw import adamw_step, unit
from sparsecomm.calls.options import Options
from sparsecomm.errors import InvalidInputError, pip_install
from sparsecomm.jax.exchange import Comm, Density, accumulator_dtype, schedule_of
from sparsecomm.jax.transform import check_parameters, check_wire
from sparsecomm.jax.trees import PyTree, allreduce_tree, checked, init_residuals, tree_step
from sparsecomm.optimizers.adamw import DENSITY, START, AdamWRule, coefficients, step_eps
from sparsecomm.states.weights import check_every
from sparsecomm.wire import WireName

if TYPE_CHECKING:
    import optax  # type: ignore[import-untyped, import-not-found, unused-ignore]

__all__ = ["SparseAdamWState", "sparse_adamw"]


class SparseAdamWState(NamedTuple):
    """The state of `sparse_adamw`: the same on all ranks, except the residuals.

    Attributes:
        step: the number of steps made; int32, of shape ().
        mu, nu: averages of gradients and of their squares, in float32, or float64 beside it. Before an element's first
            update ``nu`` is only the unit in which its gradients are sent.
        last: int32, the step of each weight's last update; 0: none yet.
        residuals: what this rank has not sent, divided by ``unit(nu)``.
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
    dense_steps: int = 0,
    comm: Comm = None,
    wire: WireName = "auto",
    check_weights_every: int | None = 0,
) -> optax.GradientTransformationExtraArgs:
    """Return what ``optax.adamw`` is, with gradients summed over all ranks in 1/40 of the bytes of dense sums.

        optimizer = sparsecomm.jax.sparse_adamw(1e-3)

    This is the whole optimizer, not a link of a chain: pass ``update`` the gradients of this rank, and the parameters.
    It is collective. All ranks make the same updates, bit for bit. A gradient that is not finite on some rank leaves
    parameters and state as they are on all ranks; finite gradients of that step stay in the residuals. So does a step
    that would make a parameter or a moment infinite; what waits in residuals for these elements is dropped. At
    ``density=1.0`` it is ``optax.adamw`` of dense, exact means. See `sparsecomm.SparseAdamW`.

    Args:
        learning_rate: a number, or a schedule of optax: a function of the step, from 0.
        b1, b2, eps, weight_decay, mask: as in ``optax.adamw``; ``mask`` says which leaves decay. Under
            ``optax.inject_hyperparams`` pass ``static_args=("density", "dense_steps", "check_weights_every")``.
        density: the part of the entries that is sent, both ways, as in `sparsify`.
        dense_steps: the number of steps at the beginning with density 1.0.
        comm, wire: as in `sparsify`: values of 2 bits by default, exact ones for float64.
        check_weights_every: as in `sparsify`; moments are compared as well.

    Returns:
        A transformation whose state is `SparseAdamWState`, a pytree.

    Raises:
        ImportError: optax is not installed.
        InvalidInputError: an argument is out of range. ``update`` raises it without parameters, and otherwise as
            `allreduce_tree`.
    """
    try:
        import optax
    except ImportError as error:
        raise ImportError(f"sparse_adamw needs optax ({error}): {pip_install('jax')}") from error
    if not any(isinstance(each, jax.Array) for each in (learning_rate, b1, b2, eps, weight_decay)):
        AdamWRule.of(0.0 if callable(learning_rate) else learning_rate, (b1, b2), eps, weight_decay)
    at = schedule_of(density, dense_steps, comm=comm)
    every = check_every(check_weights_every)
    options = Options("auto", "mean", wire)

    def init(params: PyTree) -> SparseAdamWState:
        zeros = init_residuals(params)
        check_wire(options, zeros)
        last = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.int32), params)
        return SparseAdamWState(jnp.zeros((), jnp.int32), zeros, zeros, last, zeros)

    def update(updates: PyTree, state: SparseAdamWState, params: PyTree = None) -> tuple[PyTree, SparseAdamWState]:
        if params is None:
            raise InvalidInputError("sparse_adamw: update got no parameters; expected update(gradients, state, params)")
        checked(updates, state.residuals, "grads", "residuals", comm=comm)
        if every is not None:
            check_parameters({"params": params, "state": state[1:4]}, state.step, every, comm=comm)
        begun, step = _begun(updates, state, START * (1 - b2), comm=comm), state.step + 1
        quotients = jax.tree.map(
            lambda g, v: g.astype(v.dtype) / unit(jnp, v, jnp.asarray(eps, v.dtype)), updates, begun
        )
        squared: PyTree = jax.tree.map(lambda g, v: jnp.square(g.astype(v.dtype)), updates, begun)
        sums = jax.tree.map(jnp.add, state.residuals, quotients)
        mine = _all_finite(quotients) & _all_finite(squared) & _all_finite(sums)
        sent = jax.tree.map(lambda q: jnp.where(mine, q, jnp.full_like(q, jnp.nan)), quotients)  # reaches all ranks
        means, residuals = tree_step(
            sent, at, state.residuals, "model", 0, options, state.step, chunk=4096, comm=comm, training=True
        )
        counts, dense = _all_finite(means), _is_dense(at, state.step)
        rate = learning_rate(state.step) if callable(learning_rate) else learning_rate
        decayed = mask(params) if callable(mask) else mask
        decays = jax.tree.map(lambda on: weight_decay * on, decayed or jax.tree.map(lambda _: True, params))

        def leaf(p: Any, mean: Any, m: Any, v: Any, last: Any, decay: Any) -> tuple[Any, ...]:
            hit = counts & (dense | (mean != 0))
            waited = jnp.maximum(step - last, 1).astype(v.dtype)
            t, lr = step.astype(v.dtype), jnp.asarray(rate, v.dtype)
            rows = coefficients(jnp, waited, t, lr, (b1, b2), jnp.asarray(decay, v.dtype))
            tiny = jnp.asarray(eps, v.dtype)
            made = adamw_step(jnp, p.astype(v.dtype), mean, m, v, last == 0, rows, tiny, step_eps(jnp, tiny, b2, t))
            change, new_m, new_v, factor = made
            moved = jnp.where(hit, change, 0).astype(p.dtype)
            fits = jnp.isfinite(new_m) & jnp.isfinite(new_v) & (jnp.isfinite(p + moved) | ~jnp.isfinite(p))
            return hit, moved, new_m, new_v, factor, hit & ~fits

        def end(p: Any, one: Any, mean: Any, q: Any, m: Any, v: Any, last: Any, r: Any, old: Any) -> tuple[Any, ...]:
            hit, change, new_m, new_v, factor, overflows = one
            max_ = float(np.finfo(v.dtype).max)
            rescaled = jnp.clip(r * jnp.where(hit, jnp.minimum(factor, max_), 1), -max_, max_)
            kept = jnp.where(overflows | jnp.isinf(mean), 0, old + jnp.where(mine, q, 0))
            hit = hit & usable
            return (
                jnp.where(hit, change, 0),
                jnp.where(hit, new_m, m),
                jnp.where(hit, new_v, v),
                jnp.where(hit, step, last),
                jnp.where(usable, rescaled, kept),
            )

        steps = jax.tree.map(leaf, params, means, state.mu, begun, state.last, decays)
        structure: Any = jax.tree.structure(params)
        leaves = structure.flatten_up_to(steps)
        usable = counts & ~jnp.any(jnp.stack([overflows.any() for *_, overflows in leaves]))  # the same on all ranks
        made = jax.tree.map(
            end, params, steps, means, quotients, state.mu, begun, state.last, residuals, state.residuals
        )
        changes, mu, nu, last, residuals = jax.tree.transpose(structure, jax.tree.structure((0,) * 5), made)
        began = usable | (state.step > 0)
        nu, residuals = (
            jax.tree.map(lambda new, old: jnp.where(began, new, old), new, old)
            for new, old in ((nu, state.nu), (residuals, state.residuals))
        )
        return changes, SparseAdamWState(jnp.where(usable, step, state.step), mu, nu, last, residuals)

    return optax.with_extra_args_support(optax.GradientTransformation(init, update))


def _is_dense(at: Density, step: jax.Array) -> bool | jax.Array:
    """Return whether a step sums whole gradients. A schedule is called on the host."""
    if not callable(at):
        return at == 1.0
    shape: Any = jax.ShapeDtypeStruct((), bool)  # type: ignore[no-untyped-call]
    dense: jax.Array = jax.pure_callback(lambda now: np.bool_(at(int(now)) == 1.0), shape, step)
    return dense


def _all_finite(tree: PyTree) -> jax.Array:
    return jnp.all(jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]))


def _begun(grads: PyTree, state: SparseAdamWState, start: float, *, comm: Comm) -> PyTree:
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
            value = jnp.maximum((start * jnp.where(mean > 0, mean, overall)).astype(dtype), float(np.finfo(dtype).tiny))
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
