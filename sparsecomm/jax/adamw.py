"""`sparse_adamw`, AdamW with a sparse exchange as an optax transformation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparsecomm.backends import float_mode_only
from sparsecomm.backends.adamw import Moments, unit_dtype
from sparsecomm.errors import InvalidInputError, SparseCommError, needing
from sparsecomm.jax.exchange import call
from sparsecomm.jax.transform import check_parameters
from sparsecomm.jax.trees import PyTree, checked, init_residuals, spec_of
from sparsecomm.optimizers.adamw import LazyAdamW
from sparsecomm.optimizers.options import AdamWOptions, AdamWRule, AdamWSettings, settings_of
from sparsecomm.options import Unpack, with_options
from sparsecomm.reducer import Reducer
from sparsecomm.reducer.options import ReducerSettings
from sparsecomm.signals import deferred, interrupt_in
from sparsecomm.tensors.interop import TensorSpec
from sparsecomm.tensors.sparse import Array
from sparsecomm.transport import Comm, Transport, transport_of

if TYPE_CHECKING:
    import optax  # type: ignore[import-untyped, import-not-found, unused-ignore]


class SparseAdamWState(NamedTuple):
    """The state of `sparse_adamw`. All ranks have the same step and, without nodes, the same units.

    Each rank has the moments of its part of the weights. With one rank, they have the shapes of the parameters. With
    several, they are flat arrays, which may be empty, and with nodes, so are units and residuals. Moments and residuals
    are float32 (float64 for float64).
    """

    step: jax.Array  # number of steps so far; int32, of shape ()
    mu: PyTree  # running averages of gradients
    nu: PyTree  # and of their squares
    last: PyTree  # the step of each weight's last update, int32; 0: none yet
    compensation: PyTree  # the exact weights minus the parameters; None with one rank
    units: PyTree  # gradients are divided by powers of two with these exponents; uint8, uint16 for float64; 0: none yet
    residuals: PyTree  # what this rank has not sent yet, divided by the units
    units_lag: jax.Array  # whether dense steps have changed nu, but not yet the units; of shape ()


@with_options(AdamWOptions, AdamWRule, AdamWSettings)
def sparse_adamw(
    learning_rate: float | Callable[[Any], Any],
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    mask: PyTree | Callable[[PyTree], PyTree] | None = None,
    *,
    comm: Comm = None,
    **options: Unpack[AdamWOptions],
) -> optax.GradientTransformationExtraArgs:
    """Return ``optax.adamw`` with gradients averaged over all ranks, in 1/41 of the bytes of dense sums.

        optimizer = sparsecomm.jax.sparse_adamw(1e-3)

    This is a complete optimizer, not a link of a chain: pass ``update`` this rank's gradients and the parameters, and
    add what it returns to the parameters. ``init`` and ``update`` are collective, and all ranks make the same updates,
    bit for bit. If a gradient is not finite on some rank, or the step would make a parameter or a moment infinite, all
    ranks skip the step; finite gradients stay in the residuals, and elements that would overflow are dropped. At
    ``density=1.0`` it is ``optax.adamw`` of exact means. The step is computed on the host, by the code of
    `sparsecomm.SparseAdamW`.

    Args:
        learning_rate: a number, or an optax schedule: a function of the step, from 0.
        b1, b2, eps, weight_decay, mask: as in ``optax.adamw``. With ``optax.inject_hyperparams`` pass
            ``static_args=("density", "dense_steps", "bucket_bytes", "on_step", "check_weights_every")``.
        comm: as in `sparsecomm.sparse_allreduce`.
        options: as in `sparsecomm.SparseAdamW`. With nodes, residuals and units are flat arrays of this rank's part,
            too.

    Returns:
        A transformation whose state is `SparseAdamWState`, a pytree. ``update`` raises the errors of `allreduce_tree`.
    """
    with needing("optax", "sparse_adamw", "jax"):
        import optax
    settings, rule_options = settings_of(sparse_adamw, options)
    if not any(isinstance(number, jax.Array) for number in (learning_rate, b1, b2, eps, weight_decay)):
        rate = 0.0 if callable(learning_rate) else learning_rate
        AdamWRule(lr=rate, betas=(b1, b2), eps=eps, weight_decay=weight_decay, **rule_options)
    ReducerSettings(**settings.reducer_options)

    @functools.cache
    def on_host(transport: Transport, *specs: TensorSpec) -> _OnHost:
        return _OnHost({spec.name: spec for spec in specs}, settings, transport)

    def init(params: PyTree) -> SparseAdamWState:
        residuals, structure = jax.tree.flatten(init_residuals(params))
        specs, transport = _specs(params), transport_of(comm)
        optimizer = on_host(transport, *specs) if specs else None  # optax.tree.map_params passes no leaves
        shapes, residual_shapes = ([], []) if optimizer is None else (optimizer.shapes, optimizer.residual_shapes)
        reals = [leaf.dtype for leaf in residuals]

        def zeros(dtypes: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> PyTree:
            return jax.tree.unflatten(structure, map(jnp.zeros, shapes, dtypes))

        return SparseAdamWState(
            step=jnp.zeros((), jnp.int32),
            mu=zeros(reals, shapes),
            nu=zeros(reals, shapes),
            last=zeros([jnp.int32] * len(reals), shapes),
            compensation=None if transport.size == 1 else zeros(reals, shapes),
            units=zeros([unit_dtype(real) for real in reals], residual_shapes),
            residuals=zeros(reals, residual_shapes),
            units_lag=jnp.zeros((), bool),
        )

    def update(updates: PyTree, state: SparseAdamWState, params: PyTree = None) -> tuple[PyTree, SparseAdamWState]:
        if params is None:
            raise InvalidInputError("sparse_adamw: update got no parameters; call update(gradients, state, params)")
        shapes, old_shapes = ([jnp.shape(leaf) for leaf in jax.tree.leaves(tree)] for tree in (params, state.residuals))
        are_parts = old_shapes != shapes and all(len(shape) == 1 for shape in old_shapes)
        residuals = None if are_parts else state.residuals  # `optimizer.check` compares the shapes of parts
        grads, *_ = checked(updates, residuals, "grads", "residuals", comm=comm)
        weights, *_ = checked(params, residuals, "params", "residuals", comm=comm)
        specs = _specs(params)
        optimizer = on_host(transport_of(comm), *specs)
        optimizer.check(state)
        compared = {"params": params} if optimizer.has_slices else {"params": params, "units": state.units}
        check_parameters(compared, state.step, settings.check_weights_every, comm=comm)
        rate = learning_rate(state.step) if callable(learning_rate) else learning_rate
        numbers = rate, b1, b2, eps, weight_decay
        fixed = [None if isinstance(number, jax.Array) else float(number) for number in numbers]
        masked = (mask(params) if callable(mask) else mask) or jax.tree.map(lambda _: True, params)
        decays = jax.tree.leaves(jax.tree.map(lambda _, decays: bool(decays), params, masked))
        traced = [number for number in numbers if isinstance(number, jax.Array)]
        operands, structure = jax.tree.flatten([traced, grads, weights, [jax.tree.leaves(tree) for tree in state]])

        def host(*operands: Any) -> list[Array]:
            traced, grads, weights, old = jax.tree.unflatten(structure, operands)
            values = iter(traced)
            # By its text, a float32 of 0.1 becomes 0.1, and not the float64 next to the float32.
            rate, *betas, epsilon, decay = (float(str(np.asarray(next(values)))) if n is None else n for n in fixed)
            shared = {"lr": rate, "betas": betas, "eps": epsilon, **rule_options}
            rule_by_mask = {on: AdamWRule(**shared, weight_decay=decay * on) for on in {*decays}}
            rules = [rule_by_mask[on] for on in decays]
            optimizer = on_host(transport_of(comm), *specs)
            return jax.tree.leaves(optimizer.step(grads, weights, SparseAdamWState(*old), rules))

        remaining = iter(call(host, operands[len(traced) + len(grads) :], *operands))
        changes, *new = (jax.tree.map(lambda _: next(remaining), tree) for tree in (params, *state))
        return changes, SparseAdamWState(*new)

    return optax.with_extra_args_support(optax.GradientTransformation(init, update))


def _specs(params: PyTree) -> list[TensorSpec]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return [spec_of(leaf, "params" + jax.tree_util.keystr(path)) for path, leaf in leaves]


@deferred
class _OnHost:
    """The optimizer of a tree of parameters, in host memory. Between steps it keeps memory and plans, but no state."""

    def __init__(self, specs: dict[str, TensorSpec], settings: AdamWSettings, comm: Comm) -> None:
        in_reverse = dict(reversed(specs.items()))  # as buckets are filled
        self._reducer = Reducer(in_reverse, comm=comm, **settings.reducer_options)
        self._names, self._adamw = list(specs), LazyAdamW(specs, self._reducer, None)
        self._inputs: list[Any] = []  # the state from which an interrupted step began
        self._weights: dict[str, Array] = {}
        self._moments: dict[str, Moments] = {}

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of this rank's moments."""
        if self._reducer.transport.size == 1:
            return [self._adamw.specs[name].shape for name in self._names]
        return [(end - begin,) for begin, end in map(self._adamw.part, self._names)]

    @property
    def has_slices(self) -> bool:
        """Whether this rank has residuals and units of a part of the parameters only: see `Reducer`."""
        return any(bucket.nodes is not None for bucket in self._reducer.buckets)

    @property
    def residual_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of this rank's residuals and units."""
        return [self._reducer.residual(name).shape for name in self._names]

    def check(self, state: SparseAdamWState) -> None:
        """Check that a state has this rank's part of the moments, and of the residuals and units."""
        of_parts = {"mu": self.shapes, "residuals": self.residual_shapes, "units": self.residual_shapes}
        for name, expected in of_parts.items():
            shapes = [leaf.shape for leaf in jax.tree.leaves(getattr(state, name))]
            if shapes != expected:
                transport = self._reducer.transport
                raise InvalidInputError(
                    f"state: {name} has leaves of shapes {shapes}; expected {expected}, the part of rank "
                    f"{transport.rank} of {transport.size}; pass the state that init or update returned on this rank, "
                    "with the same world size and nodes"
                )

    @float_mode_only  # XLA's threads flush denormals
    def step(
        self, grads: list[Any], params: list[Any], state: SparseAdamWState, rules: list[AdamWRule]
    ) -> tuple[list[Array], list[list[Array]]]:
        """Return the changes of parameters, and the new state. Call it again with the same state after an interrupt.

        Trees are lists of arrays here, which are neither written nor kept.
        """
        adamw, reducer, names, inputs = self._adamw, self._reducer, self._names, jax.tree.leaves(state)
        if [*map(id, inputs)] != [*map(id, self._inputs)]:
            if reducer.pending:
                with suppress(SparseCommError):
                    reducer.wait()
            self._load(params, state)
        self._inputs = inputs
        try:
            gradients = dict(zip(names, map(np.asarray, grads), strict=True))
            done = adamw.exchange(gradients, self._weights, {}, dict(zip(names, rules, strict=True)))
            if not adamw.missing:
                adamw.update(self._weights, done)
        except BaseException as error:
            if interrupt_in(error) is None:
                self._inputs = []
            raise
        self._inputs, moments = [], adamw.moments or self._moments
        changes = [self._change(np.asarray(p), name, moments[name]) for p, name in zip(params, names, strict=True)]
        new = [
            [np.asarray(state.step[0] + done.usable, np.int32)],
            *([array for array in field if array is not None] for field in zip(*map(moments.get, names), strict=True)),
            [reducer.exponents(name).copy() for name in names],
            [reducer.residual(name).copy() for name in names],
            [np.asarray(any(bucket.units_lag for bucket in reducer.buckets))],
        ]
        adamw.adopt({}, {})
        trees = zip(new, state, strict=True)
        return changes, [[a.reshape(leaf.shape) for a, leaf in zip(*pair, strict=True)] for pair in trees]

    def _load(self, params: list[Any], state: SparseAdamWState) -> None:
        names, adamw, reducer, step = self._names, self._adamw, self._reducer, int(state.step[0])
        reducer.go_to(step)
        trees: Any = [[np.array(leaf) for leaf in tree] for tree in state]
        old = SparseAdamWState(*trees)
        for name, exponents, residual in zip(names, old.units, old.residuals, strict=True):
            reducer.exponents(name)[:] = exponents.reshape(-1)
            reducer.residual(name)[...] = residual
        self._weights = {name: np.array(p) for name, p in zip(names, params, strict=True)}
        fields = old.mu, old.nu, old.last, old.compensation  # the last one is empty with one rank
        flat: list[list[Any]] = [[leaf.reshape(-1) for leaf in tree] or [None] * len(names) for tree in fields]
        self._moments = {name: Moments(*arrays) for name, *arrays in zip(names, *flat, strict=True)}
        for bucket in reducer.buckets:
            bucket.units_lag, bucket.unsummed = bool(old.units_lag[0]), []  # the caller passes gradients again
        begun = any(exponents.any() for exponents in old.units)
        adamw.adopt(self._moments if begun else {}, dict.fromkeys(names, step))

    def _change(self, p: Array, name: str, moments: Moments) -> Array:
        """Return what to add to a parameter. The compensation takes what this addition rounds off."""
        new, change = self._weights[name], np.zeros_like(p)
        np.subtract(new, p, out=change, where=new != p)
        if moments.compensation is not None:
            own, real = slice(*self._adamw.part(name)), moments.compensation.dtype
            exact, rounded = (array.reshape(-1)[own].astype(real) for array in (new, p + change))
            moments.compensation[:] += np.where(exact == rounded, 0, exact - rounded)
        return change
