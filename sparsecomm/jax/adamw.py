"""`sparse_adamw`, AdamW with a sparse exchange as an optax transformation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparsecomm.backends.adamw import adamw_step, unit
from sparsecomm.calls.plan import Options
from sparsecomm.errors import InvalidInputError, pip_install
from sparsecomm.jax.exchange import Density, accumulator_dtype
from sparsecomm.jax.transform import all_finite, check_parameters, check_wire, select, training_step
from sparsecomm.jax.trees import PyTree, allreduce_tree, checked, init_residuals, tree_step
from sparsecomm.optimizers.adamw import DENSITY, START, AdamWRule, coefficients, step_eps
from sparsecomm.reducer.options import with_dense_steps
from sparsecomm.states.weights import check_every
from sparsecomm.transport import Comm
from sparsecomm.wire import WireName

if TYPE_CHECKING:
    import optax  # type: ignore[import-untyped, import-not-found, unused-ignore]


class SparseAdamWState(NamedTuple):
    """The state of `sparse_adamw`: the same on all ranks, except the residuals.

    ``mu`` and ``nu`` are running averages of gradients and of their squares, in float32 (float64 for float64). Before
    an element's first update, ``nu`` only determines the unit in which its gradients are sent.
    """

    step: jax.Array  # number of steps so far; int32, of shape ()
    mu: PyTree
    nu: PyTree
    last: PyTree  # the step of each weight's last update, int32; 0: none yet
    residuals: PyTree  # what this rank has not sent yet, divided by ``unit(nu)``


def sparse_adamw(
    learning_rate: float | Callable[[Any], Any],
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    mask: PyTree | Callable[[PyTree], PyTree] | None = None,
    *,
    density: Density = DENSITY,
    dense_steps: int | None = None,
    comm: Comm = None,
    wire: WireName = "auto",
    check_weights_every: int | None = 0,
) -> optax.GradientTransformationExtraArgs:
    """Return ``optax.adamw`` with gradients averaged over all ranks, in 1/42 of the bytes of dense sums.

        optimizer = sparsecomm.jax.sparse_adamw(1e-3)

    This is a complete optimizer, not a link of a chain: pass ``update`` this rank's gradients and the parameters. It is
    collective, and all ranks make the same updates, bit for bit. If a gradient is not finite on some rank, or the step
    would make a parameter or a moment infinite, all ranks skip the step; finite gradients stay in the residuals, and
    elements that would overflow are dropped. At ``density=1.0`` it is ``optax.adamw`` of exact means.

    Args:
        learning_rate: a number, or an optax schedule: a function of the step, from 0.
        b1, b2, eps, weight_decay, mask: as in ``optax.adamw``. With ``optax.inject_hyperparams`` pass
            ``static_args=("density", "dense_steps", "check_weights_every")``.
        density: share of the entries that is sent and received: a number or a function, as in `sparsify`.
        dense_steps: as in `sparsify`.
        comm, wire: as in `sparsify`; by default values have 2 bits, and float64 values are exact.
        check_weights_every: as in `sparsify`; moments are compared, too.

    Returns:
        A transformation whose state is `SparseAdamWState`, a pytree. ``update`` raises the errors of `allreduce_tree`.
    """
    try:
        import optax
    except ImportError as error:
        raise ImportError(f"sparse_adamw needs optax ({error}): {pip_install('jax')}") from error
    if not any(isinstance(each, jax.Array) for each in (learning_rate, b1, b2, eps, weight_decay)):
        AdamWRule.of(0.0 if callable(learning_rate) else learning_rate, (b1, b2), eps, weight_decay)
    schedule = with_dense_steps(density, dense_steps)
    every = check_every(check_weights_every)
    options = Options("auto", "mean", wire)

    def init(params: PyTree) -> SparseAdamWState:
        zeros = init_residuals(params)
        check_wire(options, zeros)
        last = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.int32), params)
        return SparseAdamWState(jnp.zeros((), jnp.int32), zeros, zeros, last, zeros)

    def update(updates: PyTree, state: SparseAdamWState, params: PyTree = None) -> tuple[PyTree, SparseAdamWState]:
        if params is None:
            raise InvalidInputError("sparse_adamw: update got no parameters; call update(gradients, state, params)")
        checked(updates, state.residuals, "grads", "residuals", comm=comm)
        check_parameters({"params": params, "state": state[1:4]}, state.step, every, comm=comm)
        nu, step = _first_moments(updates, state, START * (1 - b2), comm=comm), state.step + 1
        quotients = jax.tree.map(lambda g, v: g.astype(v.dtype) / unit(jnp, v, jnp.asarray(eps, v.dtype)), updates, nu)
        squares: PyTree = jax.tree.map(lambda g, v: jnp.square(g.astype(v.dtype)), updates, nu)
        sums = jax.tree.map(jnp.add, state.residuals, quotients)

        rate = learning_rate(state.step) if callable(learning_rate) else learning_rate
        on = (mask(params) if callable(mask) else mask) or jax.tree.map(lambda _: True, params)
        decays = jax.tree.map(lambda on: weight_decay * on, on)
        shared = {"learning_rate": rate, "b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay}
        for path, decay in jax.tree_util.tree_flatten_with_path(decays)[0] if mask is not None else ():
            shared[f"weight_decay of {jax.tree_util.keystr(path)}"] = decay

        def exchange(sent: PyTree) -> tuple[PyTree, PyTree]:
            return tree_step(sent, schedule, state.residuals, "model", 0, options, state.step, 4096, comm, True, shared)

        finite = all_finite((squares, sums))
        means, residuals, after_skip, finite = training_step(quotients, finite, state.residuals, exchange, comm)
        dense = _is_dense(schedule, state.step)

        def leaf(
            p: Any, mean: Any, m: Any, v: Any, last: Any, decay: Any, residual: Any, skipped: Any
        ) -> tuple[Any, ...]:
            """Return a leaf's change, new mu, nu, last and residual, residual after a skip, and where it overflows."""
            t, tiny, max_ = step.astype(v.dtype), jnp.asarray(eps, v.dtype), float(np.finfo(v.dtype).max)
            waited = jnp.maximum(step - last, 1).astype(v.dtype)
            rows = coefficients(jnp, waited, t, jnp.asarray(rate, v.dtype), (b1, b2), jnp.asarray(decay, v.dtype))
            change, new_m, new_v, factor = adamw_step(
                jnp, p.astype(v.dtype), mean, m, v, (last == 0) & (m == 0), rows, tiny, step_eps(jnp, tiny, b2, t)
            )
            hit = finite & (dense | (mean != 0))
            moved = jnp.where(hit, change, 0).astype(p.dtype)
            fits = jnp.isfinite(new_m) & jnp.isfinite(new_v) & (jnp.isfinite(p + moved) | ~jnp.isfinite(p))
            rescaled = jnp.clip(residual * jnp.where(hit, jnp.minimum(factor, max_), 1), -max_, max_)
            made: Any = moved, *(jnp.where(hit, *each) for each in ((new_m, m), (new_v, v), (step, last))), rescaled
            return *made, jnp.where(hit & ~fits, 0, skipped), hit & ~fits

        leaves = jax.tree.map(leaf, params, means, state.mu, nu, state.last, decays, residuals, after_skip)
        structure: Any = jax.tree.structure(params)
        changes, *made, after_skip, overflows = jax.tree.transpose(structure, jax.tree.structure((0,) * 7), leaves)
        usable = finite & ~jnp.any(jnp.stack([each.any() for each in jax.tree.leaves(overflows)]))
        # After a skipped first step the new units are discarded, and so are residuals in these units.
        skipped = (
            state.mu,
            select(state.step > 0, nu, state.nu),
            state.last,
            select(state.step > 0, after_skip, state.residuals),
        )
        changes = jax.tree.map(lambda change: jnp.where(usable, change, 0), changes)
        return changes, SparseAdamWState(
            jnp.where(usable, step, state.step), *(select(usable, *each) for each in zip(made, skipped, strict=True))
        )

    return optax.with_extra_args_support(optax.GradientTransformation(init, update))


def _is_dense(schedule: Density, step: jax.Array) -> bool | jax.Array:
    """Return whether a step is dense. A schedule is called on the host."""
    if not callable(schedule):
        return schedule == 1.0
    shape: Any = jax.ShapeDtypeStruct((), bool)  # type: ignore[no-untyped-call]
    dense: jax.Array = jax.pure_callback(lambda now: np.bool_(schedule(int(now)) == 1.0), shape, step)
    return dense


def _first_moments(grads: PyTree, state: SparseAdamWState, start: float, *, comm: Comm) -> PyTree:
    """Return ``state.nu``; in step 0, ``start`` times the mean square of each leaf over all ranks."""
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
