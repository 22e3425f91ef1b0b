"""Hybrid FSDP2: shards within groups of ranks, whose gradients are summed sparsely across the groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from sparsecomm.checks import with_options
from sparsecomm.reducer.options import DENSITY, Schedule
from sparsecomm.torch.exchange import Exchange, ExchangeOptions
from sparsecomm.torch.parameters import parameters_of
from sparsecomm.torch.shards import is_sharded

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ShardedState", "register_fsdp"]


@with_options(ExchangeOptions, Exchange.__init__)
def register_fsdp(model: nn.Module, density: Schedule = DENSITY, **options: Unpack[ExchangeOptions]) -> ShardedState:
    """Sum the gradients of a model that FSDP2 shards, sparsely across the replicas of its shards.

        mesh = init_device_mesh("cuda", (replicas, shards), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        state = sparsecomm.torch.register_fsdp(model, comm=mesh["replicate"].get_group())

    After ``loss.backward()`` every ``p.grad`` holds the mean over all ranks. FSDP sums a gradient within the group that
    shards it. Then each rank exchanges its shard with the ranks that hold the same shard, while the backward pass
    continues. Leave the replicating dimension out of the mesh that you pass to FSDP, because FSDP would sum densely
    along it. The mesh may have tensor-parallel dimensions.

    Call this after `fully_shard`, before the first forward pass. All replicas must begin with the same weights: see
    `broadcast_parameters`, with the same ``comm``. Parameters that FSDP does not shard are not exchanged.

    A parameter that is frozen, or that no replica used, does not change, and its residual is kept. If only some
    replicas used it, the others contribute zeros, and all get the mean.

    Passes under ``state.no_sync()``, and passes without ``set_requires_gradient_sync``, only add up gradients. Use
    ``state.no_sync()`` for passes whose gradients you throw away by ``zero_grad()``, or call ``state.discard()``
    afterwards; otherwise these gradients enter the residuals and are applied later.

    Args:
        model: a model with at least one module wrapped by `torch.distributed.fsdp.fully_shard`.
        density: as in `sparsecomm.Reducer`, for each rank's shards.
        comm: the process group of the ranks that hold the same shards as this one.
        scaler, check_weights_every: as in `SparseState`; each rank checks its shards. An overflow that only some
            shards have seen makes all scalers skip the step, and drops the sums of the other shards.
        options: those of `sparsecomm.Reducer` except ``clip``. ``op`` is "mean" by default; pass "sum" if you have
            called ``set_gradient_divide_factor``.

    Raises:
        InvalidInputError: no parameter is sharded, the ranks of ``comm`` hold different shards, FSDP sums over them
            itself, or an argument is not supported.
    """
    return ShardedState(model, density, **options)


class ShardedState(Exchange):
    """The exchange of a model's shards across replicas, as `register_fsdp` returns it.

    It ends with this object, or with `remove`, which drops residuals. Under `no_sync` FSDP still sums within its group,
    so that no rank has to store a whole gradient. If a shard group has lost a rank, FSDP cannot continue in it; the
    other groups `rebuild` over process groups of the ranks that hold the same shards.
    """

    def __init__(self, model: nn.Module, density: Schedule, **options: Unpack[ExchangeOptions]) -> None:
        """Begin the exchange: see `register_fsdp`."""
        super().__init__([(name, p) for name, p in parameters_of(model) if is_sharded(p)], density, **options)
        self.begin()

    def __repr__(self) -> str:
        return f"ShardedState({super().__repr__()})"
