"""A torch optimizer as the outer one of local steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.dlpack import from_dlpack

from sparsecomm.errors import InvalidInputError
from sparsecomm.tensors.arrays import Array
from sparsecomm.torch.optimizer_state import mapped, snapshot, try_step

__all__ = ["TorchOuter"]


class TorchOuter:
    """Steps the global parameters by an optimizer that was made over a model's: see `sparsecomm.OuterOptimizer`.

    In its groups stand parameters of its own, until `give_back`. In each step those of an exchange are the global
    arrays, and have the means as their gradients; the others have none, so the optimizer leaves them alone.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, named: Mapping[str, torch.Tensor], views: Mapping[str, torch.Tensor]
    ) -> None:
        """Take the optimizer.

        Args:
            optimizer: over all parameters of ``named``; others, such as frozen ones, are left alone.
            named: the parameters, by name.
            views: their memory on this rank, for types, shapes and devices.

        Raises:
            InvalidInputError: it lacks one of the parameters, or belongs to local steps already.
        """
        known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if strangers := [name for name, parameter in named.items() if id(parameter) not in known]:
            raise InvalidInputError(
                f"outer_optimizer: it lacks {strangers[0]!r}, and perhaps others; expected one that was made over "
                "model.parameters(), and is not used by another DiLoCo (call its remove() first)"
            )
        self._optimizer = optimizer
        self._own = {name: nn.Parameter(_widened(view)) for name, view in views.items()}
        self._exchange(dict(zip(map(id, named.values()), self._own.values(), strict=True)))
        self._theirs = {id(own): parameter for own, parameter in zip(self._own.values(), named.values(), strict=True)}

    def give_back(self) -> None:
        """Put the model's parameters into the optimizer's groups again."""
        self._exchange(self._theirs)

    def step(self, name: str, parameter: Array, gradient: Array) -> None:
        """See `sparsecomm.OuterOptimizer`."""
        self.step_together({name: (parameter, gradient)})

    def step_together(self, arrays: Mapping[str, tuple[Array, Array]]) -> None:
        """See `sparsecomm.OuterOptimizer`: one step of the optimizer."""
        try:
            for name, (parameter, gradient) in arrays.items():
                own = self._own[name]
                own.data = from_dlpack(parameter).view(own.shape)
                own.grad = from_dlpack(gradient).view(own.shape)
            self._optimizer.step()
        finally:
            for name in arrays:
                self._own[name].grad = None

    def state_dict(self) -> dict[str, Any]:
        """See `sparsecomm.OuterOptimizer`. Tensors are in host memory."""
        state: dict[str, Any] = copy.deepcopy(mapped(self._optimizer.state_dict(), torch.Tensor, torch.Tensor.cpu))
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `sparsecomm.OuterOptimizer`. Arrays are NumPy's or tensors."""
        try:
            self._optimizer.load_state_dict(copy.deepcopy(mapped(dict(state), np.ndarray, torch.from_numpy)))
        except Exception as error:
            raise InvalidInputError(
                f"outer state: {error}; expected that of a {type(self._optimizer).__name__} over the same parameters"
            ) from error

    def snapshot(self) -> Callable[[], None]:
        """Return what gives the optimizer back the state that it has now."""
        return snapshot(self._optimizer)

    def fit(self, specs: object) -> None:
        """Check that the optimizer can step with what it has loaded.

        Raises:
            InvalidInputError: it cannot.
        """
        try:
            try_step(self._optimizer, self._own.values())
        except Exception as error:
            raise InvalidInputError(
                f"outer state: a step with it raises {type(error).__name__}: {error}; expected that of a "
                f"{type(self._optimizer).__name__} over the same parameters"
            ) from error

    def _exchange(self, others: Mapping[int, torch.Tensor]) -> None:
        """Put other parameters in the place of those with these ids, in groups and state."""
        for group in self._optimizer.param_groups:
            group["params"] = [others.get(id(parameter), parameter) for parameter in group["params"]]
        state = self._optimizer.state
        for parameter in [parameter for parameter in state if id(parameter) in others]:
            state[others[id(parameter)]] = state.pop(parameter)


def _widened(view: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the type in which sums are made: float32, or float64."""
    return view if view.dtype == torch.float64 else view.float()
