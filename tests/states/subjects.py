"""Objects with states, for tests of damaged states and of checkpoints."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest

import sparsecomm as sc
from tests.local_steps import programs
from tests.reducer.programs import gradients, reducer_of

SHAPES = {"weight": (6, 5), "bias": (5,), "scale": (3,)}


class Subject(NamedTuple):
    """An object with a state, a function ``step(number)``, its weights by name, and their module."""

    obj: Any
    step: Callable[[int], object]
    weights: dict[str, Any]
    module: Any = None


def digest(value: Any) -> str:
    """Return a hash of the keys, types and bits of nested values."""
    sha = hashlib.sha1()

    def add(value: Any) -> None:
        if isinstance(value, Mapping):
            for key in sorted(value, key=repr):
                sha.update(repr(key).encode())
                add(value[key])
        elif isinstance(value, (list, tuple)):
            sha.update(f"[{len(value)}".encode())
            for item in value:
                add(item)
        elif hasattr(value, "__dlpack__") or isinstance(value, (np.ndarray, np.generic)):
            array = np.ascontiguousarray(value.detach() if hasattr(value, "detach") else value)
            sha.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
        else:
            sha.update(repr(value).encode())

    add(value)
    return sha.hexdigest()


def small(step: int, rank: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([step, rank])
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def reducer(transport: Any, momentum: float = 0.5) -> Subject:
    stateful = reducer_of(transport, momentum=momentum, masking=False)
    return Subject(stateful, lambda step: stateful.reduce(gradients(10 * step + transport.rank)), {})


def local_steps(transport: Any) -> Subject:
    parameters = programs.initial()
    fragments = [["f", "a"], ["b", "c"], ["d", "e"]]
    schedule = {"sync_every": 4, "fragments": fragments, "fragment_sync_delay": 2, "fragment_update_alpha": 0.25}
    local = programs.made(transport, parameters, outer=sc.NesterovSGD(), **schedule)
    return Subject(local, lambda step: programs.train(local, parameters, transport.rank, step, step), parameters)


def adamw(transport: Any) -> Subject:
    weights = small(0, 0)
    optimizer = sc.SparseAdamW(weights, 0.01, density=0.2, comm=transport)
    return Subject(optimizer, lambda step: optimizer.step(small(step, transport.rank)), weights)


def of_torch(make: Callable[[Any, Any, Any, Any], Any]) -> Callable[[Any], Subject]:
    """Return a function for an object of PyTorch parameters, from (torch, sparsecomm.torch, module, transport)."""

    def build(transport: Any) -> Subject:
        torch = pytest.importorskip("torch")
        sct = pytest.importorskip("sparsecomm.torch")
        module = torch.nn.Module()
        for name, values in small(0, 0).items():
            module.register_parameter(name, torch.nn.Parameter(torch.from_numpy(values)))
        stateful, optimizer = make(torch, sct, module, transport)

        def step(number: int) -> None:
            for name, values in small(number, transport.rank).items():
                module.get_parameter(name).grad = torch.from_numpy(values)
            optimizer.step()

        return Subject(stateful, step, {name: p.detach() for name, p in module.named_parameters()}, module)

    return build


def inner_optimizer(kind: str, torch: Any, module: Any) -> Any:
    if kind == "SGD":
        return torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9, nesterov=True)
    return torch.optim.Adam(module.parameters(), lr=0.1)


def torch_adamw(torch: Any, sct: Any, module: Any, transport: Any) -> Any:
    optimizer = sct.SparseAdamW(module.named_parameters(), 0.01, density=0.2, comm=transport)
    return optimizer, optimizer


def distributed(kind: str) -> Any:
    def make(torch: Any, sct: Any, module: Any, transport: Any) -> Any:
        inner = inner_optimizer(kind, torch, module)
        optimizer = sct.DistributedOptimizer(inner, module.named_parameters(), 0.5, comm=transport, dense_below=0)
        return optimizer, optimizer

    return of_torch(make)


def diloco(kind: str) -> Any:
    def make(torch: Any, sct: Any, module: Any, transport: Any) -> Any:
        inner = torch.optim.SGD(module.parameters(), lr=0.1)
        outer = inner_optimizer(kind, torch, module)
        return sct.DiLoCo(module, inner, outer, 0.5, sync_every=2, dense_below=0, comm=transport), inner

    return of_torch(make)


def sparse_state(torch: Any, sct: Any, module: Any, transport: Any) -> Any:
    state = sct.SparseState(module.named_parameters(), comm=transport)

    class Scaler:
        def step(self) -> None:
            state._scale = 2.0 * (state._scale or 1.0)

    return state, Scaler()


def jax_local_steps(transport: Any) -> Subject:
    jnp, optax = pytest.importorskip("jax.numpy"), pytest.importorskip("optax")
    params = {name: jnp.asarray(values) for name, values in small(0, 0).items()}
    options = {"comm": transport, "sync_every": 2, "dense_below": 0}
    local = pytest.importorskip("sparsecomm.jax").LocalSteps(params, 0.5, outer=optax.sgd(0.7, 0.9), **options)

    def step(number: int) -> None:
        moves = small(number, transport.rank)
        params.update(local.step({name: values + moves[name] for name, values in params.items()}))

    return Subject(local, step, params)


KINDS: dict[str, Callable[[Any], Subject]] = {
    "Reducer": reducer,
    "LocalSteps": local_steps,
    "SparseAdamW": adamw,
    "torch SparseAdamW": of_torch(torch_adamw),
    "DistributedOptimizer of SGD": distributed("SGD"),
    "DistributedOptimizer of Adam": distributed("Adam"),
    "DiLoCo with SGD": diloco("SGD"),
    "DiLoCo with Adam": diloco("Adam"),
    "jax LocalSteps": jax_local_steps,
    "SparseState": of_torch(sparse_state),
}
