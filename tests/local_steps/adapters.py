"""One interface to local steps with NumPy arrays, a PyTorch model and a JAX tree."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from tests.local_steps.programs import PLAIN, Arrays, Frozen, initial, move, nothing_frozen

SGD = (float, float, bool)  # learning rate, momentum, Nesterov


class OnArrays:
    """Local steps of one rank, and the parameters that it trains.

    Attributes:
        local: the object under test.
    """

    local: Any

    def __init__(
        self, transport: Any, density: Any = 0.1, sgd: Any = None, start: Arrays | None = None, **options: Any
    ) -> None:
        self.start(initial() if start is None else start, transport, density, sgd, PLAIN | options)

    def start(self, parameters: Arrays, transport: Any, density: Any, sgd: Any, options: dict[str, Any]) -> None:
        self.parameters = parameters
        outer = sc.NesterovSGD(*sgd) if sgd else None
        self.local = sc.LocalSteps(parameters, density, comm=transport, outer=outer, **options)

    def values(self) -> Arrays:
        return self.parameters

    def write(self, values: Arrays) -> None:
        for name, array in values.items():
            self.parameters[name][...] = array

    def step(self, rank: int, number: int, frozen: Frozen = nothing_frozen) -> None:
        values = {name: array.copy() for name, array in self.values().items()}
        move(values, rank, number, frozen)
        self.write(values)
        self.count()

    def count(self) -> None:
        """Count the local step that has been taken."""
        self.local.step(self.parameters)

    def finish(self) -> None:
        self.local.finish(self.parameters)

    def rebuild(self, transport: Any, joining: bool = False) -> sc.Rebuilt:
        rebuilt: sc.Rebuilt = self.local.rebuild(transport, self.parameters, joining=joining)
        return rebuilt

    def global_parameters(self) -> Arrays:
        return dict(self.local.global_parameters())


class OnTorch(OnArrays):
    def start(self, parameters: Arrays, transport: Any, density: Any, sgd: Any, options: dict[str, Any]) -> None:
        torch = pytest.importorskip("torch")
        from sparsecomm.torch import DiLoCo

        self.model = torch.nn.Module()
        for name, values in parameters.items():
            self.model.register_parameter(name, torch.nn.Parameter(torch.from_numpy(values.copy())))
        every = list(self.model.parameters())
        outer = torch.optim.SGD(every, sgd[0], sgd[1], nesterov=sgd[2]) if sgd else None
        self.inner = torch.optim.SGD(every, lr=0.0)
        for parameter in every:
            parameter.grad = torch.ones_like(parameter)
        self.local = DiLoCo(self.model, self.inner, outer, density, comm=transport, **options)

    def values(self) -> Arrays:
        return {name: p.detach().numpy() for name, p in self.model.named_parameters()}

    def write(self, values: Arrays) -> None:
        for name, array in self.values().items():
            array[...] = values[name]

    def count(self) -> None:
        self.inner.step()

    def finish(self) -> None:
        self.local.finish()

    def rebuild(self, transport: Any, joining: bool = False) -> sc.Rebuilt:
        rebuilt: sc.Rebuilt = self.local.rebuild(transport, joining=joining)
        return rebuilt

    def global_parameters(self) -> Arrays:
        return {name: tensor.numpy() for name, tensor in self.local.global_parameters().items()}


class OnJax(OnArrays):
    def start(self, parameters: Arrays, transport: Any, density: Any, sgd: Any, options: dict[str, Any]) -> None:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")
        import sparsecomm.jax as sj

        jax.config.update("jax_enable_x64", True)
        self.names, self.write_leaf = list(parameters), jax.numpy.array
        self.write(parameters)
        outer = optax.sgd(sgd[0], sgd[1], nesterov=sgd[2]) if sgd else None
        if "fragments" in options and not isinstance(options["fragments"], int):
            paths = dict(zip(self.names, jax.tree_util.tree_flatten_with_path(self.parameters)[0], strict=True))
            options["fragments"] = [
                [jax.tree_util.keystr(paths[name][0]) for name in names] for names in options["fragments"]
            ]
        self.local = sj.LocalSteps(self.parameters, density, comm=transport, outer=outer, **options)

    def values(self) -> Arrays:
        return self.named(self.parameters)

    def named(self, tree: Any) -> Arrays:
        leaves = [np.asarray(leaf) for leaf in (tree["first"], *tree["rest"])]
        return dict(zip(self.names, leaves, strict=True))

    def write(self, values: Arrays) -> None:
        first, *rest = (self.write_leaf(values[name]) for name in self.names)
        self.parameters: Any = {"first": first, "rest": rest}

    def count(self) -> None:
        self.parameters = self.local.step(self.parameters)

    def finish(self) -> None:
        self.parameters = self.local.finish(self.parameters)

    def rebuild(self, transport: Any, joining: bool = False) -> sc.Rebuilt:
        rebuilt: sc.Rebuilt
        rebuilt, self.parameters = self.local.rebuild(transport, self.parameters, joining=joining)
        return rebuilt

    def global_parameters(self) -> Arrays:
        return self.named(self.local.global_parameters())


ADAPTERS = {"arrays": OnArrays, "torch": OnTorch, "jax": OnJax}
