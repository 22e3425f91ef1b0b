"""The replicas of a model that FSDP2 shards: its own sum across them is switched off, for another to take its place."""

from __future__ import annotations

import copy
from typing import Any, TypeAlias

import torch
from torch import nn

from sparsecomm.errors import InvalidInputError
from sparsecomm.torch.shards import ranks_of
from sparsecomm.transport import Comm

__all__ = ["Replicas"]

ParamGroup: TypeAlias = Any  # FSDPParamGroup, which torch keeps to itself


class Replicas:
    """The ranks that hold the same shards of a model, and FSDP's own sum across them, which stays off until `join`.

    With a mesh of one dimension there is nothing to switch off. With one of two, FSDP has no public way to do so: its
    groups of parameters take the class of mesh that does not replicate (`FSDPMeshInfo`) for that of one that does, over
    the same ranks. Where a version of PyTorch lacks what that needs, nothing is changed, and `check_replicated` refuses
    the mesh.

    Attributes:
        comm: of the replicas.
        summed_here: parameters whose gradients FSDP does not sum across replicas.
        divided: whether the user has set what FSDP divides gradients by.
    """

    def __init__(self, model: nn.Module, comm: Comm) -> None:
        """Find the replicas, and switch FSDP's sum off, if ``comm`` is to do it.

        Args:
            model: of any kind. One that is not sharded has nothing to switch off.
            comm: ``None``: the dimension of the mesh that replicates, or all ranks if nothing is sharded.

        Raises:
            InvalidInputError: the model is sharded, and its mesh has no replicas and ``comm`` was not given; or
                ``comm`` has only a part of the ranks over which FSDP sums.
        """
        self.comm, self.summed_here, self._changed = comm, [], []  # type: Comm, list[torch.Tensor], list[_Changed]
        groups = _param_groups(model)
        self.divided = any(getattr(group, "gradient_divide_factor", None) is not None for group in groups)
        self._group_of = {id(param.sharded_param): group for group in groups for param in group.fsdp_params}
        hybrid = [group for group in groups if _is_hybrid(group.mesh_info)]
        if comm is None and groups:
            self.comm = _common(hybrid, groups)
        ranks = set(ranks_of(self.comm) or ())
        ours = []  # groups whose sum is that over comm; FSDP sums the others over other ranks
        for group in hybrid:
            theirs = set(ranks_of(group.mesh_info.replicate_process_group) or ())
            if len(ranks & theirs) > 1:
                ours.append(group)
                if not theirs <= ranks:
                    raise InvalidInputError(
                        f"comm: its ranks {sorted(ranks)} are a part of those over which FSDP replicates, "
                        f"{sorted(theirs)}; expected all of them, which comm=None takes, or none"
                    )
        for group in ours:
            self._changed.append(_Changed(group))
            self.summed_here += [param.sharded_param for param in group.fsdp_params]

    def held(self, parameter: torch.Tensor) -> bool:
        """Return whether ``set_requires_all_reduce(False)`` is in force for a parameter."""
        group = self._group_of.get(id(parameter))
        return group is not None and not getattr(group, "all_reduce_grads", True)

    def join(self) -> None:
        """Let FSDP sum across its mesh again."""
        for changed in self._changed:
            changed.undo()
        self._changed.clear()


class _Changed:
    """A group of parameters that replicates no more, as FSDP sees it."""

    def __init__(self, group: ParamGroup) -> None:
        self._group, self._before = group, group.mesh_info
        self._after = copy.copy(self._before)  # with the same mesh, and its process groups
        self._after.__class__ = next(c for c in type(self._before).__mro__ if c.__name__ == "FSDPMeshInfo")
        self._replace(self._before, self._after)

    def undo(self) -> None:
        self._replace(self._after, self._before)

    def _replace(self, old: object, new: object) -> None:
        self._group.mesh_info = new
        if self._group.post_forward_mesh_info is old:  # it reshards to where it was sharded
            self._group.post_forward_mesh_info = new


def _param_groups(model: nn.Module) -> list[ParamGroup]:
    """Return FSDP's groups of parameters, sharded as they are between steps; none, if they cannot be found."""
    found: dict[int, ParamGroup] = {}
    for module in model.modules():
        if not hasattr(module, "_get_fsdp_state"):  # of FSDPModule, which old versions have elsewhere
            continue
        module.reshard()  # type: ignore[operator]
        state: Any = module._get_fsdp_state()  # type: ignore[operator]
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            if all(hasattr(group, name) for name in ("mesh_info", "post_forward_mesh_info", "fsdp_params")):
                found[id(group)] = group
    return list(found.values())


def _is_hybrid(mesh_info: object) -> bool:
    return all(hasattr(mesh_info, kind) for kind in ("replicate_process_group", "shard_process_group"))


def _common(hybrid: list[ParamGroup], groups: list[ParamGroup]) -> Comm:
    """Return the process group of the replicas of all groups of parameters."""
    found = {id(group.mesh_info.replicate_process_group): group for group in hybrid}
    if len(found) == 1 and len(hybrid) == len(groups):
        comm: Comm = hybrid[0].mesh_info.replicate_process_group
        return comm
    raise InvalidInputError(
        "comm is None, and the mesh that shards the model has no dimension that replicates it, or there are several: "
        "plain FSDP leaves every rank another part of the gradient, and there is nothing to sum. Expected a mesh of "
        "replicas and shards: mesh = init_device_mesh(device, (replicas, shards), mesh_dim_names=('replicate', "
        "'shard')), fully_shard(module, mesh=mesh); or pass comm, the process group of the ranks that hold the same "
        "shards as this one"
    )
