"""Arrays and trees of arrays: what is checked before a byte is sent, and which leaves go together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsecomm.calls import arguments
from sparsecomm.calls.options import Options
from sparsecomm.errors import InvalidInputError
from sparsecomm.jax.exchange import Call, Density, Exchange, accumulator, density_of, run
from sparsecomm.jax.staged import ONE_DEVICE
from sparsecomm.tensors.dtypes import DTYPES

if TYPE_CHECKING:
    from mpi4py import MPI

    from sparsecomm import transport

__all__ = ["SCOPES", "allreduce_tree", "init_residuals", "sparse_allreduce", "tree_step"]

SCOPES = ("model", "tensor")


def sparse_allreduce(
    x: Any,
    k: int | float,
    *,
    residual: Any = None,
    comm: MPI.Intracomm | transport.Transport | None = None,
    algorithm: str = "auto",
    op: str = "sum",
    wire: str = "auto",
    complete: bool = False,
) -> Any:
    """`sparsecomm.sparse_allreduce` of a JAX array, eagerly or traced. Collective: every rank calls it.

    Under `jax.jit` it is an ordered callback of XLA, so that a rank's calls keep the order of the program.

    Args:
        x: this rank's gradient: float16, bfloat16, float32 or float64, any shape, on one device.
        k: how many entries: an int from 1 to x's size, or a float in (0, 1], the density. Not traced.
        residual: of x's shape, float64 beside a float64 x and float32 beside any other. Begin with `init_residuals`.
        comm: an mpi4py communicator, or a transport; ``None`` is COMM_WORLD.
        algorithm, op, wire, complete: as in `sparsecomm.sparse_allreduce`.

    Returns:
        The dense result, of x's shape and type: 16-bit types are rounded to nearest even. With a residual:
        ``(result, new_residual)``.

    Raises:
        InvalidInputError: an argument cannot be used, or is sharded over devices. Nothing was sent.
        CollectiveMismatchError, TimeoutError, RankFailedError, TransportError: as `sparsecomm.sparse_allreduce`; but
            nothing was written, and the residual is what it was. Under jit JAX raises `jax.errors.JaxRuntimeError`,
            whose text ends with the type and the text of the error.
    """
    leaves, residuals = _checked(x, residual, "x", "residual", tree=False, comm=comm)
    options = Options(algorithm, op, wire, bool(complete))
    exchange = _plan(leaves, k, "tensor", 0, options, comm=comm)
    results, kept = run(exchange, leaves, residuals)
    return results[0] if residual is None else (results[0], kept[0])


def allreduce_tree(
    grads: Any,
    density: float,
    *,
    residuals: Any = None,
    scope: str = "model",
    dense_below: int = 1024,
    comm: MPI.Intracomm | transport.Transport | None = None,
    algorithm: str = "auto",
    op: str = "mean",
    wire: str = "auto",
    complete: bool = False,
) -> Any:
    """Sum, or average, a tree of gradients over all ranks. Collective: every rank calls it, with the same tree.

    Args:
        grads: a pytree of arrays as `sparse_allreduce` takes them; types may differ.
        density: in (0, 1]: the part of the entries that every rank selects.
        residuals: a tree as `init_residuals` makes it, and as this function returned it in the step before.
        scope: "model": the largest entries of all leaves together, in one call. "tensor": those of each leaf, in a call
            for each. float64 leaves are apart from the others.
        dense_below: leaves of fewer elements are sent whole, in one dense call for all of them. 0: none.
        comm, algorithm, op, wire, complete: as in `sparsecomm.sparse_allreduce`.

    Returns:
        A tree like ``grads``. With residuals: ``(tree, new_residuals)``.

    Raises:
        InvalidInputError: an argument cannot be used; the message names the leaf. Nothing was sent.
        CollectiveMismatchError, TimeoutError, RankFailedError, TransportError: as in `sparse_allreduce`.
    """
    number = density_of(density, "density", comm=comm)
    options = Options(algorithm, op, wire, bool(complete))
    result, kept = tree_step(grads, number, residuals, scope, dense_below, options, comm=comm)
    return result if residuals is None else (result, kept)


def init_residuals(tree: Any) -> Any:
    """Zeros: float64 for leaves in float64, float32 for all others. ``tree``: the parameters, or their gradients."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, accumulator(np.dtype(leaf.dtype))), tree)


def tree_step(
    grads: Any,
    density: Density,
    residuals: Any,
    scope: str,
    dense_below: int,
    options: Options,
    step: Any = 0,
    *,
    comm: MPI.Intracomm | transport.Transport | None,
) -> tuple[Any, Any]:
    """`allreduce_tree` with a density that may depend on the step, which may be traced."""
    leaves, kept = _checked(grads, residuals, "grads", "residuals", comm=comm)
    exchange = _plan(leaves, density, scope, dense_below, options, comm=comm)
    results, kept = run(exchange, leaves, kept, step)
    structure = jax.tree.structure(grads)
    tree = jax.tree.unflatten(structure, results)
    return tree, None if residuals is None else jax.tree.unflatten(structure, kept)


@arguments.naming_rank
def _checked(
    grads: Any,
    residuals: Any,
    name: str,
    beside: str,
    *,
    tree: bool = True,
    comm: MPI.Intracomm | transport.Transport | None,
) -> tuple[list[Any], list[Any]]:
    """The leaves of both trees, as JAX arrays."""
    is_leaf = None if tree else lambda _: True
    found = jax.tree_util.tree_flatten_with_path(grads, is_leaf=is_leaf)[0]
    structure: Any = jax.tree.structure(grads, is_leaf=is_leaf)
    if not found:
        raise InvalidInputError(f"{name}: got a tree without leaves; expected at least one array")
    leaves = [_array(leaf, name + jax.tree_util.keystr(path)) for path, leaf in found]
    kept = []
    if residuals is not None:
        if jax.tree.structure(residuals, is_leaf=is_leaf) != structure:
            raise InvalidInputError(
                f"{beside}: got a tree of the structure {jax.tree.structure(residuals)}; expected that of {name}, "
                f"{structure}; begin with init_residuals({name})"
            )
        for (path, _), leaf, residual in zip(found, leaves, jax.tree.leaves(residuals, is_leaf=is_leaf), strict=True):
            where = beside + jax.tree_util.keystr(path)
            r, like = _array(residual, where), f"{name}{jax.tree_util.keystr(path)}"
            expected = accumulator(leaf.dtype)
            if r.shape != leaf.shape or r.dtype != expected:
                raise InvalidInputError(
                    f"{where}: got {r.dtype} of shape {r.shape}; expected {expected} of shape {leaf.shape}, since "
                    f"{like} is {leaf.dtype} of shape {leaf.shape}; begin with init_residuals"
                )
            kept.append(r)
    _on_one_device(leaves + kept, name)
    return leaves, kept


def _array(leaf: Any, name: str) -> Any:
    if not isinstance(leaf, (jax.Array, np.ndarray)):
        raise InvalidInputError(f"{name}: got {type(leaf).__name__}; expected a JAX array, jnp.asarray(x)")
    if leaf.dtype.name not in DTYPES:
        raise InvalidInputError(
            f"{name}: got elements of type {leaf.dtype}; expected one of {', '.join(DTYPES)}; convert it"
        )
    return jnp.asarray(leaf)


def _on_one_device(arrays: list[Any], name: str) -> None:
    mesh = getattr(jax.sharding, "get_abstract_mesh", lambda: None)()
    if axes := getattr(mesh, "manual_axes", ()):
        raise InvalidInputError(
            f"{name}: traced under shard_map or pmap, over {', '.join(map(str, axes))}; {ONE_DEVICE}"
        )
    devices = {d for a in arrays if not isinstance(a, jax.core.Tracer) for d in a.devices()}
    if len(devices) > 1:
        raise InvalidInputError(f"{name}: got arrays on {len(devices)} devices; {ONE_DEVICE}")


@arguments.naming_rank
def _plan(
    leaves: list[Any],
    k: int | Density,
    scope: str,
    dense_below: int,
    options: Options,
    *,
    comm: MPI.Intracomm | transport.Transport | None,
) -> Exchange:
    """Which leaves go together, the same on all ranks: sparse calls in the order of the leaves, then the dense ones."""
    if scope not in SCOPES:
        raise InvalidInputError(f"scope={scope!r}: expected one of {', '.join(SCOPES)}")
    if not arguments.is_real(dense_below) or dense_below != int(dense_below) or dense_below < 0:
        raise InvalidInputError(f"dense_below={dense_below!r}: expected a number of elements, an int from 0 on")
    if isinstance(k, jax.Array):
        raise InvalidInputError(
            "k: got a JAX array; expected a number that is known while tracing, since it says what is sent: make it "
            "static, jax.jit(..., static_argnames='k')"
        )
    large = [i for i, leaf in enumerate(leaves) if leaf.size >= dense_below]
    small = [i for i, leaf in enumerate(leaves) if leaf.size < dense_below]
    calls = [_call([i], leaves) for i in large] if scope == "tensor" else _together(large, leaves)
    for call in calls:
        options.check(call.dtype.name)
        if not callable(k):
            arguments.count_of(k, sum(leaves[i].size for i in call.leaves))
    options.check(leaves[0].dtype.name)  # also if all are small
    return Exchange((*calls, *_together(small, leaves, dense=True)), k, comm, options)


def _together(places: list[int], leaves: list[Any], *, dense: bool = False) -> list[Call]:
    """A call for all leaves whose sums are carried in float32, and one for float64."""
    groups = [[i for i in places if accumulator(leaves[i].dtype) == of] for of in (np.float32, np.float64)]
    return [_call(group, leaves, dense=dense) for group in groups if group]


def _call(places: list[int], leaves: list[Any], *, dense: bool = False) -> Call:
    dtypes = {leaves[i].dtype for i in places}
    dtype = dtypes.pop()
    return Call(tuple(places), accumulator(dtype) if dtypes else dtype, dense)
