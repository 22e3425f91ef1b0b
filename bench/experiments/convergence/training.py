"""One training: P ranks, from the same weights, on the same batches, with any of the methods."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import sparsecomm as sc
from bench.experiments.tasks import TASKS, Samples, evaluate, weights_of
from bench.experiments.trainer import Trainer
from sparsecomm.transport import Transport, simulated
from sparsecomm.transport.base import Bytes
from sparsecomm.transport.simulated import SimulatedTransport
from sparsecomm.wire import HEADER_BYTES

# Methods: the name in the table, and arguments of `sparsecomm.Reducer`; None: only in earlier results.
METHODS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "dense": ("Dense", {"algorithm": "dense", "momentum": 0.0, "clip": None}),
    "allgather": ("Top-k", {"algorithm": "allgather"}),
    "tree": ("gTop-k, tree", {"algorithm": "tree"}),
    "butterfly": ("gTop-k, butterfly", {"algorithm": "butterfly"}),
    "split": ("gTop-k, split", {"algorithm": "split"}),
    "double": ("gTop-k, double", {"algorithm": "double"}),
    "butterfly-complete": ("gTop-k, complete", None),
}

MOMENTUM = 0.9
WARMUP = 0.1  # of all steps: four stages from density 0.25 on
RULE = 2  # version of error feedback and masking; a change invalidates all sparse trainings
EVALUATIONS = 20

# The network of the virtual seconds, and the model whose messages are timed.
ALPHA, BETA = 50e-6, 8e-9  # per message, per byte: 1 Gb/s
LARGE = 25_600_000  # weights, as many as ResNet-50 has


@dataclass(frozen=True)
class Setting:
    """The parameters of a training. Parameters that dense gradients ignore have their defaults there.

    Attributes:
        density: after the warm-up; 1.0 for dense gradients.
        momentum: of sparse trainings; dense ones use `MOMENTUM`.
        rate: factor on the task's learning rate.
        wire: the wire format of sparse messages.
        warmup: share of the steps in which the density falls.
        decay: factor on the residuals, in each step.
        equal_to: the density at which Top-k sends as many bytes per step; 0 if the density was given.
    """

    model: str
    ranks: int
    method: str
    density: float
    seed: int
    steps: int
    momentum: float = MOMENTUM
    rate: float = 1.0
    wire: str = "packed"
    warmup: float = WARMUP
    decay: float = 1.0
    equal_to: float = 0.0

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
    """The course of a training, as one rank sees it.

    Attributes:
        steps: after which the model was evaluated.
        losses, accuracies: at these steps, on some held-out samples; on rank 0 only.
        sent: bytes that this rank had sent by then.
        seconds: virtual time of communication until then, for the large model; empty over MPI.
        warm, warm_seconds: bytes and seconds at the end of the warm-up.
        loss, accuracy: at the end, on all held-out samples; on rank 0 only.
        weights: SHA-256 of the weights at the end.
    """

    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    warm: int = 0
    warm_seconds: float = 0.0
    loss: float = 0.0
    accuracy: float = 0.0
    weights: str = ""


def train(
    setting: Setting, transport: Transport, advance: Callable[[], None] = lambda: None, *, factor: int = 1
) -> Curve:
    """Train as one rank.

    Args:
        setting: the same on all ranks.
        transport: of MPI or of simulated ranks.
        advance: called after each step.
        factor: of simulated bytes to sent bytes, except headers.
    """
    trainer = Trainer(TASKS[setting.model], setting.seed, setting.steps)
    task, model, parameters, held_out = trainer.task, trainer.model, trainer.parameters, trainer.held_out
    some = Samples(held_out.inputs[: task.some], held_out.targets[: task.some])
    dense = setting.method == "dense"
    arguments = {"momentum": setting.momentum, "clip": task.clip} | (METHODS[setting.method][1] or {})
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
            curve.warm_seconds = transport.seconds if isinstance(transport, SimulatedTransport) else 0.0
        if (step + 1) % every == 0 or step + 1 in (1, setting.steps):
            curve.steps.append(step + 1)
            curve.sent.append(sent())
            if isinstance(transport, SimulatedTransport):
                curve.seconds.append(transport.seconds)
            if transport.rank == 0:
                loss, accuracy = evaluate(model, some)
                curve.losses.append(loss)
                curve.accuracies.append(accuracy)
        advance()

    if transport.rank == 0:
        curve.loss, curve.accuracy = evaluate(model, held_out)
    digest = hashlib.sha256()
    for p in parameters.values():
        digest.update(p.detach().numpy().tobytes())
    curve.weights = digest.hexdigest()
    return curve


def combined(setting: Setting, curves: Sequence[Curve]) -> Curve:
    """Return the curve of rank 0, with the bytes of the rank that sends most.

    Raises:
        RuntimeError: the ranks' weights differ.
    """
    for rank, curve in enumerate(curves):
        if curve.weights != curves[0].weights:
            raise RuntimeError(
                f"{setting}: at the end the weights of ranks 0 and {rank} differ; expected the same bits"
            )
    return replace(
        curves[0],
        sent=[max(of_ranks) for of_ranks in zip(*(curve.sent for curve in curves), strict=True)],
        seconds=[max(of_ranks) for of_ranks in zip(*(curve.seconds for curve in curves), strict=True)],
        warm=max(curve.warm for curve in curves),
        warm_seconds=max(curve.warm_seconds for curve in curves),
    )


def simulate(setting: Setting, advance: Callable[[], None] = lambda: None) -> Curve:
    """Run a training with all ranks in this process; the bits are the same as with MPI.

    Messages take the virtual time of a model with `LARGE` weights and the same densities.

    Args:
        advance: called after each step.
    """
    factor = max(1, round(LARGE / weights_of(setting.model)))  # a whole number, so that bytes can be counted exactly

    def program(transport: Transport) -> Curve:
        return train(setting, transport, advance if transport.rank == 0 else lambda: None, factor=factor)

    def weigh(message: Bytes) -> int:
        return HEADER_BYTES + factor * (len(message) - HEADER_BYTES)

    results = simulated.run(setting.ranks, program, alpha=ALPHA, beta=BETA, weigh=weigh)
    return combined(setting, [result.value for result in results if result.value is not None])
