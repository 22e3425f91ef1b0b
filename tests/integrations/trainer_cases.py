"""Cases of the Trainer, on each rank."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from sparsecomm.integrations.transformers import register
from sparsecomm.torch import SparseAdamW
from tests.integrations.cases import case, main, module, only_rank_0_warned, refused, residuals, rows, warned, weights
from tests.integrations.contract import Framework, Outcome, contract

KINDS = ["sgd", "adamw"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = module()

    def forward(self, x: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
        y = self.net(x)
        return {"loss": y.square().mean(), "logits": y}


class MakesItsOptimizer(Trainer):
    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = SparseAdamW((model or self.model).named_parameters(), lr=0.01, density=0.05)
        return self.optimizer


def trainer_of(
    folder: Path, kind: str, steps: int, density: float | None = 0.05, model: Any = None, **settings: Any
) -> Any:
    """Return a Trainer, with its callback as ``sparse``."""
    model = model or Model()
    arguments = TrainingArguments(
        str(folder), use_cpu=True, per_device_train_batch_size=4, max_steps=steps, report_to=[], max_grad_norm=0,
        disable_tqdm=True, lr_scheduler_type="constant", logging_strategy="no", dataloader_pin_memory=False,
        **{"save_strategy": "steps", "save_steps": 2, **settings},
    )  # fmt: skip
    optimizer = None
    if kind == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.0 if density else 0.9)
    elif kind == "adamw":
        optimizer = SparseAdamW(model.named_parameters(), lr=0.01, density=density)
    data = [{"x": x, "labels": 0} for x in rows()]
    of = MakesItsOptimizer if kind == "created" else Trainer
    trainer = of(model, arguments, train_dataset=data, eval_dataset=data[:8], optimizers=(optimizer, None))
    if density is not None:
        trainer.sparse = register(trainer, density, **({"momentum": 0.9, "dense_below": 0} if kind == "sgd" else {}))
    return trainer


def trained(*arguments: Any, start: Any = None, **settings: Any) -> torch.Tensor:
    trainer = trainer_of(*arguments, **settings)
    trainer.train(resume_from_checkpoint=start)
    return weights(trainer.model)


class Begun(TrainerCallback):
    """Records the residuals at the start of a run."""

    at_start: Mapping[str, np.ndarray] = MappingProxyType({})

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if hasattr(self.trainer, "sparse"):
            self.at_start = residuals(self.trainer.sparse.sparse)


class OfTrainer(Framework):
    kinds = ("sgd", "adamw", "created")
    dense = (({}, 4), ({"gradient_accumulation_steps": 2}, 4), ({"bf16": True}, 4))
    compiled = (("adamw", {"torch_compile": True, "torch_compile_backend": "eager"}),)
    nodes = {"save_on_each_node": True}  # noqa: RUF012

    def run(self, folder: Path, kind: str, steps: int, start: Any = None, density: Any = 0.05, **more: Any) -> Outcome:
        trainer = trainer_of(folder, kind, steps, density, **more)
        trainer.add_callback(begun := Begun(trainer))
        trainer.train(resume_from_checkpoint=start and str(start))
        return Outcome(weights(trainer.model), density and trainer.sparse.sparse, begun.at_start)

    def checkpoint(self, folder: Path, step: int) -> Path:
        return folder / f"checkpoint-{step}"


contract(OfTrainer())


@case(kind=[*KINDS, "created"])
def twice(folder: Path, kind: str) -> None:
    """A second train() continues with the same optimizer, model and residuals."""
    trainer = trainer_of(folder, kind, 3, save_strategy="no")
    trainer.train()
    first, first_residuals = trainer.sparse.sparse, residuals(trainer.sparse.sparse)
    trainer.train()
    assert trainer.sparse.sparse is first
    assert first.step == 6
    assert any(values.any() for values in first_residuals.values())
    weights(trainer.model)
    expected = trained(folder, kind, 3)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert torch.equal(weights(trainer.model), expected)
    assert first.step == 3
    if kind == "created":  # the Trainer makes another optimizer
        trainer.optimizer = None
        trainer.train()
        assert trainer.sparse.sparse.step == 3


@case(kind=["sgd"])
def only_the_model(folder: Path, kind: str) -> None:
    """Without the optimizer, residuals are not saved either, and a resumed run warns."""
    trained(folder, kind, 4, save_only_model=True)
    assert not list(folder.rglob("sparsecomm"))
    with warned() as messages:
        trained(folder / "again", kind, 4, start=str(folder / "checkpoint-2"))
    only_rank_0_warned(messages, "the residuals of this checkpoint are not in")


@case(kind=["adamw"])
def the_best_model(folder: Path, kind: str) -> None:
    """The best model is loaded at the end, other checkpoints are removed, and a run resumes from it."""
    settings = {
        "load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "save_total_limit": 1,
        "metric_for_best_model": "loss", "greater_is_better": True,
    }  # fmt: skip
    trained(folder, kind, 4, **settings)  # the loss falls: the first is "best"
    (left,) = [name for name in os.listdir(folder) if name.startswith("checkpoint")]
    assert left == "checkpoint-2"
    expected = trained(folder / "all", kind, 4)
    assert torch.equal(trained(folder, kind, 4, start=True), expected)


@case(kind=KINDS)
def two_trainers(folder: Path, kind: str) -> None:
    """Two trainers train a model in turn; with SparseAdamW, the second needs the first one's remove()."""
    first = trainer_of(folder, kind, 2, save_strategy="no")
    first.train()
    if kind == "adamw":
        with refused("call its remove() first"):
            trainer_of(folder, kind, 2, model=first.model)
        first.optimizer.optimizer.remove()
    second = trainer_of(folder, kind, 2, model=first.model, save_strategy="no")
    second.train()
    assert first.sparse.sparse.step == second.sparse.sparse.step == 2
    weights(second.model)
    with refused("it was registered already"):
        register(second)


if __name__ == "__main__":
    main()
