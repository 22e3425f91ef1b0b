"""A rank of three over gloo, of which one dies; the others go on with a new process group.

python -m tests.torch.lost_rank RANK FOLDER
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sparsecomm as sc
import sparsecomm.torch

RANK, FOLDER = int(sys.argv[1]), Path(sys.argv[2])
VICTIM, P = 1, 3
N = 3000


class Model(nn.Module):
    """Its gradient is what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.zeros(N)), nn.Parameter(torch.zeros(10))

    def forward(self, g: torch.Tensor) -> torch.Tensor:
        return (self.w * g).sum() + (self.b * g[:10]).sum()


def gradient(rank: int, step: int) -> torch.Tensor:
    """Whole numbers."""
    return torch.randint(-8, 9, (N,), generator=torch.Generator().manual_seed(100 * rank + step)).float()


def group(rank: int, size: int) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(FOLDER / f"of{size}"), size), rank=rank, world_size=size)


def conserved(step: int, rank: int, model: nn.Module, ddp: nn.Module, reducer: sc.Reducer) -> None:
    """In a step on two ranks, residuals and sums add up to what residuals and gradients were."""

    def total() -> torch.Tensor:
        kept = torch.cat([torch.from_numpy(reducer.residual(name).copy()) for name in ("w", "b")])
        dist.all_reduce(kept)
        return kept

    before = total()
    for parameter in model.parameters():
        parameter.grad = None
    ddp(gradient(rank, step)).backward()
    added = sum(torch.cat([g, g[:10]]) for g in (gradient(r, step) for r in range(2)))
    means = torch.cat([parameter.grad for parameter in model.parameters()])
    assert torch.equal(total() + 2 * means, before + added)


group(RANK, P)
alone, hooked = Model(), Model()
optimizer = torch.optim.SGD(alone.parameters(), lr=0.5)
optimizer = sparsecomm.torch.DistributedOptimizer(optimizer, alone.named_parameters(), 0.05, dense_below=100)
state = sparsecomm.torch.SparseState(hooked.named_parameters(), 0.05, dense_below=100)
ddp = DistributedDataParallel(hooked)
ddp.register_comm_hook(state, sparsecomm.torch.sparse_hook)
for step in range(3):
    optimizer.zero_grad()
    alone(gradient(RANK, step)).backward()
    optimizer.step()
    hooked.zero_grad()
    ddp(gradient(RANK, step)).backward()
dist.barrier()
if RANK == VICTIM:
    os.kill(os.getpid(), signal.SIGKILL)

for model in (alone, ddp):
    model.zero_grad()
    with pytest.raises(sc.RankFailedError, match="rank 1 died") as error:
        model(gradient(RANK, 3)).backward()
    assert error.value.ranks == (VICTIM,)
dist.destroy_process_group()
rank = RANK - (RANK > VICTIM)
group(rank, 2)
for rebuilt in (optimizer.rebuild(dist.group.WORLD), state.rebuild(dist.group.WORLD)):
    assert (rebuilt.size, rebuilt.ranks_lost, rebuilt.elements_lost, rebuilt.step) == (2, (VICTIM,), N + 10, 4)
for parameter in (*alone.parameters(), *hooked.parameters()):
    assert parameter.grad is not None
    assert not parameter.grad.any()  # no call of the step that failed was made: one rank of three was missing
optimizer.step()
sparsecomm.torch.broadcast_parameters(alone.state_dict())
del ddp, model, error  # its hooks would still be there
gc.collect()
ddp = DistributedDataParallel(hooked)
ddp.register_comm_hook(state, sparsecomm.torch.sparse_hook)
for step in range(4, 7):
    conserved(step, rank, alone, alone, optimizer.reducer)
    optimizer.step()
    conserved(step, rank, hooked, ddp, state.reducer)
weights = torch.cat([parameter.detach() for parameter in alone.parameters()])
other = weights.clone()
dist.broadcast(other, 0)
assert torch.equal(weights, other)
dist.destroy_process_group()
