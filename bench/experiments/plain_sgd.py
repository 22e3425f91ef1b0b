"""Does an unchanged SGD program train as well when only its gradients are exchanged sparsely?

    python -m bench.experiments.plain_sgd ranks=8 density=1,0.05 seed=0,1,2
    python -m bench.experiments.plain_sgd --report bench/results/plain-sgd.jsonl

The program is typical for users: SGD with momentum 0.9, clipping of the averaged gradient, and the learning rate that
suits dense gradients. The exchange has no momentum correction, and no settings but those below. Every combination of
the values is trained on a task of `tasks`, with all ranks in one process. Each training is a line of the file OUT, and
is not repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import sparsecomm as sc
from bench.experiments.grid import Grid, Outcome, mean, spread
from bench.experiments.tasks import TASKS
from bench.experiments.trainer import Trainer
from sparsecomm.quantities import number_text
from sparsecomm.transport import Transport, simulated


@dataclass(frozen=True)
class Setting:
    """A training."""

    model: str = "text"  # one of `TASKS`
    ranks: int = 8
    seed: int = 0
    density: float = 0.0  # of the `Reducer`; density 0 leaves all three at their defaults
    algorithm: str = "double"
    wire: str = "packed_int2"
    dense_steps: int = 0  # dense steps at the beginning
    warmup: int = 0  # steps after these in which the density falls from ``start`` in ``stages``
    start: float = 0.25
    stages: int = 4
    momentum: float = 0.9
    rate: float = 1.0
    # where gradients are clipped: "after" the exchange, as in a program for dense gradients, or "before" it, by the
    # `Reducer`
    clip: str = "after"
    steps: int = 0  # 0 for the model's own number


def program(setting: Setting, transport: Transport) -> Outcome:
    """Train as one rank; return the bytes that it sent, and on rank 0 the outcome."""
    trainer = Trainer(TASKS[setting.model], setting.seed, setting.steps)
    task, model, options = trainer.task, trainer.model, dict[str, Any]()
    if setting.density == 1.0:
        options = {"density": 1.0, "algorithm": "dense"}
    elif setting.density:
        density = sc.Warmup(setting.density, setting.warmup, setting.start, setting.stages, setting.dense_steps)
        options = {"density": density, "algorithm": setting.algorithm, "wire": setting.wire}
    if setting.clip == "before":
        options["clip"] = task.clip
    tensors = {name: p.detach() for name, p in trainer.parameters.items()}
    reducer = sc.Reducer(tensors, comm=transport, **options)
    optimizer = torch.optim.SGD(model.parameters(), task.rate, momentum=setting.momentum)
    for step in range(trainer.steps):
        trainer.backward(trainer.batch()[transport.rank :: transport.size])
        reducer.reduce({name: p.grad for name, p in trainer.parameters.items()})
        if task.clip is not None and setting.clip == "after":
            torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip)
        for group in optimizer.param_groups:
            group["lr"] = setting.rate * task.rate_at(step, trainer.steps)
        optimizer.step()
        if transport.rank == 0:
            trainer.note(step)
    return (trainer.outcome() if transport.rank == 0 else {}) | {"sent": reducer.counters.bytes_sent}


def train(setting: Setting) -> Outcome:
    """Return the outcome of a training on simulated ranks."""
    results = simulated.run(setting.ranks, lambda transport: program(setting, transport))
    outcomes = [result.value for result in results if result.value is not None]
    return outcomes[0] | {"sent": max(outcome["sent"] for outcome in outcomes)}


GRID = Grid(
    Setting,
    "setting",
    "Sparse gradients in an unchanged program",
    {"model": "model", "ranks": "P", "density": "density (0: default)"},
    {"score": spread("score"), "seeds": len, "MB sent": mean("sent", lambda sent: number_text(sent / 1e6))},
    lambda setting, seeds: (setting.model, setting.ranks),
)


def main() -> None:
    GRID.run(__doc__, train, "plain-sgd.jsonl")


if __name__ == "__main__":
    main()
