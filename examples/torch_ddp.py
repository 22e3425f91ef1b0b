"""DistributedDataParallel with sparse gradients, over gloo or NCCL; no MPI is needed.

    torchrun --nproc_per_node 2 examples/torch_ddp.py

A small network learns scikit-learn's digits. Each epoch ends with a checkpoint, from which the next run continues.
Comments with ``# sparsecomm:`` mark the lines that use sparsecomm.
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
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
except ImportError as error:
    sys.exit(f"This example needs {error.name}: pip install torch scikit-learn")

import sparsecomm.torch

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--folder", type=Path, default=Path("checkpoints/torch_ddp"))
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
ddp = DistributedDataParallel(model)
sparse = sparsecomm.torch.register(ddp, 0.1)  # sparsecomm: gradients are exchanged sparsely
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)

# sparsecomm: every rank saves its own residuals. A later run may have another number of ranks.
objects = {"model": model, "optimizer": optimizer, "sparse": sparse}
checkpoint = sparsecomm.torch.load(arguments.folder, objects)
begin = checkpoint.step if checkpoint else 0

for epoch in range(begin, arguments.epochs):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(images), labels).backward()
        optimizer.step()
    sparsecomm.torch.save(arguments.folder, epoch + 1, objects)

accuracy = (model(x[test]).argmax(1) == y[test]).float().mean().item()
weights = nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
counters = sparse.reducer.counters
sent, dense = counters.bytes_sent / max(1, counters.steps), 8 * len(weights) * (ranks - 1) / ranks  # of a ring
summary = f"{counters.steps} steps, sent {sent:.0f} B per step (dense: {dense:.0f} B)"
if not counters.steps:
    summary = f"nothing to train: the checkpoint has {begin} epochs; pass a larger --epochs"
print(f"rank {rank}: accuracy {accuracy:.1%}, {summary}, weights {hashlib.sha256(weights).hexdigest()[:8]}\n", end="")
dist.destroy_process_group()
