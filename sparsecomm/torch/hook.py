"""Sparse sums for wrapped models: `register` for DistributedDataParallel, `register_fsdp` for FSDP2."""

# Without `from __future__ import annotations`: DDP reads the annotations of hooks, and requires types.

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined] # torch does not list it
from torch.nn.parallel import DistributedDataParallel

from sparsecomm.errors import InvalidInputError
from sparsecomm.options import Unpack, check_options, with_options
from sparsecomm.reducer.options import DENSITY, Schedule
from sparsecomm.signals import deferred
from sparsecomm.torch.autograd import AutogradExchange
from sparsecomm.torch.exchange import (
    ExchangeOptions,
    Future,
    GradientExchange,
    SparseState,
    in_backward_pass,
    new_future,
    sparse_hook,
)
from sparsecomm.torch.parameters import is_sharded, parameters_of


@with_options(ExchangeOptions, GradientExchange.__init__)
def register(
    ddp: DistributedDataParallel, density: Schedule = DENSITY, **options: "Unpack[ExchangeOptions]"
) -> SparseState:
    """Let a DDP model exchange its gradients sparsely.

        state = sparsecomm.torch.register(DistributedDataParallel(model))

    Use it for SGD, with or without momentum. The defaults are explained in docs/guides/choosing.md. For a dense
    baseline, pass ``density=1.0``: gradients are then the same as without this line. Adam and its variants divide by
    the size of gradients, and train worse with sparse means: use `SparseAdamW` for these, without DDP.

    Args:
        ddp: a DDP model before its first backward pass. Parameters that DDP ignores are not exchanged.
        comm: ``None``: the process group of ``ddp``.
        options: as in `SparseState`.

    Returns:
        The state, registered with ``ddp``.

    Raises:
        InvalidInputError: ``ddp`` is not a DDP model, or has a hook already, or an argument is not supported.
    """
    check_options(register, options)
    _check_free(ddp)
    if options.get("comm") is None:
        options["comm"] = ddp.process_group
    ignored = ddp.parameters_to_ignore
    # DDP puts a "." before the names of parameters that the module itself holds.
    named = [(n, p) for n, p in ddp.module.named_parameters() if (n if "." in n else f".{n}") not in ignored]
    state = SparseState(named, density, **options)
    state.watch(ddp.module)
    ddp.register_comm_hook(state, sparse_hook)
    return state


def keep_local(ddp: DistributedDataParallel) -> None:
    """Stop DDP from averaging gradients.

    Use it with `SparseAdamW` and `DiLoCo` if a framework wraps the model in DDP. It does not work with
    `DistributedOptimizer`, whose means DDP would overwrite; use `register` instead. DDP's ``join()`` is not supported.

    Args:
        ddp: a DDP model before its first backward pass.

    Raises:
        InvalidInputError: ``ddp`` is not a DDP model, or has a hook already.
    """
    _check_free(ddp)
    ddp.register_comm_hook(None, _local_hook)


@deferred
def _local_hook(state: object, bucket: GradBucket) -> Future:
    if not hasattr(bucket, "is_last"):  # compiled autograd calls hooks for single gradients, and takes no result
        return torch.futures.Future()
    if not in_backward_pass():
        raise InvalidInputError(
            "DistributedDataParallel.join() is not supported after keep_local(), because a rank that has no more "
            "batches would miss the exchanges of the optimizer; train on the same number of batches on all ranks"
        )
    future = new_future(bucket.buffer())
    future.set_result(bucket.buffer())
    return future


def _check_free(ddp: DistributedDataParallel) -> None:
    """Check that ``ddp`` is a DDP model without a hook."""
    model: object = ddp
    if not isinstance(model, DistributedDataParallel):
        kind = type(ddp).__name__
        sharded = kind.startswith(("FSDP", "FullySharded"))
        hint = "; use register_fsdp for replicas of a model that FSDP2 shards" if sharded else ""
        raise InvalidInputError(f"ddp: got {kind}; expected torch.nn.parallel.DistributedDataParallel{hint}")
    if getattr(ddp, "_comm_hooks", ()):  # a private attribute, for a clearer error than PyTorch's
        raise InvalidInputError(
            "ddp: a communication hook is registered already, and DistributedDataParallel takes one; keep the state "
            "that the first register returned, or wrap the module in a new DistributedDataParallel"
        )


@with_options(ExchangeOptions, GradientExchange.__init__)
def register_fsdp(
    model: torch.nn.Module, density: Schedule = DENSITY, **options: "Unpack[ExchangeOptions]"
) -> "ShardedState":
    """Average the gradients of a model that FSDP2 shards, sparsely across the replicas of its shards.

        mesh = init_device_mesh("cuda", (replicas, shards), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh["shard"])
        state = sparsecomm.torch.register_fsdp(model, comm=mesh["replicate"].get_group())

    FSDP sums a gradient within the group that shards it. Then each rank exchanges its shard with the ranks that hold
    the same shard, while the backward pass continues. Leave the replicating dimension out of the mesh that you pass to
    FSDP, because FSDP would sum densely along it. The mesh may have tensor-parallel dimensions. Parameters that FSDP
    does not shard are not exchanged. After ``set_requires_gradient_sync(False)``, backward passes only add up
    gradients, like passes under ``state.no_sync()``.

    Args:
        model: a model with at least one module wrapped by `torch.distributed.fsdp.fully_shard`, before its first
            forward pass.
        density: as in `sparsecomm.Reducer`, for each rank's shards.
        comm: the process group of the ranks that hold the same shards as this one.
        scaler, check_weights_every: as in `SparseState`, for this rank's shards. If only some shards overflow, all
            scalers skip the step, and the sums of the other shards are lost.
        options: those of `sparsecomm.Reducer` except ``clip``. ``op`` is "mean" by default; pass "sum" if you have
            called ``set_gradient_divide_factor``.

    Raises:
        InvalidInputError: no parameter is sharded, the ranks of ``comm`` hold different shards, FSDP sums over them
            itself, or an argument is not supported.
    """
    check_options(register_fsdp, options)
    state = ShardedState([(name, p) for name, p in parameters_of(model) if is_sharded(p)], density, **options)
    state.begin()
    return state


class ShardedState(AutogradExchange):
    """The exchange of a model's shards across replicas, returned by `register_fsdp`. `remove` ends it.

    Under `no_sync` FSDP still sums within its group, so that no rank has to store a whole gradient. FSDP cannot
    continue in a shard group that has lost a rank. Ranks of the other groups call `rebuild`, each with the remaining
    ranks that hold the same shards.
    """

    def __repr__(self) -> str:
        return f"ShardedState({super().__repr__()})"

    def _leave_to_step(self) -> None:
        raise InvalidInputError(
            "register_fsdp does not support compiled autograd, which does not say when a backward pass ends; set "
            "torch._dynamo.config.compiled_autograd = False"
        )
