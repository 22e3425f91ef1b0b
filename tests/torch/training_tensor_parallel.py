"""Cases of tensor parallelism, on four ranks, two replicas of two shards."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from sparsecomm.torch import DistributedOptimizer
from tests.torch.training_ranks import P, case, sgd


@case
def tensor_parallel_parameters() -> None:
    """Replicas train as one that sees the data of both. The norm's gradient is in parts when it comes."""
    meshes = init_device_mesh("cpu", (P // 2, 2), mesh_dim_names=("dp", "tp"))

    def network() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6), nn.LayerNorm(6))

    model, whole = network(), network()
    replica = meshes["dp"].get_local_rank()
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel(output_layouts=Shard(1), use_local_output=False)}
    plan["2"] = SequenceParallel(use_local_output=False)
    parallelize_module(model, meshes["tp"], plan)
    settings: dict[str, Any] = {"density": 1.0, "comm": meshes["dp"].get_group()}
    optimizer = DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), **settings)
    plain = sgd(whole.parameters())
    for step in range(3):
        x = torch.randn(4, 2, 6, generator=torch.Generator().manual_seed(step))  # of both replicas
        optimizer.zero_grad()
        model(x[2 * replica : 2 * replica + 2]).full_tensor().square().mean().backward()
        optimizer.step()
        plain.zero_grad()
        whole(x).square().mean().backward()
        plain.step()
    assert optimizer.reducer.counters.bytes_sent > 0
    for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q, msg=name)
