"""`LocalSteps` for pytrees of JAX arrays, which cannot be written in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsecomm import local_steps as core
from sparsecomm.errors import InvalidInputError
from sparsecomm.jax.exchange import Density
from sparsecomm.jax.trees import PyTree
from sparsecomm.local_steps.adapter import Adapter
from sparsecomm.local_steps.defaults import DEFAULTS, LocalStepsOptions
from sparsecomm.local_steps.exchange import ImmutableParameters
from sparsecomm.options import Unpack, with_options
from sparsecomm.reducer import Rebuilt
from sparsecomm.tensors.arrays import Array
from sparsecomm.tensors.interop import TensorSpec
from sparsecomm.transport import Comm

if TYPE_CHECKING:
    import optax  # type: ignore[import-untyped, import-not-found, unused-ignore]


class LocalSteps(Adapter):
    """`sparsecomm.LocalSteps` for pytrees: ranks train alone, and average their changes sparsely once per round.

        local = sparsecomm.jax.LocalSteps(params, sync_every=30)
        for batch in data:                                    # different data on each rank
            params, state = train_step(params, state, batch)  # may be under jit
            params = local.step(params)                       # usually the same tree
        model = local.global_parameters()

    Call all methods from Python, not under `jax.jit`. Replaced leaves stay on their devices.

    Args:
        params: a pytree of arrays, each on one device: float16, bfloat16, float32 or float64, the same on all ranks.
        fragments: the number of fragments; or a list of each fragment's leaves, named by `jax.tree_util.keystr`.
        outer: the outer optimizer: an optax transformation, such as ``optax.sgd(0.7, 0.9, nesterov=True)``, applied to
            one leaf at a time; a `sparsecomm.OuterOptimizer`; or ``None``: global = global - mean.
        options: of `sparsecomm.LocalSteps` and `sparsecomm.Reducer`, with the defaults of the former.
    """

    @with_options(LocalStepsOptions, core.LocalSteps, **DEFAULTS)
    def __init__(
        self,
        params: PyTree,
        density: Density = 64 / 4096,
        *,
        fragments: int | Sequence[Sequence[str]] = 1,
        outer: optax.GradientTransformation | core.OuterOptimizer | None = None,
        comm: Comm = None,
        **options: Unpack[LocalStepsOptions],
    ) -> None:
        self._leaves = _Leaves(params)
        if hasattr(outer, "init") and hasattr(outer, "update"):
            outer = _OptaxOuter(outer)
        self._core = core.LocalSteps(self._leaves, density, fragments=fragments, outer=outer, comm=comm, **options)

    def step(self, params: PyTree) -> PyTree:
        """Count a local step; begin and apply the exchanges that are due. Return the parameters to continue with.

        After an error, some leaves are set to the global ones. The next call uses these instead of the ones you pass.
        """
        self._core.step(self._leaves.of(params))
        return self._leaves.tree(params)

    def finish(self, params: PyTree) -> PyTree:
        """Wait for the exchanges in flight, and apply them now. Return the parameters to continue with."""
        self._core.finish(self._leaves.of(params))
        return self._leaves.tree(params)

    def global_parameters(self) -> PyTree:
        """Return a copy of the global parameters: a tree of float32 arrays (float64 for float64)."""
        return self._leaves.unflatten(map(_as_jax, self._core.global_parameters().values()))

    def rebuild(self, comm: Comm, params: PyTree, *, joining: bool = False) -> tuple[Rebuilt, PyTree]:
        """Call `sparsecomm.LocalSteps.rebuild`. Return its result, and the parameters to continue with."""
        rebuilt = self._core.rebuild(comm, self._leaves.of(params), joining=joining)
        return rebuilt, self._leaves.tree(params)


class _Leaves(ImmutableParameters):
    """The leaves of a tree, by path. ``_new`` holds replaced leaves until `tree` returns them."""

    def __init__(self, params: PyTree) -> None:
        self._structure: Any = jax.tree.structure(params)
        self._new: dict[str, jax.Array] = {}
        self.of(params)
        self._like = {name: (leaf.shape, leaf.dtype, leaf.sharding) for name, leaf in self._leaves.items()}

    def of(self, params: PyTree) -> _Leaves:
        """Take the leaves of a tree, and return this object."""
        by_path, structure = jax.tree_util.tree_flatten_with_path(params)
        if structure != self._structure:
            raise InvalidInputError(
                f"params: got a tree of structure {structure}; expected {self._structure}, as in the constructor"
            )
        leaves = {jax.tree_util.keystr(path): leaf for path, leaf in by_path}
        for name, leaf in leaves.items():
            if isinstance(leaf, jax.core.Tracer):
                raise InvalidInputError(f"params{name}: got a traced array; call LocalSteps outside of jax.jit")
            if not isinstance(leaf, jax.Array) or len(leaf.devices()) > 1:
                raise InvalidInputError(f"params{name}: got {type(leaf).__name__}; expected a JAX array on one device")
        self._leaves: dict[str, jax.Array] = leaves
        return self

    def tree(self, params: PyTree) -> PyTree:
        """Return ``params``, or a new tree if leaves were replaced."""
        if not self._new:
            return params
        leaves, self._new = list(self.values()), {}
        return self.unflatten(leaves)

    def unflatten(self, leaves: Any) -> PyTree:
        return jax.tree.unflatten(self._structure, leaves)

    def replace(self, name: str, values: Array) -> None:
        shape, dtype, sharding = self._like[name]
        self._new[name] = jax.device_put(_as_jax(values).reshape(shape).astype(dtype), sharding)

    def __getitem__(self, name: str) -> jax.Array:
        return self._new.get(name, self._leaves[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)


class _OptaxOuter:
    """A `sparsecomm.OuterOptimizer` that applies an optax transformation to one leaf at a time."""

    def __init__(self, transformation: Any) -> None:
        self._transformation = transformation
        self._leaves: dict[str, list[Any]] = {}  # of optax's states, by name of the parameter

    def step(self, name: str, parameter: Array, gradient: Array) -> None:
        p, g = _as_jax(parameter), _as_jax(gradient)
        state = self._transformation.init(p)
        if name in self._leaves:
            structure: Any = jax.tree.structure(state)
            state = jax.tree.unflatten(structure, [jnp.asarray(leaf) for leaf in self._leaves[name]])
        updates, state = self._transformation.update(g, state, p)
        self._leaves[name] = jax.tree.leaves(state)
        updated = p + updates
        parameter[:] = np.asarray(updated) if isinstance(parameter, np.ndarray) else _as_cupy(updated)

    def state_dict(self) -> dict[str, Any]:
        return {"leaves": {name: [np.array(leaf) for leaf in leaves] for name, leaves in self._leaves.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._leaves = {name: [np.array(leaf) for leaf in leaves] for name, leaves in state["leaves"].items()}

    def fit(self, specs: Mapping[str, TensorSpec]) -> None:
        """Check that the loaded states have the structure that optax gives them for these parameters."""
        for name, leaves in self._leaves.items():
            if name not in specs:
                raise InvalidInputError(f"outer state: it has leaves of {name!r}, which is not a parameter")
            like = jnp.zeros(specs[name].size, specs[name].accumulator.accumulator)
            states = jax.tree.leaves(self._transformation.init(like)), leaves
            expected, got = ([f"{np.asarray(leaf).dtype} {np.shape(leaf)}" for leaf in state] for state in states)
            if got != expected:
                raise InvalidInputError(f"outer state: {name!r} has leaves {got}; expected {expected}")


def _as_jax(array: Array) -> jax.Array:
    """Return a copy of a NumPy or CuPy array on its device."""
    if isinstance(array, np.ndarray):
        return jnp.array(array, copy=True)
    return jnp.from_dlpack(array.copy())  # type: ignore[unreachable] # the array is CuPy's


def _as_cupy(array: jax.Array) -> Any:
    import cupy

    return cupy.from_dlpack(array)
