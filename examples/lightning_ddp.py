"""Lightning with sparse gradients.

    python examples/lightning_ddp.py

A small network learns scikit-learn's digits, by SGD or, with ``--adamw``, by `SparseAdamW`. Each epoch ends with a
checkpoint, from which the next run continues. Comments with ``# sparsecomm:`` mark the lines that use sparsecomm.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path
from typing import Any

try:
    import lightning
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
except ImportError as error:
    sys.exit(f"This example needs {error.name}: pip install lightning scikit-learn")

import sparsecomm.torch
from sparsecomm.integrations.lightning import SparseDDPStrategy


class Digits(lightning.LightningModule):
    def __init__(self, adamw: bool) -> None:
        super().__init__()
        self.adamw = adamw
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.adamw:  # sparsecomm: this optimizer exchanges gradients itself
            return sparsecomm.torch.SparseAdamW(self.named_parameters(), lr=2e-3)
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--adamw", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints/lightning_ddp"))
    arguments = parser.parse_args()

    x, y = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    x, test = x.float() / 16, torch.arange(len(x)) % 5 == 0
    # sparsecomm: gradients are exchanged sparsely.
    strategy = SparseDDPStrategy(0.1, process_group_backend="gloo")  # "nccl" on GPUs
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=arguments.epochs,
        logger=False,
        enable_progress_bar=False,
        callbacks=[ModelCheckpoint(arguments.folder, "{epoch}", save_top_k=-1, save_last=True)],
    )
    lightning.seed_everything(0, verbose=False)
    model = Digits(arguments.adamw)
    last = arguments.folder / "last.ckpt"
    loader = DataLoader(TensorDataset(x[~test], y[~test]), batch_size=32, shuffle=True)
    trainer.fit(model, loader, ckpt_path=last if last.exists() else None)

    accuracy = (model.net(x[test]).argmax(1) == y[test]).float().mean().item()
    weights = nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    counters = strategy.sparse.reducers[0].counters
    rank, ranks = trainer.global_rank, trainer.world_size
    sent, dense = counters.bytes_sent / max(1, counters.steps), 8 * len(weights) * (ranks - 1) / ranks  # of a ring
    summary = f"{counters.steps} steps, sent {sent:.0f} B per step (dense: {dense:.0f} B)"
    if not counters.steps:
        summary = f"nothing to train: the checkpoint has {arguments.epochs} epochs; pass a larger --epochs"
    print(
        f"rank {rank}: accuracy {accuracy:.1%}, {summary}, weights {hashlib.sha256(weights).hexdigest()[:8]}\n", end=""
    )
