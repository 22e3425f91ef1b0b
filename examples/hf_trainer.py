"""The Trainer of Hugging Face Transformers with sparse gradients.

    torchrun --nproc_per_node 2 examples/hf_trainer.py

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
    from sklearn.datasets import load_digits
    from torch import nn
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint
except ImportError as error:
    sys.exit(f"This example needs {error.name}: pip install 'transformers[torch]' scikit-learn")

import sparsecomm.torch
from sparsecomm.integrations.transformers import register


class Digits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--adamw", action="store_true")
parser.add_argument("--folder", type=Path, default=Path("checkpoints/hf_trainer"))
arguments = parser.parse_args()

x, y = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
x, test = x.float() / 16, torch.arange(len(x)) % 5 == 0
torch.manual_seed(0)
model = Digits()
optimizer: torch.optim.Optimizer
if arguments.adamw:  # sparsecomm: this optimizer exchanges gradients itself
    optimizer = sparsecomm.torch.SparseAdamW(model.named_parameters(), lr=2e-3)
else:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
trainer = Trainer(
    model,
    TrainingArguments(
        str(arguments.folder),
        num_train_epochs=arguments.epochs,
        per_device_train_batch_size=32,
        use_cpu=True,
        lr_scheduler_type="constant",
        save_strategy="epoch",
        report_to="none",
        disable_tqdm=True,
        max_grad_norm=0,  # sparsecomm: do not clip means. To clip gradients, pass clip=1.0 to `register`
    ),
    train_dataset=[{"x": image, "labels": label} for image, label in zip(x[~test], y[~test], strict=True)],
    optimizers=(optimizer, None),
)
callback = register(trainer, 0.1)  # sparsecomm: gradients are exchanged sparsely
trainer.train(resume_from_checkpoint=get_last_checkpoint(arguments.folder) if arguments.folder.exists() else None)

accuracy = (model.net(x[test]).argmax(1) == y[test]).float().mean().item()
weights = nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
counters = callback.sparse.reducers[0].counters
rank, ranks = trainer.args.process_index, trainer.args.world_size
sent, dense = counters.bytes_sent / max(1, counters.steps), 8 * len(weights) * (ranks - 1) / ranks  # of a ring
summary = f"{counters.steps} steps, sent {sent:.0f} B per step (dense: {dense:.0f} B)"
if not counters.steps:
    summary = f"nothing to train: the checkpoint has {arguments.epochs} epochs; pass a larger --epochs"
print(f"rank {rank}: accuracy {accuracy:.1%}, {summary}, weights {hashlib.sha256(weights).hexdigest()[:8]}\n", end="")
