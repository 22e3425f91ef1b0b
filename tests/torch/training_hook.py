"""Cases for the DDP hook only, on every rank: see `test_training.py`."""

from __future__ import annotations

import gc
import warnings
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import sparsecomm as sc
from sparsecomm.torch import DistributedOptimizer, SparseState, register, sparse_hook
from tests.torch.training_ranks import EXACT, RANK, Chosen, P, Training, case, gradients

ALL = partial(dict.fromkeys, range(P))


@case
def buffers_that_ddp_broadcasts_are_no_reason_for_a_warning() -> None:
    """DDP's next forward pass makes them equal. Without DDP, they stay different."""
    for plain in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        if plain:
            wrapped: Any = model
            sgd = torch.optim.SGD(model.parameters(), 0.1)
            DistributedOptimizer(sgd, model.named_parameters())
        else:
            state, wrapped = SparseState(model.named_parameters()), DistributedDataParallel(model)
            wrapped.register_comm_hook(state, sparse_hook)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            wrapped(torch.randn(5, 3, generator=torch.Generator().manual_seed(RANK))).square().sum().backward()
        messages = [str(warning.message)[:24] for warning in caught]
        assert messages == ["the ranks' buffers differ"[:24]] * (plain and P > 1)


@case
def what_is_no_ddp_model() -> None:
    mesh = dist.init_device_mesh("cpu", (P,))
    sharded = fully_shard(nn.Linear(8 * P, 4), mesh=mesh)
    for model, match in (
        (nn.Linear(2, 2), "got Linear; expected torch.nn.parallel"),
        (sharded, "use register_fsdp"),
        (3, "got int"),
    ):
        with pytest.raises(sc.InvalidInputError, match=match):
            register(model)  # type: ignore[arg-type]
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    register(ddp, **EXACT)
    with pytest.raises(sc.InvalidInputError, match=r"registered already, .* keep the state"):
        register(ddp)
    if P > 1:  # a single rank has all shards
        with pytest.raises(sc.InvalidInputError, match="weight is a DTensor, sharded"):
            SparseState(sharded.named_parameters())


@case
def wrong_arguments() -> None:
    with pytest.raises(sc.InvalidInputError, match="DistributedDataParallel averages"):
        SparseState(Chosen().named_parameters(), op="sum")
    ddp = DistributedDataParallel(Chosen())
    ddp.register_comm_hook(SparseState(Chosen().named_parameters(), **EXACT), sparse_hook)
    with pytest.raises(sc.InvalidInputError, match="none of the 5 that were named"):
        ddp(gradients(0, RANK)).backward()


@case
def a_backward_pass_that_does_not_reach_all() -> None:
    """DDP raises in its next forward pass; the state raises if another DDP continues with it."""
    training = Training("hook")
    state = training.exchange
    training.backward(gradients(0, RANK))
    training.backward({name: g for name, g in gradients(1, RANK).items() if name != "a"})
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        training.run(gradients(2, RANK))
    training.run = None
    gc.collect()
    other = DistributedDataParallel(training.model)
    other.register_comm_hook(state, sparse_hook)
    loss = other(gradients(2, RANK))
    with pytest.raises(sc.InvalidInputError, match="backward pass before this one did not end"):
        loss.backward()
    state.reducer.wait()  # ends calls that had begun on all ranks


@case
def what_is_dropped_is_freed() -> None:
    training = Training("hook")
    training.backward(gradients(0, RANK))
    watched = [weakref.ref(x) for x in (training.run, training.exchange, training.model, training.model.a)]
    del training
    gc.collect()
    assert [w() for w in watched] == [None] * 4
