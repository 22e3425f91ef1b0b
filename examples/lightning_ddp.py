"""Lightning with sparse gradients.

    python examples/lightning_ddp.py

A small network learns scikit-learn's digits. Each epoch ends with a checkpoint, and another call goes on from there.
What switches sparsecomm on is the strategy, below ``# sparsecomm:``.
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
    from lightning.pytorch.strategies import DDPStrategy
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
except ImportError as error:
    sys.exit(f"This example needs {error.name}: pip install lightning scikit-learn")

import sparsecomm.torch


# sparsecomm: `DDPStrategy(ddp_comm_state=..., ddp_comm_hook=...)` would do on GPUs; on CPUs Lightning ignores hooks,
# and anywhere a checkpoint is rank 0's. So this strategy registers the hook, and puts a file per rank beside.
class SparseDDP(DDPStrategy):
    def setup(self, trainer: lightning.Trainer) -> None:
        super().setup(trainer)
        if trainer.training:
            # 1 % of the gradient is sent. Momentum comes before that, and the optimizer has none.
            self.sparse = sparsecomm.torch.register(self.model, 0.01, momentum=0.9)
            if trainer.ckpt_path:
                # On another number of ranks, all old ranks' files make a new rank's state.
                first = torch.load(self.beside(trainer.ckpt_path, 0), weights_only=True)
                files = [self.beside(trainer.ckpt_path, rank) for rank in range(first["world_size"])]
                states = (torch.load(file, weights_only=True) for file in files)
                self.sparse.load_state_dict(sparsecomm.reshard(states, self.global_rank, self.world_size))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, filepath, storage_options)
        self.beside(filepath, self.global_rank).parent.mkdir(parents=True, exist_ok=True)
        torch.save(self.sparse.state_dict(), self.beside(filepath, self.global_rank))

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        self.beside(filepath, self.global_rank).unlink(missing_ok=True)

    def beside(self, filepath: Any, rank: int) -> Path:
        return Path(f"{filepath}.rank{rank}")


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("checkpoints/lightning_ddp"))
    arguments = parser.parse_args()

    x, y = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    x, test = x.float() / 16, torch.arange(len(x)) % 5 == 0
    strategy = SparseDDP(process_group_backend="gloo")  # "nccl" on GPUs
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
    model = Digits()
    last = arguments.folder / "last.ckpt"
    loader = DataLoader(TensorDataset(x[~test], y[~test]), batch_size=32, shuffle=True)
    trainer.fit(model, loader, ckpt_path=last if last.exists() else None)

    accuracy = (model.net(x[test]).argmax(1) == y[test]).float().mean().item()
    weights = nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    counters = strategy.sparse.reducer.counters
    rank, ranks = trainer.global_rank, trainer.world_size
    sent, dense = counters.bytes_sent / max(1, counters.steps), 8 * len(weights) * (ranks - 1) / ranks  # of a ring
    did = f"{counters.steps} steps, sent {sent:.0f} B per step (dense: {dense:.0f} B)"
    if not counters.steps:
        did = f"nothing to train, since the checkpoint is of {arguments.epochs} epochs: pass more by --epochs"
    print(f"rank {rank}: accuracy {accuracy:.1%}, {did}, weights {hashlib.sha256(weights).hexdigest()[:8]}\n", end="")
