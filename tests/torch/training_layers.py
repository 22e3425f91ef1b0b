"""Cases of layers that are added, replaced, frozen or unfrozen during training, on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sparsecomm as sc
from sparsecomm.torch import DiLoCo, DistributedOptimizer, SparseAdamW, SparseState, broadcast_parameters, register
from tests.torch.training_ranks import RANK, P, case, same_everywhere


class Changing:
    """Training whose model and optimizer change. Ranks have different samples, and so different gradients."""

    def __init__(self, way: str, group: Any) -> None:
        torch.manual_seed(0)
        self.way, self.group, self.random = way, group, torch.Generator().manual_seed(RANK)
        self.model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False), nn.Flatten())
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer: Any = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        self.wrap()

    def wrap(self) -> None:
        self.run: Any = self.model
        options: dict[str, Any] = {"comm": self.group, "density": 0.5}
        if self.way == "DistributedOptimizer":
            self.holder: Any = DistributedOptimizer(self.optimizer, self.model.named_parameters(), **options)
        elif self.way == "SparseAdamW":
            self.holder = self.optimizer = SparseAdamW(self.model.named_parameters(), **options)
        elif self.way == "DiLoCo":
            self.holder = DiLoCo(self.model, self.optimizer, sync_every=2, **options)
        else:
            self.run = DistributedDataParallel(self.model, process_group=self.group)
            self.holder = register(self.run, **options)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.run(torch.randn(4, 6, generator=self.random)).square().mean().backward()
        self.optimizer.step()

    def round(self) -> None:
        """Make the steps of a round, and check that all ranks have the same weights."""
        self.step()
        self.step()
        same_everywhere(self.model)

    def change_and_step(self, change: str) -> None:
        getattr(self, change)()
        self.step()

    def end(self) -> None:
        if self.way != "register":
            self.holder.remove()

    # -- changes of the model or the optimizer

    def append(self) -> None:
        torch.manual_seed(1)
        self.model.append(nn.Linear(6, 6))

    def add_group(self) -> None:
        """Add a group for the parameters that have none, except frozen ones."""
        known = {p for group in self.optimizer.param_groups for p in group["params"]}
        new = [p for p in self.model.parameters() if p.requires_grad and p not in known]
        if new:
            self.optimizer.add_param_group({"params": new})

    def new_layer(self) -> None:
        self.append()
        self.add_group()

    def unfrozen_layer(self) -> None:
        self.model[1].requires_grad_(True)
        self.add_group()

    def group_made_by_hand(self) -> None:
        self.append()
        group = self.optimizer.param_groups[0]
        self.optimizer.param_groups.append({**group, "params": list(self.model[-1].parameters())})

    def replaced_parameter(self) -> None:
        self.model[0].bias = nn.Parameter(torch.zeros(6))
        self.optimizer.param_groups[0]["params"][1] = self.model[0].bias

    def removed_parameter(self) -> None:
        del self.optimizer.param_groups[0]["params"][1]

    def frozen_layer(self) -> None:
        self.model[0].weight.requires_grad_(False)
        self.model[0].weight.grad = None

    def tied_parameters(self) -> None:
        self.model.append(nn.Linear(6, 6, bias=False))
        self.model[-1].weight = self.model[0].weight


FOLLOWED = {  # changes, and the ways that follow them
    "removed_parameter": ("register", "DiLoCo"),
    "frozen_layer": ("DistributedOptimizer", "SparseAdamW", "DiLoCo"),
    "tied_parameters": ("DistributedOptimizer", "SparseAdamW", "DiLoCo"),
}
CHANGES = ("new_layer", "unfrozen_layer", "group_made_by_hand", "replaced_parameter", *FOLLOWED)
REFUSED = "new|was removed|requires a gradient now|no group any more"


@case
def layers_that_change() -> None:
    """Changes are followed, or refused before anything is sent. A new exchange keeps the optimizer's state."""
    for way, change in product(("DistributedOptimizer", "SparseAdamW", "register", "DiLoCo"), CHANGES):
        if way == "register" and change in ("replaced_parameter", "frozen_layer", "tied_parameters"):
            continue
        training = Changing(way, dist.group.WORLD)
        training.round()
        if way in FOLLOWED.get(change, ()):
            training.change_and_step(change)
            training.step()  # the last step of a round
        else:
            weight = training.model[0].weight
            before, momentum = weight.clone(), training.optimizer.state[weight].get("momentum_buffer")
            with pytest.raises(sc.InvalidInputError, match=REFUSED):
                training.change_and_step(change)
            assert weight.equal(before) or way == "DiLoCo"  # DiLoCo's inner optimizer has made the step
            training.end()
            training.add_group()
            broadcast_parameters(training.model.state_dict())
            training.wrap()
            assert training.optimizer.state[weight].get("momentum_buffer") is momentum or way == "SparseAdamW"
        training.round()
        training.end()


warnings.filterwarnings("ignore", "Sparse CSR tensor support|The PyTorch API of nested tensors")
# Tensors that cannot be trained, and the error.
EYE = torch.eye(4)
KINDS: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "meta": (lambda: torch.empty(3, 3, device="meta"), "is on the meta device"),
    "COO": (EYE.to_sparse, "is torch.sparse_coo"),
    "CSR": (EYE.to_sparse_csr, "is torch.sparse_csr"),
    "MKL-DNN": (EYE.to_mkldnn, "is torch._mkldnn"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "is nested"),
    "complex": (lambda: EYE.to(torch.complex64), "is torch.complex64; expected float16.*view_as_real"),
    "float8": (lambda: EYE.to(torch.float8_e4m3fn), "is torch.float8_e4m3fn; expected float16"),
    "expanded": (lambda: torch.ones(1, 4).expand(4, 4), "share memory"),
    "lazy": (nn.UninitializedParameter, "is not initialized; run a forward pass first"),
}


def wrappers(model: nn.Module, sgd: torch.optim.Optimizer) -> dict[str, Callable[[], Any]]:
    return {
        "DistributedOptimizer": lambda: DistributedOptimizer(sgd, model.named_parameters()),
        "SparseAdamW": lambda: SparseAdamW(model.named_parameters()),
        "DiLoCo": lambda: DiLoCo(model, sgd, sync_every=1),
        "register": lambda: SparseState(model.named_parameters()),
    }


@case
def tensors_of_any_kind() -> None:
    """Parameters that cannot be trained are refused by name. As frozen parameters or buffers they are accepted."""
    for kind, (make, match) in KINDS.items():
        model = nn.Linear(4, 4)
        model.extra = nn.Parameter(make()) if kind != "lazy" else make()
        for wrap in wrappers(model, torch.optim.SGD(model.parameters(), lr=0.1)).values():
            with pytest.raises(sc.InvalidInputError, match=f"extra.* {match}"):
                wrap()
        model = nn.Linear(4, 4)
        model.load_state_dict({name: torch.ones_like(p) for name, p in model.named_parameters()})
        model.extra = nn.Parameter(make() if kind != "lazy" else EYE, requires_grad=False)
        model.register_buffer("buffer", make() if kind != "lazy" else nn.UninitializedBuffer())
        sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for way, wrap in wrappers(model, sgd).items():
            if way != "register":
                wrapped = wrap()
                model(torch.full((4,), RANK + 1.0)).sum().backward()
                (wrapped if way == "SparseAdamW" else sgd).step()
                wrapped.remove()


@case
def tensors_to_broadcast_and_compare() -> None:
    pending = torch.tensor([1 + RANK * 2j, 3 - 1j]).conj()
    negated = torch._neg_view(torch.tensor([1.0 + RANK]))
    broadcast_parameters({"pending": pending, "negated": negated})
    assert pending.tolist() == [1, 3 + 1j]
    assert negated.tolist() == [-1]
    for kind, (make, match) in KINDS.items():
        if kind not in ("complex", "float8"):
            with pytest.raises(sc.InvalidInputError, match=f"^x .*{match}"):
                broadcast_parameters({"x": make()})
        if kind in ("meta", "COO", "CSR", "lazy") and P > 1:
            with pytest.raises(sc.InvalidInputError, match="x: its elements cannot be read"):
                sc.check_weights({"x": make()})
