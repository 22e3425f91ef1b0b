"""A torchrun job. Calls are refused until there is a process group. See `test_training.py`."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import sparsecomm as sc
from sparsecomm.torch import DistributedOptimizer, broadcast_parameters

assert "mpi4py.MPI" not in sys.modules
x = np.ones(4, np.float32)
model = nn.Linear(2, 2)
optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters()), model.named_parameters())
reducer = sc.Reducer({"x": x})
CALLS: dict[str, Callable[[], object]] = {
    "sparse_allreduce": lambda: sc.sparse_allreduce(x, 4),
    "isparse_allreduce": lambda: sc.isparse_allreduce(x, 4).wait(),
    "Reducer": lambda: reducer.push("x", x.copy()),
    "broadcast_parameters": lambda: broadcast_parameters(model.state_dict()),
    "DistributedOptimizer": lambda: model(torch.ones(2)).sum().backward(),
    "explain": lambda: sc.explain(100, 3),
}

weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
for name, call in CALLS.items():
    with pytest.raises(sc.InvalidInputError, match=r"WORLD_SIZE=2, RANK=\d.*init_process_group\(\) first"):
        print(f"{name}: {call()}")
assert all(model.state_dict()[name].equal(tensor) for name, tensor in weights.items())

from mpi4py import MPI  # noqa: E402

with pytest.raises(sc.InvalidInputError, match="WORLD_SIZE=2"):
    sc.sparse_allreduce(x, 4, comm=MPI.COMM_WORLD)
assert sc.sparse_allreduce(x, 4, comm=MPI.COMM_SELF).values.tolist() == [1, 1, 1, 1]  # a world of one is intended

if "jax" in sys.argv:
    import jax.numpy as jnp

    import sparsecomm.jax

    CALLS["jax"] = lambda: sparsecomm.jax.sparse_allreduce(jnp.ones(4), 4)
    with pytest.raises(sc.InvalidInputError, match="WORLD_SIZE=2"):
        CALLS["jax"]()

import torch.distributed as dist  # noqa: E402

dist.init_process_group("gloo")
RANK, GROUP = dist.get_rank(), dist.group.WORLD
for comm in (None, GROUP):
    assert sc.sparse_allreduce(x, 4, comm=comm).values.tolist() == [2, 2, 2, 2]
    assert sc.isparse_allreduce(x, 4, comm=comm).wait().values.tolist() == [2, 2, 2, 2]
    assert "on 2 ranks" in str(sc.explain(100, 3, comm=comm))
    gradient = x * RANK
    sc.Reducer({"x": x}, 1.0, comm=comm).reduce({"x": gradient})
    assert gradient.tolist() == [0.5] * 4
    if "jax" in sys.argv:
        assert sparsecomm.jax.sparse_allreduce(jnp.ones(4), 4, comm=comm).tolist() == [2, 2, 2, 2]
CALLS["broadcast_parameters"]()
optimizer.synchronize()  # exchanges the gradients of the refused pass
assert optimizer.reducer.counters.bytes_sent > 0

halves = [dist.new_group([rank]) for rank in range(2)]
assert sc.sparse_allreduce(x, 4, comm=halves[RANK]).values.tolist() == [1, 1, 1, 1]  # a group of one is intended
with pytest.raises(sc.InvalidInputError, match=r"not a member of the group"):
    sc.sparse_allreduce(x, 4, comm=halves[1 - RANK])
with pytest.raises(sc.InvalidInputError, match=r"rank \d: comm is 3.*process group of torch.distributed"):
    sc.sparse_allreduce(x, 4, comm=3)
dist.barrier()  # rank 1 may still need rank 0's store for its own group
print(f"rank {RANK} is done\n", end="")
dist.destroy_process_group()
