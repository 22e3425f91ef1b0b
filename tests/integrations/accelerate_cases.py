"""Cases of Accelerate, on each rank."""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import ProjectConfiguration, TorchDynamoPlugin
from torch import nn

from sparsecomm.integrations.accelerate import register
from sparsecomm.torch import SparseAdamW
from tests.integrations.cases import batch, case, main, module, refused, residuals, same, weights
from tests.integrations.contract import Framework, Outcome, contract

KINDS = ["sgd", "adamw"]


class Training:
    """The models of one accelerator, each with optimizers of its own."""

    def __init__(self, kind: str, models: int = 1, density: float | None = 0.05, **accelerator: Any) -> None:
        """Create the accelerator. With ``density=None``, nothing is registered, and DDP averages gradients."""
        AcceleratorState._reset_state()  # accelerators of a process share it
        GradientState._reset_state()
        self.accelerator = Accelerator(cpu=True, **accelerator)
        self.prepare(kind, models, density)

    def prepare(self, kind: str, models: int, density: float | None) -> None:
        modules = [module() for _ in range(models)]
        self.lists = [optimizers(kind, model, density) for model in modules]
        prepared = self.accelerator.prepare(*modules, *chain(*self.lists))
        self.models, rest = list(prepared[:models]), list(prepared[models:])
        self.lists = [[rest.pop(0) for _ in of_model] for of_model in self.lists]
        self.sparse: list[Any] = [None] * models
        for number in reversed(range(models)) if density is not None else ():  # in the reverse order of prepare()
            self.sparse[number] = register(
                self.accelerator, self.models[number], self.lists[number], density, **options(kind)
            )

    def train(self, *steps: int) -> torch.Tensor:
        for step in steps:
            with self.accelerator.accumulate(*self.models):
                loss = sum(10.0**i * model(batch(step)).square().mean() for i, model in enumerate(self.models))
                self.accelerator.backward(loss)
                for optimizer in chain(*self.lists):
                    optimizer.step()
                    optimizer.zero_grad()
        return self.weights()

    def weights(self) -> torch.Tensor:
        return torch.cat([weights(model) for model in self.models])


def options(kind: str) -> dict[str, Any]:
    return {} if kind.startswith("adamw") else {"momentum": 0.9, "dense_below": 0}


def optimizers(kind: str, model: nn.Module, density: float | None) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a model; of ``two``, each has some of the parameters."""
    named = list(model.named_parameters())
    parts = [named[:2], named[2:]] if kind.endswith("two") else [named]
    if kind.startswith("adamw"):
        return [
            SparseAdamW(part, lr=0.01, density=density) if density else torch.optim.AdamW(dict(part).values(), lr=0.01)
            for part in parts
        ]
    momentum = 0.9 if density is None else 0.0  # otherwise the hook has momentum
    return [torch.optim.SGD([p for _, p in part], lr=0.05, momentum=momentum) for part in parts]


class All(NamedTuple):
    """The exchanges of all models."""

    exchanges: list[Any]

    @property
    def step(self) -> int:
        (step,) = {attached.step for attached in self.exchanges}
        return step

    @property
    def reducers(self) -> list[Any]:
        return [reducer for attached in self.exchanges for reducer in attached.reducers]


class Accelerate(Framework):
    kinds = ("sgd", "adamw", "sgd two", "adamw two")
    dense = tuple(
        ({"mixed_precision": type_, "gradient_accumulation_steps": passes}, 4 // passes)
        for type_, passes in (("no", 1), ("no", 2), ("bf16", 2))
    )
    compiled = tuple((kind, {"regions": kind == "adamw"}) for kind in KINDS)
    nodes = {"project_config": ProjectConfiguration(save_on_each_node=True)}  # noqa: RUF012

    def run(self, folder: Path, kind: str, steps: int, start: Any = None, density: Any = 0.05, **more: Any) -> Outcome:
        if "regions" in more:
            more["dynamo_plugin"] = TorchDynamoPlugin("eager", use_regional_compilation=more.pop("regions"))
        training, begun = Training(kind, 2 if kind in ("adamw", "sgd two") else 1, density, **more), {}
        sparse = None if density is None else All(training.sparse)
        if start is not None:
            training.accelerator.load_state(str(start))
            begun = residuals(sparse)
        for step in range(2 if start else 0, steps):
            training.train(step)
            if step % 2:
                training.accelerator.save_state(str(self.checkpoint(folder, step + 1)))
        return Outcome(training.weights(), sparse, begun)

    def checkpoint(self, folder: Path, step: int) -> Path:
        return folder / str(step)


contract(Accelerate())


@case(kind=["adamw"])
def names_its_folders_itself(folder: Path, kind: str) -> None:
    """With a limit of one checkpoint, older ones are removed with their residuals."""
    settings = {"project_dir": str(folder), "automatic_checkpoint_naming": True, "total_limit": 1}
    first = Training(kind, project_config=ProjectConfiguration(**settings))
    for step in range(3):
        first.train(step)
        first.accelerator.save_state()
    expected = first.train(3)
    assert os.listdir(folder / "checkpoints") == ["checkpoint_2"]
    again = Training(kind, project_config=ProjectConfiguration(**settings))
    again.accelerator.load_state()
    assert torch.equal(again.train(3), expected)


@case(kind=KINDS)
def free_memory_and_prepare_anew(folder: Path, kind: str) -> None:
    """A freed model is no longer saved, even if the program still refers to it."""
    training = Training(kind)
    training.train(0)
    old, models = training.sparse[0], training.models
    training.accelerator.free_memory()
    training.prepare(kind, 1, 0.05)
    training.train(0, 1)
    training.accelerator.save_state(str(folder))
    saved, expected = residuals(training.sparse[0]), training.train(2)
    assert os.listdir(folder / "sparsecomm") == ["model_0"]
    assert old.step == 1
    assert models
    again = Training(kind)
    again.accelerator.load_state(str(folder))
    assert same(saved, residuals(again.sparse[0]))
    assert torch.equal(again.train(2), expected)


@case(kind=KINDS)
def wrapped(folder: Path, kind: str) -> None:
    """A prepared model may be inside another module. A module with two of them is refused."""
    expected = Training(kind).train(0, 1)
    training = Training(kind, density=None)
    own = optimizers(kind, training.models[0].module, 0.05)
    own = [training.accelerator.prepare(optimizer) for optimizer in own]
    around = nn.Sequential(training.models[0], nn.Flatten())
    register(training.accelerator, around, own, 0.05, **options(kind))
    training.models, training.lists = [around], [own]
    assert torch.equal(training.train(0, 1), expected)
    two = Training(kind, 2, density=None)
    with refused("contains 2 DistributedDataParallel models; register each of them"):
        register(two.accelerator, nn.ModuleList(two.models), two.lists[0])


@case(kind=["sgd"])
def the_scaler_of_the_accelerator(folder: Path, kind: str) -> None:
    """With the accelerator's scaler, all ranks skip a step that overflows on one rank."""
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model, optimizer = accelerator.prepare(model := module(), torch.optim.SGD(model.parameters(), lr=0.05))
    register(accelerator, model, optimizer, 0.05)
    for step in range(3):
        before = weights(model)
        loss = model(batch(step)).square().mean()
        accelerator.backward(loss * (torch.inf if step == 1 and dist.get_rank() else 1))
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(weights(model), before) == (step == 1)
        assert accelerator.scaler.get_scale() == (4.0 if step == 0 else 2.0)


@case()
def what_is_refused(folder: Path) -> None:
    training, other = Training("sgd", density=None), Training("sgd", density=None)
    model, optimizer = training.models[0], training.lists[0][0]
    with refused("model: this accelerator has not prepared it"):
        register(training.accelerator, other.models[0], optimizer)
    with refused("optimizer: this accelerator has not prepared it, and would not save it"):
        register(training.accelerator, model, torch.optim.SGD(model.parameters(), lr=0.1))
    with refused("is not wrapped in DistributedDataParallel; pass the model that the framework has wrapped"):
        register(training.accelerator, module(), optimizer)
    some = training.accelerator.prepare(SparseAdamW(list(model.module.named_parameters())[:2]))
    with refused("no SparseAdamW has 2.weight, so its gradient would not be exchanged"):
        register(training.accelerator, model, some)


if __name__ == "__main__":
    main()
