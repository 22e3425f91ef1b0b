"""An optimizer that exchanges sparse gradients: PyTorch over MPI, without DistributedDataParallel.

    mpirun -n 2 python examples/torch_optimizer.py

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
    from mpi4py import MPI
    from sklearn.datasets import load_digits
    from torch import nn
except ImportError as error:
    sys.exit(f"This example needs {error.name}: pip install torch scikit-learn")

import sparsecomm.torch

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--folder", type=Path, default=Path("checkpoints/torch_optimizer"))
arguments = parser.parse_args()

rank, ranks = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
torch.set_num_threads(1)  # the ranks share the cores

x, y = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
x, test = x.float() / 16, torch.arange(len(x)) % 5 == 0
train = torch.arange(len(x))[~test]

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
# sparsecomm: all ranks begin with the same weights. Gradients are exchanged sparsely.
sparsecomm.torch.broadcast_parameters(model.state_dict())
optimizer = sparsecomm.torch.DistributedOptimizer(optimizer, model.named_parameters(), 0.1)

# sparsecomm: the optimizer's state includes the rank's residuals, so every rank saves its own.
objects = {"model": model, "optimizer": optimizer}
checkpoint = sparsecomm.torch.load(arguments.folder, objects)
begin = checkpoint.step if checkpoint else 0

for epoch in range(begin, arguments.epochs):
    order = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))]
    for mine in order[: len(order) // (32 * ranks) * 32 * ranks].view(-1, ranks, 32)[:, rank]:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
        optimizer.step()
    sparsecomm.torch.save(arguments.folder, epoch + 1, objects)

accuracy = (model(x[test]).argmax(1) == y[test]).float().mean().item()
weights = nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
counters = optimizer.reducer.counters
sent, dense = counters.bytes_sent / max(1, counters.steps), 8 * len(weights) * (ranks - 1) / ranks  # of a ring
summary = f"{counters.steps} steps, sent {sent:.0f} B per step (dense: {dense:.0f} B)"
if not counters.steps:
    summary = f"nothing to train: the checkpoint has {begin} epochs; pass a larger --epochs"
print(f"rank {rank}: accuracy {accuracy:.1%}, {summary}, weights {hashlib.sha256(weights).hexdigest()[:8]}\n", end="")
