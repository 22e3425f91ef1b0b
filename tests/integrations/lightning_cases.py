"""Cases of Lightning, on each rank."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import fsspec
import lightning
import numpy as np
import torch
import torch.distributed as dist
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader, TensorDataset

from sparsecomm.integrations.lightning import SparseDDPStrategy
from sparsecomm.torch import SparseAdamW
from tests.integrations.cases import (
    case,
    main,
    module,
    move,
    on_rank_0,
    only_rank_0_warned,
    residuals,
    rows,
    warned,
    weights,
)
from tests.integrations.contract import Framework, Outcome, contract

KINDS = ["sgd", "adamw"]


class Net(lightning.LightningModule):
    def __init__(self, kind: str, momentum: float = 0.0) -> None:
        super().__init__()
        self.net, self.kind, self.momentum, self.lr = module(), kind, momentum, 0.01
        self.automatic_optimization = kind != "pair"

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.net(batch[0]).square().mean()
        if self.automatic_optimization:
            return loss
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("loss", self.net(batch[0]).square().mean(), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        if self.kind == "pair":
            halves = [list(layer.named_parameters(prefix=name)) for name, layer in self.net.named_children()]
            return [SparseAdamW(half, lr=self.lr, density=0.05) for half in halves if half]
        if self.kind == "adamw":
            return SparseAdamW(self.named_parameters(), lr=self.lr, density=0.05)
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=self.momentum)


class Shelf(DirFileSystem):
    """A local folder that looks like a remote file system to the library."""

    protocol = "shelf"

    def __init__(self, **_: Any) -> None:
        super().__init__(os.environ["SHELF"], LocalFileSystem())

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("shelf://").strip("/")


fsspec.register_implementation("shelf", Shelf)


def trainer_of(epochs: int, kind: str = "sgd", *callbacks: Any, density: float | None = 0.05, **settings: Any) -> Any:
    options = {"momentum": 0.9, "dense_below": 0} if kind == "sgd" else {}
    gloo = {"process_group_backend": "gloo"}
    return lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]), logger=False,
        strategy=DDPStrategy(**gloo) if density is None else SparseDDPStrategy(density, options, **gloo),
        enable_progress_bar=False, enable_model_summary=False, callbacks=list(callbacks),
        **{"enable_checkpointing": bool(callbacks), **settings},
    )  # fmt: skip


def data(count: int = 16) -> Any:
    return DataLoader(TensorDataset(rows(count)), batch_size=4)  # two batches for each of two ranks


def trained(*arguments: Any, start: Any = None, **settings: Any) -> torch.Tensor:
    kind = arguments[1] if len(arguments) > 1 else "sgd"
    net = Net(kind)
    trainer_of(*arguments, **settings).fit(net, data(), ckpt_path=start)
    return weights(net)


def keep(folder: Any, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, "{epoch}", **{"save_top_k": -1, **options})


class Begun(lightning.Callback):
    """Records the residuals at the start of a run."""

    at_start: Mapping[str, np.ndarray] = MappingProxyType({})

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if isinstance(trainer.strategy, SparseDDPStrategy):
            self.at_start = residuals(trainer.strategy.sparse)


class Lightning(Framework):
    """An epoch has two batches."""

    kinds = ("sgd", "adamw", "pair")
    dense = (({}, 4), ({"accumulate_grad_batches": 2}, 2), ({"precision": "bf16-mixed"}, 4))
    compiled = (("adamw", {"compile": True}),)

    def run(self, folder: Path, kind: str, steps: int, start: Any = None, density: Any = 0.05, **more: Any) -> Outcome:
        net: Any = Net(kind, 0.0 if density else 0.9)
        net = torch.compile(net, backend="eager") if more.pop("compile", False) else net
        trainer = trainer_of(steps // 2, kind, keep(folder), begun := Begun(), density=density, **more)
        trainer.fit(net, data(), ckpt_path=start)
        return Outcome(weights(net), getattr(trainer.strategy, "sparse", None), begun.at_start)

    def checkpoint(self, folder: Path, step: int) -> Path:
        return folder / f"epoch={step // 2 - 1}.ckpt"

    def beside(self, checkpoint: Path) -> Path:
        return Path(f"{checkpoint}.ranks")

    def move(self, source: Path, target: Path) -> None:
        move(source, target)
        move(self.beside(source), self.beside(target))


contract(Lightning())


@case(kind=["adamw"])
def links_and_copies(folder: Path, kind: str) -> None:
    """Links and copies in the same folder use the residuals of the checkpoint."""
    expected, longer = trained(3, kind, keep(folder, save_last="link")), trained(4, kind)
    assert torch.equal(trained(4, kind, start=folder / "last.ckpt"), longer)
    assert torch.equal(trained(4, kind, keep(folder, save_last=True), start="last"), longer)
    on_rank_0(shutil.copy, folder / "epoch=0.ckpt", folder / "copy.ckpt")
    assert torch.equal(trained(3, kind, start=folder / "copy.ckpt"), expected)


@case(kind=["adamw"])
def a_remote_address(folder: Path, kind: str) -> None:
    """Residuals are saved beside a remote checkpoint and removed with it."""
    on_rank_0(folder.mkdir)
    os.environ["SHELF"] = str(folder)
    Shelf.clear_instance_cache()
    expected = trained(3, kind, keep("shelf://run", save_top_k=1, save_last=True))
    assert torch.equal(trained(3, kind, keep("shelf://other"), start="shelf://run/last.ckpt"), expected)
    dist.barrier()
    assert sorted(os.listdir(folder / "run")) == ["epoch=2.ckpt", "epoch=2.ckpt.ranks", "last.ckpt", "last.ckpt.ranks"]
    assert [len(os.listdir(message)) for message in (folder / "run").glob("*.ranks")] == [1, 1]
    longer = trained(4, kind)
    assert torch.equal(trained(4, kind, start="shelf://run/epoch=2.ckpt"), longer)
    on_rank_0(shutil.rmtree, folder / "run/epoch=2.ckpt.ranks")
    on_rank_0(shutil.rmtree, folder / "run/last.ckpt.ranks")
    with warned() as messages:
        trained(4, kind, start="shelf://run/epoch=2.ckpt")
    missing = "the residuals of this checkpoint are not in"
    assert any(missing in message for message in messages) == (dist.get_rank() == 0)


@case(kind=KINDS)
def fit_twice(folder: Path, kind: str) -> None:
    """A second fit has a new optimizer, as Lightning has, and warns that residuals are lost."""
    net, trainer = Net(kind), trainer_of(1, kind)
    trainer.fit(net, data())
    first = trainer.strategy.sparse
    trainer.save_checkpoint(folder / "a.ckpt")
    saved = residuals(first)
    trainer.fit_loop.max_epochs = 2
    with warned() as messages:
        trainer.fit(net, data())
    only_rank_0_warned(messages, "fit() makes new optimizers, and begins with empty residuals")
    assert trainer.strategy.sparse.step == 2
    weights(net)
    with warned() as messages:
        trainer.fit(net, data(), ckpt_path=folder / "a.ckpt")
    assert not messages
    assert trainer.strategy.sparse.step == 4
    assert torch.equal(weights(net), trained(2, kind))
    assert any(values.any() for values in saved.values())
    other = trainer_of(1, kind)  # of the same model
    other.fit(net, data())
    assert other.strategy.sparse.step == 2
    weights(net)


@case(kind=KINDS)
def lr_find(folder: Path, kind: str) -> None:
    """It changes neither weights nor residuals."""
    net, trainer = Net(kind), trainer_of(2, kind, default_root_dir=str(folder))
    with warned() as messages:
        Tuner(trainer).lr_find(net, data(), num_training=6, update_attr=False, max_lr=0.1)
        trainer.fit(net, data())
    assert not messages
    assert torch.equal(weights(net), trained(2, kind))
    dist.barrier()
    assert not list(folder.glob(".lr_find*"))


@case(kind=["sgd"])
def other_stages(folder: Path, kind: str) -> None:
    """``fit`` after ``validate``, ``test`` with the best checkpoint, and a checkpoint at any path after them."""
    net, trainer = Net(kind), trainer_of(2, kind, keep(folder, save_top_k=1, monitor="loss", mode="max"))
    trainer.validate(net, data(), verbose=False)
    trainer.fit(net, data(), data())
    expected, before = weights(net), residuals(trainer.strategy.sparse)
    trainer.test(net, data(), ckpt_path="best", verbose=False)
    trainer.test(net, data(), verbose=False)
    assert all((before[name] == values).all() for name, values in residuals(trainer.strategy.sparse).items())
    trainer.save_checkpoint(folder / "any/path")
    again = Net(kind)
    trainer_of(3, kind).fit(again, data(), ckpt_path=folder / "epoch=0.ckpt")
    assert torch.equal(weights(again), trained(3, kind))
    assert not torch.equal(weights(again), expected)
    with warned() as messages:
        trained(3, kind, start=folder / "any/path")
    assert not messages
    trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    assert not (folder / "weights.ckpt.ranks").exists()


if __name__ == "__main__":
    main()
