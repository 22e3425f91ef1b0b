"""One of three ranks dies; the others continue with a new process group: see `test_training.py`."""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sparsecomm as sc
from sparsecomm.torch import DistributedOptimizer, SparseState, broadcast_parameters, sparse_hook
from tests.torch.training_ranks import FOLDER, RANK, Chosen, P, case, gradients, sgd

VICTIM = 1
SHAPES = {"w": (3000,), "b": (10,)}


def hooked(model: nn.Module, state: SparseState) -> nn.Module:
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(state, sparse_hook)
    return ddp


def conserved(step: int, rank: int, model: nn.Module, run: nn.Module, reducer: sc.Reducer) -> None:
    """Check in a step on two ranks that residuals plus sums equal the earlier residuals plus gradients."""

    def total() -> torch.Tensor:
        residuals = torch.cat([torch.from_numpy(reducer.residual(name).copy()) for name in SHAPES])
        dist.all_reduce(residuals)
        return residuals

    before = total()
    model.zero_grad()
    run(gradients(step, rank, SHAPES)).backward()
    added = sum(torch.cat(list(gradients(step, r, SHAPES).values())) for r in range(2))
    means: Any = torch.cat([parameter.grad for parameter in model.parameters()])  # type: ignore[misc]
    assert torch.equal(total() + 2 * means, before + added)


@case
def survivors_go_on() -> None:
    alone, other = Chosen(SHAPES), Chosen(SHAPES)
    optimizer: Any = DistributedOptimizer(sgd(alone.parameters()), alone.named_parameters(), 0.05, dense_below=100)
    state = SparseState(other.named_parameters(), 0.05, dense_below=100)
    runs = [alone, hooked(other, state)]
    for step in range(3):
        for run in runs:
            run.zero_grad()
            run(gradients(step, RANK, SHAPES)).backward()
        optimizer.step()
    dist.barrier()
    if RANK == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    for run in runs:
        run.zero_grad()
        with pytest.raises(sc.RankFailedError, match="rank 1 died") as error:
            run(gradients(3, RANK, SHAPES)).backward()
        assert error.value.ranks == (VICTIM,)
    del runs, run, error  # removes their hooks
    gc.collect()
    dist.destroy_process_group()
    rank = RANK - (RANK > VICTIM)
    store = dist.FileStore(str(FOLDER / "survivors"), P - 1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=P - 1)
    for rebuilt in (optimizer.rebuild(dist.group.WORLD), state.rebuild(dist.group.WORLD)):
        assert (rebuilt.size, rebuilt.ranks_lost, rebuilt.elements_lost, rebuilt.step) == (2, (VICTIM,), 3010, 4)
    for parameter in (*alone.parameters(), *other.parameters()):
        assert parameter.grad is not None
        assert not parameter.grad.any()  # no call of the failed step was made, since one of three ranks was missing
    optimizer.step()
    broadcast_parameters(alone.state_dict())
    ddp = hooked(other, state)
    for step in range(4, 7):
        conserved(step, rank, alone, alone, optimizer.reducer)
        optimizer.step()
        conserved(step, rank, other, ddp, state.reducer)
    weights = torch.cat([parameter.detach() for parameter in alone.parameters()])
    of_first = weights.clone()
    dist.broadcast(of_first, 0)
    assert torch.equal(weights, of_first)
