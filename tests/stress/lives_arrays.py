"""Lives with arrays and with JAX on simulated ranks: see `tests.stress.lives`."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests.stress.lives import Life, Record, digest_of

SHAPES = {"matrix": (12, 9), "bias": (9,), "number": ()}


def weights() -> dict[str, np.ndarray]:
    return {name: np.asarray(np.random.default_rng(3).standard_normal(s), np.float32) for name, s in SHAPES.items()}


class ArrayLife:
    """A life on a simulated rank. Subclasses `make` a front end and make steps with it."""

    it: Any

    def __init__(self, life: Life, transport: Any) -> None:
        self.life, self.transport, self.lone = life, transport, set[str]()
        self.density, self.weights = life.options["density"], weights()
        self.make()

    def rate(self, step: int) -> float:
        return 0.02 * self.life.factor(step) * (2 if "lone rate" in self.lone else 1)

    def run(self) -> list[Record]:
        records = []
        for step in range(self.life.steps):
            record, kinds = Record(step), {event.kind for event in self.life.at(step, rank=self.transport.rank)}
            self.lone = kinds & {"lone rate", "lone swap"}
            try:
                for kind in ("weights", "reload", "discard"):
                    if kind in kinds:
                        getattr(self, f"on_{kind}")()
                self.step(step, self.life.gradients(step, 0, self.transport.rank, SHAPES))
                record.digest = digest_of(self.weights.values())
            except Exception as error:
                record.fail(error)
            records.append(record)
            if record.error is not None:
                break
        return records

    def on_weights(self) -> None:
        for value in self.weights.values():
            value *= np.float32(0.5)

    def on_reload(self) -> None:
        state = copy.deepcopy(self.it.state_dict())
        self.make()
        self.it.load_state_dict(state)

    def on_discard(self) -> None:
        self.it.discard()


class AdamW(ArrayLife):
    def decays(self) -> dict[str, float]:
        first, second = (0.3, 0.1) if "lone swap" in self.lone else (0.1, 0.3)
        return {"matrix": first, "bias": second, "number": 0.0}

    def make(self) -> None:
        options: dict[str, Any] = {"comm": self.transport, "weight_decay": self.decays()}
        self.it = sc.SparseAdamW(self.weights, 0.02, density=self.density, **options)

    def step(self, step: int, gradients: dict[str, np.ndarray]) -> None:
        self.it.lr, self.it.weight_decay = self.rate(step), self.decays()
        self.it.step(gradients)


class Reducer(ArrayLife):
    def make(self) -> None:
        options: dict[str, Any] = {"op": "mean", "dense_below": 0, "skip_nonfinite": True}
        self.it = sc.Reducer(weights(), self.density, comm=self.transport, **options)

    def step(self, step: int, gradients: dict[str, np.ndarray]) -> None:
        outs = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
        for name, out in outs.items():
            self.it.push(name, gradients.get(name), out)
        done = self.it.wait()
        for name, out in outs.items():
            if done.usable and name not in done.without_gradient:
                self.weights[name] -= np.float32(0.1) * out


class LocalSteps(ArrayLife):
    """`weights` are the global parameters."""

    def make(self) -> None:
        self.local = {name: value.copy() for name, value in self.weights.items()}
        self.it = sc.LocalSteps(self.local, self.density, comm=self.transport, sync_every=2, fragments=2)

    def step(self, step: int, gradients: dict[str, np.ndarray]) -> None:
        for name, g in gradients.items():
            self.local[name] -= np.float32(self.rate(step)) * np.nan_to_num(g)
        self.it.step(self.local)
        self.weights = {name: np.array(value) for name, value in self.it.global_parameters().items()}

    def on_weights(self) -> None:
        for value in self.local.values():
            value *= np.float32(0.5)

    def on_reload(self) -> None:
        self.weights = self.local
        super().on_reload()

    def on_discard(self) -> None:
        pass


class Jax(ArrayLife):
    """`sparse_adamw`, `sparsify` and `allreduce_tree`, eagerly."""

    def make(self) -> None:
        import jax

        import sparsecomm.jax as sj

        self.jax, self.sj = jax, sj
        self.params = {name: jax.numpy.asarray(value) for name, value in self.weights.items()}
        it = self.optimizer(0)
        self.state = sj.init_residuals(self.params) if it is None else it.init(self.params)

    def optimizer(self, step: int) -> Any:
        """Return the transformation with the settings of a step."""
        if self.life.front == "jax adamw":
            decayed = ("matrix", "number") if "lone swap" in self.lone else ("matrix", "bias")
            options = {"weight_decay": 0.1, "mask": {name: name in decayed for name in self.params}}
            return self.sj.sparse_adamw(self.rate(step), **options, density=self.density, comm=self.transport)
        if self.life.front == "jax sparsify":
            return self.sj.sparsify(self.density, dense_below=0, comm=self.transport)
        return None

    def step(self, step: int, gradients: dict[str, np.ndarray]) -> None:
        tree = {n: self.jax.numpy.asarray(gradients.get(n, np.zeros(s, np.float32))) for n, s in SHAPES.items()}
        optimizer = self.optimizer(step)
        if optimizer is None:
            if step % 4 == 3:  # another tree with its own residuals
                other = {"a": tree["matrix"], "b": [tree["bias"]]}
                zeros = self.sj.init_residuals(other)
                self.sj.allreduce_tree(other, self.density, residuals=zeros, comm=self.transport)
            means, state = self.sj.allreduce_tree(
                tree, self.density, residuals=self.state, dense_below=0, comm=self.transport
            )
            if not all(np.isfinite(mean).all() for mean in means.values()):
                means, state = {}, self.state
        else:
            means, state = optimizer.update(tree, self.state, self.params)
        factor = 1.0 if self.life.front == "jax adamw" else -0.1
        self.params = {name: p + factor * means[name] if means else p for name, p in self.params.items()}
        self.state, self.weights = state, {name: np.asarray(p) for name, p in self.params.items()}

    def on_weights(self) -> None:
        self.params = {name: p * 0.5 for name, p in self.params.items()}

    def on_reload(self) -> None:
        self.state = self.jax.tree.map(lambda leaf: self.jax.numpy.array(np.asarray(leaf)), self.state)

    def on_discard(self) -> None:
        pass


def be_ranks(pipe: Any) -> None:
    """Run lives from the pipe. JAX's compiled functions are reused."""
    kinds = {"arrays": AdamW, "reducer": Reducer, "local": LocalSteps}
    while True:
        life = pipe.recv()
        kind, answer = kinds.get(life.front, Jax), []
        nodes = [rank // 2 for rank in range(life.P)] if life.P == 4 else None
        for result in simulated.run(
            life.P, lambda t, life=life, kind=kind: kind(life, t).run(), node_of_rank=nodes, catch=True
        ):
            if result.error is not None:
                (record := Record(-1)).fail(result.error)
                result.value = [record]
            answer.append(result.value)
        pipe.send(answer)
