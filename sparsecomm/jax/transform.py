"""`sparsify`, a link of an optax chain, and what it shares with `sparse_adamw`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from sparsecomm.checks import check_choice
from sparsecomm.errors import InvalidInputError, log, needing
from sparsecomm.jax.exchange import Density, call_if
from sparsecomm.jax.trees import PyTree, TreeOptions, TreeScope, checked, init_residuals, tree_step
from sparsecomm.options import Unpack, check_options, with_options
from sparsecomm.reducer.options import DENSITY, ReducerSettings
from sparsecomm.reducer.step import cause_of
from sparsecomm.states.weights import check_every, check_weights
from sparsecomm.tensors.sparse import Array
from sparsecomm.transport import Comm, transport_of

if TYPE_CHECKING:
    import optax  # type: ignore[import-untyped, import-not-found, unused-ignore]


class SparsifyOptions(TreeOptions, total=False):
    """Options of a `Reducer` that `sparsify` accepts."""

    dense_steps: int | None


class SparsifyState(NamedTuple):
    """The state of `sparsify`."""

    step: jax.Array  # number of steps that were not skipped; int32, of shape ()
    residuals: PyTree  # what this rank has not sent yet; differs between ranks


@with_options(SparsifyOptions, ReducerSettings)
def sparsify(
    density: Density = DENSITY,
    *,
    scope: TreeScope = "model",
    comm: Comm = None,
    check_weights_every: int | None = 0,
    **options: Unpack[SparsifyOptions],
) -> optax.GradientTransformation:
    """Replace this rank's gradients by the sparse average over all ranks, with error feedback (Stich et al., 2018).

    Use it as the first link of a chain: ``optax.chain(sparsify(), optax.sgd(0.1))``. All ranks then make the same
    updates, bit for bit. The defaults are the recommended setting (docs/guides/choosing.md); for a dense baseline pass
    ``density=1.0``. Clip gradients before this link, because its output mixes gradients of many steps. ``update`` is
    collective.

    If a gradient is not finite on some rank, or a sum overflows, all ranks skip the step: ``update`` returns zeros and
    does not count it. Finite gradients of the step stay in the residuals; other gradients, and entries whose sum has
    overflowed, are dropped. Momentum and weight decay still act. Do not wrap ``sparsify`` in ``optax.apply_if_finite``,
    which would skip the exchange on some ranks only.

    Args:
        density: a number in (0, 1], or a function of the step (an int, from 0), such as `sparsecomm.Warmup` or an optax
            schedule. It is called on the host, also under jit, and must return the same on all ranks. At 1.0 sums are
            dense and exact, whatever ``algorithm`` and ``wire`` are.
        scope: as in `allreduce_tree`.
        comm: as in `sparsecomm.sparse_allreduce`.
        algorithm, op, wire: as in `sparsecomm.Reducer`: "auto" is "double" with values of 2 bits. ``op`` is "mean" by
            default.
        check_weights_every: compare the parameters passed to ``update`` between ranks in step 0 and in every step that
            is a multiple of this; 0: in step 0 only; ``None``: never. A resumed run continues to count the steps.

    Returns:
        A transformation whose state is `SparsifyState`, a pytree. ``update`` raises the errors of `allreduce_tree`.
    """
    with needing("optax", "sparsify", "jax", "; allreduce_tree does not"):
        import optax
    check_options(sparsify, options)
    check_choice("scope", scope, get_args(TreeScope))
    settings = ReducerSettings(density=density, scope=scope, **options)
    every = check_every(check_weights_every)

    def init(params: PyTree) -> SparsifyState:
        residuals = init_residuals(params)
        for dtype in {leaf.dtype.name for leaf in jax.tree.leaves(residuals)}:
            settings.check(dtype)
        return SparsifyState(jnp.zeros((), jnp.int32), residuals)

    def update(updates: PyTree, state: SparsifyState, params: PyTree = None) -> tuple[PyTree, SparsifyState]:
        if not isinstance(state, SparsifyState) or state.residuals is None:
            raise InvalidInputError(
                f"state: got {type(state).__name__}; expected the SparsifyState that init or update returned"
            )
        if params is not None:
            check_parameters({"params": params}, state.step, every, comm=comm)
        grads, *_ = checked(updates, state.residuals, "grads", "residuals", comm=comm)

        finite = all_finite(grads)  # otherwise this rank sends NaN, so that all ranks skip the step
        sent = jax.tree.map(lambda g: jnp.where(finite, g, jnp.full_like(g, jnp.nan)), updates)
        old, step = state.residuals, state.step
        means, new = tree_step(sent, old, settings, step, comm=comm, training=True)

        def after_skip(g: jax.Array, old: jax.Array, mean: jax.Array) -> jax.Array:
            unsent = jnp.where(jnp.isfinite(old), old, 0) + jnp.where(finite, g, 0).astype(old.dtype)
            return jnp.where(jnp.isinf(mean), 0, unsent)  # an infinite sum has overflowed

        usable = all_finite(means)  # the same on all ranks
        _warn_unless(usable, updates, comm)
        residuals = select(usable, new, jax.tree.map(after_skip, updates, old, means))
        return select(usable, means, jax.tree.map(jnp.zeros_like, means)), SparsifyState(step + usable, residuals)

    return optax.GradientTransformation(init, update)


def _warn_unless(usable: jax.Array, grads: PyTree, comm: Comm) -> None:
    """Log which of this rank's gradients is not finite, or that it is another rank's, unless a step is usable."""
    leaves = jax.tree_util.tree_flatten_with_path(grads)[0]

    def host(*arrays: Array) -> list[Array]:
        pairs = zip(leaves, arrays, strict=True)
        here = (jax.tree_util.keystr(path) for (path, _), array in pairs if not np.isfinite(array).all())
        log.warning("%s; all ranks skip the step", cause_of(transport_of(comm).rank, next(here, None)))
        return []

    call_if(~usable, host, *(leaf for _, leaf in leaves))


def all_finite(tree: PyTree) -> jax.Array:
    """Return whether all elements are finite."""
    return jnp.all(jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]))


def select(condition: Any, chosen: PyTree, other: PyTree) -> PyTree:
    """Return one of two trees of the same structure."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), chosen, other)


def check_parameters(trees: dict[str, PyTree], step: int | jax.Array, every: int | None, *, comm: Comm) -> None:
    """Call `sparsecomm.check_weights` in steps that are multiples of ``every``; 0: in step 0 only; ``None``: never."""
    if every is None:
        return
    leaves, _ = jax.tree_util.tree_flatten_with_path(trees)
    names = [path[0].key + jax.tree_util.keystr(path[1:]) for path, _ in leaves]
    due = step % every == 0 if every else step == 0

    def host(*arrays: Array) -> list[Array]:
        check_weights(list(zip(names, arrays, strict=True)), comm=comm)
        return []

    call_if(due, host, *(jnp.asarray(leaf) for _, leaf in leaves))
