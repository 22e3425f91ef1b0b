"""Which ways to exchange gradients train a transformer under AdamW, and for how many bytes?

    python -m bench.experiments.adamw_rules ranks=4,8,16 way=sparse_adamw rate=1.5 --jobs 2
    python -m bench.experiments.adamw_rules --report bench/results/adamw.jsonl

Every combination of the values is trained on a task of `tasks`, with all ranks in one process. All ways are plain
NumPy except for the selection; way=sparse_adamw is the library itself. Each training is a line of the file OUT, and is
not repeated. Bytes are those that a rank sends: values, indices and scales; a dense float32 sum along a ring sends
8 (P - 1)/P bytes per weight and step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import sparsecomm as sc
from bench.experiments.grid import Grid, Outcome, mean, spread
from bench.experiments.tasks import TASKS, TRANSFORMERS, Task
from bench.experiments.trainer import Trainer, Vector
from sparsecomm.quantities import number_text
from sparsecomm.transport import simulated
from sparsecomm.wire import WireName

Indices = NDArray[Any]

_ONE, _TINY = np.float32(1), np.float32(1e-8)
_BLOCK = 64  # values that share a scale of 2 bytes
_LEVEL = {1: 0.798, 2: 0.996, 3: 0.586, 4: 0.335, 8: 0.031}  # spacing / root mean square, by bits


@dataclass(frozen=True)
class Rule:
    """A training."""

    model: str = "transformer"  # one of `TRANSFORMERS`, or with optimizer=sgd of `TASKS`
    ranks: int = 8
    per_node: int = 1  # ranks per node, for "sparse_adamw"; above 1, each node counts as one rank if there are several
    # "dense"; "gradients": error feedback; the optimizer uses the mean of all selections as the gradient; "updates":
    # local steps with rounds of one step: the updates of each rank's optimizer are exchanged with error feedback, as
    # means over the ranks that selected an index, with a decay of 0.8; "whole": complete sums at the indices of
    # `choose`, and one step of the optimizer for each step of waiting; "sparse_adamw": `sparsecomm.SparseAdamW` on
    # simulated ranks, which count the bytes, without a warm-up; "powersgd" (Vogels et al., NeurIPS 2019); "onebit":
    # 1-bit Adam (Tang et al., ICML 2021)
    way: str = "sparse_adamw"
    optimizer: str = "adamw"  # "adamw", "lion" or "sgd" (momentum 0.9)
    rate: float = 1.0  # factor on the model's learning rate
    density: float = 0.09  # of the result; for "gradients" and "updates" of a rank's selection
    bits: int = 2  # of a value
    # for "whole": "sum" (the largest complete sums, as if all ranks knew them), "owner" (by the residual of the range's
    # owner), "moment" (by the first moment of the owner's earlier gradients, as in SCAPE, 2026), "turn" (by one rank
    # after another), "cyclic" (each index in turn)
    choose: str = "sum"
    cap: int = 0  # for "whole": weights that waited for this many steps are chosen first; 0: none
    warmup: float = 0.02  # share of the steps, at the beginning, that send everything in 4 bits; "onebit" in 32
    rank: int = 4  # of PowerSGD's matrices
    seed: int = 0
    steps: int = 0  # 0 for the model's own number
    beta2: float = 0.95  # of AdamW
    weights: str = "float32"  # or "bfloat16"; "masters": bfloat16, with a copy in float32 that the optimizer changes

    def __post_init__(self) -> None:
        for name, known in _KNOWN.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)}: expected one of {', '.join(map(str, known))}")
        if self.model in TASKS and self.optimizer != "sgd":
            raise ValueError(f"model={self.model} is trained by SGD: expected optimizer=sgd, got {self.optimizer}")
        if self.way == "sparse_adamw" and (self.optimizer != "adamw" or self.bits not in _WIRES):
            raise ValueError("way=sparse_adamw: expected optimizer=adamw, and bits=1,2,4,8 or 32")
        if self.weights == "masters" and self.way == "sparse_adamw":
            raise ValueError("weights=masters: way=sparse_adamw needs no float32 copies; expected weights=bfloat16")
        if self.per_node > 1 and self.way != "sparse_adamw":
            raise ValueError(f"per_node={self.per_node} needs way=sparse_adamw; got way={self.way}")
        if self.way == "onebit" and self.optimizer != "adamw":
            raise ValueError(f"way=onebit is 1-bit Adam: expected optimizer=adamw, got {self.optimizer}")


_WIRES: dict[int, WireName] = {1: "packed_sign", 2: "packed_int2", 4: "packed_int4", 8: "packed_int8", 32: "packed"}
_KNOWN: dict[str, Sequence[Any]] = {
    "model": [*TRANSFORMERS, *TASKS],
    "way": ["dense", "gradients", "updates", "whole", "sparse_adamw", "powersgd", "onebit"],
    "optimizer": ["adamw", "lion", "sgd"],
    "choose": ["sum", "owner", "moment", "turn", "cyclic"],
    "bits": [*_LEVEL, 32],
    "weights": ["float32", "bfloat16", "masters"],
}


# -- values of few bits, and bytes ------------------------------------------------------------------------------------


def rounded(values: Vector, bits: int) -> Vector:
    """Round values to ``bits`` bits, with a scale for every `_BLOCK` values. No result is zero."""
    if bits == 32 or not len(values):
        return values
    blocks = np.concatenate([values, np.zeros(-len(values) % _BLOCK, np.float32)]).reshape(-1, _BLOCK)
    used = np.minimum(_BLOCK, len(values) - _BLOCK * np.arange(len(blocks)))[:, None]
    step = _LEVEL[bits] * np.sqrt(np.square(blocks).sum(1, keepdims=True) / used) * (2 if bits == 1 else 1)
    half = 2 ** (bits - 1)
    levels = np.clip(np.floor(blocks / np.maximum(step, np.float32(1e-30))), -half, half - 1) + np.float32(0.5)
    return (levels * step).ravel()[: len(values)].astype(np.float32)


def value_bits(bits: int) -> float:
    """Return the bits of a value, including its share of the scale."""
    return bits if bits == 32 else bits + 16 / _BLOCK


def index_bits(density: float) -> float:
    """Return the bits of an index at a density: of Elias-Fano coding or of a bitmap."""
    return 0.0 if density >= 1 else min(1 / density, math.log2(1 / density) + 2)


# -- optimizers -------------------------------------------------------------------------------------------------------


class Optimizer:
    """AdamW, Lion or SGD with momentum, which can make several steps at once with a mean gradient."""

    def __init__(self, kind: str, n: int, beta2: float = 0.95) -> None:
        self.kind, self.t = kind, 0
        self.b1, self.b2 = 0.9, beta2 if kind == "adamw" else 0.99
        self.m, self.v = np.zeros(n, np.float32), np.zeros(n, np.float32)

    def update(self, g: Vector, where: Any = slice(None), steps: Any = _ONE) -> Vector:
        """Return the update, before the learning rate, of ``steps`` steps with the gradient g at ``where``."""
        b1, b2, m = self.b1, self.b2, self.m[where]
        if self.kind == "sgd":  # the sum of the velocities of these steps
            decayed = b1**steps
            moved = m * (b1 * (1 - decayed) / (1 - b1)) + g * (steps - b1 * (1 - decayed) / (1 - b1)) / (1 - b1)
            self.m[where] = m * decayed + g * ((1 - decayed) / (1 - b1))
            return moved
        if self.kind == "lion":
            moved = steps * np.sign(b1 * m + (1 - b1) * g)
            self.m[where] = b2**steps * m + (1 - b2**steps) * g
            return moved
        self.m[where] = m = b1**steps * m + (1 - b1**steps) * g
        # The sum of a noisy gradients has a times the variance of one.
        self.v[where] = v = b2**steps * self.v[where] + (1 - b2**steps) * g * g * steps
        return steps * (m / (1 - b1**self.t)) / (np.sqrt(v / (1 - b2**self.t)) + _TINY)

    def scale(self) -> Vector:
        """Return the scale by which gradients are compared: their root mean square after the first step."""
        if self.kind != "adamw" or self.t < 2:
            return np.ones_like(self.v)
        return np.sqrt(self.v / np.float32(1 - self.b2 ** (self.t - 1))) + _TINY


# -- ways of exchanging -----------------------------------------------------------------------------------------------


class Way:
    """The state of all ranks between steps.

    ``step`` takes the ranks' gradients, the number of the step, and whether it is in the warm-up. It returns the update
    before the learning rate.
    """

    def __init__(self, rule: Rule, shapes: Sequence[tuple[int, ...]]) -> None:
        self.rule, self.shapes, self.n = rule, shapes, sum(map(math.prod, shapes))
        self.optimizer = Optimizer(rule.optimizer, self.n, rule.beta2)
        self.nbytes = 0.0  # that a rank sent
        self.step: Callable[[Vector, int, bool], Vector] = getattr(self, f"_{rule.way}")
        self.residual = np.zeros((1 if rule.way == "dense" else rule.ranks, self.n), np.float32)
        self.age = np.zeros(self.n, np.float32)
        self.total = np.zeros(self.n, np.float32)  # sums that owners have not sent yet
        self.moment = np.zeros_like(self.residual if rule.choose == "moment" else self.residual[:0])
        own = self.residual if rule.way == "updates" else ()
        self.own = [Optimizer(rule.optimizer, self.n, rule.beta2) for _ in own]
        self.right: dict[int, Vector] = {}  # PowerSGD's matrices, by parameter

    def _sent(self, count: float, bits: float) -> None:
        self.nbytes += count * bits / 8 * (self.rule.ranks - 1) / self.rule.ranks

    def _dense(self, gradients: Vector, step: int, first: bool) -> Vector:
        self._sent(2 * self.n, 32)
        return self.optimizer.update(gradients[0])

    def _everything(self, gradients: Vector, bits: int = 4) -> Vector:
        """Exchange everything in few bits, with error feedback on both sides, and make one step."""
        self.residual += gradients
        scale, total = self.optimizer.scale(), self.total
        for residual in self.residual:
            sent = rounded(residual / scale, bits) * scale
            residual -= sent
            total += sent
        result = rounded(total / scale, bits) * scale
        total -= result
        self._sent(2 * self.n, value_bits(bits))
        return self.optimizer.update(result / len(gradients))

    def _gradients(self, gradients: Vector, step: int, first: bool) -> Vector:
        if first:
            return self._everything(gradients)
        self.residual += gradients
        return self.optimizer.update(self._selected(self.residual)[0] / len(gradients))

    def _updates(self, gradients: Vector, step: int, first: bool) -> Vector:
        for residual, own, g in zip(self.residual, self.own, gradients, strict=True):
            own.t = self.optimizer.t
            residual *= 0.8
            residual += own.update(g)
        total, count = self._selected(self.residual)
        return total / np.maximum(count, 1)

    def _selected(self, rows: Vector) -> tuple[Vector, Vector]:
        """Return the sum of all selections, which leave the rows, and the number of contributors of each element."""
        rule, total, count = self.rule, np.zeros(self.n, np.float32), np.zeros(self.n, np.float32)
        k = max(1, round(rule.density * self.n))
        for row in rows:
            indices = sc.topk(row, k).indices
            sent = rounded(row[indices], rule.bits)
            row[indices] -= sent
            total[indices] += sent
            count[indices] += 1
        self._sent(k * rule.ranks, index_bits(rule.density) + value_bits(rule.bits))  # to all: allgather
        return total, count

    def _whole(self, gradients: Vector, step: int, first: bool) -> Vector:
        if first:
            return self._everything(gradients)
        self.age += 1
        rule, n, P, scale = self.rule, self.n, self.rule.ranks, self.optimizer.scale()
        self.residual += gradients
        k = max(1, round(rule.density * n))
        overdue = np.where(self.age >= rule.cap, np.float32(1e6), _ONE) if rule.cap else _ONE
        if rule.choose == "sum":
            where = sc.topk((self.residual.sum(0) + self.total) / scale * overdue, k).indices
        elif rule.choose == "turn":
            where = sc.topk(self.residual[step % P] / scale * overdue, k).indices
        elif rule.choose == "cyclic":
            where = np.arange(step % round(1 / rule.density), n, round(1 / rule.density))
        else:
            ends = [n * rank // P for rank in range(P + 1)]
            rows = self.residual if rule.choose == "owner" else self.moment
            where = np.concatenate(
                [
                    begin + sc.topk((row / scale * overdue)[begin:end].copy(), max(1, k // P)).indices
                    for row, begin, end in zip(rows, ends, ends[1:], strict=False)
                ]
            )
        if rule.choose == "moment":
            self.moment += np.float32(1 - self.optimizer.b1) * (gradients - self.moment)
        at = scale[where]
        for row in self.residual:
            sent = rounded(row[where] / at, rule.bits) * at
            row[where] -= sent
            self.total[where] += sent
        self._sent(len(where), 2 * value_bits(rule.bits) + (rule.choose != "cyclic") * index_bits(rule.density))
        return self._stepped(where, at)

    def _stepped(self, where: Indices, at: Vector) -> Vector:
        """Return the update at these indices: one step for each step without an update."""
        result = rounded(self.total[where] / at, self.rule.bits) * at
        self.total[where] -= result
        steps = self.age[where]
        self.age[where] = 0
        update = np.zeros(self.n, np.float32)
        update[where] = self.optimizer.update(result / self.rule.ranks / steps, where, steps)
        return update

    def _powersgd(self, gradients: Vector, step: int, first: bool) -> Vector:
        if first:
            return self._everything(gradients, 8)
        self.residual += gradients
        mean, begin, rank = np.empty(self.n, np.float32), 0, self.rule.rank
        for i, shape in enumerate(self.shapes):
            rows, count = shape[0], math.prod(shape)
            columns, end = count // rows, begin + count
            own = self.residual[:, begin:end]
            if len(shape) > 1 and (rows + columns) * rank < count:
                start = np.random.default_rng(i).standard_normal((columns, rank)).astype(np.float32)
                matrices = own.reshape(-1, rows, columns)
                left = np.linalg.qr((matrices @ self.right.get(i, start)).mean(0))[0]
                self.right[i] = (matrices.transpose(0, 2, 1) @ left).mean(0)
                mean[begin:end] = (left @ self.right[i].T).ravel()
                count = (rows + columns) * rank
            else:
                mean[begin:end] = own.mean(0)
            self._sent(2 * count, 32)
            begin = end
        self.residual -= mean
        return self.optimizer.update(mean)

    def _onebit(self, gradients: Vector, step: int, first: bool) -> Vector:
        optimizer = self.optimizer
        if first:
            self._sent(2 * self.n, 32)
            return optimizer.update(gradients.mean(0))
        total = self.total  # sums of momenta; v is frozen
        for residual, g in zip(self.residual, gradients, strict=True):
            residual += optimizer.b1 * optimizer.m + (1 - optimizer.b1) * g
            sent = rounded(residual, 1)
            residual -= sent
            total += sent
        result = rounded(total, 1)
        total -= result
        optimizer.m = result / len(gradients)
        self._sent(2 * self.n, value_bits(1))
        return optimizer.m / (np.sqrt(optimizer.v) + _TINY)


# -- training ---------------------------------------------------------------------------------------------------------


def clip(gradient: Vector, limit: float | None, ranks: int) -> None:
    """Clip a rank's gradient, in place, to its share of the norm."""
    gradient *= min(1.0, (limit or math.inf) * math.sqrt(ranks) / max(1e-12, float(np.linalg.norm(gradient))))


def rate_of(rule: Rule, task: Task, step: int, steps: int) -> float:
    """Return the learning rate: a linear warm-up, then a cosine to a twentieth; for SGD a cosine to zero."""
    if rule.optimizer == "sgd":
        return rule.rate * task.rate_at(step, steps)
    return rule.rate * task.rate * min(1, (step + 1) / 50) * (0.05 + 0.95 * task.rate_at(step, steps) / task.rate)


def train_by_library(rule: Rule) -> Outcome:
    """Return the outcome of a training by `sparsecomm.SparseAdamW` on simulated ranks."""

    def program(transport: simulated.SimulatedTransport) -> tuple[Outcome, float]:
        trainer = Trainer(TRANSFORMERS[rule.model], rule.seed, rule.steps)
        weights = {name: p.detach().to(getattr(torch, rule.weights)) for name, p in trainer.parameters.items()}
        trainer.use(weights)
        optimizer = sc.SparseAdamW(
            weights,
            betas=(0.9, rule.beta2),
            weight_decay={name: 0.1 for name, weight in weights.items() if weight.ndim > 1},
            density=rule.density,
            wire=_WIRES[rule.bits],
            comm=transport,
        )
        ends = np.cumsum(trainer.sizes)
        gradient = np.empty(ends[-1], np.float32)
        for step in range(trainer.steps):
            trainer.gradient(trainer.batch()[transport.rank :: rule.ranks], gradient)
            clip(gradient, trainer.task.clip, rule.ranks)
            optimizer.lr = rate_of(rule, trainer.task, step, trainer.steps)
            split = np.split(gradient, ends[:-1])
            optimizer.step({name: g.reshape(weights[name].shape) for name, g in zip(weights, split, strict=True)})
            trainer.use(weights)
        outcome = trainer.outcome() if transport.rank == 0 else {}
        return outcome, optimizer.reducer.counters.bytes_sent / trainer.steps / len(gradient)

    nodes = [rank // rule.per_node for rank in range(rule.ranks)]
    by_rank = simulated.run(rule.ranks, program, node_of_rank=nodes)
    results = [result.value for result in by_rank if result.value is not None]
    return _with_bytes(rule, results[0][0], fmean(nbytes for _, nbytes in results))


def _with_bytes(rule: Rule, outcome: Outcome, nbytes: float) -> Outcome:
    """Add bytes per weight and step, and how many times as many a dense ring sends."""
    losses = {name: outcome[name] for name in ("loss", "accuracy")}
    return losses | {"bytes": nbytes, "ring": 8 * (rule.ranks - 1) / rule.ranks / nbytes}


def train(rule: Rule) -> Outcome:
    """Return the outcome of a training."""
    if rule.way == "sparse_adamw":
        return train_by_library(rule)
    trainer = Trainer({**TRANSFORMERS, **TASKS}[rule.model], rule.seed, rule.steps)
    way = Way(rule, [tuple(p.shape) for p in trainer.parameters.values()])
    gradients = np.zeros_like(way.residual)
    for step in range(trainer.steps):
        batch, exact = trainer.batch(), {name: p.detach().clone() for name, p in trainer.parameters.items()}
        if rule.weights != "float32":
            trainer.use({name: weight.bfloat16() for name, weight in exact.items()})
        for rank, g in enumerate(gradients):
            trainer.gradient(batch[rank :: len(gradients)], g)
            clip(g, trainer.task.clip, len(gradients))
        if rule.weights == "masters":
            trainer.use(exact)
        way.optimizer.t += 1
        update = way.step(gradients, step, step < rule.warmup * trainer.steps)
        if not np.isfinite(update).all():
            break
        rate = rate_of(rule, trainer.task, step, trainer.steps)
        trainer.subtract(update, rate, 0.0 if rule.optimizer == "sgd" else 0.1)
    if rule.weights != "float32":
        trainer.use({name: p.detach().bfloat16() for name, p in trainer.parameters.items()})
    return _with_bytes(rule, trainer.outcome(), way.nbytes / trainer.steps / way.n)


GRID = Grid(
    Rule,
    "rule",
    "Ways to exchange under optimizers with moments",
    {"model": "model", "ranks": "P", "way": "way"},
    {
        "nats": spread("loss"),
        "seeds": len,
        "%": mean("accuracy", "{:.1f}".format),
        "bytes per weight": mean("bytes", number_text),
        "ring / this": mean("ring", "{:.1f}".format),
    },
    lambda rule, seeds: (rule.model, rule.ranks, rule.optimizer, fmean(o["loss"] for o in seeds)),
)


def main() -> None:
    GRID.run(__doc__, train, "adamw.jsonl")


if __name__ == "__main__":
    main()
