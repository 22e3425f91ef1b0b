"""One training on P ranks, from the same weights and batches; and densities at which methods send equal bytes."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch

import sparsecomm as sc
from bench.experiments.tasks import TASKS, Samples, evaluate, weights_of
from bench.experiments.trainer import Trainer
from sparsecomm.transport import Transport, simulated
from sparsecomm.transport.base import Bytes
from sparsecomm.transport.simulated import SimulatedTransport
from sparsecomm.wire import HEADER_BYTES

# Methods: the name in the table, and arguments of `sparsecomm.Reducer`.
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Dense", {"algorithm": "dense", "momentum": 0.0, "clip": None}),
    "allgather": ("Top-k", {"algorithm": "allgather"}),
    "tree": ("gTop-k, tree", {"algorithm": "tree"}),
    "butterfly": ("gTop-k, butterfly", {"algorithm": "butterfly"}),
    "split": ("gTop-k, split", {"algorithm": "split"}),
    "double": ("gTop-k, double", {"algorithm": "double"}),
}

MOMENTUM = 0.9
WARMUP = 0.1  # of all steps: four stages from density 0.25 on
RULE = 2  # version of error feedback and masking; a change invalidates all sparse runs
EVALUATIONS = 20

# The network of the virtual seconds, and the model whose messages are timed.
ALPHA, BETA = 50e-6, 8e-9  # per message, per byte: 1 Gb/s
LARGE = 25_600_000  # weights, as many as ResNet-50 has


@dataclass(frozen=True)
class Setting:
    """The parameters of a training. Parameters that dense gradients ignore have their defaults there."""

    model: str
    ranks: int
    method: str
    density: float  # after the warm-up; 1.0 for dense gradients
    seed: int
    steps: int
    momentum: float = MOMENTUM  # of sparse runs; dense ones use `MOMENTUM`
    rate: float = 1.0  # factor on the task's learning rate
    wire: str = "packed"
    warmup: float = WARMUP  # share of the steps in which the density falls
    decay: float = 1.0  # factor on the residuals, in each step
    equal_to: float = 0.0  # the density at which Top-k sends as many bytes per step; 0 if the density was given

    @property
    def unusual(self) -> str:
        """The parameters that are not the defaults, in words."""
        parts = (
            (self.momentum == MOMENTUM, f"momentum {self.momentum:g}"),
            (self.rate == 1.0, f"rate x {self.rate:g}"),
            (self.wire == "packed", self.wire),
            (self.warmup == WARMUP, f"warm-up {self.warmup:g}"),
            (self.decay == 1.0, f"decay {self.decay:g}"),
        )
        return ", ".join(words for usual, words in parts if not usual)

    @property
    def name(self) -> str:
        """The name of the method, with the parameters that are not the defaults."""
        return ", ".join(filter(None, (METHODS[self.method][0], self.unusual)))

    @property
    def warm(self) -> int:
        """The number of steps of the warm-up."""
        return 0 if self.method == "dense" else round(self.warmup * self.steps)

    @property
    def work(self) -> Setting:
        """The setting without its comparison: equal settings have equal outcomes."""
        return replace(self, equal_to=0.0)


def recipe(setting: Setting) -> dict[str, Any]:
    """Return everything else that the outcome depends on."""
    task = TASKS[setting.model]
    always = {"batch": task.batch, "rate": task.rate, "clip": task.clip}
    return always | ({"momentum": MOMENTUM} if setting.method == "dense" else {"masking": task.masking, "rule": RULE})


@dataclass
class Curve:
    """The course of a training, as one rank sees it. Losses and accuracies are on rank 0 only."""

    steps: list[int] = field(default_factory=list)  # after which the model was evaluated
    losses: list[float] = field(default_factory=list)  # at these steps, on some held-out samples
    accuracies: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)  # bytes that this rank had sent by then
    seconds: list[float] = field(default_factory=list)  # virtual time of communication; empty in earlier results
    warm: int = 0  # bytes and seconds at the end of the warm-up
    warm_seconds: float = 0.0
    loss: float = 0.0  # at the end, on all held-out samples
    accuracy: float = 0.0
    weights: str = ""  # SHA-256 of the weights at the end


def train(setting: Setting, transport: SimulatedTransport, factor: int) -> Curve:
    """Train as one rank; simulated bytes are ``factor`` times those sent, except headers."""
    trainer = Trainer(TASKS[setting.model], setting.seed, setting.steps)
    task, model, parameters, held_out = trainer.task, trainer.model, trainer.parameters, trainer.held_out
    some = Samples(held_out.inputs[: task.some], held_out.targets[: task.some])
    dense = setting.method == "dense"
    arguments = {"momentum": setting.momentum, "clip": task.clip} | METHODS[setting.method][1]
    if setting.decay != 1.0:
        arguments["decay"] = setting.decay
    reducer = sc.Reducer(
        {name: p.detach() for name, p in parameters.items()},
        1.0 if dense else sc.Warmup(setting.density, setting.warm),
        comm=transport,
        op="mean",
        scope="model",  # one selection from the whole gradient, as gTop-k has it
        dense_below=0,
        wire=setting.wire,
        masking=task.masking,
        **arguments,
    )
    optimizer = torch.optim.SGD(parameters.values(), task.rate, momentum=MOMENTUM if dense else 0.0)
    curve, every = Curve(), max(8, setting.steps // EVALUATIONS)

    def sent() -> int:
        headers = HEADER_BYTES * reducer.counters.messages_sent
        return headers + (reducer.counters.bytes_sent - headers) // factor

    for step in range(setting.steps):
        trainer.backward(trainer.batch()[transport.rank :: transport.size])  # a share of the batch of all ranks
        reducer.reduce({name: p.grad for name, p in parameters.items()})
        if dense and task.clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters.values(), task.clip)
        for group in optimizer.param_groups:
            group["lr"] = setting.rate * task.rate_at(step, setting.steps)
        optimizer.step()
        if step + 1 == setting.warm:
            curve.warm = sent()
            curve.warm_seconds = transport.seconds
        if (step + 1) % every == 0 or step + 1 in (1, setting.steps):
            curve.steps.append(step + 1)
            curve.sent.append(sent())
            curve.seconds.append(transport.seconds)
            if transport.rank == 0:
                loss, accuracy = evaluate(model, some)
                curve.losses.append(loss)
                curve.accuracies.append(accuracy)

    if transport.rank == 0:
        curve.loss, curve.accuracy = evaluate(model, held_out)
    digest = hashlib.sha256()
    for p in parameters.values():
        digest.update(p.detach().numpy().tobytes())
    curve.weights = digest.hexdigest()
    return curve


def combined(setting: Setting, curves: Sequence[Curve]) -> Curve:
    """Return the curve of rank 0, with the bytes of the rank that sends most; raise if the ranks' weights differ."""
    for rank, curve in enumerate(curves):
        if curve.weights != curves[0].weights:
            raise RuntimeError(f"{setting}: the final weights of ranks 0 and {rank} differ; expected the same bits")
    return replace(
        curves[0],
        sent=[max(of_ranks) for of_ranks in zip(*(curve.sent for curve in curves), strict=True)],
        seconds=[max(of_ranks) for of_ranks in zip(*(curve.seconds for curve in curves), strict=True)],
        warm=max(curve.warm for curve in curves),
        warm_seconds=max(curve.warm_seconds for curve in curves),
    )


def simulate(setting: Setting) -> Curve:
    """Run a training with all ranks in this process; messages take the virtual time of a model with `LARGE` weights."""
    factor = max(1, round(LARGE / weights_of(setting.model)))  # a whole number, so that bytes can be counted exactly

    def program(transport: SimulatedTransport) -> Curve:
        return train(setting, transport, factor)

    def weigh(message: Bytes) -> int:
        return HEADER_BYTES + factor * (len(message) - HEADER_BYTES)

    results = simulated.run(setting.ranks, program, alpha=ALPHA, beta=BETA, weigh=weigh)
    return combined(setting, [result.value for result in results if result.value is not None])


# -- equal bytes ------------------------------------------------------------------------------------------------------

NEAR = 0.005  # relative error in bytes that ends the search
TOLERANCE, MIN_RATIO = 0.02, 0.8  # relative excess, and ratio, that are accepted if bytes jump
STEPS = 4  # with residuals, on which the bytes of `split` depend


def equal_density(model: str, P: int, method: str, wire: str, density: float) -> float | None:
    """Return the density at which ``method`` sends as many bytes per step as Top-k at ``density``, or ``None``."""
    if method == "allgather":
        return density
    k = _equal_k(weights_of(model), P, method, wire, density)
    return None if k is None else k / weights_of(model)


@cache
def _equal_k(n: int, P: int, method: str, wire: str, density: float) -> int | None:
    """Return the nearest k with three significant digits.

    The bytes of some methods jump as k grows. Without a near k, the result sends fewer bytes, not more.
    """
    if P == 1:
        return None
    k = max(1, round(density * n))
    wanted = _sent(n, P, "allgather", wire, k)
    ratios: dict[int, float] = {}  # of the bytes wanted, by k
    low, high = 0, n
    while (k := _rounded(k)) not in (low, high):
        ratios[k] = _sent(n, P, method, wire, k) / wanted
        if abs(ratios[k] - 1) <= NEAR:
            return k
        low, high = (k, high) if ratios[k] < 1 else (low, k)
        k = round(k / ratios[k])  # bytes are about proportional to k
        if len(ratios) > 3 or not low < _rounded(k) < high:
            k = math.isqrt(max(low, 1) * high)  # bisection, of digits
    near = any(abs(ratio - 1) <= TOLERANCE for ratio in ratios.values())
    for step in range(-12, 13):  # a jump: search around it, since bytes may also fall as k grows
        k = _rounded(round(max(low, 1) * 1.15**step))
        if not near and 0 < k < n:
            ratios[k] = _sent(n, P, method, wire, k) / wanted
    fitting = {k: ratio for k, ratio in ratios.items() if MIN_RATIO <= ratio <= 1 + TOLERANCE}
    return min(fitting, key=lambda k: abs(fitting[k] - 1), default=None)


def _rounded(k: int) -> int:
    """Return ``k`` rounded down to three significant digits."""
    unit = 10 ** max(0, len(str(k)) - 3)
    return k // unit * unit


@cache
def _sent(n: int, P: int, method: str, wire: str, k: int) -> int:
    """Return the bytes of the rank that sends most."""
    algorithm = METHODS[method][1]["algorithm"]

    def program(transport: Transport) -> None:
        residual = np.zeros(n, np.float32)
        for gradient in _gradients(n, P)[transport.rank]:
            sc.sparse_allreduce(gradient, k, comm=transport, residual=residual, wire=wire, algorithm=algorithm)

    with mock.patch.dict(os.environ, SPARSECOMM_PROFILE="none"):  # measure no links
        return max(result.counters.bytes_sent for result in simulated.run(P, program))


@lru_cache(1)
def _gradients(n: int, P: int) -> list[npt.NDArray[Any]]:
    """Return heavy-tailed gradients of each rank."""
    random = np.random.default_rng(0)
    return [random.standard_normal((STEPS, n), dtype=np.float32) ** 3 for _ in range(P)]
