"""Hugging Face Accelerate: gradients that are exchanged sparsely, and checkpoints with what was not sent yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparsecomm.hints import pip_install

try:
    from accelerate import Accelerator
except ImportError as error:
    raise ImportError(
        f"sparsecomm.integrations.accelerate needs Accelerate ({error}): {pip_install('accelerate')}"
    ) from error

from sparsecomm.integrations.attach import Attached, attach
from sparsecomm.reducer.options import DENSITY
from sparsecomm.reducer.schedule import Schedule

__all__ = ["register"]

_FOLDER = "sparsecomm"  # in that of a checkpoint


def register(
    accelerator: Accelerator, model: object, optimizer: object, density: Schedule = DENSITY, **options: Any
) -> Attached:
    """Let a training exchange gradients sparsely, and save with its checkpoints what each rank has not sent yet.

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        sparse = sparsecomm.integrations.accelerate.register(accelerator, model, optimizer)

    With `sparsecomm.torch.SparseAdamW` the optimizer exchanges, and DDP leaves gradients as they are.
    ``accelerator.save_state`` and ``load_state`` then save and load residuals as well: call them on all ranks.

    Args:
        accelerator: it has prepared the model.
        model, optimizer: as `prepare` has returned them; several optimizers as a list.
        density, options: as in `sparsecomm.torch.register`; `SparseAdamW` has its own.

    Raises:
        InvalidInputError: the model is not in DDP, or an argument cannot be used.
    """
    given = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    sparse = attach(model, [getattr(each, "optimizer", each) for each in given], density, options)

    def save_ours(models: list[Any], weights: list[Any], folder: str) -> None:
        sparse.save(Path(folder) / _FOLDER)

    def load_ours(models: list[Any], folder: str) -> None:
        sparse.load(Path(folder) / _FOLDER)

    accelerator.register_save_state_pre_hook(save_ours)
    accelerator.register_load_state_pre_hook(load_ours)
    return sparse
