"""Cases of checkpoints of `torch.distributed.checkpoint`, on every rank: see `test_training.py`."""

from __future__ import annotations

import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, get_state_dict, set_state_dict

import sparsecomm as sc
from sparsecomm.torch import DistributedOptimizer, SparseAdamW, Stateful
from tests.torch.training_ranks import RANK, Chosen, P, case, gradients

FOLDER = Path(sys.argv[3]).with_name("dcp")


def made(way: str, comm: Any = None) -> tuple[nn.Module, Any]:
    model = Chosen()
    if way == "SparseAdamW":
        return model, SparseAdamW(model.named_parameters(), lr=0.05, density=0.2, comm=comm)
    named = model.named_parameters()
    options: dict[str, Any] = {"comm": comm, "algorithm": "split", "dense_below": 0, "momentum": 0.5}
    return model, DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named, 0.1, **options)


def stepped(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    model(gradients(step, RANK)).backward()
    optimizer.step()


def weights_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def waiting(optimizer: Any, group: Any = None) -> torch.Tensor:
    """The sum of all ranks' residuals."""
    parts = [torch.from_numpy(optimizer.reducer.residual(name)).reshape(-1) for name in optimizer.reducer.names]
    total = torch.cat(parts).double()
    dist.all_reduce(total, group=group)
    return total


@case
def states_beside_a_model() -> None:
    """They go on as if they had not stopped; fewer ranks share out what all had."""
    fewer = dist.new_group(list(range(max(1, P - 1))))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for way in ("SparseAdamW", "DistributedOptimizer"):
            model, optimizer = made(way)
            for step in range(3):
                stepped(model, optimizer, step)
            dcp.save({"model": model, "sparse": Stateful(optimizer)}, checkpoint_id=FOLDER)
            before = waiting(optimizer)
            assert before.any()
            again, other = made(way)
            dcp.load({"model": again, "sparse": Stateful(other, FOLDER)}, checkpoint_id=FOLDER)
            for step in (3, 4):
                stepped(model, optimizer, step)
                stepped(again, other, step)
            assert torch.equal(weights_of(model), weights_of(again))
            assert torch.equal(waiting(optimizer), waiting(other))
            if max(1, P - 1) > RANK:
                _, few = made(way, fewer)
                dcp.load({"sparse": Stateful(few, FOLDER, comm=fewer)}, checkpoint_id=FOLDER, process_group=fewer)
                assert few.reducer.step == 3
                torch.testing.assert_close(waiting(few, fewer), before, rtol=1e-5, atol=1e-5)
            with pytest.raises(sc.InvalidInputError, match="has no 'other' of a Stateful"):
                Stateful(other, FOLDER, name="other").state_dict()
            dist.barrier()
            if RANK == 0:
                shutil.rmtree(FOLDER)
            dist.barrier()


@case
def states_that_pytorch_gets_and_sets() -> None:
    """By names of parameters, as trainers do that are built on `torch.distributed.checkpoint`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for way in ("SparseAdamW", "DistributedOptimizer"):
            model, optimizer = made(way)
            residuals = optimizer.residuals_apart()
            if way == "SparseAdamW":  # one that has made no step, and whose state has been got, can train and be saved
                get_optimizer_state_dict(model, optimizer)
                assert optimizer.reducer.step == 0
                _, early = made(way)
                early.residuals_apart()
                early.load_state_dict(optimizer.state_dict())
                assert not early.state
            for step in range(3):
                stepped(model, optimizer, step)
            before = waiting(optimizer)
            assert before.any()
            optimizer.zero_grad()  # PyTorch makes a step without gradients and rate, where there is no state
            weights, state = get_state_dict(model, optimizer)
            saved = {"model": weights, "optimizer": state, "residuals": Stateful(residuals)}
            dcp.save(saved, checkpoint_id=FOLDER)
            assert torch.equal(waiting(optimizer), before)

            again, other = made(way)
            its = other.residuals_apart()
            weights, state = get_state_dict(again, other)
            room = {"model": weights, "optimizer": state, "residuals": Stateful(its, FOLDER)}
            dcp.load(room, checkpoint_id=FOLDER)
            set_state_dict(again, other, model_state_dict=weights, optim_state_dict=state)
            for step in (3, 4):
                stepped(model, optimizer, step)
                stepped(again, other, step)
            assert torch.equal(weights_of(model), weights_of(again))
            assert torch.equal(waiting(optimizer), waiting(other))

            _, forgetful = made(way)
            with pytest.raises(sc.InvalidInputError, match="residuals_apart"):
                forgetful.load_state_dict(optimizer.state_dict())  # which has none
            dist.barrier()
            if RANK == 0:
                shutil.rmtree(FOLDER)
            dist.barrier()
