"""Does training with local steps reach the same loss where workers are not equally fast?

    python examples/local_steps_uneven.py                          # a quarter of an hour
    python examples/local_steps_uneven.py --seeds 0 --sync-every 5 --speeds 1 1 1 4

P workers train a small transformer on English text, each on its own share of the data, by AdamW, on simulated ranks in
one process, by `sparsecomm.LocalSteps` with its defaults. A local step takes as many units of virtual time as
``--speeds`` says of the worker; exchanges take none. Workers take equally many local steps, which is one training
whether they are equally fast or not, or local steps by speed. Both trainings have equally many rounds, and "in all" are
the local steps of all workers: with the default numbers equally many, so that both see as many characters; with others
a worker may take up to one more or less in a round. "Computing" is the part of the time for which the mean worker does
not wait. The last line is the difference of the losses, seed by seed: below 0 where those by speed end lower.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from dataclasses import dataclass
from typing import Any

if missing := [name for name in ("torch", "rich", "greenlet") if importlib.util.find_spec(name) is None]:
    sys.exit(f"This example needs {', '.join(missing)}: pip install 'sparsecomm[demo,torch,simulated]'")

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("SPARSECOMM_THREADS", "1")

import math

import torch
from convergence_tasks import LENGTH, Samples, characters, evaluate, text
from torch import Tensor, nn
from torch.nn import functional

import sparsecomm as sc
from sparsecomm.transport import simulated

__all__ = ["Transformer", "train"]

torch.set_num_threads(1)

WIDTH, BLOCKS, HEADS = 64, 3, 4
BATCH = 4  # samples of a worker and step
RATE = 0.006  # of AdamW; it rises for `WARM` steps of a worker, then falls to a twentieth
WARM = 50
SOME = 512  # held-out samples by which the loss is measured


class Transformer(nn.Module):
    """A decoder of characters: 3 blocks, 4 heads, width 64."""

    def __init__(self) -> None:
        super().__init__()
        number = len(set(text()))
        self.embedding, self.positions = nn.Embedding(number, WIDTH), nn.Embedding(LENGTH, WIDTH)
        block = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, BLOCKS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, number)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.05)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        scores: Tensor = self.head(
            self.blocks(self.embedding(x) + self.positions.weight[: x.shape[1]], mask, is_causal=True)
        )
        return scores


@dataclass(frozen=True)
class Setting:
    """A training.

    Attributes:
        speeds: units of time of a local step, by worker.
        by_speed: whether the faster workers take more local steps.
        sync_every, rounds, seed: local steps of a round, of a worker on average; rounds; of weights and batches.
    """

    speeds: tuple[float, ...]
    by_speed: bool
    sync_every: int
    rounds: int
    seed: int


def train(setting: Setting) -> dict[str, Any]:
    """Return the loss, in nats on text that was held out, local steps, time, and the part of it without waits."""
    results = simulated.run(len(setting.speeds), lambda transport: work(setting, transport))
    outcomes = [result.value for result in results if result.value is not None]
    time = max(result.seconds for result in results)
    steps = [outcome["steps"] for outcome in outcomes]
    busy = sum(n * unit for n, unit in zip(steps, setting.speeds, strict=True)) / len(steps)
    return {"loss": outcomes[0]["loss"], "steps": steps, "time": time, "computing": busy / time}


def work(setting: Setting, transport: simulated.SimulatedTransport) -> dict[str, Any]:
    """Do one worker's part of a training."""
    training, held_out = characters()
    torch.manual_seed(setting.seed)
    model = Transformer()
    batches = torch.Generator().manual_seed(1000 * setting.seed + transport.rank)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, RATE, betas=(0.9, 0.95), foreach=False)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    local = sc.LocalSteps(parameters, sync_every=setting.sync_every, by_speed=setting.by_speed, comm=transport)
    steps = 0
    while local.round < setting.rounds:
        done = (local.round + local.local_step / local.steps[transport.rank]) / setting.rounds
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (steps + 1) / WARM) * (0.525 + 0.475 * math.cos(math.pi * done))
        rows = (
            torch.randint(len(training) // transport.size, (BATCH,), generator=batches) * transport.size
            + transport.rank
        )
        optimizer.zero_grad()
        scores = model(training.inputs[rows]).flatten(0, -2)
        functional.cross_entropy(scores, training.targets[rows].flatten()).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), math.sqrt(transport.size))
        optimizer.step()
        steps += 1
        transport.compute(setting.speeds[transport.rank])
        local.step(parameters)
    some = Samples(held_out.inputs[:SOME], held_out.targets[:SOME])
    return {"steps": steps, "loss": evaluate(model, some)[0] if transport.rank == 0 else None}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with local steps, by workers that are not equally fast.")
    parser.add_argument(
        "--speeds", type=float, nargs="+", default=[1, 1, 2, 2, 2, 4, 4, 4], help="units of a local step"
    )
    parser.add_argument("--sync-every", type=int, default=17, help="local steps of a round (17)")
    parser.add_argument("--steps", type=int, default=867, help="local steps of a worker, on average (867)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="of trainings (0 1 2 3 4)")
    given = parser.parse_args()
    from rich.console import Console
    from rich.table import Table

    table = Table("local steps", "by worker", "in all", "time", "computing", "nats, mean (least to most)")
    speeds, rounds, losses = tuple(given.speeds), given.steps // given.sync_every, []
    for by_speed in (False, True):
        made = [train(Setting(speeds, by_speed, given.sync_every, rounds, seed)) for seed in given.seeds]
        losses.append([found["loss"] for found in made])
        each = " ".join(map(str, made[0]["steps"]))
        numbers = f"{made[0]['time']:.0f}", f"{100 * made[0]['computing']:.1f} %", spread(losses[-1])
        table.add_row("by speed" if by_speed else "equally many", each, str(sum(made[0]["steps"])), *numbers)
    console = Console(width=150)
    console.print(table)
    console.print("by speed - equally many, nats:", spread([b - a for a, b in zip(*losses, strict=True)]))


def spread(values: list[float]) -> str:
    """Return the mean, and the least and the most where there are several."""
    mean = f"{sum(values) / len(values):.4f}"
    return f"{mean} ({min(values):.4f} to {max(values):.4f})" if len(values) > 1 else mean


if __name__ == "__main__":
    main()
