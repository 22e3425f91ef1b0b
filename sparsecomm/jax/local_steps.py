"""Local steps for trees of arrays that are never written in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from sparsecomm import local_steps as core
from sparsecomm.errors import InvalidInputError
from sparsecomm.jax.exchange import Comm, Density
from sparsecomm.jax.trees import PyTree
from sparsecomm.local_steps.defaults import DEFAULTS
from sparsecomm.reducer import Rebuilt, Reducer
from sparsecomm.reducer.bucket import TensorSpec
from sparsecomm.reducer.options import ReducerOptions
from sparsecomm.signatures import with_options
from sparsecomm.tensors import interop
from sparsecomm.tensors.arrays import Array

if TYPE_CHECKING:
    import optax  # type: ignore[import-untyped, import-not-found, unused-ignore]
    from typing_extensions import Unpack

__all__ = ["LocalSteps"]


class LocalSteps:
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
        density, sync_every, fragment_sync_delay, fragment_update_alpha, comm, skip_nonfinite, options: as in
            `sparsecomm.LocalSteps`.
        fragments: how many; or the names of the leaves of each, as `jax.tree_util.keystr` gives their paths.
        outer: the outer optimizer: an optax transformation, such as ``optax.sgd(0.7, 0.9, nesterov=True)``, which is
            given the mean pseudo-gradient of one leaf at a time; or a `sparsecomm.OuterOptimizer`; ``None``: the
            global parameters fall by the mean.

    Raises:
        InvalidInputError: an argument cannot be used.
    """

    @with_options(ReducerOptions, Reducer.__init__, **DEFAULTS)
    def __init__(
        self,
        params: PyTree,
        density: Density = 64 / 4096,
        *,
        sync_every: int = 30,
        fragments: int | Sequence[Sequence[str]] = 1,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
        outer: optax.GradientTransformation | core.OuterOptimizer | None = None,
        comm: Comm = None,
        skip_nonfinite: bool = True,
        **options: Unpack[ReducerOptions],
    ) -> None:
        self._structure: Any = jax.tree.structure(params)
        transformed = hasattr(outer, "init") and hasattr(outer, "update")
        self._core = _LocalSteps(
            self._named(params),
            density,
            sync_every=sync_every,
            fragments=fragments,
            fragment_sync_delay=fragment_sync_delay,
            fragment_update_alpha=fragment_update_alpha,
            outer=_OptaxOuter(outer) if transformed else outer,
            comm=comm,
            skip_nonfinite=skip_nonfinite,
            **options,
        )

    @property
    def local_step(self) -> int:
        """How many local steps of this round have been taken."""
        return self._core.local_step

    @property
    def round(self) -> int:
        """The number of this round, from 0."""
        return self._core.round

    @property
    def reducers(self) -> tuple[Reducer, ...]:
        """The reducer of each fragment, with its counters and residuals."""
        return self._core.reducers

    @property
    def fragments(self) -> tuple[tuple[str, ...], ...]:
        """The names of each fragment's leaves."""
        return self._core.fragments

    def __repr__(self) -> str:
        return repr(self._core)

    def step(self, params: PyTree) -> PyTree:
        """Count a local step; begin and apply the exchanges that are due after it. Return the parameters to go on with.

        Raises:
            SparseCommError: as `sparsecomm.LocalSteps.step`. The next call of `step`, `finish` or `rebuild` then
                returns the leaves that were to be set to the global ones, whatever it is given in their place.
        """
        named = self._named(params)
        self._core.step(named)
        return self._replaced(params, named)

    def finish(self, params: PyTree) -> PyTree:
        """Wait for the exchanges that are under way, and apply them now. Return the parameters to go on with.

        Raises:
            SparseCommError: as `step`.
        """
        named = self._named(params)
        self._core.finish(named)
        return self._replaced(params, named)

    def global_parameters(self) -> PyTree:
        """Return a copy of the global parameters: a tree of arrays in float32, of float64 for leaves in float64."""
        return jax.tree.unflatten(self._structure, [_as_jax(a) for a in self._core.global_parameters().values()])

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank needs to go on, as `sparsecomm.LocalSteps.state_dict`; save ``params`` beside it."""
        return self._core.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned on this rank. Collective: see `sparsecomm.LocalSteps.load_state_dict`.

        Raises:
            SparseCommError: as there.
        """
        self._core.load_state_dict(state)

    def rebuild(self, comm: Comm, params: PyTree, *, joining: bool = False) -> tuple[Rebuilt, PyTree]:
        """Go on with the ranks of another communicator: see `sparsecomm.LocalSteps.rebuild`. Collective over them.

        Returns:
            What it found, and the parameters to go on with: of a new rank the global ones.

        Raises:
            SparseCommError: as there.
        """
        named = self._named(params)
        rebuilt = self._core.rebuild(comm, named, joining=joining)
        return rebuilt, self._replaced(params, named)

    def _named(self, params: PyTree) -> dict[str, jax.Array]:
        """Return the leaves by their paths, with those of `_LocalSteps.new` in their places."""
        found, structure = jax.tree_util.tree_flatten_with_path(params)
        if structure != self._structure:
            raise InvalidInputError(
                f"params: got a tree of the structure {structure}; expected {self._structure}, as LocalSteps was made"
            )
        named = {jax.tree_util.keystr(path): leaf for path, leaf in found}
        for name, leaf in named.items():
            if isinstance(leaf, jax.core.Tracer):
                raise InvalidInputError(f"params{name}: got a traced array; call LocalSteps outside of jax.jit")
            if not isinstance(leaf, jax.Array) or len(leaf.devices()) > 1:
                raise InvalidInputError(f"params{name}: got {type(leaf).__name__}; expected a JAX array on one device")
        return named | (self._core.new if hasattr(self, "_core") else {})

    def _replaced(self, params: PyTree, named: dict[str, jax.Array]) -> PyTree:
        """Return the tree with new leaves; the same one if there are none."""
        new = self._core.new
        if not new:
            return params
        leaves = [new.get(name, leaf) for name, leaf in named.items()]
        new.clear()
        return jax.tree.unflatten(self._structure, leaves)


class _LocalSteps(core.LocalSteps):
    """Local steps that make new arrays instead of writing into those of the program.

    Attributes:
        new: leaves, by name, that the program has not been given yet.
    """

    _in_place = False

    def __init__(self, parameters: Mapping[str, jax.Array], *arguments: Any, **options: Any) -> None:
        self.new: dict[str, jax.Array] = {}
        self._like = {name: (leaf.shape, leaf.dtype, leaf.sharding) for name, leaf in parameters.items()}
        jax.block_until_ready(parameters)  # type: ignore[no-untyped-call]
        super().__init__(parameters, *arguments, **options)

    def _go_on(self, parameters: Mapping[str, object]) -> tuple[str, ...]:
        if self._due:
            jax.block_until_ready(parameters)  # type: ignore[no-untyped-call]
        return super()._go_on(parameters)

    def _write(self, name: str, local: interop.Tensor, values: Array) -> None:
        shape, dtype, sharding = self._like[name]
        self.new[name] = jax.device_put(_as_jax(values).reshape(shape).astype(dtype), sharding)


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
        leaves = state.get("leaves") if isinstance(state, Mapping) else None
        if not isinstance(leaves, Mapping) or not all(isinstance(each, (list, tuple)) for each in leaves.values()):
            raise InvalidInputError("outer state: expected that of an optax transformation, as state_dict() returns it")
        self._leaves = {name: [np.array(leaf) for leaf in each] for name, each in leaves.items()}

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
