"""Cases of checkpoints of `torch.distributed.checkpoint`, on every rank: see `test_training.py`."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
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
    """Make these steps in all trainings, which end alike: weights, and the sums of residuals."""
    for step in steps:
        for model, optimizer in trainings:
            optimizer.zero_grad()
            model(gradients(step, RANK)).backward()
            optimizer.step()
    (model, optimizer), (other, its) = trainings[0], trainings[-1]
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    assert torch.equal(waiting(optimizer), waiting(its))


def waiting(optimizer: Any, group: Any = None) -> torch.Tensor:
    """The sum of all ranks' residuals."""
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
def states_beside_a_model() -> None:
    """They go on as if they had not stopped; fewer ranks share out what all had."""
    fewer = dist.new_group(list(range(max(1, P - 1))))
    for way in WAYS:
        model, optimizer = made(way)
        stepped(0, 1, 2, trainings=[(model, optimizer)])
        dcp.save({"model": model, "sparse": Stateful(optimizer)}, checkpoint_id=SAVED)
        before = waiting(optimizer)
        again, other = made(way)
        dcp.load({"model": again, "sparse": Stateful(other, SAVED)}, checkpoint_id=SAVED)
        stepped(3, 4, trainings=[(model, optimizer), (again, other)])
        if max(1, P - 1) > RANK:
            _, few = made(way, fewer)
            dcp.load({"sparse": Stateful(few, SAVED, comm=fewer)}, checkpoint_id=SAVED, process_group=fewer)
            assert few.reducer.step == 3
            torch.testing.assert_close(waiting(few, fewer), before, rtol=1e-5, atol=1e-5)
        with pytest.raises(sc.InvalidInputError, match="has no 'other' of a Stateful"):
            Stateful(other, SAVED, name="other").state_dict()
        removed()


@case
@quiet()
def states_that_pytorch_gets_and_sets() -> None:
    """By names of parameters, as trainers do that are built on `torch.distributed.checkpoint`."""
    for way in WAYS:
        model, optimizer = made(way)
        residuals = optimizer.residuals_apart()
        if way == "SparseAdamW":  # one that has made no step, and whose state has been got, can train and be saved
            get_optimizer_state_dict(model, optimizer)
            assert optimizer.reducer.step == 0
            _, early = made(way)
            early.residuals_apart()
            early.load_state_dict(optimizer.state_dict())
            assert not early.state
        stepped(0, 1, 2, trainings=[(model, optimizer)])
        before = waiting(optimizer)
        optimizer.zero_grad()  # PyTorch makes a step without gradients and rate, where there is no state
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state, "residuals": Stateful(residuals)}, checkpoint_id=SAVED)
        assert torch.equal(waiting(optimizer), before)

        again, other = made(way)
        its = other.residuals_apart()
        weights, state = get_state_dict(again, other)
        room = {"model": weights, "optimizer": state, "residuals": Stateful(its, SAVED)}
        dcp.load(room, checkpoint_id=SAVED)
        set_state_dict(again, other, model_state_dict=weights, optim_state_dict=state)
        stepped(3, 4, trainings=[(model, optimizer), (again, other)])
        _, forgetful = made(way)
        with pytest.raises(sc.InvalidInputError, match="residuals_apart"):
            forgetful.load_state_dict(optimizer.state_dict())  # which has none
        removed()
