"""Hybrid FSDP2: two replicas of a model, each sharded over two ranks, with sparse sums over replicas; without MPI.

    torchrun --nproc_per_node 4 examples/fsdp_hybrid.py
    torchrun --nproc_per_node 4 examples/fsdp_hybrid.py --local-steps 10

In each step every rank exchanges its shard of the gradient with the rank that holds the same shard of the other
replica. With ``--local-steps N``, ranks exchange the change of their shards once in N steps (DiLoCo). Place the
replicas (``--replicas`` sets their number) so that the slow links are between them. A small network learns
scikit-learn's digits. Each epoch ends with a checkpoint, from which the next run continues. Comments with
``# sparsecomm:`` mark the lines that use sparsecomm.
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
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
except ImportError as error:
    sys.exit(f"This example needs {error.name}: pip install torch scikit-learn")

import sparsecomm.torch

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--replicas", type=int, default=2)
parser.add_argument("--local-steps", type=int, default=0, help="steps per round; 0: sum gradients in each step")
parser.add_argument("--folder", type=Path, default=Path("checkpoints/fsdp_hybrid"))
arguments = parser.parse_args()

dist.init_process_group("gloo")  # "nccl" with a GPU per rank, and "cuda" below
rank, ranks = dist.get_rank(), dist.get_world_size()
shards = ranks // arguments.replicas

x, y = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
x, test = x.float() / 16, torch.arange(len(x)) % 5 == 0
data = TensorDataset(x[~test], y[~test])
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler)

mesh = init_device_mesh("cpu", (arguments.replicas, shards), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
for layer in (model[2], model):
    # sparsecomm: pass only the mesh of the shards; across replicas, sums are sparse.
    fully_shard(layer, mesh=mesh["shard"])
replicas = mesh["replicate"].get_group()
if arguments.local_steps:
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    # sparsecomm: FSDP sums within each replica; optimizer.step() exchanges between replicas at the end of a round.
    sparse = sparsecomm.torch.DiLoCo(model, optimizer, sync_every=arguments.local_steps, comm=replicas)
    reducers = sparse.reducers
else:
    sparse = sparsecomm.torch.register_fsdp(model, 0.1, comm=replicas)  # sparsecomm: shards are exchanged sparsely
    optimizer, reducers = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), (sparse.reducer,)

# sparsecomm: every rank saves its shards and residuals. A later run needs the same ranks and --replicas.
objects = {"model": model, "optimizer": optimizer, "sparse": sparse}
checkpoint = sparsecomm.torch.load(arguments.folder, objects)
begin = checkpoint.step if checkpoint else 0

steps = 0
for epoch in range(begin, arguments.epochs):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        steps += 1
    sparsecomm.torch.save(arguments.folder, epoch + 1, objects)

if isinstance(sparse, sparsecomm.torch.DiLoCo):
    # sparsecomm: the result is the global parameters; this rank has its shards of them.
    sparse.finish()
    sparse.write_global_parameters()
sparse.remove()
whole = [parameter.full_tensor().detach().reshape(-1) for parameter in model.parameters()]
weights = torch.cat(whole).numpy()
accuracy = (model(x[test]).argmax(1) == y[test]).float().mean().item()
sent = sum(reducer.counters.bytes_sent for reducer in reducers) / max(1, steps)
part = arguments.replicas / ranks  # of the model that each rank holds
dense = 8 * len(weights) * part * (arguments.replicas - 1) / arguments.replicas  # of ring allreduces between replicas
summary = f"{steps} steps, sent {sent:.0f} B per step (dense: {dense:.0f} B)"
if not steps:
    summary = f"nothing to train: the checkpoint has {begin} epochs; pass a larger --epochs"
print(f"rank {rank}: accuracy {accuracy:.1%}, {summary}, weights {hashlib.sha256(weights).hexdigest()[:8]}\n", end="")
dist.destroy_process_group()
