"""Outer optimizers: what is done to the global parameters with the mean pseudo-gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from sparsecomm.calls.loading import as_float
from sparsecomm.checks import flag, number, shown
from sparsecomm.errors import InvalidInputError
from sparsecomm.reducer.layout import TensorSpec
from sparsecomm.tensors.arrays import Array, from_host, to_host

__all__ = ["NesterovSGD", "OuterOptimizer"]


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
        self.learning_rate, self.momentum = number(learning_rate), number(momentum)
        if not 0 < self.learning_rate < math.inf:
            raise InvalidInputError(f"learning_rate={shown(learning_rate)}: expected a number above 0")
        if not 0 <= self.momentum < 1:
            raise InvalidInputError(f"momentum={shown(momentum)}: expected a number from 0 to below 1")
        self.nesterov = flag("nesterov", nesterov)
        self._velocities: dict[str, Array] = {}

    def step(self, name: str, parameter: Array, gradient: Array) -> None:
        """See `OuterOptimizer.step`. An interrupt comes before anything has changed, or when all has."""
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
        change = self.learning_rate * gradient
        parameter -= change  # no signal comes from here on
        if velocity is not None:
            self._velocities[name] = velocity

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
