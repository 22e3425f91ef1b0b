"""Cases of the Trainer, on each rank, against trainings that were not interrupted, or dense ones."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from sparsecomm.integrations.transformers import register
from sparsecomm.torch import SparseAdamW
from tests.integrations.cases import (
    case,
    main,
    module,
    move,
    on_rank_0,
    one_warning,
    refused,
    residuals,
    rows,
    same_sum,
    warned,
    weights,
)

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


def made(folder: Path, kind: str, steps: int, density: float | None = 0.05, model: Any = None, **settings: Any) -> Any:
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
    trainer = made(*arguments, **settings)
    trainer.train(resume_from_checkpoint=start)
    return weights(trainer.model)


@case(kind=[*KINDS, "created"])
def resumes(folder: Path, kind: str) -> None:
    """With the residuals of the checkpoint, wherever that is, and whatever else is in the output folder."""
    expected = trained(folder / "first", kind, 4, save_total_limit=2)
    trained(folder / "stale", kind, 2, data_seed=7)
    assert torch.equal(trained(folder / "stale", kind, 4, start=str(folder / "first/checkpoint-2")), expected)
    assert torch.equal(trained(folder / "first", kind, 6, start=True), trained(folder / "all", kind, 6))
    on_rank_0(move, folder / "first/checkpoint-2", folder / "moved/to")
    assert torch.equal(trained(folder / "last", kind, 4, start=str(folder / "moved/to")), expected)


@case(kind=KINDS)
def another_checkpoint(folder: Path, kind: str) -> None:
    """Residuals that a dense training, or another one, has left behind in a checkpoint are not loaded."""
    trained(folder, kind, 2)
    with warned() as messages:
        assert not begins_empty(folder, kind, folder / "checkpoint-2")
    assert not messages
    state = folder / "checkpoint-2/trainer_state.json"

    def another_run() -> None:
        saved = json.loads(state.read_text())
        saved["stateful_callbacks"]["sparsecomm_checkpoint"] = "0" * 16
        state.write_text(json.dumps(saved))

    on_rank_0(another_run)
    with warned() as messages:
        assert begins_empty(folder, kind, folder / "checkpoint-2")
    one_warning(messages, f"the residuals of this checkpoint are not in {folder / 'checkpoint-2/sparsecomm'}")
    trained(folder, "sgd", 2, density=None)
    assert (folder / "checkpoint-2/sparsecomm").is_dir()
    with warned() as messages:
        assert begins_empty(folder, "sgd", folder / "checkpoint-2")
    one_warning(messages, "was saved without residuals")


class Look(TrainerCallback):
    """Keeps the residuals with which a training begins."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.found = residuals(self.trainer.sparse.sparse)


def residuals_at_begin(trainer: Any, start: Path) -> dict[str, np.ndarray]:
    """Resume, and return the residuals with which the training began."""
    trainer.add_callback(look := Look())
    look.trainer = trainer
    trainer.train(resume_from_checkpoint=str(start))
    return look.found


def begins_empty(folder: Path, kind: str, start: Path) -> bool:
    found = residuals_at_begin(made(folder, kind, 2, save_strategy="no"), start)
    return not any(values.any() for values in found.values())


@case(kind=[*KINDS, "created"])
def twice(folder: Path, kind: str) -> None:
    """As two trainings that are one: the optimizer, the model and the residuals stay."""
    trainer = made(folder, kind, 3, save_strategy="no")
    trainer.train()
    first, kept = trainer.sparse.sparse, residuals(trainer.sparse.sparse)
    trainer.train()
    assert trainer.sparse.sparse is first
    assert first.step == 6
    assert any(values.any() for values in kept.values())
    weights(trainer.model)
    expected = trained(folder, kind, 3)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert torch.equal(weights(trainer.model), expected)
    assert first.step == 3
    if kind == "created":  # the Trainer makes another optimizer
        trainer.optimizer = None
        trainer.train()
        assert trainer.sparse.sparse.step == 3


@case(kind=["adamw"])
def compiled(folder: Path, kind: str) -> None:
    expected = trained(folder / "first", kind, 4)
    settings = {"torch_compile": True, "torch_compile_backend": "eager"}
    assert torch.allclose(trained(folder / "compiled", kind, 4, **settings), expected, rtol=1e-4, atol=1e-6)
    again = trained(folder / "again", kind, 4, start=str(folder / "compiled/checkpoint-2"), **settings)
    assert torch.allclose(again, expected, rtol=1e-4, atol=1e-6)


@case(kind=["sgd"], settings=[{}, {"gradient_accumulation_steps": 2}, {"bf16": True}])
def as_dense(folder: Path, kind: str, settings: dict[str, Any]) -> None:
    dense = trained(folder, kind, 4, density=None, save_strategy="no", **settings)
    trainer = made(folder, kind, 4, density=1.0, save_strategy="no", **settings)
    trainer.train()
    torch.testing.assert_close(weights(trainer.model), dense, rtol=1e-3, atol=1e-5)
    assert trainer.sparse.sparse.step == 4


@case(kind=["sgd"])
def only_the_model(folder: Path, kind: str) -> None:
    """Where the optimizer is not saved, residuals are not, and a resumed training says so."""
    trained(folder, kind, 4, save_only_model=True)
    assert not list(folder.rglob("sparsecomm"))
    with warned() as messages:
        trained(folder / "again", kind, 4, start=str(folder / "checkpoint-2"))
    one_warning(messages, "the residuals of this checkpoint are not in")


@case(kind=["adamw"])
def the_best_model(folder: Path, kind: str) -> None:
    """It is loaded at the end, other checkpoints are removed, and a training resumes from it."""
    settings = {
        "load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "save_total_limit": 1,
        "metric_for_best_model": "loss", "greater_is_better": True,
    }  # fmt: skip
    trained(folder, kind, 4, **settings)  # the loss falls: the first is "best"
    (left,) = [each for each in os.listdir(folder) if each.startswith("checkpoint")]
    assert left == "checkpoint-2"
    expected = trained(folder / "all", kind, 4)
    assert torch.equal(trained(folder / "again", kind, 4, start=str(folder / left)), expected)


@case(kind=KINDS)
def two_trainers(folder: Path, kind: str) -> None:
    """They train one model after another; with SparseAdamW, after the first optimizer's remove()."""
    first = made(folder, kind, 2, save_strategy="no")
    first.train()
    if kind == "adamw":
        with refused("call its remove() first"):
            made(folder, kind, 2, model=first.model)
        first.optimizer.optimizer.remove()
    second = made(folder, kind, 2, model=first.model, save_strategy="no")
    second.train()
    assert first.sparse.sparse.step == second.sparse.sparse.step == 2
    weights(second.model)
    with refused("it was registered already"):
        register(second)


@case(kind=["sgd"])
def a_trial_of_a_search(folder: Path, kind: str) -> None:
    """Its checkpoints are in a folder of its own, where residuals go as well."""
    trainer = made(folder, kind, 2)
    trainer._get_output_dir = lambda trial: str(folder / "run-0")
    trainer.train()
    assert not (folder / "checkpoint-2").exists()
    assert (folder / "run-0/checkpoint-2/sparsecomm").is_dir()


@case(kind=KINDS)
def on_another_number_of_ranks(folder: Path, kind: str) -> None:
    """A program on two ranks has saved; on three, the sum of residuals is what it was."""
    trainer = made(folder, kind, 2, save_strategy="steps" if dist_size() == 2 else "no")
    if dist_size() == 2:
        trainer.train()
        own = residuals(trainer.sparse.sparse)
    else:
        own = residuals_at_begin(trainer, folder / "checkpoint-2")
    same_sum(folder, own)


@case(kind=KINDS)
def each_rank_has_a_folder_of_its_own(folder: Path, kind: str) -> None:
    """As on nodes without a shared file system, where one rank of each saves the model."""
    if os.environ["LOCAL_WORLD_SIZE"] == "1":
        own = folder / os.environ["RANK"]
        expected = trained(own, kind, 4, save_on_each_node=True)
        assert torch.equal(trained(own, kind, 4, start=str(own / "checkpoint-2"), save_on_each_node=True), expected)
        on_rank_0(shutil.rmtree, own / "checkpoint-2/sparsecomm")  # one lacks its own: all begin without
        with warned() as messages:
            trained(own, kind, 4, start=str(own / "checkpoint-2"), save_on_each_node=True)
        one_warning(messages, "are not in")


def dist_size() -> int:
    return int(os.environ["WORLD_SIZE"])


if __name__ == "__main__":
    main()
