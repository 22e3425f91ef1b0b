"""What has a state that ranks train, save and load: by name, and how many of a hundred cases it is drawn in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import sparsecomm as sc

__all__ = ["KINDS", "ON_HOST", "Subject"]

_SHAPES = {"a": (3, 4), "b": (7,), "c": (20,), "d": (0, 2), "e": ()}
_FLOAT32 = dict.fromkeys(_SHAPES, "float32")


def _arrays(rng: np.random.Generator, dtypes: Mapping[str, str]) -> dict[str, Any]:
    return {name: np.asarray(rng.normal(size=shape), dtypes[name]) for name, shape in _SHAPES.items()}


class Subject:
    """What ranks train, save and load; all choices follow from ``rng``, which is alike on all ranks.

    Attributes:
        it: what has the state.
        part: of a state, the one that may be damaged alike on all ranks; ``None``: any. PyTorch's optimizers take
            settings and state that fail in the next step only.
        keys: of the state, what all ranks must hold alike.
    """

    it: Any
    part: str | None = None
    keys: tuple[str, ...] = ()

    def __init__(self, comm: Any, rank: int, rng: np.random.Generator) -> None:
        self.moves = np.random.default_rng([int(rng.integers(2**31)), rank])
        single = rng.random() < 0.6
        self.dtypes = {name: "float32" if single else str(rng.choice(["float32", "float64"])) for name in _SHAPES}
        self.make(comm, rng)

    def make(self, comm: Any, rng: np.random.Generator) -> None:
        """Make it."""
        raise NotImplementedError

    def step(self) -> Any:
        """Train a step; return what is alike on all ranks."""
        raise NotImplementedError

    def finish(self) -> None:
        """End what is under way."""

    def own(self) -> Any:
        """Return all that a refused state may not change."""
        return self.it.state_dict()

    def common(self) -> Any:
        """Return what all ranks must hold alike."""
        state = self.it.state_dict()
        return [state[key] for key in self.keys]


class _Reducer(Subject):
    keys = ("step", "order", "bucket_bytes")

    def make(self, comm: Any, rng: np.random.Generator) -> None:
        self.it = sc.Reducer(
            _arrays(rng, self.dtypes),
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
        mine = _arrays(self.moves, self.dtypes)
        return self.it.reduce(mine).usable, mine

    def own(self) -> Any:
        return super().own(), self.it.groups

    def common(self) -> Any:
        return super().common(), self.it.groups


class _LocalSteps(Subject):
    keys = ("round", "local_step", "global_parameters", "outer", "exchanges")

    def make(self, comm: Any, rng: np.random.Generator) -> None:
        self.parameters = _arrays(rng, self.dtypes)
        outer = sc.NesterovSGD() if rng.random() < 0.7 else None
        self.it = sc.LocalSteps(self.parameters, 0.3, comm=comm, outer=outer, **_schedule(rng))

    def step(self) -> Any:
        for values in self.parameters.values():
            values += np.asarray(self.moves.normal(size=values.shape), values.dtype)
        self.it.step(self.parameters)
        return self.common()

    def finish(self) -> None:
        self.it.finish(self.parameters)


def _schedule(rng: np.random.Generator) -> dict[str, Any]:
    sync_every = int(rng.integers(2, 5))
    drawn = {"fragments": int(rng.integers(1, 3)), "fragment_sync_delay": int(rng.integers(0, sync_every))}
    sums = {"algorithm": "allgather", "scope": "tensor", "wire": "plain", "op": "mean", "dense_below": 0}
    return {"sync_every": sync_every, **drawn, **sums}


class _Jax(_LocalSteps):
    def make(self, comm: Any, rng: np.random.Generator) -> None:
        import jax.numpy as jnp
        import optax  # type: ignore[import-untyped, unused-ignore]

        from sparsecomm.jax import LocalSteps

        self.params = {name: jnp.asarray(a) for name, a in _arrays(rng, _FLOAT32).items()}
        outer = optax.sgd(0.7, 0.9, nesterov=True) if rng.random() < 0.8 else None
        self.it = LocalSteps(self.params, 0.3, comm=comm, outer=outer, **_schedule(rng))

    def step(self) -> Any:
        moves = _arrays(self.moves, _FLOAT32)
        self.params = self.it.step({name: a + moves[name] for name, a in self.params.items()})
        return self.common()

    def finish(self) -> None:
        self.params = self.it.finish(self.params)


class _Torch(Subject):
    """With parameters of PyTorch."""

    def make(self, comm: Any, rng: np.random.Generator) -> None:
        import torch

        self.named = {name: torch.nn.Parameter(p) for name, p in self._tensors(rng).items()}
        self.hold(comm, rng)

    def hold(self, comm: Any, rng: np.random.Generator) -> None:
        """Make what has the state."""
        raise NotImplementedError

    def _tensors(self, rng: np.random.Generator) -> dict[str, Any]:
        import torch

        return {name: torch.from_numpy(np.array(a)) for name, a in _arrays(rng, _FLOAT32).items()}

    def optimizer(self, rng: np.random.Generator) -> Any:
        import torch

        if rng.random() < 0.5:
            return torch.optim.SGD(self.named.values(), lr=0.7, momentum=0.9, nesterov=True)
        return torch.optim.Adam(self.named.values(), lr=0.1)

    def step(self) -> Any:
        for p, gradient in zip(self.named.values(), self._tensors(self.moves).values(), strict=True):
            p.grad = gradient
        self.stepped.step()
        return self.common()

    @property
    def stepped(self) -> Any:
        """The optimizer that steps."""
        return self.it


class _SparseState(_Torch):
    keys = ("step", "order", "bucket_bytes", "loss_scale")

    def hold(self, comm: Any, rng: np.random.Generator) -> None:
        from sparsecomm.torch import SparseState

        momentum = float(rng.choice([0, 0.5]))
        self.it = SparseState(self.named.items(), 0.3, comm=comm, dense_below=0, momentum=momentum)
        self.it._scale = 8.0 if rng.integers(2) else None

    def step(self) -> Any:
        sums = self._tensors(self.moves)
        for name, gradient in sums.items():
            self.it.push(name, gradient)
        self.it.wait()
        return sums


class _DistributedOptimizer(_Torch):
    part = "sparsecomm"

    def hold(self, comm: Any, rng: np.random.Generator) -> None:
        from sparsecomm.torch import DistributedOptimizer

        self.it = DistributedOptimizer(self.optimizer(rng), self.named.items(), 0.3, comm=comm, dense_below=0)

    def common(self) -> Any:
        state = self.it.state_dict()
        return list(self.named.values()), state["state"], state["param_groups"], state["sparsecomm"]["step"]


class _DiLoCo(_Torch):
    keys = _LocalSteps.keys

    def hold(self, comm: Any, rng: np.random.Generator) -> None:
        import torch

        from sparsecomm.torch import DiLoCo

        model = torch.nn.Module()
        for name, p in self.named.items():
            model.register_parameter(name, p)
        self.inner = torch.optim.SGD(model.parameters(), lr=1.0)
        outer = self.optimizer(rng) if rng.random() < 0.8 else None
        self.it = DiLoCo(model, self.inner, outer, 0.3, comm=comm, **_schedule(rng))

    @property
    def stepped(self) -> Any:
        return self.inner

    def finish(self) -> None:
        self.it.finish()


KINDS: dict[str, tuple[type[Subject], int]] = {
    "Reducer": (_Reducer, 34),
    "LocalSteps": (_LocalSteps, 34),
    "SparseState": (_SparseState, 9),
    "DistributedOptimizer": (_DistributedOptimizer, 9),
    "DiLoCo": (_DiLoCo, 9),
    "jax.LocalSteps": (_Jax, 5),
}
ON_HOST = {name: KINDS[name] for name in ("Reducer", "LocalSteps")}
