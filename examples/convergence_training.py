"""One training: P ranks, from the same weights, on the same batches, with any of the methods."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from convergence_tasks import TASKS, Samples, evaluate, weights_of
from torch.nn import functional

import sparsecomm as sc
from sparsecomm.transport import Transport, simulated
from sparsecomm.transport.memory import Bytes
from sparsecomm.transport.simulated import SimulatedTransport
from sparsecomm.wire import HEADER_BYTES

__all__ = ["METHODS", "MOMENTUM", "WARMUP", "Curve", "Setting", "combined", "recipe", "simulate", "train"]

torch.set_num_threads(1)  # the ranks share the cores

# How gradients are summed: the name in the table, and arguments of `sparsecomm.Reducer`; None: in earlier results only.
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
RULE = 2  # the rule of error feedback and masking: another one, and no sparse training is as before
EVALUATIONS = 20

# The network on which communication takes virtual seconds, and the model that the messages stand for.
ALPHA, BETA = 50e-6, 8e-9  # per message, per byte: 1 Gb/s
LARGE = 25_600_000  # weights, as many as ResNet-50 has


@dataclass(frozen=True)
class Setting:
    """The parameters of a training. Those that dense gradients do not have are the usual ones there.

    Attributes:
        density: after the warm-up; 1.0 where all is sent.
        momentum: dense ones have `MOMENTUM`, and so have sparse ones unless they are asked for less.
        rate: factor on the task's learning rate.
        wire: the wire format of sparse messages.
        warmup: share of the steps in which the density falls.
        decay: factor on the residuals, in each step.
        equal_to: the density of Top-k that sends as many bytes per step; 0 where the density was asked for.
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
        """What differs from the usual, in words."""
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
        """The name of the method, with what differs from the usual."""
        return ", ".join(filter(None, (METHODS[self.method][0], self.unusual)))

    @property
    def warm(self) -> int:
        """The number of steps of the warm-up."""
        return 0 if self.method == "dense" else round(self.warmup * self.steps)

    @property
    def work(self) -> Setting:
        """The training itself, whatever it is to be compared with: equal ones have equal outcomes."""
        return replace(self, equal_to=0.0)


def recipe(setting: Setting) -> dict[str, Any]:
    """Return what else the outcome depends on."""
    task = TASKS[setting.model]
    always = {"batch": task.batch, "rate": task.rate, "clip": task.clip}
    return always | ({"momentum": MOMENTUM} if setting.method == "dense" else {"masking": task.masking, "rule": RULE})


@dataclass
class Curve:
    """The course of a training, as one rank sees it.

    Attributes:
        steps: after which the model was evaluated.
        losses, accuracies: at these steps, on a part of what is held out; on rank 0 only.
        sent: bytes that this rank had sent by then.
        seconds: of communication until then, in virtual time, of the large model; empty over MPI.
        warm, warm_seconds: the same when the warm-up was over.
        loss, accuracy: at the end, on all that is held out; on rank 0 only.
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
    """Do this rank's part of a training.

    Args:
        setting: the same on all ranks.
        ranks: of MPI, or simulated ones.
        advance: called after each step.
        factor: how many bytes each byte counts for that ``ranks`` sends; headers count as they are.
    """
    task = TASKS[setting.model]
    training, held_out = task.data()
    some = Samples(held_out.inputs[: task.some], held_out.targets[: task.some])
    torch.manual_seed(setting.seed)
    model = task.build()
    batches = torch.Generator().manual_seed(setting.seed)
    dense = setting.method == "dense"
    parameters = dict(model.named_parameters())
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
        # All ranks draw the same batch, and each takes every P-th sample of it.
        batch = torch.randint(len(training), (task.batch,), generator=batches)[transport.rank :: transport.size]
        optimizer.zero_grad()
        scores = model(training.inputs[batch]).flatten(0, -2)
        functional.cross_entropy(scores, training.targets[batch].flatten()).backward()  # type: ignore[no-untyped-call]
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
    """Return the curve of the training as a whole: rank 0's, with the bytes of the rank that sends most.

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
    """Run a training with all ranks in this process, one after another; the bits are those that MPI gives.

    What is sent takes the time that it would take with a model of `LARGE` weights and the same densities.

    Args:
        setting: which.
        advance: called after each step.
    """
    factor = max(1, round(LARGE / weights_of(setting.model)))  # a whole number, so that bytes can be counted exactly

    def program(transport: Transport) -> Curve:
        return train(setting, transport, advance if transport.rank == 0 else lambda: None, factor=factor)

    def weigh(message: Bytes) -> int:
        return HEADER_BYTES + factor * (len(message) - HEADER_BYTES)

    results = simulated.run(setting.ranks, program, alpha=ALPHA, beta=BETA, weigh=weigh)
    return combined(setting, [result.value for result in results if result.value is not None])
