"""Local steps for trees of arrays that are never written in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsecomm import local_steps as core
from sparsecomm.checks import with_options
from sparsecomm.errors import InvalidInputError
from sparsecomm.jax.exchange import Comm, Density
from sparsecomm.jax.trees import PyTree
from sparsecomm.local_steps.defaults import DEFAULTS
from sparsecomm.reducer import Rebuilt, Reducer
from sparsecomm.reducer.bucket import TensorSpec
from sparsecomm.reducer.options import ReducerOptions
from sparsecomm.tensors import interop
from sparsecomm.tensors.arrays import Array

if TYPE_CHECKING:
    import optax  # type: ignore[import-untyped, import-not-found, unused-ignore]
    from typing_extensions import Unpack

__all__ = ["LocalSteps"]


class LocalSteps(core.LocalSteps):
    """Trains by local steps, and sums sparsely what they did, once in a round: `sparsecomm.LocalSteps` for pytrees.

        local = sparsecomm.jax.LocalSteps(params, sync_every=30)
        for batch in data:                                    # each rank its own
            params, state = train_step(params, state, batch)  # may be under jit
            params = local.step(params)                       # the same tree, most often
        model = local.global_parameters()

    All methods are called from Python, not under `jax.jit`. Between exchanges `step` returns the tree that it was
    given. After one it returns a tree with new leaves, where they were replaced, on the devices of the old ones.

    Args:
        params: a pytree of arrays, each on one device: float16, bfloat16, float32 or float64. The same on all ranks.
        density, sync_every, by_speed, round_seconds, deadline, comm: as in `sparsecomm.LocalSteps`.
        fragment_sync_delay, fragment_update_alpha, skip_nonfinite, options: as there.
        fragments: how many; or the names of the leaves of each, as `jax.tree_util.keystr` gives their paths.
        outer: the outer optimizer: an optax transformation, such as ``optax.sgd(0.7, 0.9, nesterov=True)``, which is
            given the mean pseudo-gradient of one leaf at a time; or a `sparsecomm.OuterOptimizer`; ``None``: the
            global parameters fall by the mean.

    Attributes:
        local_step, round, steps, left_out, reducers, fragments: as in `sparsecomm.LocalSteps`.

    Raises:
        InvalidInputError: an argument cannot be used.
    """

    _in_place = False

    @with_options(ReducerOptions, Reducer.__init__, **DEFAULTS)
    def __init__(
        self,
        params: PyTree,
        density: Density = 64 / 4096,
        *,
        sync_every: int = 30,
        by_speed: bool = False,
        round_seconds: float | None = None,
        deadline: float | None = None,
        fragments: int | Sequence[Sequence[str]] = 1,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
        outer: optax.GradientTransformation | core.OuterOptimizer | None = None,
        comm: Comm = None,
        skip_nonfinite: bool = True,
        **options: Unpack[ReducerOptions],
    ) -> None:
        self._structure: Any = jax.tree.structure(params)
        self._new: dict[str, jax.Array] = {}  # leaves, by name, that the program has not been given yet
        leaves = self._leaves(params)
        self._like = {name: (leaf.shape, leaf.dtype, leaf.sharding) for name, leaf in leaves.items()}
        transformed = hasattr(outer, "init") and hasattr(outer, "update")
        super().__init__(
            leaves,
            density,
            sync_every=sync_every,
            by_speed=by_speed,
            round_seconds=round_seconds,
            deadline=deadline,
            fragments=fragments,
            fragment_sync_delay=fragment_sync_delay,
            fragment_update_alpha=fragment_update_alpha,
            outer=_OptaxOuter(outer) if transformed else outer,
            comm=comm,
            skip_nonfinite=skip_nonfinite,
            **options,
        )

    def step(self, params: PyTree) -> PyTree:
        """Count a local step; begin and apply the exchanges that are due after it. Return the parameters to go on with.

        Raises:
            SparseCommError: as `sparsecomm.LocalSteps.step`. The next call of `step`, `finish` or `rebuild` then
                returns the leaves that were to be set to the global ones, whatever it is given in their place.
        """
        super().step(self._leaves(params))
        return self._with_new_leaves(params)

    def finish(self, params: PyTree) -> PyTree:
        """Wait for the exchanges that are under way, and apply them now. Return the parameters to go on with.

        Raises:
            SparseCommError: as `step`.
        """
        super().finish(self._leaves(params))
        return self._with_new_leaves(params)

    def global_parameters(self) -> PyTree:
        """Return a copy of the global parameters: a tree of arrays in float32, of float64 for leaves in float64."""
        return jax.tree.unflatten(self._structure, map(_as_jax, super().global_parameters().values()))

    def rebuild(  # type: ignore[override] # what cannot be written is returned
        self, comm: Comm, params: PyTree, *, joining: bool = False
    ) -> tuple[Rebuilt, PyTree]:
        """Go on with the ranks of another communicator: see `sparsecomm.LocalSteps.rebuild`. Collective over them.

        Returns:
            What it found, and the parameters to go on with: of a new rank the global ones.

        Raises:
            SparseCommError: as there.
        """
        rebuilt = super().rebuild(comm, self._leaves(params), joining=joining)
        return rebuilt, self._with_new_leaves(params)

    def _leaves(self, params: PyTree) -> dict[str, jax.Array]:
        """Return the leaves by their paths, with new ones in their places."""
        found, structure = jax.tree_util.tree_flatten_with_path(params)
        if structure != self._structure:
            raise InvalidInputError(
                f"params: got a tree of the structure {structure}; expected {self._structure}, as LocalSteps was made"
            )
        leaves = {jax.tree_util.keystr(path): leaf for path, leaf in found}
        for name, leaf in leaves.items():
            if isinstance(leaf, jax.core.Tracer):
                raise InvalidInputError(f"params{name}: got a traced array; call LocalSteps outside of jax.jit")
            if not isinstance(leaf, jax.Array) or len(leaf.devices()) > 1:
                raise InvalidInputError(f"params{name}: got {type(leaf).__name__}; expected a JAX array on one device")
        return leaves | self._new

    def _with_new_leaves(self, params: PyTree) -> PyTree:
        """Return the tree with new leaves; the same one if there are none."""
        if not self._new:
            return params
        leaves = [*self._leaves(params).values()]
        self._new = {}
        return jax.tree.unflatten(self._structure, leaves)

    def _local(self, name: str, parameters: Mapping[str, object]) -> object:
        return self._new.get(name, parameters[name])

    def _write(self, name: str, local: interop.Tensor, values: Array) -> None:
        shape, dtype, sharding = self._like[name]
        self._new[name] = jax.device_put(_as_jax(values).reshape(shape).astype(dtype), sharding)


class _OptaxOuter:
    """An optax transformation as a `sparsecomm.OuterOptimizer`, with a state for each leaf."""

    def __init__(self, transformation: Any) -> None:
        self._transformation = transformation
        self._leaves: dict[str, list[Any]] = {}  # of the states

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
        """Check that what was loaded is as the transformation makes it for these parameters.

        Raises:
            InvalidInputError: it is not.
        """
        for name, leaves in self._leaves.items():
            if name not in specs:
                raise InvalidInputError(f"outer state: leaves of {name!r}; expected names of the parameters")
            like = jnp.zeros(specs[name].size, specs[name].accumulator.accumulator)
            made = jax.tree.leaves(self._transformation.init(like))
            expected = [f"{np.asarray(leaf).dtype} {np.shape(leaf)}" for leaf in made]
            got = [f"{np.asarray(leaf).dtype} {np.shape(leaf)}" for leaf in leaves]
            if got != expected:
                raise InvalidInputError(f"outer state: {name!r} has leaves {got}; expected {expected}")


def _as_jax(array: Array) -> jax.Array:
    """Return a copy of an array, on its device."""
    if isinstance(array, np.ndarray):
        return jnp.array(array, copy=True)
    return jnp.from_dlpack(array.copy())  # type: ignore[unreachable] # the array is CuPy's


def _as_cupy(array: jax.Array) -> Any:
    import cupy

    return cupy.from_dlpack(array)
