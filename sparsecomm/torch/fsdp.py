"""Hybrid FSDP2: shards within groups of ranks, whose gradients are summed sparsely across the groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from sparsecomm.checks import with_options
from sparsecomm.reducer.options import DENSITY
from sparsecomm.reducer.schedule import Schedule
from sparsecomm.torch.exchange import Exchange
from sparsecomm.torch.parameters import ExchangeOptions, Parameters, parameters_of
from sparsecomm.torch.shards import is_sharded

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ShardedState", "register_fsdp"]


@with_options(ExchangeOptions, Parameters.__init__)
def register_fsdp(model: nn.Module, density: Schedule = DENSITY, **options: Unpack[ExchangeOptions]) -> ShardedState:
    """Let a model that FSDP2 shards sum its gradients sparsely across the replicas of its shards.

        mesh = init_device_mesh("cuda", (replicas, shards), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        state = sparsecomm.torch.register_fsdp(model, comm=mesh["replicate"].get_group())

    After ``loss.backward()`` every ``p.grad`` holds the mean over all ranks of what was sent. FSDP sums a gradient
    within the group that shards it, as ever; then each rank exchanges its own shard with the ranks that hold the same
    one, as soon as it is there, beside the backward pass. So leave the dimension that replicates out of the mesh that
    FSDP gets: along it FSDP would sum densely. Tensor-parallel dimensions may be there besides.

    Call this after `fully_shard`, before the first forward pass. All replicas must begin with the same weights: see
    `broadcast_parameters`, with the same ``comm``. Parameters that are not sharded by FSDP are left alone, as by FSDP.

    A parameter that is frozen, or that no replica used, does not move, and what waits in its residual stays there. If
    only some replicas used it, it counts as zeros on the others, and all get the mean.

    Passes within ``state.no_sync()``, and passes that ``set_requires_gradient_sync(False)`` leaves out, only add up.
    Run passes under ``state.no_sync()`` if you throw their gradients away by ``zero_grad()``, or call
    ``state.discard()`` afterwards; otherwise these gradients enter the residuals and are applied later.

    Args:
        model: one whose modules `torch.distributed.fsdp.fully_shard` has wrapped, at least one of them.
        density: as in `sparsecomm.Reducer`; of each rank's shards.
        comm: the process group of the ranks that hold the same shards as this one.
        scaler, check_weights_every: as in `SparseState`; each rank checks its shards. An overflow that only some
            shards have seen makes all scalers skip the step, and drops what the other shards sent in it.
        options: those of `sparsecomm.Reducer`, but not ``clip``. ``op`` is "mean" by default: "sum" is for those who
            have called ``set_gradient_divide_factor``, as FSDP divides by nothing else then.

    Raises:
        InvalidInputError: no parameter is sharded, the ranks of ``comm`` hold different shards, FSDP sums over them
            itself, or an argument cannot be used.
    """
    return ShardedState(model, density, **options)


class ShardedState(Exchange):
    """What `register_fsdp` returns: the exchange of a model's shards across replicas, and what it keeps.

    It goes on as long as this object lives, or until `remove`, which drops what waits in residuals. Within `no_sync`
    FSDP sums within its group all the same, so that no rank has to keep a whole gradient. A shard group that lost a
    rank is lost as a whole: FSDP cannot go on in it; the others `rebuild` over process groups of the ranks that hold
    the same shards.
    """

    def __init__(self, model: nn.Module, density: Schedule, **options: Unpack[ExchangeOptions]) -> None:
        """Begin the exchange: see `register_fsdp`."""
        super().__init__([(name, p) for name, p in parameters_of(model) if is_sharded(p)], density, **options)
        self.begin()

    def __repr__(self) -> str:
        return f"ShardedState({super().__repr__()})"
