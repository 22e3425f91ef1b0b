"""Why there is no backend of process groups: what one is asked to sum does not tell gradients from weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.nn.parallel import DistributedDataParallel

import sparsecomm as sc
from tests.torch.training_ranks import RANK, case


class Recording(dist.ProcessGroup):
    """What gloo does, and a list of all sums: operation, element type, elements."""

    def __init__(self, gloo: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.gloo, self.sums = gloo, []  # type: ignore[var-annotated]

    def getBackendName(self) -> str:  # noqa: N802 - PyTorch calls it
        return type(self).__name__.lower()

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        (tensor,) = tensors
        self.sums.append((options.reduceOp, tensor.dtype, tensor.numel()))
        return self.gloo.allreduce(tensors, options)

    def broadcast(self, *arguments: Any) -> Any:
        return self.gloo.broadcast(*arguments)

    def allgather(self, *arguments: Any) -> Any:
        return self.gloo.allgather(*arguments)


class Sparse(Recording):
    """Sums sparsely what it has been asked for before, with a residual for each length."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.residuals: dict[int, torch.Tensor] = {}

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> Any:
        (tensor,) = tensors
        if tensor.numel() not in self.residuals:
            self.residuals[tensor.numel()] = torch.zeros_like(tensor)
            return super().allreduce(tensors, options)
        residual = self.residuals[tensor.numel()]
        # By what "auto" measures it may take dense sums, in which nothing is lost.
        options: dict[str, Any] = {"algorithm": "butterfly", "comm": dist.group.WORLD}
        sc.sparse_allreduce(tensor, 0.05, residual=residual, out=tensor, **options)
        done: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        done.set_result(tensors)
        return torch._C._distributed_c10d._create_work_from_future(done)


def trained(kind: type[Recording]) -> tuple[nn.Module, Recording]:
    """Train for three steps with a backend, and average weights, as local SGD does now and then."""
    made: list[Recording] = []

    def make(store: dist.Store, rank: int, size: int, timeout: Any) -> Recording:
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)  # type: ignore[attr-defined]
        made.append(kind(gloo, rank, size))
        return made[-1]

    dist.Backend.register_backend(kind.__name__, make, devices=["cpu"])
    group = dist.new_group(backend=kind.__name__.lower())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 10))
    ddp = DistributedDataParallel(model, process_group=group)
    torch.manual_seed(RANK)
    for _ in range(3):
        ddp(torch.randn(8, 20)).square().mean().backward()
    average_parameters(iter(model.parameters()), group)
    return model, made[0]


def norm(model: nn.Module) -> float:
    return float(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).norm())


@case
def a_backend_sees_no_difference_between_gradients_and_weights() -> None:
    """If this fails, PyTorch tells backends more than it did: see docs/how-to/integrations.md."""
    model, group = trained(Recording)
    *gradients, weights = group.sums
    assert len(gradients) == 3
    assert gradients == [weights] * 3
    averaged, _ = trained(Sparse)
    assert norm(averaged) < 0.5 * norm(model)
