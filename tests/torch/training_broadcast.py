"""Cases of `broadcast_parameters`, on every rank: see `test_training.py`."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sparsecomm as sc
from sparsecomm.torch import DistributedOptimizer, broadcast_parameters, register
from tests.torch.training_ranks import ODD, RANK, P, case, case_of_several, sgd, soon


def bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def tensors(rank: int) -> dict[str, Any]:
    """Return tensors of every kind, and a value that is no tensor."""
    random = torch.Generator().manual_seed(rank)
    noise = torch.randn(40, generator=random)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e-45, 3e38, -1.5]) * (1 + rank)
    return {
        "float32": noise,
        "float64": noise.double() / 3,
        "half": noise.half(),
        "bfloat16": noise.bfloat16(),
        "special": special,
        "nan": torch.full((3,), torch.nan if rank == ODD else 0.0),
        "eighth": noise.to(torch.float8_e4m3fn),
        "complex": torch.complex(noise, noise + 1),
        "int64": torch.tensor([2**53 + 1 + rank, -(2**62) - rank, 2**63 - 1]),
        "int8": torch.tensor([-128, rank, 127], dtype=torch.int8),
        "bool": torch.tensor([rank % 2 == 0, True, False]),
        "scalar": torch.tensor(7 + rank),
        "of no elements": torch.empty(0, 3),
        "transposed": torch.randn(4, 6, generator=random).t(),
        "channels last": torch.randn(2, 3, 4, 5, generator=random).to(memory_format=torch.channels_last),
        "part": torch.randn(8, 8, generator=random)[1:6, 2:5],
        "epoch": 3,
        "parameter": nn.Parameter(torch.randn(5, generator=random)),
    }


@case
def all_get_the_same_bits() -> None:
    """One group has no backend for host memory, like a group of NCCL."""
    for root, config in product(range(P), [dist.get_backend_config(), "cuda:nccl"]):
        mine = tensors(RANK)
        strides = {name: t.stride() for name, t in mine.items() if name != "epoch"}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "get_backend_config", lambda group, config=config: config)
            broadcast_parameters(mine if root % 2 else list(mine.items()), root)
        for name, stride in strides.items():
            assert bits(mine[name]) == bits(tensors(root)[name]), name
            assert mine[name].stride() == stride, name
        assert mine["parameter"].requires_grad
        assert mine["parameter"].is_leaf


@case
def wrong_arguments() -> None:
    model = nn.Linear(2, 2)
    for tensors, options, match in (
        (model.named_parameters(), {"root": P}, f"root={P}: must be a rank from 0 to {P - 1}"),
        (model.named_parameters(), {"root": -1}, "root=-1"),
        (model.named_parameters(), {"root": 0.0}, r"root=0\.0"),
        (model, {}, r"got Linear; .* pass model\.state_dict"),
    ):
        with pytest.raises(sc.InvalidInputError, match=match):
            broadcast_parameters(tensors, **options)  # type: ignore[arg-type]


@case_of_several
def tensors_that_differ_between_ranks() -> None:
    """Numbers, names, shapes, dtypes or roots differ: all ranks raise at once."""
    one, two = torch.ones(4), torch.ones(6)
    a, root_of_odd = {"a": one}, {"a": one}
    for of_odd, others in (
        ({"a": one, "b": two}, a),
        ({"a": one, "c": one}, {"a": one, "b": one}),
        *(({"a": other}, a) for other in (two, one.double(), one.int(), torch.ones(2, 2))),
        ({}, a),
        (root_of_odd, a),
    ):
        tensors, group = of_odd if RANK == ODD else others, dist.new_group(backend="gloo")
        root = int(tensors is root_of_odd)
        with soon(), pytest.raises(sc.CollectiveMismatchError, match=r"is .* on rank \d and .* on rank \d: use the"):
            broadcast_parameters(tensors, root, comm=group)
        assert all(tensor.eq(1).all() for tensor in tensors.values())
        dist.barrier()


def network() -> nn.Sequential:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[1].bias.requires_grad_(False)
    with torch.no_grad():
        model[0].bias[:] = torch.nan  # the same bits on all ranks
        model[0].weight.data = model[0].weight.t().contiguous().t()
    return model


def spoil(model: nn.Module, name: str) -> None:
    """Change the last bit of a parameter of one rank."""
    if RANK == ODD:
        parameter = model.get_parameter(name).detach()
        parameter.view(-1)[-1:].view(torch.int32).bitwise_xor_(1)


differs = pytest.raises(
    sc.WeightMismatchError, match=rf"^1\.\w+, float32 .* of rank {ODD} differ from rank 0.*broadcast"
)


@case_of_several
def weights_that_differ() -> None:
    """All ranks raise in the first step, and continue with equal weights."""
    for name in ("1.weight", "1.bias"):  # the second one is frozen
        model = network()
        optimizer: Any = DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), 1.0)
        before = {key: bits(tensor) for key, tensor in model.state_dict().items()}
        spoil(model, name)
        with soon(), differs:
            model(torch.ones(3) + dist.get_rank()).sum().backward()
        with soon(), differs:
            optimizer.synchronize()
        broadcast_parameters(model.state_dict())
        assert {key: bits(tensor) for key, tensor in model.state_dict().items()} == before
        optimizer.synchronize()
        assert optimizer.reducer.step == 1
        spoil(model, name)  # weights are compared in the first step only
        model(torch.ones(3) + dist.get_rank()).sum().backward()
        optimizer.load_state_dict(optimizer.state_dict())  # and in the first step after loading
        with soon(), differs:
            model(torch.ones(3) + dist.get_rank()).sum().backward()


@case_of_several
def weights_that_begin_to_differ() -> None:
    for every, detected_at in ((2, 2), (3, 3), (None, None), (0, None)):
        model = network()
        ddp = nn.parallel.DistributedDataParallel(model)
        state = register(ddp, 1.0, check_weights_every=every)
        for step in range(4):
            if step == 1:
                spoil(model, "1.weight")
            if step == detected_at:
                with soon(), differs:
                    ddp(torch.ones(3) + dist.get_rank()).sum().backward()
                break
            ddp(torch.ones(3) + dist.get_rank()).sum().backward()
        assert state.reducer.step == (4 if detected_at is None else detected_at)
    for value in (-1, 1.0, True):
        with pytest.raises(sc.InvalidInputError, match=f"check_weights_every={value}: expected"):
            register(nn.parallel.DistributedDataParallel(network()), check_weights_every=value)  # type: ignore[arg-type]


@case_of_several
def a_rank_that_loads_no_state_but_goes_on() -> None:
    model = network()
    optimizer: Any = DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), 0.5)
    state = optimizer.state_dict()
    loss = model(torch.ones(3)).sum()
    go_on = loss.backward if RANK == ODD else partial(optimizer.load_state_dict, state)
    with soon(), pytest.raises(sc.CollectiveMismatchError, match=r"is in .*, and rank \d in "):
        go_on()
