"""Sparse gradients as a link of an optax chain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from sparsecomm.calls.options import Options
from sparsecomm.jax.exchange import Density, density_of
from sparsecomm.jax.trees import init_residuals, tree_step

if TYPE_CHECKING:
    import optax  # type: ignore[import-untyped, import-not-found, unused-ignore]
    from mpi4py import MPI

    from sparsecomm import transport

__all__ = ["SparsifyState", "sparsify"]


class SparsifyState(NamedTuple):
    """What `sparsify` keeps from step to step.

    Attributes:
        step: how many steps were made; int32, of no dimension.
        residuals: what this rank has not sent yet, as `init_residuals` makes it. It differs between ranks.
    """

    step: jax.Array
    residuals: Any


def sparsify(
    density: Density,
    *,
    scope: str = "model",
    dense_below: int = 1024,
    comm: MPI.Intracomm | transport.Transport | None = None,
    algorithm: str = "auto",
    op: str = "mean",
    wire: str = "auto",
    complete: bool = False,
) -> optax.GradientTransformation:
    """Replace this rank's gradients by the sparse average of all ranks', with error feedback (Stich et al., 2018).

    The first link of a chain: ``optax.chain(sparsify(0.001), optax.sgd(0.1))``. All ranks then make the same updates,
    bit for bit. Clip before it, not after: residuals mix gradients of many steps. ``update`` is collective.

    Args:
        density: in (0, 1], or a function from the step (a Python int, from 0 on) to it, such as a warm-up. It is called
            on the host in every step, also under jit, and must give the same on all ranks. Those of optax will do.
        scope, dense_below, comm, algorithm, op, wire, complete: as in `allreduce_tree`.

    Returns:
        With the state `SparsifyState`, a pytree: ``init`` makes the residuals zero.

    Raises:
        ImportError: optax is not installed.
        InvalidInputError: density is out of range; ``update`` raises it for all else, as `allreduce_tree`.
    """
    try:
        import optax
    except ImportError as error:
        raise ImportError(f"sparsify needs optax ({error}): pip install optax; allreduce_tree does not") from error
    at = density if callable(density) else density_of(density, "density", comm=comm)
    options = Options(algorithm, op, wire, bool(complete))

    def init(params: Any) -> SparsifyState:
        return SparsifyState(jnp.zeros((), jnp.int32), init_residuals(params))

    def update(updates: Any, state: SparsifyState, params: Any = None) -> tuple[Any, SparsifyState]:
        averaged, residuals = tree_step(
            updates, at, state.residuals, scope, dense_below, options, state.step, comm=comm
        )
        return averaged, SparsifyState(state.step + 1, residuals)

    return optax.GradientTransformation(init, update)
