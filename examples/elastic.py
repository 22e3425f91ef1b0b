"""A training that goes on with fewer ranks, or with more, from checkpoints: PyTorch under torchrun, without MPI.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nnodes=1:2 --nproc-per-node=1 --max-restarts=3 --rdzv-backend=c10d --rdzv-endpoint=localhost:29400 \\
        --rdzv-conf=last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3 examples/elastic.py

Start it twice, in two shells, as on two nodes. Kill the second one, and its worker: the first goes on with one rank,
from the newest checkpoint that is complete. Residuals move along: `sparsecomm.reshard` makes those of the new ranks
from those of the old. Another number of ranks may also start from there later. With ``--local-steps 10`` ranks exchange
what so many steps did (DiLoCo), and no gradients. What that takes stands below ``# sparsecomm:``. The variable lets
torchrun make a new store for each number of ranks.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import sparsecomm
import sparsecomm.torch

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
parser.add_argument("--local-steps", type=int, default=0, help="in a round; 0: sum gradients in each step")
parser.add_argument("--pause", type=float, default=0.05, help="seconds that a step takes at least")
parser.add_argument("--folder", type=Path, default=Path("checkpoints/elastic"), help="which all ranks can read")
arguments = parser.parse_args()
arguments.folder.mkdir(parents=True, exist_ok=True)
torch.set_num_threads(1)
NAME = re.compile(r"step(\d+)-rank(\d+)-of(\d+)\.pt")


def newest_complete() -> tuple[int, int] | None:
    """Return step and number of ranks of the newest checkpoint that all its ranks have saved."""
    found: dict[tuple[int, int], set[int]] = {}
    for path in arguments.folder.iterdir():
        if name := NAME.fullmatch(path.name):
            step, rank, size = map(int, name.groups())
            found.setdefault((step, size), set()).add(rank)
    return max((which for which, ranks in found.items() if len(ranks) == which[1]), default=None)


def save(step: int) -> None:
    """Save this rank's part of a checkpoint: under its name it is whole, or not there."""
    path = arguments.folder / f"step{step}-rank{rank}-of{ranks}.pt"
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if diloco is not None:  # sparsecomm: the global parameters, the residuals, and what is under way
        state["diloco"] = diloco.state_dict()
    torch.save(state, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)


def load(step: int, size: int) -> None:
    """Go on from a checkpoint of ``size`` ranks."""
    paths = [arguments.folder / f"step{step}-rank{old}-of{size}.pt" for old in range(size)]
    saved: list[dict[str, Any]] = [torch.load(path, weights_only=True) for path in paths]
    mine = saved[rank if size == ranks else 0]
    model.load_state_dict(mine["model"])
    # sparsecomm: the residuals of all old ranks, shared out among the new ones; their sum stays what it was.
    if diloco is not None:
        optimizer.load_state_dict(mine["optimizer"])
        diloco.load_state_dict(sparsecomm.reshard([state["diloco"] for state in saved], rank, ranks))
        if size != ranks:  # all begin with the same model: in the middle of a round those of the old ranks differed
            model.load_state_dict(diloco.global_parameters())
        return
    kept = sparsecomm.reshard([state["optimizer"]["sparsecomm"] for state in saved], rank, ranks)
    optimizer.load_state_dict(mine["optimizer"] | {"sparsecomm": kept})


dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
teacher = nn.Linear(50, 5)
model = nn.Sequential(nn.Linear(50, 100), nn.ReLU(), nn.Linear(100, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
diloco = None
if arguments.local_steps:
    # sparsecomm: 2 % of what a round has done is sent at its end.
    diloco = sparsecomm.torch.DiLoCo(model, optimizer, density=0.02, sync_every=arguments.local_steps)
else:
    # sparsecomm: 2 % of the gradient is sent in each step.
    optimizer = sparsecomm.torch.DistributedOptimizer(optimizer, model.named_parameters(), 0.02, momentum=0.9)

# sparsecomm: one rank looks, and all take what it has seen: files come and go.
choice = [newest_complete() if rank == 0 else None]
dist.broadcast_object_list(choice)
first = 0
if choice[0] is not None:
    load(*choice[0])
    first = choice[0][0]
before = f"from a checkpoint of {choice[0][1]}" if choice[0] else "from the beginning"
print(f"rank {rank} of {ranks}: step {first}, {before}, life {os.environ['TORCHELASTIC_RESTART_COUNT']}", flush=True)

loss = torch.zeros(())
for step in range(first, arguments.steps):
    random = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(32, 50, generator=random)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), teacher(x).detach())
    loss.backward()
    optimizer.step()  # this or that raises sparsecomm.RankFailedError if a rank dies: torchrun starts this process anew
    if (step + 1) % arguments.every == 0:
        save(step + 1)
    time.sleep(arguments.pause)
print(f"rank {rank} of {ranks}: done, loss {loss.item():.3f}", flush=True)
dist.destroy_process_group()
