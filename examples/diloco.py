"""Local steps (DiLoCo): every ten steps, ranks average the changes of their weights sparsely; over gloo, without MPI.

    torchrun --nproc_per_node 2 examples/diloco.py

A small network learns scikit-learn's digits. Each epoch ends with a checkpoint, from which the next run continues, also
with another number of ranks. Comments with ``# sparsecomm:`` mark the lines that use sparsecomm.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

try:
    import torch
    import torch.distributed as dist
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
except ImportError as error:
    sys.exit(f"This example needs {error.name}: pip install torch scikit-learn")

import sparsecomm.torch

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--sync-every", type=int, default=10, help="local steps in a round")
parser.add_argument("--folder", type=Path, default=Path("checkpoints/diloco"))
arguments = parser.parse_args()

dist.init_process_group("gloo")  # "nccl" with a GPU per rank
rank, ranks = dist.get_rank(), dist.get_world_size()

x, y = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
x, test = x.float() / 16, torch.arange(len(x)) % 5 == 0
data = TensorDataset(x[~test], y[~test])
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=32, sampler=sampler)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
# sparsecomm: inner.step() now also exchanges each half of the model once per round. The exchange of a half overlaps
# with the next two local steps. Residuals store what is not sent yet; they act as outer momentum.
diloco = sparsecomm.torch.DiLoCo(model, inner, sync_every=arguments.sync_every, fragments=2, fragment_sync_delay=2)

# sparsecomm: every rank saves its own state, because ranks differ within a round. Another number of ranks begins with
# the global parameters.
objects = {"model": model, "inner": inner, "diloco": diloco}
checkpoint = sparsecomm.torch.load(arguments.folder, objects)
begin = checkpoint.step if checkpoint else 0

steps = 0
for epoch in range(begin, arguments.epochs):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        inner.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        inner.step()
        steps += 1
    sparsecomm.torch.save(arguments.folder, epoch + 1, objects)

# sparsecomm: the global parameters are the result, the same on all ranks.
diloco.finish()
diloco.write_global_parameters()
diloco.remove()
accuracy = (model(x[test]).argmax(1) == y[test]).float().mean().item()
weights = nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
sent = sum(reducer.counters.bytes_sent for reducer in diloco.reducers) / max(1, steps)
dense = 8 * len(weights) * (ranks - 1) / ranks  # of a ring allreduce in each step
summary = f"{steps} steps, sent {sent:.0f} B per step (dense: {dense:.0f} B)"
if not steps:
    summary = f"nothing to train: the checkpoint has {begin} epochs; pass a larger --epochs"
print(f"rank {rank}: accuracy {accuracy:.1%}, {summary}, weights {hashlib.sha256(weights).hexdigest()[:8]}\n", end="")
dist.destroy_process_group()
