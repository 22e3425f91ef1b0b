"""One worker of a training with local steps: a copy of the model, its own optimizer, and its own share of the data.

Shared by `local_steps_training.py`, where the library exchanges pseudo-gradients, and `local_steps_rules.py`, where
plain NumPy does. The model and the text are those of `convergence_tasks.py`.
"""

from __future__ import annotations

import math

import torch
from convergence_tasks import TASKS, Samples, evaluate
from torch import Tensor
from torch.nn import functional

__all__ = ["STEPS", "Worker"]

torch.set_num_threads(1)  # the workers share the cores

TASK = TASKS["text"]
STEPS = 600  # local steps of a worker
BATCH = 4  # samples of a worker and step
RATE = 0.02  # of AdamW, chosen for dense pseudo-gradients at H = 30; it rises for `WARM` steps, then falls to a tenth
WARM = 30
BETAS = (0.9, 0.99)
WEIGHT_DECAY = 0.01
SOME = 256  # held-out samples for a point of a curve; the end is evaluated on all


class Worker:
    """A worker: worker r of P draws its batches from samples r, r + P, r + 2 P, ...

    Args:
        rank, ranks: which worker of how many.
        seed: of the weights, which are the same for all, and of the batches.
        steps: in all, for the schedule of the learning rate.
    """

    def __init__(self, rank: int, ranks: int, seed: int, steps: int = STEPS) -> None:
        self.rank, self.ranks, self.steps, self.done = rank, ranks, steps, 0
        self.training, self.held_out = TASK.data()
        torch.manual_seed(seed)
        self.model = TASK.build()
        self.batches = torch.Generator().manual_seed(1000 * seed + rank)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, foreach=False
        )

    @property
    def parameters(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def step(self) -> None:
        """Take a local step."""
        rows = torch.randint(len(self.training) // self.ranks, (BATCH,), generator=self.batches)
        rows = rows * self.ranks + self.rank
        self.optimizer.param_groups[0]["lr"] = rate_at(self.done, self.steps)
        self.optimizer.zero_grad()
        scores = self.model(self.training.inputs[rows]).flatten(0, -2)
        functional.cross_entropy(scores, self.training.targets[rows].flatten()).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.done += 1

    def loss(self, *, some: bool) -> float:
        """Return the cross-entropy of what is held out, or of some of it, in nats."""
        held = self.held_out
        return evaluate(self.model, Samples(held.inputs[:SOME], held.targets[:SOME]) if some else held)[0]


def rate_at(step: int, steps: int) -> float:
    """Return the learning rate: a warm-up, then half a cosine down to a tenth."""
    return RATE * min(1.0, (step + 1) / WARM) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
