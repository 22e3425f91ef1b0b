"""Hybrid FSDP2: shards within groups of ranks, whose gradients are summed sparsely across the groups."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from sparsecomm.errors import InvalidInputError
from sparsecomm.reducer.schedule import Schedule
from sparsecomm.signatures import with_options
from sparsecomm.torch.exchange import Exchange
from sparsecomm.torch.parameters import ExchangeOptions, Parameters
from sparsecomm.torch.shards import is_sharded, ranks_of
from sparsecomm.transport import Comm

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Replicas", "ShardedState", "register_fsdp"]

ParamGroup: TypeAlias = Any  # FSDPParamGroup, which torch keeps to itself


@with_options(ExchangeOptions, Parameters.__init__)
def register_fsdp(model: nn.Module, density: Schedule = 0.001, **options: Unpack[ExchangeOptions]) -> ShardedState:
    """Let a model that FSDP2 shards sum its gradients sparsely across the replicas of its shards.

        mesh = init_device_mesh("cuda", (replicas, shards), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
        state = sparsecomm.torch.register_fsdp(model, 0.001)

    After ``loss.backward()`` every ``p.grad`` holds the mean over all ranks of what was sent. FSDP sums a gradient
    within the group that shards it, as ever; then each rank exchanges its own shard with the ranks that hold the same
    one, as soon as it is there, beside the backward pass. FSDP's own sum across replicas is switched off.

    The mesh may also be of one dimension: ``fully_shard(model, mesh=mesh["shard"])`` and
    ``comm=mesh["replicate"].get_group()``; so may tensor-parallel dimensions be there besides. Call this after
    `fully_shard`, before the first forward pass. Parameters that are not sharded by it are left alone, as by FSDP.

    A parameter that this rank did not use counts as zeros. Passes within ``state.no_sync()``, and such that
    ``set_requires_gradient_sync(False)`` or ``set_requires_all_reduce(False)`` leaves out, only add up.

    Args:
        model: one whose modules `torch.distributed.fsdp.fully_shard` has wrapped, at least one of them.
        density: as in `sparsecomm.Reducer`; of each rank's shards.
        comm: the process group of the ranks that hold the same shards as this one; ``None``: that of the mesh's
            dimension that replicates.
        scaler, check_weights_every: as in `SparseState`; each rank checks its shards. An overflow that only some
            shards have seen makes all scalers skip the step, and drops what the other shards sent in it.
        options: those of `sparsecomm.Reducer`, but not ``clip``. ``op`` is "mean" by default: "sum" is for those who
            have called ``set_gradient_divide_factor``, as FSDP divides by nothing else then.

    Raises:
        InvalidInputError: no module is sharded, the mesh has no replicas and ``comm`` is not given, the ranks of
            ``comm`` hold different shards, or an argument cannot be used.
    """
    return ShardedState(model, density, **options)


class ShardedState(Exchange):
    """What `register_fsdp` returns: the exchange of a model's shards across replicas, and what it keeps.

    It goes on as long as this object lives, or until `remove`. Within `no_sync` FSDP sums within its group all the
    same, so that no rank has to keep a whole gradient. A shard group that lost a rank is lost as a whole: FSDP cannot
    go on in it; the others `rebuild` over process groups of the ranks that hold the same shards.
    """

    def __init__(self, model: nn.Module, density: Schedule, **options: Unpack[ExchangeOptions]) -> None:
        """Begin the exchange: see `register_fsdp`."""
        self._replicas = replicas = Replicas(model, options.pop("comm", None))
        try:
            if replicas.divided and "op" not in options:
                raise InvalidInputError(
                    "set_gradient_divide_factor was called, so that FSDP divides gradients by that and by nothing "
                    "else; pass op='sum' to do the same here, or op='mean' to divide by the number of replicas besides"
                )
            sharded = [(name, p) for name, p in model.named_parameters() if is_sharded(p)]
            super().__init__(sharded, density, comm=replicas.comm, summed_here=replicas.summed_here, **options)
            self.begin()
        except BaseException:
            replicas.join()
            raise

    def __repr__(self) -> str:
        return f"ShardedState({super().__repr__()})"

    def remove(self) -> None:
        """Exchange nothing any more: FSDP sums across the mesh as before. What waits in residuals is dropped."""
        super().remove()
        self._replicas.join()

    def _only_adds(self, parameter: torch.Tensor) -> bool:
        return super()._only_adds(parameter) or self._replicas.held(parameter)


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
        self._meshes: list[tuple[ParamGroup, object, object]] = []  # before and after
        groups = _param_groups(model)
        self.divided = any(getattr(group, "gradient_divide_factor", None) is not None for group in groups)
        self._group_of = {id(param.sharded_param): group for group in groups for param in group.fsdp_params}
        kinds = "replicate_process_group", "shard_process_group"
        hybrid = [group for group in groups if all(hasattr(group.mesh_info, kind) for kind in kinds)]
        self.comm = _common(hybrid, groups) if comm is None and groups else comm
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
        self.summed_here = [param.sharded_param for group in ours for param in group.fsdp_params]
        for group in ours:
            before, after = group.mesh_info, copy.copy(group.mesh_info)  # the same mesh, and its process groups
            after.__class__ = next(c for c in type(before).__mro__ if c.__name__ == "FSDPMeshInfo")
            self._meshes.append((group, before, after))
            _replace(group, before, after)

    def held(self, parameter: torch.Tensor) -> bool:
        """Return whether ``set_requires_all_reduce(False)`` is in force for a parameter."""
        return not getattr(self._group_of.get(id(parameter)), "all_reduce_grads", True)

    def join(self) -> None:
        """Let FSDP sum across its mesh again."""
        for group, before, after in self._meshes:
            _replace(group, after, before)
        self._meshes.clear()


def _replace(group: ParamGroup, old: object, new: object) -> None:
    group.mesh_info = new
    if group.post_forward_mesh_info is old:  # it reshards to where it was sharded
        group.post_forward_mesh_info = new


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
