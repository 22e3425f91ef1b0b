"""DTensors: their local shards, and checks that ranks which sum shards hold the same ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from sparsecomm import transport
from sparsecomm.calls.sparse import sparse_allreduce
from sparsecomm.errors import CollectiveMismatchError, InvalidInputError
from sparsecomm.transport import Comm, Transport

__all__ = ["HYBRID", "check_replicated", "compare", "described", "gradient_of", "is_sharded", "local", "ranks_of"]

# Classes of torch.distributed.tensor, which takes long to import.
DTensor: TypeAlias = Any
DeviceMesh: TypeAlias = Any

HYBRID = (
    "shard within groups of ranks and replicate across them: mesh = init_device_mesh(device, (replicas, shards), "
    "mesh_dim_names=('replicate', 'shard')), fully_shard(module, mesh=mesh['shard']), and "
    "comm=mesh['replicate'].get_group(); or keep dense sums"
)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    return hasattr(tensor, "to_local")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, or another tensor itself: detached, and without a copy."""
    detached: DTensor = tensor.detach()
    shard: torch.Tensor = detached.to_local() if is_sharded(tensor) else detached
    return shard


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a parameter, with the parameter's placements.

    Autograd may leave a part of the sum on each rank of a mesh (``Partial``). The gradient is then replaced by its sum
    over the mesh, which is collective over it.
    """
    gradient, dtensor = parameter.grad, parameter  # type: DTensor, DTensor
    if gradient is not None and is_sharded(parameter) and gradient.placements != dtensor.placements:
        parameter.grad = gradient = gradient.redistribute(placements=dtensor.placements)
    result: torch.Tensor | None = gradient
    return result


def ranks_of(comm: Comm) -> list[int] | None:
    """Return the global ranks of a process group; ``None`` for other communicators."""
    group = transport.group_of(comm)
    return dist.get_process_group_ranks(group) if isinstance(group, dist.ProcessGroup) else None


def check_replicated(named: Mapping[str, torch.Tensor], comm: Comm, *, summed: bool = True) -> None:
    """Check that all ranks of ``comm`` hold the same shards, as far as meshes tell. Nothing is sent.

    Args:
        named: names and parameters.
        comm: the ranks that will sum their shards.
        summed: also check that PyTorch does not sum the gradients over these ranks itself.

    Raises:
        InvalidInputError: two ranks hold different shards, or PyTorch sums gradients over these ranks.
    """
    if (ranks := ranks_of(comm)) is None:
        return
    layouts: dict[tuple[DeviceMesh, Any], str] = {}  # with the name of the first parameter
    for name, parameter in named.items():
        if is_sharded(parameter):
            t: DTensor = parameter
            layouts.setdefault((t.device_mesh, t.placements), name)
    which = "all ranks (comm is None)" if comm is None else f"the ranks {ranks} of comm"
    for (mesh, placements), name in layouts.items():
        apart = _dimensions_apart(mesh, ranks)
        if sharded := [d for d in apart if not placements[d].is_replicate()]:
            raise InvalidInputError(
                f"{name} is a DTensor, sharded over {_dimension(mesh, sharded[0])} of its mesh, along which {which} "
                "lie: each holds another part of it, so their gradients cannot be summed. Pass ranks that hold the "
                f"same shard: {HYBRID}"
            )
        if apart and summed:
            raise InvalidInputError(
                f"{name} is a DTensor, replicated over {_dimension(mesh, apart[0])} of its mesh, along which {which} "
                "lie: PyTorch itself sums its gradients there, densely and in each step. Leave the dimension out "
                f"of the mesh: {HYBRID}"
            )


def compare(transport: Transport, texts: Iterable[str], otherwise: str) -> None:
    """Check that all ranks have the same texts. Collective.

    Raises:
        CollectiveMismatchError: the texts differ; the message begins with ``otherwise``.
    """
    try:  # a sum that ends when all ranks have begun it, and that fails on all of them if labels differ
        sparse_allreduce(np.zeros(1, np.float32), 1, comm=transport, algorithm="dense", label="\n".join(texts))
    except CollectiveMismatchError as error:
        raise CollectiveMismatchError(f"{otherwise}. {error}") from error


def described(name: str, t: DTensor) -> str:
    """Return a text with a tensor's name, dtype and shape, and with this rank's shard of it."""
    text = f"{name}, {t.dtype} {tuple(t.shape)}"
    if not is_sharded(t):
        return text
    mesh = t.device_mesh
    where = [
        f"{placement}: {at} of {mesh.size(d)}"
        for d, (placement, at) in enumerate(zip(t.placements, mesh.get_coordinate() or [], strict=False))
        if not placement.is_replicate()
    ]
    return f"{text}, {', '.join(where) or 'whole'}"


def _dimensions_apart(mesh: DeviceMesh, ranks: Iterable[int]) -> list[int]:
    """Return the dimensions of a mesh in which the coordinate of a rank of ``ranks`` differs from this rank's."""
    matches = (mesh.mesh == rank for rank in ranks)
    others = [match.nonzero()[0].tolist() for match in matches if match.any()]
    return [d for d, mine in enumerate(mesh.get_coordinate() or ()) if any(other[d] != mine for other in others)]


def _dimension(mesh: DeviceMesh, d: int) -> str:
    return f"dimension {d}" if mesh.mesh_dim_names is None else f"dimension {mesh.mesh_dim_names[d]!r}"
