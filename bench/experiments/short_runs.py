"""How far is sparse training from dense training after few steps?

    torchrun --nproc_per_node 2 -m bench.experiments.short_runs > bench/results/short-runs.txt    # minutes on 2 cores

Trains the model of docs/guides/compare-with-dense.md with the same weights and data, once with dense gradients and once
with each sparse setting. A run's loss is the mean over its last 20 steps. The table shows the loss of the sparse run
minus the loss of the dense run, in nats: the mean over the seeds, and the range.
"""

from __future__ import annotations

import argparse
from pydoc_data.topics import topics
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import sparsecomm as sc
import sparsecomm.torch

TEXT = torch.tensor(list("".join(topics.values()).encode("ascii", "ignore")))
MEAN_OF = 20  # steps
SETTINGS: dict[str, dict[str, Any]] = {
    "SparseAdamW(density=1.0)": {"density": 1.0},
    "SparseAdamW()": {},
    "SparseAdamW(dense_steps=100)": {"dense_steps": 100},
    'SparseAdamW(density=0.033, wire="packed_sign")': {"density": 0.033, "wire": "packed_sign"},
}


def train(steps: int, seed: int, options: dict[str, Any]) -> torch.Tensor:
    """Return the mean loss of all ranks by step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(128, 32), nn.Flatten(), nn.Linear(512, 256), nn.GELU(), nn.Linear(256, 128))
    optimizer = sc.torch.SparseAdamW(model.named_parameters(), lr=2e-3, **options)
    random, losses = torch.Generator().manual_seed(1000 * seed + dist.get_rank()), []
    for _ in range(steps):
        starts = torch.randint(len(TEXT) - 16, (32, 1), generator=random)
        window = TEXT[starts + torch.arange(17)]
        optimizer.zero_grad()
        losses.append(nn.functional.cross_entropy(model(window[:, :16]), window[:, 16]))
        losses[-1].backward()
        optimizer.step()
    mean = torch.stack(losses).detach() / dist.get_world_size()
    dist.all_reduce(mean)
    return mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[20, 40, 100, 300, 1000])
    parser.add_argument("--seeds", type=int, default=4)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    runs = {
        name: [train(max(options.steps), seed, setting) for seed in range(options.seeds)]
        for name, setting in SETTINGS.items()
    }
    dense, *sparse = runs if dist.get_rank() == 0 else ("",)
    if sparse:
        ranks = dist.get_world_size()
        print(f"# sparsecomm {sc.__version__}, torch {torch.__version__}: {ranks} ranks, {options.seeds} seeds")
        print(f"{'nats above dense after':<48}", *(f"{f'{steps} steps':>26}" for steps in options.steps))
    for name in sparse:
        above = [a - b for a, b in zip(runs[name], runs[dense], strict=True)]
        cells = []
        for steps in options.steps:
            means = [float(losses[max(0, steps - MEAN_OF) : steps].mean()) for losses in above]
            cells.append(f"{fmean(means):+.3f} ({min(means):+.3f} to {max(means):+.3f})")
        print(f"{name:<48}", *(f"{cell:>26}" for cell in cells))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
