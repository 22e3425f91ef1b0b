"""Outer optimizers, which update the global parameters with the mean of the pseudo-gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np

from sparsecomm.backends import default_float_mode
from sparsecomm.checks import quote, to_bool, to_float
from sparsecomm.errors import InvalidInputError, text_of
from sparsecomm.states.loading import Prepared, Undo, as_float, load, reading
from sparsecomm.states.values import from_bytes, to_bytes
from sparsecomm.tensors.arrays import Array
from sparsecomm.tensors.interop import TensorSpec, from_host, to_host
from sparsecomm.transport import Transport


class OuterOptimizer(Protocol):
    """The interface of an outer optimizer for `sparsecomm.LocalSteps`.

    Optional methods:

    - ``step_together(arrays)`` replaces ``step``. It is called once per usable exchange, with a pair (parameter,
      gradient) by name. After an interrupt, it is called again with the same names.
    - ``fit(specs)`` is called after ``load_state_dict``. It raises `InvalidInputError` if the loaded state does not fit
      the parameters.
    - ``snapshot()`` returns a function that restores the current state.
    """

    def step(self, name: str, parameter: Array, gradient: Array) -> None:
        """Update a global parameter in place, once per usable exchange. All ranks must compute the same bits.

        Both arrays are flat NumPy arrays, or CuPy arrays on a GPU, in float32 (float64 for float64). ``gradient``, the
        mean pseudo-gradient, may be overwritten.
        """

    def state_dict(self) -> Mapping[str, Any]:
        """Return a copy of the state: NumPy arrays, numbers, strings, lists and dictionaries."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned; or raise `InvalidInputError`, and change nothing."""


class NesterovSGD:
    """Gradient descent with momentum, DiLoCo's outer optimizer (Douillard et al., 2023, Section 3).

    velocity = momentum * velocity + gradient; then parameter -= learning_rate * (gradient + momentum * velocity), or
    without ``nesterov`` parameter -= learning_rate * velocity: `torch.optim.SGD`, up to rounding.

    Args:
        learning_rate: must be positive.
        momentum: at least 0 and below 1; with 0 there are no velocities.
        nesterov: use Nesterov momentum.
    """

    def __init__(self, learning_rate: float = 0.7, momentum: float = 0.9, nesterov: bool = True) -> None:
        self.learning_rate, self.momentum = to_float(learning_rate), to_float(momentum)
        if not 0 < self.learning_rate < math.inf:
            raise InvalidInputError(f"learning_rate={quote(learning_rate)}: must be a positive number")
        if not 0 <= self.momentum < 1:
            raise InvalidInputError(f"momentum={quote(momentum)}: must be at least 0 and below 1")
        self.nesterov = to_bool("nesterov", nesterov)
        self._velocities: dict[str, Array] = {}

    @default_float_mode
    def step(self, name: str, parameter: Array, gradient: Array) -> None:
        """See `OuterOptimizer.step`. An interrupt leaves the step unmade or completely made."""
        change, velocity = self._change(name, gradient)
        parameter -= change
        if velocity is not None:
            self._velocities[name] = velocity

    def preview(self, name: str, parameter: Array, gradient: Array) -> Array:
        """Return what `step` would make of the parameter, with NaN where the velocity would become infinite."""
        change, velocity = self._change(name, gradient)
        after: Array = parameter - change
        return after if velocity is None else after + 0 * velocity

    def _change(self, name: str, gradient: Array) -> tuple[Array, Array | None]:
        """Return what to subtract from the parameter, and the new velocity."""
        velocity = None
        if self.momentum:
            before = self._velocities.get(name)
            if before is None:
                velocity = gradient.copy()
            else:
                if isinstance(before, np.ndarray):  # a loaded state is in host memory
                    before = from_host(before, gradient)
                velocity = self.momentum * before + gradient
            gradient = gradient + self.momentum * velocity if self.nesterov else velocity
        return self.learning_rate * gradient, velocity

    def state_dict(self) -> dict[str, Any]:
        """See `OuterOptimizer.state_dict`."""
        return {"velocities": {name: to_host(velocity) for name, velocity in self._velocities.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `OuterOptimizer.load_state_dict`."""
        velocities = state.get("velocities") if isinstance(state, Mapping) else None
        if not isinstance(velocities, Mapping) or any(np.asarray(v).dtype.kind != "f" for v in velocities.values()):
            raise InvalidInputError("outer state: expected the dictionary that NesterovSGD.state_dict() returned")
        self._velocities = {name: np.array(velocity) for name, velocity in velocities.items()}

    def fit(self, specs: Mapping[str, TensorSpec]) -> None:
        """Convert the loaded velocities to the types of the parameters: see `OuterOptimizer`."""
        fitting = {}
        for name, velocity in self._velocities.items():
            if name not in specs:
                raise InvalidInputError(f"outer state: it has a velocity of {name!r}, which is not a parameter")
            spec = specs[name]
            fitting[name] = as_float(velocity, f"the velocity of {name!r}", (spec.size,), spec.accumulator)
        self._velocities = fitting


def load_outer(outer: OuterOptimizer, state: Any, specs: Mapping[str, TensorSpec], undo: Undo) -> object:
    """Load a state into an outer optimizer, and return its new state. ``undo`` can restore the old one."""
    with reading("outer", f"what {type(outer).__name__}.state_dict() returned"):
        if hasattr(outer, "snapshot"):
            undo.append(outer.snapshot())
        else:
            undo.append(partial(_restore, outer, outer.state_dict(), dict(getattr(outer, "__dict__", {}))))
        outer.load_state_dict(state)
        if hasattr(outer, "fit"):
            outer.fit(specs)
        return outer.state_dict()


def _restore(outer: OuterOptimizer, state: Mapping[str, Any], attributes: dict[str, Any]) -> None:
    """Load a state. If the optimizer refuses it, restore at least its attributes."""
    try:
        outer.load_state_dict(state)
    except Exception:
        vars(outer).update(attributes)


def broadcast_outer(
    transport: Transport, root: int, outer: OuterOptimizer | None, specs: Mapping[str, TensorSpec]
) -> None:
    """Load the state of rank ``root``'s outer optimizer on all ranks, or raise an error on all. Collective."""
    data, failed = np.empty(0, np.uint8), ""
    if transport.rank == root:
        try:
            data = to_bytes(None if outer is None else outer.state_dict())
        except Exception as error:  # sent as a length of 0, so that all ranks raise
            failed = f": {text_of(error)}"
    length = np.array([len(data)], "<u8")
    transport.broadcast(length.view(np.uint8), root)
    nbytes, limit = int(length[0]), (64 << 20) + 64 * sum(spec.nbytes for spec in specs.values())
    if not 0 < nbytes <= limit:
        raise InvalidInputError(
            f"rank {transport.rank}: the state of rank {root}'s outer optimizer cannot be sent{failed}. Its state_dict "
            f"must return numbers, strings, arrays, lists and dictionaries, of at most {limit:,} bytes; got {nbytes:,}"
        )
    data = data if transport.rank == root else np.empty(nbytes, np.uint8)
    transport.broadcast(data, root)

    def prepare(undo: Undo) -> Prepared:
        state = from_bytes(data)
        if outer is not None and transport.rank != root:
            state = load_outer(outer, state, specs, undo)
        return Prepared({"outer": state})

    load(transport, "rebuild() of LocalSteps", ["outer"], prepare)
