"""Outer optimizers: what is done to the global parameters with the mean pseudo-gradient; and their states."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np

from sparsecomm.checks import quote, to_bool, to_float
from sparsecomm.errors import InvalidInputError
from sparsecomm.reducer.bucket import TensorSpec
from sparsecomm.states.loading import Prepared, Undo, as_float, error_text, load, reading
from sparsecomm.states.values import from_bytes, to_bytes
from sparsecomm.tensors.arrays import Array, from_host, to_host
from sparsecomm.transport import Transport

__all__ = ["NesterovSGD", "OuterOptimizer", "SharedState", "load_outer"]


class OuterOptimizer(Protocol):
    """What `sparsecomm.LocalSteps` asks of an outer optimizer.

    It may also have ``step_together(arrays)``, which takes the place of ``step``: it is called once in each exchange
    that counts, with a dictionary from each name to the pair (parameter, gradient). An interrupt within it may leave a
    step of the whole fragment made in part; the next call repeats it.
    """

    def step(self, name: str, parameter: Array, gradient: Array) -> None:
        """Update a parameter, in place.

        Called once for each parameter in each exchange that counts, in the same order on all ranks, which must come to
        the same bits.

        Args:
            name: of the parameter.
            parameter: the global one: a flat array of float32 (float64 for float64), of NumPy, or of CuPy on a GPU.
            gradient: the mean pseudo-gradient: the same shape and type. It may be overwritten.
        """

    def state_dict(self) -> Mapping[str, Any]:
        """Return a copy of the state: NumPy arrays, numbers, lists, dictionaries and texts."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned.

        Raises:
            InvalidInputError: it does not fit. Nothing has changed.
        """


class NesterovSGD:
    """Gradient descent with momentum, as DiLoCo's outer optimizer (Douillard et al., 2023, Section 3).

    velocity = momentum * velocity + gradient; the parameter falls by learning_rate times the velocity, or with
    ``nesterov`` by learning_rate * (gradient + momentum * velocity). The same as `torch.optim.SGD`, up to rounding.

    Args:
        learning_rate: above 0.
        momentum: from 0 to below 1; 0 keeps no velocities.
        nesterov: look ahead by one step.

    Raises:
        InvalidInputError: one of them cannot be used.
    """

    def __init__(self, learning_rate: float = 0.7, momentum: float = 0.9, nesterov: bool = True) -> None:
        self.learning_rate, self.momentum = to_float(learning_rate), to_float(momentum)
        if not 0 < self.learning_rate < math.inf:
            raise InvalidInputError(f"learning_rate={quote(learning_rate)}: expected a number above 0")
        if not 0 <= self.momentum < 1:
            raise InvalidInputError(f"momentum={quote(momentum)}: expected a number from 0 to below 1")
        self.nesterov = to_bool("nesterov", nesterov)
        self._velocities: dict[str, Array] = {}

    def step(self, name: str, parameter: Array, gradient: Array) -> None:
        """See `OuterOptimizer.step`. An interrupt comes before anything has changed, or when all has."""
        change, velocity = self._change(name, gradient)
        parameter -= change
        if velocity is not None:
            self._velocities[name] = velocity

    def preview(self, name: str, parameter: Array, gradient: Array) -> Array:
        """Return what `step` would make of a parameter, with NaN where the velocity would be infinite."""
        change, velocity = self._change(name, gradient)
        after: Array = parameter - change
        return after if velocity is None else after + 0 * velocity

    def _change(self, name: str, gradient: Array) -> tuple[Array, Array | None]:
        """Return by how much the parameter falls, and the new velocity."""
        velocity = None
        if self.momentum:
            before = self._velocities.get(name)
            if before is None:
                velocity = gradient.copy()
            else:
                if isinstance(before, np.ndarray):  # also of a state that was loaded
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
            raise InvalidInputError("outer state: expected what NesterovSGD.state_dict() returned")
        self._velocities = {name: np.array(velocity) for name, velocity in velocities.items()}

    def fit(self, specs: Mapping[str, TensorSpec]) -> None:
        """Bring what was loaded to the types of the parameters.

        Raises:
            InvalidInputError: it is of parameters of other names or sizes.
        """
        fitting = {}
        for name, velocity in self._velocities.items():
            if name not in specs:
                raise InvalidInputError(f"outer state: a velocity of {name!r}; expected names of the parameters")
            spec = specs[name]
            fitting[name] = as_float(velocity, f"the velocity of {name!r}", (spec.size,), spec.accumulator)
        self._velocities = fitting


def load_outer(outer: OuterOptimizer, state: Any, specs: Mapping[str, TensorSpec], undo: Undo) -> object:
    """Let an outer optimizer load a state; return the state that it then has.

    Args:
        specs: of the parameters. An optimizer with a method ``fit`` checks that the state fits them.
        undo: to which is appended what gives it back its own. It has ``snapshot``, which returns that, or loads what
            its ``state_dict`` returned.

    Raises:
        InvalidInputError: it does not load.
    """
    with reading("outer", f"what {type(outer).__name__}.state_dict() returned"):
        if hasattr(outer, "snapshot"):
            undo.append(outer.snapshot())
        else:
            undo.append(partial(_put_back, outer, outer.state_dict(), dict(getattr(outer, "__dict__", {}))))
        outer.load_state_dict(state)
        if hasattr(outer, "fit"):
            outer.fit(specs)
        return outer.state_dict()


def _put_back(outer: OuterOptimizer, state: Mapping[str, Any], attributes: dict[str, Any]) -> None:
    """Give an optimizer its state again; if it refuses that, at least the attributes that it had."""
    try:
        outer.load_state_dict(state)
    except Exception:
        vars(outer).update(attributes)


class SharedState:
    """An outer optimizer's state on its way to other ranks, as named arrays and plain values.

    Attributes:
        nbytes: of the state of this rank, as it would be sent; 0: it cannot be.
    """

    def __init__(self, outer: OuterOptimizer | None, specs: Mapping[str, TensorSpec]) -> None:
        self._outer, self._specs = outer, specs
        self._error: BaseException | None = None
        try:
            self._data = to_bytes(None if outer is None else outer.state_dict())
        except Exception as error:  # all ranks are told
            self._data, self._error = np.empty(0, np.uint8), error
        self.nbytes = len(self._data)

    def broadcast(self, transport: Transport, root: int, nbytes: int) -> None:
        """Give all ranks the state of rank ``root``, which has said that it is of so many bytes. Collective.

        Raises:
            InvalidInputError: it cannot be sent, or a rank cannot load it; all ranks raise it, and none has changed.
        """
        limit = (64 << 20) + 64 * sum(spec.nbytes for spec in self._specs.values())
        if not 0 < nbytes <= limit:
            why = f": {error_text(self._error)}" if transport.rank == root and self._error else ""
            raise InvalidInputError(
                f"rank {transport.rank}: the state of rank {root}'s outer optimizer cannot be sent{why}. Expected "
                f"numbers, texts, arrays, and lists and dictionaries of such, of {limit:,} bytes at most; got {nbytes:,}"
            )
        data = self._data if transport.rank == root else np.empty(nbytes, np.uint8)
        transport.broadcast(data, root)

        def prepare(undo: Undo) -> Prepared:
            state = from_bytes(data)
            if self._outer is not None and transport.rank != root:
                state = load_outer(self._outer, state, self._specs, undo)
            return Prepared({"outer": state}, lambda: None)

        load(transport, "LocalSteps.rebuild", ["outer"], prepare)
