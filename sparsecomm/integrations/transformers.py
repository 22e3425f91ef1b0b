"""The Trainer of Hugging Face's Transformers: gradients that are exchanged sparsely, in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparsecomm.hints import pip_install

try:
    from transformers import Trainer, TrainerCallback, TrainingArguments
except ImportError as error:
    raise ImportError(
        f"sparsecomm.integrations.transformers needs Transformers ({error}): {pip_install('transformers[torch]')}"
    ) from error

from sparsecomm.integrations.attach import Attached, attach
from sparsecomm.reducer.options import DENSITY
from sparsecomm.reducer.schedule import Schedule
from sparsecomm.torch import SparseOptimizer

__all__ = ["SparseCallback", "register"]


def register(trainer: Trainer, density: Schedule = DENSITY, **options: Any) -> SparseCallback:
    """Let a Trainer exchange gradients sparsely, and save with its checkpoints what each rank has not sent yet.

        adamw = sparsecomm.torch.SparseAdamW(model.named_parameters(), lr=1e-3)
        trainer = Trainer(model, arguments, train_dataset=data, optimizers=(adamw, None))
        sparsecomm.integrations.transformers.register(trainer)
        trainer.train()

    With `SparseAdamW`, as here, the optimizer exchanges. With others a hook does, whose ``density`` and ``options`` are
    those of `sparsecomm.torch.register`. Then pass ``max_grad_norm=0`` to `TrainingArguments`, which would clip what
    was summed up, and ``clip=1.0`` here.

    Args:
        trainer: before ``train()``.
        density, options: as in `sparsecomm.torch.register`; `SparseAdamW` has its own.

    Returns:
        The callback; its ``sparse.reducers`` have counters once the training has begun.
    """
    callback = SparseCallback(trainer, density, options)
    trainer.add_callback(callback)
    return callback


class SparseCallback(TrainerCallback):
    """What `register` adds to a Trainer.

    Attributes:
        sparse: from the beginning of the training on.
    """

    sparse: Attached

    def __init__(self, trainer: Trainer, density: Schedule, options: dict[str, Any]) -> None:
        self._trainer, self._density, self._options = trainer, density, options
        if isinstance(trainer.optimizer, SparseOptimizer):  # its state is loaded before the training begins
            trainer.optimizer.residuals_apart()

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        """Attach to the model, which is in DDP now; go on from a checkpoint if the Trainer does."""
        trainer = self._trainer
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        self.sparse = attach(trainer.model_wrapped, [optimizer], self._density, self._options)
        if state.global_step:
            self.sparse.load(self._folder(args, state))

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        """Save what this rank has not sent yet, in the folder of the Trainer's checkpoint."""
        self.sparse.save(self._folder(args, state))

    def _folder(self, args: TrainingArguments, state: Any) -> Path:
        return Path(str(args.output_dir), f"checkpoint-{state.global_step}", "sparsecomm")
