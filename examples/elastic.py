"""A training that continues with fewer or more ranks, from checkpoints: PyTorch under torchrun, without MPI.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nnodes=1:2 --nproc-per-node=1 --max-restarts=3 --rdzv-backend=c10d --rdzv-endpoint=localhost:29400 \\
        --rdzv-conf=last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3 examples/elastic.py

Start it twice, in two shells, as on two nodes. Kill the second one, and its worker: the first goes on with one rank,
from the newest checkpoint that is complete. Residuals move along. Another number of ranks may also start from there
later. With ``--local-steps 10`` ranks exchange what so many steps did (DiLoCo), and no gradients. What that takes
stands below ``# sparsecomm:``. The variable lets torchrun make a new store for each number of ranks.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

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
torch.set_num_threads(1)

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
teacher = nn.Linear(50, 5)
model = nn.Sequential(nn.Linear(50, 100), nn.ReLU(), nn.Linear(100, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
diloco = None
if arguments.local_steps:
    # sparsecomm: 2 % of what a round has done is sent at its end.
    diloco = sparsecomm.torch.DiLoCo(model, optimizer, density=0.02, sync_every=arguments.local_steps)
else:
    # sparsecomm: gradients are exchanged sparsely in each step.
    optimizer = sparsecomm.torch.DistributedOptimizer(optimizer, model.named_parameters())

# sparsecomm: every rank saves its own: what it has not sent yet and, in the middle of a round, its weights. Residuals
# of all old ranks are shared out among the new ones; their sum stays what it was.
objects = {"model": model, "optimizer": optimizer} | ({"diloco": diloco} if diloco is not None else {})
found = sparsecomm.torch.load(arguments.folder, objects)
first = found.step if found else 0
before = f"from a checkpoint of {found.ranks}" if found else "from the beginning"
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
        sparsecomm.torch.save(arguments.folder, step + 1, objects)
    time.sleep(arguments.pause)
print(f"rank {rank} of {ranks}: done, loss {loss.item():.3f}", flush=True)
dist.destroy_process_group()
