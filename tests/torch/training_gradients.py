"""Cases of missing, scaled and shared gradients, and of `join`, on two ranks: see `test_training.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sparsecomm as sc
from sparsecomm.torch import DistributedOptimizer, keep_local, register
from sparsecomm.torch.parameters import local
from tests.torch.training_ranks import ODD, RANK, Chosen, P, Training, case, flat, gradients_by_rank, same_everywhere

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
SHAPES = {"a": (20, 14), "b": (7,), "c": (5, 24), "d": (290,), "e": (1,)}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.5, weight_decay=0.25)


WAYS = ["hook", "hook of views", "optimizer", *(["fsdp"] if VERSION >= (2, 9) else [])]  # see `test_training.py`
EVERYWHERE: Callable[[str], dict[int, str]] = partial(dict.fromkeys, range(P))


def training_of(way: str, density: float = 0.05) -> Training:
    scope = "bucket" if density == 1 else "tensor"
    return Training(way, Chosen(SHAPES), sgd, {"find_unused_parameters": True}, density=density, scope=scope)


def freeze(model: nn.Module, names: str) -> None:
    for name, p in model.named_parameters():
        p.requires_grad_(name not in names)


@case
def what_waits_for_a_parameter_without_gradient_stays() -> None:
    """Its residual stays until it trains again or is dropped, and its weights do not move."""
    for kind, frozen in product(WAYS, (False, True)):
        way = training_of(kind)
        reducer = way.exchange.reducer
        for step in range(2):
            way.step(gradients_by_rank(step, shapes=SHAPES)[RANK])
        way.optimizer.zero_grad()
        if frozen:
            freeze(way.model, "ad")
        residuals = {name: reducer.residual(name).copy() for name in "ad"}
        before = {name: local(getattr(way.model, name)).clone() for name in "ad"}
        for step in range(2, 4):
            way.step(gradients_by_rank(step, EVERYWHERE("ad"), SHAPES)[RANK])
        for name in "ad":
            assert residuals[name].any(), (kind, name)
            assert (reducer.residual(name) == residuals[name]).all(), (kind, name)
            assert torch.equal(local(getattr(way.model, name)), before[name]), (kind, name)
        way.exchange.discard("a")
        assert not reducer.residual("a").any()
        assert (reducer.residual("d") == residuals["d"]).all()
        with pytest.raises(sc.InvalidInputError, match="x"):
            way.exchange.discard(["x"])
        freeze(way.model, "")
        way.step(gradients_by_rank(4, shapes=SHAPES)[RANK])
        assert (reducer.residual("d") != residuals["d"]).any()
        way.exchange.discard()
        assert not any(reducer.residual(name).any() for name in SHAPES)
        way.end()


@case
def a_gradient_scaler_that_was_not_passed() -> None:
    """An overflow on one rank skips one step, and a warning names the argument."""
    for kind in WAYS:
        way, scaler = training_of(kind), torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            way.optimizer.zero_grad()
            by_rank = gradients_by_rank(step, shapes=SHAPES)
            whose = "the gradient of a on this rank" if RANK == ODD else "a gradient of another rank"
            if step == 1:
                for gradient in by_rank[ODD].values():
                    gradient.fill_(torch.inf)
                by_rank[ODD]["a"][0] = torch.nan
            loss = scaler.scale(way.run(by_rank[RANK]))
            if step == 1:
                with pytest.warns(UserWarning, match=rf"step 1: rank {RANK}: {whose} is not finite.*scaler="):
                    loss.backward()
            else:
                loss.backward()
            scaler.step(way.optimizer)
            scaler.update()
        assert scaler.get_scale() == 512, kind
        same_everywhere(way.model) if kind != "fsdp" else None
        way.end()


@case
def join_with_uneven_batches() -> None:
    """Equals dense sums in two epochs, with parameters that some steps do not use."""
    dense, way = (training_of(kind, 1.0) for kind in ("ddp", "hook"))
    for epoch in range(2):
        for training in (dense, way):
            with training.run.join():
                for step in range(2 + 2 * (epoch == RANK)):
                    training.step(gradients_by_rank(step, EVERYWHERE("a" if step % 2 else "b"), SHAPES)[RANK])
        assert (flat(way.model) == flat(dense.model)).all(), epoch
        same_everywhere(way.model)


@case
def join_is_refused_where_gradients_stay_local() -> None:
    ddp = DistributedDataParallel(Chosen(SHAPES))
    keep_local(ddp)
    with pytest.raises(sc.InvalidInputError, match=r"join\(\).*same number of batches"):
        ddp._match_all_reduce_for_bwd_pass()  # as join does on a rank without further batches


@case
def parameters_that_ddp_ignores() -> None:
    """Each rank keeps its own values of ignored parameters."""
    model = nn.ModuleDict({"shared": nn.Linear(30, 30), "own": nn.Linear(30, 30)})
    nn.init.constant_(model["own"].weight, RANK)
    nn.init.constant_(model["shared"].weight, 1.0)
    nn.init.zeros_(model["shared"].bias)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["own.weight", "own.bias"])
    model.forward = lambda x: model["own"](model["shared"](x))  # type: ignore[method-assign]
    ddp = DistributedDataParallel(model)
    state = register(ddp, 0.1, check_weights_every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        ddp(torch.full((2, 30), 1.0 + RANK)).sum().backward()
        optimizer.step()
    assert sorted(state.reducer.names) == ["shared.bias", "shared.weight"]


@case
def gradients_that_share_memory() -> None:
    """`torch.autograd.grad` returns such gradients: expanded, or one for two parameters."""
    a, b, c = (nn.Parameter(torch.zeros(40, 50)) for _ in range(3))
    plain = torch.optim.SGD([a, b, c], lr=1.0)
    optimizer = DistributedOptimizer(plain, [("a", a), ("b", b), ("c", c)], 1.0)
    a.grad = torch.tensor(RANK + 1.0).expand(40, 50)
    b.grad = c.grad = torch.full((40, 50), RANK + 2.0)
    if RANK == ODD:
        c.grad = torch.full((40, 50), 7.0)
    optimizer.step()
    of_c = sum(7.0 if rank == ODD else rank + 2.0 for rank in range(P)) / P
    for p, mean in ((a, P / 2 + 0.5), (b, P / 2 + 1.5), (c, of_c)):
        assert torch.equal(p, torch.full((40, 50), -mean))
