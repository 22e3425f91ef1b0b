"""The parts that all runs share: a model with its batches, and one worker of a run with local steps.

Importing it limits NumPy, PyTorch and sparsecomm to one thread: runs share the machine.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("SPARSECOMM_THREADS", "1")

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from bench.experiments.tasks import Samples, Task, evaluate

Vector = NDArray[np.float32]
Data = Callable[[], tuple[Samples, Samples]]
BATCH = 4  # samples per local step

torch.set_num_threads(1)


class Trainer:
    """A model of a task and its batches, the same on every rank with the same seed; 0 ``steps``: the task's number."""

    def __init__(self, task: Task, seed: int, steps: int = 0) -> None:
        self.task, self.steps = task, steps or task.steps
        self.training, self.held_out = task.data()
        torch.manual_seed(seed)
        self.model = task.build()
        self._random = torch.Generator().manual_seed(seed)
        self.parameters = dict(self.model.named_parameters())
        self.sizes = [p.numel() for p in self.parameters.values()]
        self.curve: list[float] = []

    def batch(self) -> Tensor:
        """Draw the sample numbers of the next batch of all ranks."""
        return torch.randint(len(self.training), (self.task.batch,), generator=self._random)

    def backward(self, rows: Tensor) -> None:
        """Compute the gradients of the mean loss of some samples."""
        self.model.zero_grad()
        _backward(self.model, self.training, rows)

    def gradient(self, rows: Tensor, out: Vector) -> None:
        """Write the flat gradient of some samples to ``out``."""
        self.backward(rows)
        np.concatenate([p.grad.numpy().ravel() for p in self.parameters.values() if p.grad is not None], out=out)

    def use(self, weights: Mapping[str, Tensor]) -> None:
        """Copy weights to the parameters."""
        for name, p in self.parameters.items():
            p.detach().copy_(weights[name])

    def subtract(self, update: Vector, rate: float, weight_decay: float = 0.0) -> None:
        """Subtract a flat update times the learning rate; weight decay applies to matrices."""
        begin = 0
        with torch.no_grad():
            for p in self.parameters.values():
                if weight_decay and p.dim() > 1:
                    p.mul_(1 - rate * weight_decay)
                p.sub_(torch.from_numpy(update[begin : begin + p.numel()].reshape(p.shape)), alpha=rate)
                begin += p.numel()

    def note(self, step: int) -> None:
        """Evaluate the model after about every 20th part of the training, for the curve."""
        if (step + 1) % max(8, self.steps // 20) == 0:
            some = Samples(self.held_out.inputs[: self.task.some], self.held_out.targets[: self.task.some])
            self.curve.append(round(evaluate(self.model, some)[0], 4))

    def outcome(self) -> dict[str, Any]:
        """Return the loss, the accuracy and the score at the end, and the curve."""
        loss, accuracy = evaluate(self.model, self.held_out)
        score = accuracy if self.task.score == "accuracy" else loss
        return {"score": score, "loss": loss, "accuracy": accuracy, "curve": self.curve}


class Worker:
    """A worker of a training with local steps: worker r of P draws batches from the samples r, r + P, r + 2 P, ..."""

    def __init__(self, build: Callable[[], nn.Module], data: Data, rank: int, ranks: int, seed: int) -> None:
        self.rank, self.ranks, self.steps_taken = rank, ranks, 0
        self.training, self.held_out = data()
        torch.manual_seed(seed)
        self.model = build()
        self._random = torch.Generator().manual_seed(1000 * seed + rank)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The parameters, as tensors without gradients that share their memory."""
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def step(self, optimizer: torch.optim.Optimizer, rate: float, clip: float = math.inf) -> None:
        """Take a local step with a learning rate; ``clip`` is the maximum norm of the gradient."""
        rows = torch.randint(len(self.training) // self.ranks, (BATCH,), generator=self._random)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        _backward(self.model, self.training, rows * self.ranks + self.rank)
        if clip < math.inf:
            nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        optimizer.step()
        self.steps_taken += 1

    def loss(self, count: int | None = None) -> float:
        """Return the cross-entropy on held-out samples, or on the first ``count`` of them, in nats."""
        held_out = self.held_out
        return evaluate(self.model, Samples(held_out.inputs[:count], held_out.targets[:count]))[0]


def _backward(model: nn.Module, samples: Samples, rows: Tensor) -> None:
    scores, targets = model(samples.inputs[rows]).flatten(0, -2), samples.targets[rows].flatten()
    functional.cross_entropy(scores, targets).backward()  # type: ignore[no-untyped-call]
