"""Hugging Face Accelerate with sparse gradients.

    torchrun --nproc_per_node 2 examples/accelerate_loop.py

A small network learns scikit-learn's digits, by SGD or, with ``--adamw``, by `SparseAdamW`. Each epoch ends with a
checkpoint, from which the next run continues. Comments with ``# sparsecomm:`` mark the lines that use sparsecomm.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

try:
    import torch
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
except ImportError as error:
    sys.exit(f"This example needs {error.name}: pip install accelerate scikit-learn")

import sparsecomm.torch
from sparsecomm.integrations.accelerate import register

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--adamw", action="store_true")
parser.add_argument("--folder", type=Path, default=Path("checkpoints/accelerate_loop"))
arguments = parser.parse_args()

accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
rank, ranks = accelerator.process_index, accelerator.num_processes
set_seed(0)

x, y = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
x, test = x.float() / 16, torch.arange(len(x)) % 5 == 0
loader = DataLoader(TensorDataset(x[~test], y[~test]), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer: torch.optim.Optimizer
if arguments.adamw:  # sparsecomm: this optimizer exchanges gradients itself
    optimizer = sparsecomm.torch.SparseAdamW(model.named_parameters(), lr=2e-3)
else:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
# sparsecomm: gradients are exchanged sparsely. Checkpoints include each rank's residuals.
sparse = register(accelerator, model, optimizer, 0.1)

begin = 0
if checkpoints := sorted(arguments.folder.glob("epoch*")):
    accelerator.load_state(str(checkpoints[-1]))
    begin = len(checkpoints)

for epoch in range(begin, arguments.epochs):
    loader.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(images), labels))
        optimizer.step()
    accelerator.save_state(str(arguments.folder / f"epoch{epoch:03}"))

accuracy = (model(x[test]).argmax(1) == y[test]).float().mean().item()
weights = nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
counters = sparse.reducers[0].counters
sent, dense = counters.bytes_sent / max(1, counters.steps), 8 * len(weights) * (ranks - 1) / ranks  # of a ring
summary = f"{counters.steps} steps, sent {sent:.0f} B per step (dense: {dense:.0f} B)"
if not counters.steps:
    summary = f"nothing to train: the checkpoint has {begin} epochs; pass a larger --epochs"
print(f"rank {rank}: accuracy {accuracy:.1%}, {summary}, weights {hashlib.sha256(weights).hexdigest()[:8]}\n", end="")
accelerator.end_training()
