"""Cases of checkpoints with `torch.distributed.checkpoint`, on every rank: see `test_training.py`."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict

import sparsecomm as sc
from sparsecomm.torch import DistributedOptimizer, SparseAdamW, Stateful
from tests.torch.training_ranks import FOLDER, RANK, Chosen, P, case, gradients

SAVED = FOLDER / "dcp"
WAYS = ("SparseAdamW", "DistributedOptimizer")


def made(way: str, comm: Any = None) -> tuple[nn.Module, Any]:
    model = Chosen()
    if way == "SparseAdamW":
        return model, SparseAdamW(model.named_parameters(), lr=0.05, density=0.2, comm=comm)
    options: dict[str, Any] = {"comm": comm, "algorithm": "split", "dense_below": 0, "momentum": 0.5}
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, DistributedOptimizer(sgd, model.named_parameters(), 0.1, **options)


def stepped(*steps: int, trainings: list[tuple[nn.Module, Any]]) -> None:
    """Make steps in all runs, and check that weights and the sums of residuals are equal."""
    for step in steps:
        for model, optimizer in trainings:
            optimizer.zero_grad()
            model(gradients(step, RANK)).backward()
            optimizer.step()
    (model, optimizer), (other, other_optimizer) = trainings[0], trainings[-1]
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    assert torch.equal(waiting(optimizer), waiting(other_optimizer))


def waiting(optimizer: Any, group: Any = None) -> torch.Tensor:
    """Return the sum of all ranks' residuals."""
    parts = [torch.from_numpy(optimizer.reducer.residual(name)).reshape(-1) for name in optimizer.reducer.names]
    total = torch.cat(parts).double()
    dist.all_reduce(total, group=group)
    assert total.any()
    return total


@contextmanager
def quiet() -> Iterator[None]:
    """Ignore PyTorch's warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def removed() -> None:
    dist.barrier()
    if RANK == 0:
        shutil.rmtree(SAVED)
    dist.barrier()


@case
@quiet()
def states_that_dcp_saves() -> None:
    """Saved beside a model, or by parameter names as in trainers, training continues as without the stop.

    Fewer ranks divide the state of all.
    """
    fewer = dist.new_group(list(range(max(1, P - 1))))
    for way, by_name in product(WAYS, (False, True)):
        (model, optimizer), (again, other) = made(way), made(way)
        residuals, other_residuals = (o.residuals_apart() if by_name else o for o in (optimizer, other))
        if by_name and way == "SparseAdamW":  # getting the state before any step must not break training
            get_optimizer_state_dict(model, optimizer)
            assert optimizer.reducer.step == 0
        stepped(0, 1, 2, trainings=[(model, optimizer)])
        before = waiting(optimizer)
        optimizer.zero_grad()  # without state, PyTorch makes a step without gradients at learning rate 0
        saved, room = (parts(m, o) if by_name else {"model": m} for m, o in ((model, optimizer), (again, other)))
        dcp.save({**saved, "sparse": Stateful(residuals)}, checkpoint_id=SAVED)
        assert torch.equal(waiting(optimizer), before)
        dcp.load({**room, "sparse": Stateful(other_residuals, SAVED)}, checkpoint_id=SAVED)
        if by_name:
            set_state_dict(again, other, model_state_dict=room["model"], optim_state_dict=room["optimizer"])
        stepped(3, 4, trainings=[(model, optimizer), (again, other)])
        if by_name:
            with pytest.raises(sc.InvalidInputError, match="residuals_apart"):
                made(way)[1].load_state_dict(optimizer.state_dict())  # a state without residuals
        elif max(1, P - 1) > RANK:
            _, few = made(way, fewer)
            dcp.load({"sparse": Stateful(few, SAVED, comm=fewer)}, checkpoint_id=SAVED, process_group=fewer)
            assert few.reducer.step == 3
            torch.testing.assert_close(waiting(few, fewer), before, rtol=1e-5, atol=1e-5)
        removed()


def parts(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": state}
