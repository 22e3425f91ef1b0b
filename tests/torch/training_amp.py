"""Cases of loss scaling, on every rank, with the hook and with the optimizer: see `test_hook.py`."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from sparsecomm.torch import DistributedOptimizer, register
from tests.torch.training_ranks import (
    EXACT,
    ODD,
    RANK,
    SHAPES,
    Chosen,
    Gradients,
    Oracle,
    P,
    case,
    gradients_by_rank,
    held,
    same_everywhere,
    sgd,
)

WAYS = ("hook", "hook of views", "optimizer")


def scaler_of(scale: float) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)


class Training:
    """A model and a scaler, in one of the ways in which gradients are exchanged."""

    def __init__(self, way: str, scale: float, **options: Any) -> None:
        self.way, self.model, self.scaler = way, Chosen(), scaler_of(scale)
        self.run: Any = self.model
        settings: dict[str, Any] = {"algorithm": "split", "scaler": self.scaler, **EXACT, **options}
        self.optimizer = sgd(self.model.parameters())
        if way == "optimizer":
            self.optimizer = DistributedOptimizer(self.optimizer, self.model.named_parameters(), **settings)
            self.reducer = self.optimizer.reducer
        else:
            self.run = DistributedDataParallel(
                self.model, bucket_cap_mb=0.0004, gradient_as_bucket_view=way != "hook", find_unused_parameters=True
            )
            self.hook = register(self.run, **settings)
            self.reducer = self.hook.reducer

    def step(self, given: Gradients) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.run(given)).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def state(self) -> Any:
        return self.optimizer.state_dict()["sparsecomm"] if self.way == "optimizer" else self.hook.state_dict()

    def load(self, state: Any) -> None:
        if self.way == "optimizer":
            self.optimizer.load_state_dict({**self.optimizer.state_dict(), "sparsecomm": state})
        else:
            self.hook.load_state_dict(state)


@case
def an_infinity_on_one_rank() -> None:
    """All ranks skip the step and halve their scale; finite gradients wait; nothing is lost, whatever the scale."""
    for way, (infinite, unused) in product(WAYS, [("a", ""), ("d", "a"), ("e", "b")]):
        training = Training(way, 16.0)
        model = training.model
        oracle = Oracle(model)
        for step in range(8):
            by_rank = gradients_by_rank(step, dict.fromkeys(range(P), unused) if step % 3 == 2 else {})
            if step != 2:
                training.step(by_rank[RANK])
                oracle.step(by_rank)
                oracle.check(model, training.state())
                continue
            before, weights = held(training.state()), same_everywhere(model)
            by_rank[ODD][infinite].view(-1)[-1] = torch.inf
            training.step(by_rank[RANK])
            after = held(training.state())
            for name in SHAPES:
                new = [g[name].reshape(-1).numpy() for g in by_rank if name in g and g[name].isfinite().all()]
                total = sum(kept[name] for kept in before) + sum(new)
                assert np.array_equal(total, sum(kept[name] for kept in after)), (way, name)
            assert np.array_equal(same_everywhere(model), weights)
            assert training.scaler.get_scale() == 8
            oracle.residuals = [{name: kept.astype(np.float32) for name, kept in mine.items()} for mine in after]
        assert training.scaler.get_scale() == 16  # halved, and grown after three steps
        assert training.reducer.counters.skipped == 1


@case
def the_scale_comes_back() -> None:
    """A checkpoint goes on under a scaler of another scale."""
    for way, later in product(WAYS, (16.0, 2.0)):
        training = Training(way, 16.0)
        oracle = Oracle(training.model)
        for step in range(4):
            if step == 2:
                saved, weights = training.state(), training.model.state_dict()
                training = Training(way, later)
                training.model.load_state_dict(weights)
                training.load(saved)
            training.step(gradients_by_rank(step)[RANK])
            oracle.step(gradients_by_rank(step))
            oracle.check(training.model, training.state())


@case
def every_optimizer_hears_of_an_infinity() -> None:
    """One scaler, an optimizer for each parameter: none applies what the residuals took back."""
    for way in ("hook", "hook of views"):
        training = Training(way, 16.0)
        optimizers = [sgd([p]) for p in training.model.parameters()]
        before = same_everywhere(training.model)
        by_rank = gradients_by_rank(0)
        by_rank[ODD]["d"][0] = torch.inf
        training.scaler.scale(training.run(by_rank[RANK])).backward()
        for optimizer in optimizers:
            training.scaler.step(optimizer)
        training.scaler.update()
        assert np.array_equal(same_everywhere(training.model), before)
        kept = held(training.state())
        assert np.array_equal(sum(k["a"] for k in kept), sum(g["a"].reshape(-1).numpy() for g in by_rank))


@case
def gradients_may_be_clipped_when_they_are_unscaled() -> None:
    for way in WAYS:
        training = Training(way, 16.0)
        oracle = Oracle(training.model)
        for step in range(3):
            training.optimizer.zero_grad()
            training.scaler.scale(training.run(gradients_by_rank(step)[RANK])).backward()
            training.scaler.unscale_(training.optimizer)
            torch.nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
            training.scaler.step(training.optimizer)
            training.scaler.update()
            oracle.exchange(gradients_by_rank(step))
            torch.nn.utils.clip_grad_norm_(oracle.model.parameters(), 1.0)
            oracle.optimizer.step()
            oracle.check(training.model, training.state())
