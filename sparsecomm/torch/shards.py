"""DTensors, of which each rank holds a shard: the ranks that sum them must hold the same one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from sparsecomm import transport
from sparsecomm.api import sparse_allreduce
from sparsecomm.errors import CollectiveMismatchError, InvalidInputError
from sparsecomm.transport import Comm, Transport

__all__ = ["HYBRID", "check_replicated", "compare", "described", "gradient_of", "is_sharded", "local", "ranks_of"]

# Those of torch.distributed.tensor, which takes long to import.
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
    """Return the shard of a DTensor that this rank holds, which is no copy; others as they are. Outside the graph."""
    detached: DTensor = tensor.detach()
    shard: torch.Tensor = detached.to_local() if is_sharded(tensor) else detached
    return shard


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a parameter, laid out over the ranks as the parameter is.

    Autograd may leave a part of the sum on each rank of a mesh (``Partial``); it is then summed over the mesh, which is
    collective over it, and replaced.
    """
    gradient, of = parameter.grad, parameter  # type: DTensor, DTensor
    if gradient is not None and is_sharded(parameter) and gradient.placements != of.placements:
        parameter.grad = gradient = gradient.redistribute(placements=of.placements)
    found: torch.Tensor | None = gradient
    return found


def ranks_of(comm: Comm) -> list[int] | None:
    """Return the ranks of a process group in the job; of other communicators ``None``: nothing is known of them."""
    group = transport.group_of(comm)
    return dist.get_process_group_ranks(group) if isinstance(group, dist.ProcessGroup) else None


def check_replicated(named: Mapping[str, torch.Tensor], comm: Comm, *, summed: bool = True) -> None:
    """Check that no two ranks of ``comm`` hold different shards, as far as the meshes tell. Nothing is sent.

    Args:
        named: names and parameters. What is no DTensor passes.
        comm: whose ranks are to sum their shards.
        summed: they are to sum gradients, which PyTorch sums along dimensions of the mesh that replicate them.

    Raises:
        InvalidInputError: two do; or PyTorch sums gradients over these ranks already.
    """
    if (ranks := ranks_of(comm)) is None:
        return
    layouts: dict[tuple[DeviceMesh, Any], str] = {}  # the first name of each
    for name, parameter in named.items():
        if is_sharded(parameter):
            t: DTensor = parameter
            layouts.setdefault((t.device_mesh, t.placements), name)
    which = "all ranks (comm is None)" if comm is None else f"ranks {ranks}, which are those of comm,"
    for (mesh, placements), name in layouts.items():
        apart = _dimensions_apart(mesh, ranks)
        if sharded := [d for d in apart if not placements[d].is_replicate()]:
            raise InvalidInputError(
                f"{name} is a DTensor, sharded over {_dimension(mesh, sharded[0])} of its mesh, along which {which} "
                "lie: each holds another part of it, and there is nothing to sum. Expected ranks that hold the same "
                f"shard: {HYBRID}"
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
        CollectiveMismatchError: they have not; the message begins with ``otherwise``.
    """
    try:  # a sum of nothing, which ends when all ranks have begun it, and is refused on all of them if labels differ
        sparse_allreduce(np.zeros(1, np.float32), 1, comm=transport, algorithm="dense", label="\n".join(texts))
    except CollectiveMismatchError as error:
        raise CollectiveMismatchError(f"{otherwise}. {error}") from error


def described(name: str, t: DTensor) -> str:
    """Return a tensor's name, type and shape, and which shard of it this rank holds, in words."""
    whole = f"{name}, {t.dtype} {tuple(t.shape)}"
    if not is_sharded(t):
        return whole
    mesh = t.device_mesh
    where = [
        f"{placement}: {at} of {mesh.size(d)}"
        for d, (placement, at) in enumerate(zip(t.placements, mesh.get_coordinate() or [], strict=False))
        if not placement.is_replicate()
    ]
    return f"{whole}, {', '.join(where) or 'whole'}"


def _dimensions_apart(mesh: DeviceMesh, ranks: Iterable[int]) -> list[int]:
    """Return the dimensions of a mesh in which a rank of ``ranks`` stands elsewhere than this one."""
    matches = (mesh.mesh == rank for rank in ranks)
    theirs = [match.nonzero()[0].tolist() for match in matches if match.any()]
    return [d for d, mine in enumerate(mesh.get_coordinate() or ()) if any(other[d] != mine for other in theirs)]


def _dimension(mesh: DeviceMesh, d: int) -> str:
    return f"dimension {d}" if mesh.mesh_dim_names is None else f"dimension {mesh.mesh_dim_names[d]!r}"
