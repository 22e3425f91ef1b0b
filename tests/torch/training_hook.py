"""Cases for the DDP hook only, on every rank: see `test_training.py`."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import sparsecomm as sc
from sparsecomm import transport
from sparsecomm.calls.queue import queue_of
from sparsecomm.torch import DistributedOptimizer, SparseState, keep_local, register, sparse_hook
from tests.torch.training_ranks import EXACT, RANK, Chosen, P, Training, case, gradients

ALL = partial(dict.fromkeys, range(P))


class Moved(TorchDispatchMode):
    """Counts the bytes that PyTorch's operators read and write, except views and operators that return no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        if not operator.is_view and any(isinstance(t, torch.Tensor) for t in tree_leaves(result)):
            tensors = (t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor))
            self.nbytes[str(operator)] += sum(t.nbytes for t in tensors)
        return result


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
def the_hook_writes_each_mean_once_and_moves_nothing_else() -> None:
    """The sum itself reads gradients, and reads and writes residuals if it selects entries."""

    class Written:
        nbytes = 0

        def around(self, part: str, name: str, function: Any) -> Any:
            def counted(segments: Any, *more: Any) -> None:
                self.nbytes += sum(t.size * t.dtype.itemsize for _, t in segments)
                function(segments, *more)

            return counted if name == "write" else function

    moved: dict[bool, Counter[str]] = {}
    for sparse in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(*(nn.Linear(200, 200, bias=False) for _ in range(4)))
        ddp, written = DistributedDataParallel(module, bucket_cap_mb=0.3), Written()
        if sparse:
            register(ddp, 0.01)
            ranks = transport.transport_of(ddp.process_group)
            queue_of(ranks).observe(ranks, written)
        else:
            keep_local(ddp)
        for _ in range(3):  # DDP rebuilds its buckets after the first pass
            written.nbytes = 0
            with Moved() as moved_now:
                ddp(torch.randn(2, 200) + dist.get_rank()).square().mean().backward()
        moved[sparse] = moved_now.nbytes
        if sparse:
            assert written.nbytes == 4 * 200 * 200 * 4
    assert sum((moved[True] - moved[False]).values()) < 1000


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
