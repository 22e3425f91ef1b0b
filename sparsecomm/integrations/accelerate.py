"""Hugging Face Accelerate: exchange gradients sparsely, and save residuals with its checkpoints."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from sparsecomm.errors import InvalidInputError, needing

with needing("Accelerate", __name__, "accelerate"):
    from accelerate import Accelerator
    from accelerate.utils import OPTIMIZER_NAME

from sparsecomm.integrations.attach import FOLDER, KEY, Attached, attach, ddp_of, ddps_in, unwrapped
from sparsecomm.reducer.options import DENSITY, Schedule


def register(
    accelerator: Accelerator, model: object, optimizer: object, density: Schedule = DENSITY, **options: Any
) -> Attached:
    """Exchange a model's gradients sparsely, and save and load residuals with the accelerator's checkpoints.

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        sparse = sparsecomm.integrations.accelerate.register(accelerator, model, optimizer)

    Residuals are in the folder ``sparsecomm`` of each checkpoint.

    Args:
        accelerator: the accelerator that has prepared the model.
        model: the model that ``prepare`` returned. Register each model of an accelerator.
        optimizer: the optimizer that ``prepare`` returned; a list if the model has several.
        density, options: as in `sparsecomm.torch.register`, with the accelerator's scaler by default. They are ignored
            for `sparsecomm.torch.SparseAdamW`, which exchanges gradients itself.

    Raises:
        InvalidInputError: the model is not in DDP, or was registered already; the accelerator has not prepared the
            model or an optimizer; or an argument is not supported.
    """
    optimizers = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    inner_optimizers: list[Any] = [*map(unwrapped, optimizers)]
    ddp = ddp_of(model)
    if _model_number(accelerator, ddp) is None:
        raise InvalidInputError("model: this accelerator has not prepared it; pass the model that prepare() returned")
    if any(_optimizer_number(accelerator, inner) is None for inner in inner_optimizers):
        raise InvalidInputError(
            "optimizer: this accelerator has not prepared it, and would not save it; pass what prepare() returned"
        )
    sparse = attach(ddp, inner_optimizers, density, {"scaler": accelerator.scaler, **options})
    saved: dict[str, str] = {}  # the name of the latest saved folder, and its checkpoint id

    def save_residuals(models: list[Any], weights: list[Any], folder: str) -> None:
        if (number := _model_number(accelerator, ddp)) is not None:  # otherwise free_memory() was called
            residuals, checkpoint = Path(folder, FOLDER, f"model_{number}"), f"{sparse.run}-{sparse.step}"
            sparse.save(residuals, checkpoint)
            sparse.prune(residuals, keep=2)  # Accelerate has not overwritten the previous checkpoint yet
            saved.clear()
            saved[residuals.name] = checkpoint

    def add_id(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        current = {name: checkpoint for name, checkpoint in saved.items() if checkpoint.endswith(f"-{sparse.step}")}
        return {**state, KEY: {**state.get(KEY, {}), **current}} if current else state

    def load_residuals(models: list[Any], folder: str) -> None:
        if (number := _model_number(accelerator, ddp)) is not None:
            saved.clear()
            residuals = Path(folder, FOLDER, f"model_{number}")
            file = _optimizer_number(accelerator, inner_optimizers[0]) if inner_optimizers else None
            ids = {} if file is None else _ids_in(Path(folder, f"{OPTIMIZER_NAME}{f'_{file}' if file else ''}.bin"))
            sparse.load(residuals, ids.get(residuals.name), folder)

    for inner in inner_optimizers:
        inner.register_state_dict_post_hook(add_id)
    accelerator.register_save_state_pre_hook(save_residuals)
    accelerator.register_load_state_pre_hook(load_residuals)
    return sparse


def _ids_in(optimizer_file: Path) -> dict[str, Any]:
    """Return the checkpoint ids that `add_id` has added to an optimizer's file, by folder of the model."""
    try:
        state = torch.load(optimizer_file, map_location="cpu", weights_only=True, mmap=True)  # reads no tensors
    except (OSError, RuntimeError, pickle.UnpicklingError):
        return {}  # Accelerate loads the same file, and reports the error
    ids = state.get(KEY) if isinstance(state, dict) else None
    return ids if isinstance(ids, dict) else {}


# Accelerate saves models and optimizers by position, which no public method returns.


def _model_number(accelerator: Accelerator, ddp: DistributedDataParallel) -> int | None:
    models = enumerate(accelerator._models)  # as they were before or after DDP wrapped them
    return next((i for i, model in models if model is ddp.module or ddp in ddps_in(model)), None)


def _optimizer_number(accelerator: Accelerator, optimizer: object) -> int | None:
    optimizers = enumerate(map(unwrapped, accelerator._optimizers))
    return next((i for i, prepared in optimizers if prepared is optimizer), None)
