"""One training: P ranks, from the same weights, on the same batches, with any of the methods."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from convergence_tasks import TASKS, Samples, evaluate
from torch.nn import functional

import sparsecomm as sc
from sparsecomm.transport import Transport

__all__ = ["METHODS", "MOMENTUM", "Curve", "Setting", "combined", "recipe", "simulate", "train"]

torch.set_num_threads(1)  # the ranks share the cores

# How gradients are summed: the name in the table, and arguments of `sparsecomm.Reducer`.
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Dense", {"algorithm": "dense", "momentum": 0.0, "clip": None}),
    "allgather": ("Top-k", {"algorithm": "allgather"}),
    "tree": ("gTop-k, tree", {"algorithm": "tree"}),
    "butterfly": ("gTop-k, butterfly", {"algorithm": "butterfly"}),
    "split": ("gTop-k, split", {"algorithm": "split"}),
    "butterfly-complete": ("gTop-k, complete", {"algorithm": "butterfly", "complete": True}),
}

MOMENTUM = 0.9
WARMUP = 0.1  # of all steps: four stages from density 0.25 on
EVALUATIONS = 20


@dataclass(frozen=True)
class Setting:
    """The parameters of a training.

    Attributes:
        density: after the warm-up; 1.0 where all is sent.
        momentum: dense ones have `MOMENTUM`, and so have sparse ones unless they are asked for less.
    """

    model: str
    ranks: int
    method: str
    density: float
    seed: int
    steps: int
    momentum: float = MOMENTUM

    @property
    def name(self) -> str:
        """The name of the method, for the table."""
        name, _ = METHODS[self.method]
        return name if self.momentum == MOMENTUM else f"{name}, momentum {self.momentum:g}"


def recipe(setting: Setting) -> dict[str, Any]:
    """Return what else the outcome depends on."""
    task = TASKS[setting.model]
    return {
        "batch": task.batch,
        "rate": task.rate,
        "clip": task.clip,
        "masking": task.masking,
        "momentum": MOMENTUM,
        "warmup": WARMUP,
    }


@dataclass
class Curve:
    """The course of a training, as one rank sees it.

    Attributes:
        steps: after which the model was evaluated.
        losses, accuracies: at these steps, on a part of what is held out; on rank 0 only.
        sent: bytes that this rank had sent by then.
        warm: bytes that this rank had sent when the warm-up was over.
        loss, accuracy: at the end, on all that is held out; on rank 0 only.
        weights: SHA-256 of the weights at the end.
    """

    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    warm: int = 0
    loss: float = 0.0
    accuracy: float = 0.0
    weights: str = ""


def train(setting: Setting, ranks: Transport, advance: Callable[[], None] = lambda: None) -> Curve:
    """Do this rank's part of a training.

    Args:
        setting: the same on all ranks.
        ranks: of MPI, or simulated ones.
        advance: called after each step.
    """
    task = TASKS[setting.model]
    training, held_out = task.data()
    some = Samples(held_out.inputs[: task.some], held_out.targets[: task.some])
    torch.manual_seed(setting.seed)
    model = task.build()
    batches = torch.Generator().manual_seed(setting.seed)
    dense = setting.method == "dense"
    warm = 0 if dense else round(WARMUP * setting.steps)
    parameters = dict(model.named_parameters())
    arguments = {"momentum": setting.momentum, "clip": task.clip} | METHODS[setting.method][1]
    reducer = sc.Reducer(
        {name: p.detach() for name, p in parameters.items()},
        1.0 if dense else sc.Warmup(setting.density, warm),
        comm=ranks,
        op="mean",
        scope="model",  # one selection from the whole gradient, as gTop-k has it
        dense_below=0,
        wire="packed",
        masking=task.masking,
        **arguments,
    )
    optimizer = torch.optim.SGD(parameters.values(), task.rate, momentum=MOMENTUM if dense else 0.0)
    curve, every = Curve(), max(8, setting.steps // EVALUATIONS)

    for step in range(setting.steps):
        # All ranks draw the same batch, and each takes every P-th sample of it.
        batch = torch.randint(len(training), (task.batch,), generator=batches)[ranks.rank :: ranks.size]
        optimizer.zero_grad()
        scores = model(training.inputs[batch]).flatten(0, -2)
        functional.cross_entropy(scores, training.targets[batch].flatten()).backward()  # type: ignore[no-untyped-call]
        reducer.reduce({name: p.grad for name, p in parameters.items()})
        if dense and task.clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters.values(), task.clip)
        for group in optimizer.param_groups:
            group["lr"] = task.rate_at(step, setting.steps)
        optimizer.step()
        if step + 1 == warm:
            curve.warm = reducer.counters.bytes_sent
        if (step + 1) % every == 0 or step + 1 in (1, setting.steps):
            curve.steps.append(step + 1)
            curve.sent.append(reducer.counters.bytes_sent)
            if ranks.rank == 0:
                loss, accuracy = evaluate(model, some)
                curve.losses.append(loss)
                curve.accuracies.append(accuracy)
        advance()

    if ranks.rank == 0:
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
    first = curves[0]
    max_sent = [max(of_ranks) for of_ranks in zip(*(curve.sent for curve in curves), strict=True)]
    return Curve(
        first.steps,
        first.losses,
        first.accuracies,
        max_sent,
        max(curve.warm for curve in curves),
        first.loss,
        first.accuracy,
        first.weights,
    )


def simulate(setting: Setting, advance: Callable[[], None] = lambda: None) -> Curve:
    """Run a training with all ranks in this process, one after another; the bits are those that MPI gives.

    Args:
        setting: which.
        advance: called after each step.
    """
    from sparsecomm.transport import simulated

    def program(ranks: Transport) -> Curve:
        return train(setting, ranks, advance if ranks.rank == 0 else lambda: None)

    curves = [result.value for result in simulated.run(setting.ranks, program)]
    return combined(setting, [curve for curve in curves if curve is not None])
