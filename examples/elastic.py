"""Training that continues from checkpoints with fewer or more ranks: PyTorch under torchrun, without MPI.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nnodes=1:2 --nproc-per-node=1 --max-restarts=3 --rdzv-backend=c10d --rdzv-endpoint=localhost:29400 \\
        --rdzv-conf=last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3 examples/elastic.py

Run this in two shells, as on two nodes. Then kill the second torchrun and its worker: the first one continues with one
rank from the newest complete checkpoint, which includes residuals. You can also start another number of ranks from it
later. With ``--local-steps 10``, ranks exchange the changes of ten steps instead of gradients (DiLoCo). Comments with
``# sparsecomm:`` mark the lines that use sparsecomm. The variable lets torchrun make a new store for each world size.
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
parser.add_argument("--local-steps", type=int, default=0, help="steps per round; 0: sum gradients in each step")
parser.add_argument("--pause", type=float, default=0.05, help="seconds to sleep after each step")
parser.add_argument("--folder", type=Path, default=Path("checkpoints/elastic"), help="a folder that all ranks can read")
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
    # sparsecomm: at the end of a round, 2 % of the changes are sent.
    diloco = sparsecomm.torch.DiLoCo(model, optimizer, density=0.02, sync_every=arguments.local_steps)
else:
    # sparsecomm: gradients are exchanged sparsely in each step.
    optimizer = sparsecomm.torch.DistributedOptimizer(optimizer, model.named_parameters())

# sparsecomm: every rank saves its own residuals and, with local steps, its own weights. The residuals of all old ranks
# are distributed over the new ranks; their sum does not change.
objects = {"model": model, "optimizer": optimizer} | ({"diloco": diloco} if diloco is not None else {})
checkpoint = sparsecomm.torch.load(arguments.folder, objects)
first = checkpoint.step if checkpoint else 0
before = f"from a checkpoint of {checkpoint.ranks}" if checkpoint else "from the beginning"
print(f"rank {rank} of {ranks}: step {first}, {before}, restart {os.environ['TORCHELASTIC_RESTART_COUNT']}", flush=True)

loss = torch.zeros(())
for step in range(first, arguments.steps):
    random = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(32, 50, generator=random)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), teacher(x).detach())
    loss.backward()
    optimizer.step()  # if a rank dies, this or backward() raises RankFailedError, and torchrun restarts this process
    if (step + 1) % arguments.every == 0:
        sparsecomm.torch.save(arguments.folder, step + 1, objects)
    time.sleep(arguments.pause)
print(f"rank {rank} of {ranks}: done, loss {loss.item():.3f}", flush=True)
dist.destroy_process_group()
