"""Sparse gradients as a link of an optax chain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from sparsecomm import api
from sparsecomm.calls.options import CallOptions, Options
from sparsecomm.checks import with_options
from sparsecomm.errors import InvalidInputError, pip_install
from sparsecomm.jax import staged
from sparsecomm.jax.exchange import Comm, Density, schedule_of
from sparsecomm.jax.trees import PyTree, TreeScope, checked, init_residuals, tree_step
from sparsecomm.reducer.options import DENSITY
from sparsecomm.states.weights import check_every
from sparsecomm.tensors.sparse import Array

if TYPE_CHECKING:
    import optax  # type: ignore[import-untyped, import-not-found, unused-ignore]
    from typing_extensions import Unpack

__all__ = ["SparsifyState", "check_parameters", "check_wire", "sparsify"]


class SparsifyState(NamedTuple):
    """The state that `sparsify` keeps from step to step.

    Attributes:
        step: how many steps were made, without those that were skipped; int32, of no dimension.
        residuals: what this rank has not sent yet, as `init_residuals` makes it. It differs between ranks.
    """

    step: jax.Array
    residuals: PyTree


@with_options(CallOptions, api.sparse_allreduce, op="mean")
def sparsify(
    density: Density = DENSITY,
    *,
    dense_steps: int = 0,
    scope: TreeScope = "model",
    chunk: int = 4096,
    dense_below: int = 1024,
    comm: Comm = None,
    check_weights_every: int | None = 0,
    **options: Unpack[CallOptions],
) -> optax.GradientTransformation:
    """Replace this rank's gradients by the sparse average of all ranks', with error feedback (Stich et al., 2018).

    The first link of a chain: ``optax.chain(sparsify(), optax.sgd(0.1))``. The defaults are what our reports
    recommend (docs/choosing.md). For a dense baseline, pass ``density=1.0``. All ranks then make the same updates,
    bit for bit. Clip before it, not after: residuals mix gradients of many steps. ``update`` is collective.

    If a gradient is NaN or infinite on some rank, or a sum overflows, the step is skipped on all ranks: ``update``
    returns zeros and does not count the step. Finite gradients of that step stay in the residuals of their ranks; the
    others are dropped, and so are entries whose sum has overflowed.
    Links that follow see zeros, so momentum and weight decay still act. Do not wrap ``sparsify`` itself in
    ``optax.apply_if_finite``, which would skip the exchange on some ranks only.

    Args:
        density: in (0, 1], or a function from the step (a Python int, from 0 on) to it, such as a warm-up. It is called
            on the host in every step, also under jit, and must give the same on all ranks. Those of optax will do. At
            1.0 gradients are summed whole, with exact values, whatever ``algorithm`` and ``wire`` are.
        dense_steps: number of steps at the beginning at density 1.0. A function counts its steps from there.
        scope, chunk, dense_below, comm: as in `allreduce_tree`.
        options: ``algorithm="auto"``, ``op="mean"`` and ``wire="auto"``, as in `sparsecomm.Reducer`.
        check_weights_every: `sparsecomm.check_weights` of the parameters that are passed to ``update``, if any are, in
            step 0 and in every step whose number it divides. 0: in step 0 only. ``None``: never. A step counts as
            the state does, so a run that goes on from a checkpoint is checked by the second rule only.

    Returns:
        A transformation whose state is `SparsifyState`, a pytree: ``init`` makes the residuals zero.

    Raises:
        ImportError: optax is not installed.
        InvalidInputError: density or check_weights_every is out of range; ``update`` raises it for all else, as
            `allreduce_tree`.
    """
    try:
        import optax
    except ImportError as error:
        raise ImportError(f"sparsify needs optax ({error}): {pip_install('jax')}; allreduce_tree does not") from error
    at = schedule_of(density, dense_steps, comm=comm)
    every = check_every(check_weights_every)
    options.setdefault("op", "mean")
    record = Options.of(**options)

    def init(params: PyTree) -> SparsifyState:
        residuals = init_residuals(params)
        check_wire(record, residuals)
        return SparsifyState(jnp.zeros((), jnp.int32), residuals)

    def update(updates: PyTree, state: SparsifyState, params: PyTree = None) -> tuple[PyTree, SparsifyState]:
        if not isinstance(state, SparsifyState) or state.residuals is None:
            raise InvalidInputError(
                f"state: got {type(state).__name__}; expected the SparsifyState that init or update returned"
            )
        if params is not None and every is not None:
            check_parameters({"params": params}, state.step, every, comm=comm)
        grads, before = checked(updates, state.residuals, "grads", "residuals", comm=comm)
        finite = jnp.all(jnp.stack([jnp.isfinite(g).all() for g in grads]))
        structure: Any = jax.tree.structure(updates)
        sent = jax.tree.unflatten(structure, [jnp.where(finite, g, jnp.full_like(g, jnp.nan)) for g in grads])
        averaged, residuals = tree_step(
            sent, at, state.residuals, scope, dense_below, record, state.step, chunk=chunk, comm=comm, training=True
        )
        means = jax.tree.leaves(averaged)
        usable = jnp.all(jnp.stack([jnp.isfinite(mean).all() for mean in means]))  # the same on all ranks
        kept = [
            jnp.where(
                usable, new, jnp.where(jnp.isinf(mean), 0, _finite(old) + jnp.where(finite, g, 0).astype(old.dtype))
            )
            for g, mean, old, new in zip(grads, means, before, jax.tree.leaves(residuals), strict=True)
        ]  # a sum that has overflowed is infinite; for a gradient that is not finite NaN was sent
        updates = jax.tree.map(lambda mean: jnp.where(usable, mean, 0), averaged)
        return updates, SparsifyState(state.step + usable, jax.tree.unflatten(structure, kept))

    return optax.GradientTransformation(init, update)


def _finite(x: jax.Array) -> jax.Array:
    """Return x with zeros for NaN and infinities."""
    return jnp.where(jnp.isfinite(x), x, 0)


def check_wire(options: Options, residuals: PyTree) -> None:
    """Check that sums of the types of residuals can be sent in the wire format of the options.

    Raises:
        InvalidInputError: they cannot.
    """
    for dtype in {leaf.dtype.name for leaf in jax.tree.leaves(residuals)}:
        options.check(dtype)


def check_parameters(trees: dict[str, PyTree], step: int | jax.Array, every: int, *, comm: Comm) -> None:
    """Check that all ranks have the same trees, in steps whose number ``every`` divides; 0: in step 0 only.

    Raises:
        SparseCommError: as `sparsecomm.check_weights`, where the check is made at once.
    """
    names, leaves = [], []
    for name, tree in trees.items():
        found = jax.tree_util.tree_flatten_with_path(tree)[0]
        names += [name + jax.tree_util.keystr(path) for path, _ in found]
        leaves += [leaf for _, leaf in found]
    due = step % every == 0 if every else step == 0

    def host(*arrays: Array) -> list[Array]:
        api.check_weights(list(zip(names, arrays, strict=True)), comm=comm)
        return []

    if not any(isinstance(a, jax.core.Tracer) for a in (step, *leaves)):
        if due:
            jax.effects_barrier()  # type: ignore[no-untyped-call]  # calls under way in jitted functions come first
            host(*leaves)
        return
    jax.lax.cond(due, lambda operands: staged.call(host, [], *operands), lambda _: [], list(map(jnp.asarray, leaves)))
