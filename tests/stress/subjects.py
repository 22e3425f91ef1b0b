"""Objects with states, by name and with relative frequencies."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

import sparsecomm as sc

SHAPES = {"a": (3, 4), "b": (7,), "c": (20,), "d": (0, 2), "e": ()}
FLOAT32 = dict.fromkeys(SHAPES, "float32")


def arrays(rng: np.random.Generator, dtypes: Mapping[str, str] = FLOAT32) -> dict[str, Any]:
    return {name: np.asarray(rng.normal(size=shape), dtypes[name]) for name, shape in SHAPES.items()}


def tensors(rng: np.random.Generator) -> dict[str, Any]:
    import torch

    return {name: torch.from_numpy(np.array(array)) for name, array in arrays(rng).items()}


def digest(value: Any) -> str:
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


def schedule(rng: np.random.Generator) -> dict[str, Any]:
    sync_every = int(rng.integers(2, 5))
    drawn = {"fragments": int(rng.integers(1, 3)), "fragment_sync_delay": int(rng.integers(0, sync_every))}
    sums = {"algorithm": "allgather", "scope": "tensor", "wire": "plain", "op": "mean", "dense_below": 0}
    return {"sync_every": sync_every, **drawn, **sums}


class Subject:
    """An object with a state. Subclasses `make` it; `step` trains it and returns values that are equal on all ranks.

    All choices follow from ``rng``, which is the same on all ranks.
    """

    it: Any
    # When all ranks' states are damaged alike, only this key is: PyTorch's optimizers accept settings and states that
    # fail only in the next step.
    part: str | None = None
    keys: tuple[str, ...] = ()  # keys of the state whose values are equal on all ranks

    def __init__(self, comm: Any, rank: int, rng: np.random.Generator) -> None:
        self.moves = np.random.default_rng([int(rng.integers(2**31)), rank])
        single = rng.random() < 0.6
        self.dtypes = {name: "float32" if single else str(rng.choice(["float32", "float64"])) for name in SHAPES}
        self.make(comm, rng)

    def finish(self) -> None:
        """End exchanges under way."""

    def rebuild(self, comm: Any) -> None:
        self.it.rebuild(comm)

    def own(self) -> Any:
        return self.it.state_dict()

    def common(self) -> Any:
        state = self.it.state_dict()
        return [state[key] for key in self.keys]


class Reducer(Subject):
    keys = ("step", "bucket_bytes")

    def make(self, comm: Any, rng: np.random.Generator) -> None:
        self.it = sc.Reducer(
            arrays(rng, self.dtypes),
            float(rng.choice([0.3, 1.0])),
            comm=comm,
            scope=str(rng.choice(["tensor", "bucket", "model", "chunk"])),  # type: ignore[arg-type]
            chunk=8,
            bucket_bytes=int(rng.choice([30, 4000])),
            dense_below=int(rng.choice([0, 10])),
            momentum=float(rng.choice([0, 0.5])),
            skip_nonfinite=bool(rng.integers(2)),
        )

    def step(self) -> Any:
        mine = arrays(self.moves, self.dtypes)
        return self.it.reduce(mine).usable, mine

    def own(self) -> Any:
        return super().own(), self.it.groups

    def common(self) -> Any:
        return super().common(), self.it.groups


class LocalSteps(Subject):
    keys = ("round", "local_step", "global_parameters", "outer", "exchanges")

    def make(self, comm: Any, rng: np.random.Generator) -> None:
        self.parameters = arrays(rng, self.dtypes)
        outer = sc.NesterovSGD() if rng.random() < 0.7 else None
        self.it = sc.LocalSteps(self.parameters, 0.3, comm=comm, outer=outer, **schedule(rng))

    def step(self) -> Any:
        for values in self.parameters.values():
            values += np.asarray(self.moves.normal(size=values.shape), values.dtype)
        self.it.step(self.parameters)
        return self.common()

    def finish(self) -> None:
        self.it.finish(self.parameters)

    def rebuild(self, comm: Any) -> None:
        self.it.rebuild(comm, self.parameters)


class JaxLocalSteps(Subject):
    keys = LocalSteps.keys

    def make(self, comm: Any, rng: np.random.Generator) -> None:
        import jax.numpy as jnp
        import optax

        from sparsecomm import jax

        self.params = {name: jnp.asarray(array) for name, array in arrays(rng).items()}
        outer = optax.sgd(0.7, 0.9, nesterov=True) if rng.random() < 0.8 else None
        self.it = jax.LocalSteps(self.params, 0.3, comm=comm, outer=outer, **schedule(rng))

    def step(self) -> Any:
        moves = arrays(self.moves)
        self.params = self.it.step({name: array + moves[name] for name, array in self.params.items()})
        return self.common()

    def finish(self) -> None:
        self.params = self.it.finish(self.params)


class TorchSubject(Subject):
    """A subject with PyTorch parameters. Subclasses `hold` them, and may set ``stepped``, the optimizer that steps."""

    stepped: Any = None

    def make(self, comm: Any, rng: np.random.Generator) -> None:
        import torch

        self.named = {name: torch.nn.Parameter(tensor) for name, tensor in tensors(rng).items()}
        self.hold(comm, rng)

    def optimizer(self, rng: np.random.Generator) -> Any:
        import torch

        if rng.random() < 0.5:
            return torch.optim.SGD(self.named.values(), lr=0.7, momentum=0.9, nesterov=True)
        return torch.optim.Adam(self.named.values(), lr=0.1)

    def step(self) -> Any:
        for p, gradient in zip(self.named.values(), tensors(self.moves).values(), strict=True):
            p.grad = gradient
        (self.stepped or self.it).step()
        return self.common()


class SparseState(TorchSubject):
    keys = ("step", "bucket_bytes", "loss_scale")

    def hold(self, comm: Any, rng: np.random.Generator) -> None:
        momentum = float(rng.choice([0, 0.5]))
        self.it = sc.torch.SparseState(self.named.items(), 0.3, comm=comm, dense_below=0, momentum=momentum)
        self.it._scale = 8.0 if rng.integers(2) else None

    def step(self) -> Any:
        sums = tensors(self.moves)
        for name, gradient in sums.items():
            self.it.push(name, gradient)
        self.it.wait()
        return sums


class DistributedOptimizer(TorchSubject):
    part = "sparsecomm"

    def hold(self, comm: Any, rng: np.random.Generator) -> None:
        options = {"comm": comm, "dense_below": 0}
        self.it = sc.torch.DistributedOptimizer(self.optimizer(rng), self.named.items(), 0.3, **options)

    def common(self) -> Any:
        state = self.it.state_dict()
        return list(self.named.values()), state["state"], state["param_groups"], state["sparsecomm"]["step"]


class DiLoCo(TorchSubject):
    keys = LocalSteps.keys

    def hold(self, comm: Any, rng: np.random.Generator) -> None:
        import torch

        model = torch.nn.Module()
        for name, p in self.named.items():
            model.register_parameter(name, p)
        self.stepped = torch.optim.SGD(model.parameters(), lr=1.0)
        outer = self.optimizer(rng) if rng.random() < 0.8 else None
        self.it = sc.torch.DiLoCo(model, self.stepped, outer, 0.3, comm=comm, **schedule(rng))

    def finish(self) -> None:
        self.it.finish()


KINDS: dict[str, tuple[type[Subject], int]] = {
    "Reducer": (Reducer, 34),
    "LocalSteps": (LocalSteps, 34),
    "SparseState": (SparseState, 9),
    "DistributedOptimizer": (DistributedOptimizer, 9),
    "DiLoCo": (DiLoCo, 9),
    "jax.LocalSteps": (JaxLocalSteps, 5),
}
ON_HOST = {name: KINDS[name] for name in ("Reducer", "LocalSteps")}
