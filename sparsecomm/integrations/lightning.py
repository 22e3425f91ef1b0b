"""Lightning: a strategy that exchanges gradients sparsely, and saves what each rank has not sent yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparsecomm.hints import pip_install

try:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy
except ImportError as error:
    raise ImportError(
        f"sparsecomm.integrations.lightning needs Lightning ({error}): {pip_install('lightning')}"
    ) from error

from sparsecomm.integrations.attach import Attached, attach
from sparsecomm.reducer.options import DENSITY
from sparsecomm.reducer.schedule import Schedule

__all__ = ["SparseDDPStrategy"]


class SparseDDPStrategy(DDPStrategy):
    """Lightning's `DDPStrategy`, with sparse sums of gradients.

        trainer = lightning.Trainer(strategy=SparseDDPStrategy(), devices=2, accelerator="gpu")

    Where ``configure_optimizers`` returns a `sparsecomm.torch.SparseAdamW`, that exchanges, and DDP leaves gradients as
    they are. Each rank's residuals are saved beside Lightning's checkpoint, in a folder of its name with ``.ranks``.

    Args:
        density: as in `sparsecomm.torch.register`.
        options: those of `sparsecomm.torch.register`.
        ddp: those of `DDPStrategy`.

    Attributes:
        sparse: from the beginning of a training on; its ``reducers`` have counters. ``None`` before.
    """

    sparse: Attached | None = None

    def __init__(self, density: Schedule = DENSITY, options: dict[str, Any] | None = None, **ddp: Any) -> None:
        super().__init__(**ddp)
        self._density, self._options = density, dict(options or {})

    def setup(self, trainer: lightning.Trainer) -> None:
        """Begin, or go on from ``trainer.ckpt_path``."""
        super().setup(trainer)
        if not trainer.training:
            return
        self.sparse = attach(self.model, self.optimizers, self._density, self._options)
        if trainer.ckpt_path:
            self.sparse.load(_beside(trainer.ckpt_path))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a checkpoint, on all ranks."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self.sparse is not None:
            self.sparse.save(_beside(filepath))

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, on all ranks."""
        super().remove_checkpoint(filepath)
        folder = _beside(filepath)
        for path in folder.glob(f"step*-rank{self.global_rank}-of*.pt"):
            path.unlink(missing_ok=True)
        self.barrier()
        if self.is_global_zero and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _beside(filepath: Any) -> Path:
    return Path(f"{filepath}.ranks")
