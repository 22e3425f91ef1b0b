"""Sparse allreduce of JAX arrays and of trees of them: `sparse_allreduce`, `allreduce_tree`."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np

from sparsecomm.calls import arguments
from sparsecomm.calls.label import Label
from sparsecomm.calls.options import SumOptions, SumSettings
from sparsecomm.checks import check_choice
from sparsecomm.errors import InvalidInputError
from sparsecomm.jax.exchange import ONE_DEVICE, Density, LeafBucket, TreeExchange, accumulator_dtype
from sparsecomm.options import Unpack, check_options, with_options
from sparsecomm.reducer.connection import layout
from sparsecomm.reducer.options import ReducerSettings, density_at, described
from sparsecomm.tensors.dtypes import DTYPES, FLOAT32, FLOAT64
from sparsecomm.tensors.interop import CPU, TensorSpec
from sparsecomm.transport import Comm

TreeScope: TypeAlias = Literal["model", "tensor", "chunk"]
PyTree: TypeAlias = Any  # any nesting of containers that JAX knows, with arrays as leaves


@with_options(SumOptions, SumSettings)
def sparse_allreduce(
    x: jax.Array, k: int | float, *, residual: jax.Array | None = None, comm: Comm = None, **options: Unpack[SumOptions]
) -> Any:
    """Sum the largest entries of every rank's JAX array over all ranks. Collective.

    Args:
        x: this rank's gradient: float16, bfloat16, float32 or float64, any shape, on one device.
        k: number of entries: an int from 1 to the size of x, or a density, a float in (0, 1]. It must not be traced.
        residual: an array of the shape of x: float64 for a float64 x, else float32. Begin with `init_residuals`.
        comm: as in `sparsecomm.sparse_allreduce`.
        options: as in `sparsecomm.sparse_allreduce`.

    Returns:
        The dense result, of the shape and type of x, rounded to nearest even. With a residual:
        ``(result, new_residual)``.

    Raises:
        SparseCommError: as in `sparsecomm.sparse_allreduce`; under jit JAX raises `jax.errors.JaxRuntimeError`.
    """
    check_options(sparse_allreduce, options)
    leaves, residuals, names = checked(x, residual, "x", "residual", tree=False, comm=comm)
    settings = ReducerSettings(scope="tensor", dense_below=0, **{"op": "sum", **options})  # type: ignore[arg-type]
    exchange = _plan(leaves, names, k, settings, comm=comm)
    results, new_residuals = exchange.run(leaves, residuals, 0)
    return results[0] if residual is None else (results[0], new_residuals[0])


class TreeOptions(SumOptions, total=False):
    """Options of a `Reducer` that functions of trees share."""

    chunk: int
    dense_below: int


@with_options(TreeOptions, ReducerSettings)
def allreduce_tree(
    grads: PyTree,
    density: float,
    *,
    residuals: PyTree = None,
    scope: TreeScope = "model",
    comm: Comm = None,
    **options: Unpack[TreeOptions],
) -> PyTree:
    """Average, or sum, a tree of gradients over all ranks. Collective: every rank passes the same structure.

    If a gradient on some rank is not finite, the result contains NaN or infinity on all ranks, and the new
    residuals may, too. Then skip the step on all ranks, and keep the residuals that you passed, as `sparsify` does.

    Args:
        grads: a pytree of arrays of the types that `sparse_allreduce` supports. Types may differ between leaves.
        density: share of the entries that every rank selects, in (0, 1].
        residuals: the tree that `init_residuals` made, or that this function returned in the previous step.
        scope: the elements among which entries are selected. "model": all leaves, in one call. "tensor": each leaf, in
            a call for each. "chunk": every ``chunk`` elements of each leaf, in a call for each leaf. float64 leaves
            have a separate call.
        comm, algorithm, op, wire: as in `sparse_allreduce`, but ``op`` is "mean" by default.

    Returns:
        A tree like ``grads``; with residuals ``(tree, new_residuals)``. It raises the errors of `sparse_allreduce`.
    """
    check_options(allreduce_tree, options)
    check_choice("scope", scope, get_args(TreeScope))
    settings = ReducerSettings(density=density_at(density), scope=scope, **options)
    result, new_residuals = tree_step(grads, residuals, settings, 0, comm=comm)
    return result if residuals is None else (result, new_residuals)


def init_residuals(tree: PyTree) -> PyTree:
    """Return zeros in the shapes of a tree: float64 for float64 leaves, float32 for all others.

    Args:
        tree: parameters or gradients: arrays of the types that `sparse_allreduce` supports, or `jax.ShapeDtypeStruct`.
    """

    def zeros(path: Any, leaf: Any) -> jax.Array:
        _check_leaf(leaf, "tree" + jax.tree_util.keystr(path), jax.ShapeDtypeStruct)
        return jnp.zeros(leaf.shape, accumulator_dtype(leaf.dtype))

    return jax.tree_util.tree_map_with_path(zeros, tree)


def tree_step(
    grads: PyTree,
    residuals: PyTree,
    settings: ReducerSettings,
    step: int | jax.Array,
    *,
    comm: Comm,
    training: bool = False,
) -> tuple[PyTree, PyTree]:
    """Return the result of `allreduce_tree`, and new residuals or ``None``. ``step`` may be traced."""
    leaves, old, names = checked(grads, residuals, "grads", "residuals", comm=comm)
    exchange = _plan(leaves, names, settings.density, settings, comm=comm, training=training)
    results, new_residuals = exchange.run(leaves, old, step)
    structure: object = jax.tree.structure(grads)
    tree = jax.tree.unflatten(structure, results)
    return tree, None if residuals is None else jax.tree.unflatten(structure, new_residuals)


@arguments.naming_rank
def checked(
    grads: PyTree, residuals: PyTree, name: str, residuals_name: str, *, tree: bool = True, comm: Comm
) -> tuple[list[jax.Array], list[jax.Array], list[str]]:
    """Check two trees, or two arrays if not ``tree``. Return their leaves as JAX arrays, and the leaves' names.

    ``name`` and ``residuals_name`` are for errors.
    """
    is_leaf = None if tree else lambda _: True
    structure: Any
    by_path, structure = jax.tree_util.tree_flatten_with_path(grads, is_leaf=is_leaf)
    if not by_path:
        raise InvalidInputError(f"{name}: got a tree without leaves; expected at least one array")
    names = [name + jax.tree_util.keystr(path) for path, _ in by_path]
    leaves = [_array(leaf, own) for own, (_, leaf) in zip(names, by_path, strict=True)]
    checked_residuals: list[jax.Array] = []
    if residuals is not None:
        if jax.tree.structure(residuals, is_leaf=is_leaf) != structure:
            raise InvalidInputError(
                f"{residuals_name}: got a tree of structure {jax.tree.structure(residuals)}; expected {structure}, as "
                f"in {name}; begin with init_residuals({name})"
            )
        for (path, _), leaf, residual in zip(by_path, leaves, jax.tree.leaves(residuals, is_leaf=is_leaf), strict=True):
            place, expected = jax.tree_util.keystr(path), accumulator_dtype(leaf.dtype)
            r = _array(residual, residuals_name + place)
            if r.shape != leaf.shape or r.dtype != expected:
                raise InvalidInputError(
                    f"{residuals_name}{place}: got {r.dtype} of shape {r.shape}; expected {expected} of shape "
                    f"{leaf.shape}, since {name}{place} is {leaf.dtype} of shape {leaf.shape}; begin with "
                    "init_residuals"
                )
            checked_residuals.append(r)
    mesh = getattr(jax.sharding, "get_abstract_mesh", lambda: None)()
    if axes := getattr(mesh, "manual_axes", ()):
        raise InvalidInputError(
            f"{name}: traced under shard_map or pmap, over {', '.join(map(str, axes))}; {ONE_DEVICE}"
        )
    devices = {d for a in leaves + checked_residuals if not isinstance(a, jax.core.Tracer) for d in a.devices()}
    if len(devices) > 1:
        raise InvalidInputError(f"{name}: got arrays on {len(devices)} devices; {ONE_DEVICE}")
    return leaves, checked_residuals, names


def spec_of(leaf: jax.Array, name: str = "") -> TensorSpec:
    """Return the spec of a leaf's sum in host memory."""
    return TensorSpec(name, leaf.shape, FLOAT64 if leaf.dtype.itemsize == 8 else FLOAT32, CPU)


def _array(leaf: Any, name: str) -> jax.Array:
    _check_leaf(leaf, name)
    return jnp.asarray(leaf)


def _check_leaf(leaf: Any, name: str, *others: type) -> None:
    """Check that a leaf is an array, or an instance of ``others``, and has a supported element type."""
    if not isinstance(leaf, (jax.Array, np.ndarray, *others)):
        raise InvalidInputError(f"{name}: got {type(leaf).__name__}; expected a JAX array, jnp.asarray(x)")
    dtype: Any = leaf.dtype  # type: ignore[attr-defined]
    if dtype.name not in DTYPES or not dtype.isnative:
        raise InvalidInputError(
            f"{name}: got elements of type {dtype}; expected one of {', '.join(DTYPES)}; convert it"
        )


@arguments.naming_rank
def _plan(
    leaves: list[jax.Array],
    names: list[str],
    k: int | Density,
    settings: ReducerSettings,
    *,
    comm: Comm,
    training: bool = False,
) -> TreeExchange:
    """Check the options, and distribute the leaves over calls, the same on all ranks."""
    if isinstance(k, jax.Array):
        raise InvalidInputError(
            "k: got a JAX array; expected a number that is known while tracing. Make it static, by "
            "jax.jit(..., static_argnames='k')"
        )
    shared = {**settings.common, **dict(described(k) if training else [])}
    shared |= {"scope": settings.scope, "chunk": settings.chunk, "dense_below": settings.dense_below}
    specs = [*map(spec_of, leaves)]
    buckets = []
    scope = "tensor" if settings.scope == "chunk" else settings.scope
    for members, dense in layout(specs, scope, settings.dense_below):
        dtypes = {leaves[i].dtype for i in members}
        dtype = dtypes.pop() if len(dtypes) == 1 else specs[members[0]].accumulator.accumulator
        if not dense:
            settings.check(dtype.name)
            if not callable(k):
                arguments.count_of(k, sum(specs[i].size for i in members))
        tensors = [(names[i], f"{leaves[i].dtype} {leaves[i].shape}") for i in members]
        label = Label(tensors, partial(list, [*shared.items(), *tensors]))
        buckets.append(LeafBucket(tuple(members), dtype, dense, label))
    settings.check(leaves[0].dtype.name)  # also if all leaves are small
    return TreeExchange(tuple(buckets), k, comm, settings, training)
