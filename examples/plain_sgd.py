"""Does a program that trains by SGD train as well when only its gradients are exchanged sparsely?

    python examples/plain_sgd.py ranks=8 density=1,0.05 seed=0,1,2
    python examples/plain_sgd.py --report bench/results/plain-sgd.jsonl

The program is what users have: SGD with momentum 0.9, clipping of the averaged gradient, and the learning rate that
suits dense gradients. The exchange has no momentum correction, and no setting but those below. Every combination of the
values is trained, with the tasks of `convergence_tasks.py`, for all ranks in one process. Each training is a line of
the file OUT. Trainings that the file already has are not repeated.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the ranks share the cores
os.environ.setdefault("SPARSECOMM_THREADS", "1")

import numpy as np
import torch
from convergence_tasks import TASKS, Samples, evaluate
from grid import Grid, mean_and_range
from rich.table import Table
from torch.nn import functional

import sparsecomm as sc
from sparsecomm.quantities import number_text
from sparsecomm.transport import Transport, simulated

torch.set_num_threads(1)


@dataclass(frozen=True)
class Setting:
    """A training.

    Attributes:
        model: one of `TASKS`.
        density, algorithm, wire: of the `Reducer`; density 0 leaves all three at their defaults.
        dense_steps: steps that begin dense.
        warmup: steps after these in which the density falls from ``start`` in ``stages``.
        clip: where gradients are clipped: "after" the exchange, as in the program for dense gradients, or by the
            `Reducer`, "before".
        steps: 0 for the model's own number.
    """

    model: str = "text"
    ranks: int = 8
    seed: int = 0
    density: float = 0.0
    algorithm: str = "double"
    wire: str = "packed_int2"
    dense_steps: int = 0
    warmup: int = 0
    start: float = 0.25
    stages: int = 4
    momentum: float = 0.9
    rate: float = 1.0
    clip: str = "after"
    steps: int = 0


def program(setting: Setting, transport: Transport) -> tuple[float, float, list[float], int]:
    """Train as one rank: return its loss, its accuracy, a curve of losses, and the bytes that it sent."""
    task = TASKS[setting.model]
    training, held_out = task.data()
    some = Samples(held_out.inputs[: task.some], held_out.targets[: task.some])
    torch.manual_seed(setting.seed)
    model = task.build()
    batches = torch.Generator().manual_seed(setting.seed)
    options: dict[str, Any] = {}
    if setting.density:
        density = sc.Warmup(setting.density, setting.warmup, setting.start, setting.stages, setting.dense_steps)
        options = {"density": density, "algorithm": setting.algorithm, "wire": setting.wire}
        if setting.density == 1.0:
            options = {"density": 1.0, "algorithm": "dense"}
    gradients = {name: p.detach() for name, p in model.named_parameters()}
    if setting.clip == "before":
        options["clip"] = task.clip
    reducer = sc.Reducer(gradients, comm=transport, **options)
    optimizer = torch.optim.SGD(model.parameters(), task.rate, momentum=setting.momentum)
    steps, curve = setting.steps or task.steps, []
    for step in range(steps):
        batch = torch.randint(len(training), (task.batch,), generator=batches)[transport.rank :: transport.size]
        optimizer.zero_grad()
        scores = model(training.inputs[batch]).flatten(0, -2)
        functional.cross_entropy(scores, training.targets[batch].flatten()).backward()  # type: ignore[no-untyped-call]
        reducer.reduce({name: p.grad for name, p in model.named_parameters()})
        if task.clip is not None and setting.clip == "after":
            torch.nn.utils.clip_grad_norm_(model.parameters(), task.clip)
        for group in optimizer.param_groups:
            group["lr"] = setting.rate * task.rate_at(step, steps)
        optimizer.step()
        if transport.rank == 0 and (step + 1) % max(1, steps // 20) == 0:
            curve.append(round(evaluate(model, some)[0], 4))
    loss, accuracy = evaluate(model, held_out) if transport.rank == 0 else (0.0, 0.0)
    return loss, accuracy, curve, reducer.counters.bytes_sent


def train(setting: Setting) -> dict[str, Any]:
    """Return the outcome of a training on simulated ranks."""
    results = [rank.value for rank in simulated.run(setting.ranks, lambda transport: program(setting, transport))]
    loss, accuracy, curve, _ = results[0]
    score = accuracy if TASKS[setting.model].score == "accuracy" else loss
    return {"score": score, "loss": loss, "accuracy": accuracy, "sent": max(r[3] for r in results), "curve": curve}


GRID = Grid(Setting, "setting")


def table(done: dict[Setting, dict[str, Any]]) -> Table:
    """Return a row for each setting: the mean of its seeds."""
    made = Table(title="Sparse gradients in an unchanged program", box=None)
    for column in ("model", "P", "density", "settings", "score", "seeds", "MB sent"):
        made.add_column(column)
    for setting, outcomes in sorted(GRID.by_seed(done).items(), key=lambda item: (item[0].model, item[0].ranks)):
        rules = GRID.unusual(setting, "model", "ranks", "density", "seed")
        made.add_row(
            setting.model,
            str(setting.ranks),
            number_text(setting.density) if setting.density else "default",
            " ".join(f"{name}={value}" for name, value in rules.items()),
            mean_and_range([o["score"] for o in outcomes]),
            str(len(outcomes)),
            number_text(float(np.mean([o["sent"] for o in outcomes])) / 1e6),
        )
    return made


def _said(outcome: dict[str, Any]) -> str:
    return f"{outcome['score']:.4f} sent {outcome['sent'] / 1e6:.2f} MB"


def main() -> None:
    GRID.run("Train with sparse gradients in an unchanged program.", train, _said, table, "plain-sgd.jsonl")


if __name__ == "__main__":
    main()
