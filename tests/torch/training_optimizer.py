"""Cases of `DistributedOptimizer`, on every rank: see `test_optimizer.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

import sparsecomm as sc
from sparsecomm.torch import DistributedOptimizer
from tests.torch.training_ranks import (
    EXACT,
    ODD,
    RANK,
    Chosen,
    Oracle,
    P,
    case,
    gradients,
    gradients_by_rank,
    same_everywhere,
    sgd,
    state_of,
    train,
    wrapped,
)


@case
def weights_are_the_oracles() -> None:
    makers: list[Any] = [
        sgd,
        lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        lambda p: Adam(p, lr=0.1),
    ]
    for algorithm, make, none in (
        ("split", makers[0], True),
        ("allgather", makers[1], False),
        ("split", makers[2], True),
    ):
        model = Chosen()
        oracle, optimizer = Oracle(model, algorithm, make), wrapped(model, make, algorithm=algorithm)
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert isinstance(optimizer, type(make(model.parameters())))
        for step in range(4):
            train(model, gradients_by_rank(step)[RANK], optimizer, none)
            oracle.step(gradients_by_rank(step))
            oracle.check(model, state_of(optimizer))
        same_everywhere(model)


@case
def every_type() -> None:
    model = Chosen(dtypes=[torch.bfloat16, torch.float32, torch.float64, torch.float16])
    oracle, optimizer = Oracle(model), wrapped(model)
    for step in range(3):
        train(model, gradients_by_rank(step)[RANK], optimizer)
        oracle.step(gradients_by_rank(step))
        oracle.check(model, state_of(optimizer))


@case
def unused_frozen_and_tied_parameters() -> None:
    """A parameter without a gradient gets one on all ranks; frozen ones do not."""
    model = Chosen()
    model.c.requires_grad_(False)
    model.tied = model.b
    oracle = Oracle(model)
    named = model.named_parameters(remove_duplicate=False)
    optimizer = DistributedOptimizer(sgd(model.parameters()), named, algorithm="split", **EXACT)
    assert "tied" not in optimizer.reducer.names
    for step, unused in enumerate(({}, {ODD: "ad"}, dict.fromkeys(range(P), "ad"), {0: "e"})):
        train(model, gradients_by_rank(step, unused)[RANK], optimizer)
        oracle.step(gradients_by_rank(step, unused))
        oracle.check(model, state_of(optimizer))
        assert [name for name, p in model.named_parameters() if p.grad is None] == ["c"]
    model.c.requires_grad_(True)
    optimizer.zero_grad()
    model(gradients(9, RANK)).backward()
    with pytest.raises(sc.InvalidInputError, match="c was frozen when"):
        optimizer.step()


@case
def passes_add_up() -> None:
    """With backward_passes_per_step, with no_sync, and with a step before all passes are made."""
    for way in ("passes", "no_sync", "early"):
        model = Chosen()
        oracle = Oracle(model)
        optimizer = wrapped(model, backward_passes_per_step={"passes": 2, "no_sync": 1, "early": 3}[way])
        for step in range(3):
            first, second = gradients_by_rank(step, {ODD: "a"}), gradients_by_rank(step + 9, {0: "a", ODD: "e"})
            optimizer.zero_grad()
            if way == "no_sync":
                with optimizer.no_sync():
                    model(first[RANK]).backward()
            else:
                model(first[RANK]).backward()
            assert all(torch.equal(getattr(model, n).grad, g) for n, g in first[RANK].items())
            model(second[RANK]).backward()
            optimizer.step()
            oracle.step(
                [
                    {n: a.get(n, torch.zeros(())) + b.get(n, torch.zeros(())) for n in {**a, **b}}
                    for a, b in zip(first, second, strict=True)
                ]
            )
            oracle.check(model, state_of(optimizer))


@case
def gradients_that_did_not_come_from_backward() -> None:
    """`step` exchanges them, once; `synchronize` does it before."""
    model = Chosen()
    oracle, optimizer = Oracle(model), wrapped(model)
    for step in range(4):
        for name, p in model.named_parameters():
            p.grad = torch.empty_like(p).copy_(gradients(step, RANK)[name])
        if step % 2:
            assert optimizer.synchronize().number == step
        optimizer.step()
        oracle.step(gradients_by_rank(step))
        oracle.check(model, state_of(optimizer))
    optimizer.zero_grad()
    optimizer.step()  # without a backward pass: what waits goes on
    oracle.step([{}] * P)
    oracle.check(model, state_of(optimizer))


@case
def closures() -> None:
    """A closure's gradients are exchanged as often as it is called, and whether or not it makes a backward pass."""
    model = Chosen()
    oracle, optimizer = Oracle(model), wrapped(model)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(gradients(step, RANK))
        if step % 2:
            loss.backward()
            return loss
        for name, p in model.named_parameters():
            p.grad = torch.empty_like(p).copy_(gradients(step, RANK)[name])
        return loss

    for step in range(4):
        assert optimizer.step(closure).ndim == 0
        oracle.step(gradients_by_rank(step))
        oracle.check(model, state_of(optimizer))
    for name, p in model.named_parameters():  # after a closure too, step exchanges what is new
        p.grad = torch.empty_like(p).copy_(gradients(8, RANK)[name])
    optimizer.step()
    oracle.step(gradients_by_rank(8))
    oracle.check(model, state_of(optimizer))

    torch.manual_seed(0)
    line = nn.Linear(5, 1)
    several = wrapped(line, lambda p: torch.optim.LBFGS(p, max_iter=4), density=1.0)
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(RANK))

    def of_line() -> torch.Tensor:
        several.zero_grad()
        loss = line(x).square().mean()
        loss.backward()
        return loss

    several.step(of_line)
    assert several.reducer.step > 1


@case
def two_backward_passes_before_a_step() -> None:
    """The second adds to the mean of the first, and both are exchanged: nothing is lost, or counted twice."""
    model = Chosen()
    oracle, optimizer = Oracle(model), wrapped(model)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(gradients(step, RANK))
        loss.backward(retain_graph=True)
        oracle.exchange(gradients_by_rank(step))
        means = {name: p.grad for name, p in oracle.named.items()}
        if P != 3:  # a third is not exact
            loss.backward()
            oracle.step([{n: means[n] + g for n, g in mine.items()} for mine in gradients_by_rank(step)])
        else:
            oracle.optimizer.step()
        optimizer.step()
        oracle.check(model, state_of(optimizer))


@case
def two_networks() -> None:
    """As in a GAN: two optimizers, and passes that reach both networks."""
    first, second = Chosen(), Chosen()
    oracles = Oracle(first), Oracle(second)
    optimizers = wrapped(first), wrapped(second)
    for step in range(3):
        for mine in (0, 1):
            for optimizer in optimizers:
                optimizer.zero_grad()
            (first(gradients(step, RANK)) + second(gradients(step + 9, RANK))).backward()
            for oracle, which in zip(oracles, (step, step + 9), strict=True):
                oracle.exchange(gradients_by_rank(which))
            optimizers[mine].step()
            oracles[mine].optimizer.step()
            same_everywhere(first)
            same_everywhere(second)
    for model, oracle, optimizer in zip((first, second), oracles, optimizers, strict=True):
        oracle.check(model, state_of(optimizer))


@case
def schedulers_and_clipping() -> None:
    model = Chosen()
    oracle, optimizer = Oracle(model), wrapped(model)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in (optimizer, oracle.optimizer)]
    for step in range(3):
        optimizer.zero_grad()
        model(gradients(step, RANK)).backward()
        oracle.exchange(gradients_by_rank(step))
        for each in (model, oracle.model):
            nn.utils.clip_grad_norm_(each.parameters(), 2.0)
        optimizer.step()
        oracle.optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        oracle.check(model, state_of(optimizer))
    assert optimizer.param_groups[0]["lr"] == 0.5 / 8
    plain = sgd(model.parameters())
    torch.optim.lr_scheduler.StepLR(plain, 1)
    with pytest.raises(sc.InvalidInputError, match="before you make the scheduler"):
        DistributedOptimizer(plain, model.named_parameters())
