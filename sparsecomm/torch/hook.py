"""Sparse sums for wrapped models: `register` for DistributedDataParallel, `register_fsdp` for FSDP2."""

# Without `from __future__ import annotations`: DDP reads the annotations of hooks, and requires types.

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined] # torch does not list it
from torch.nn.parallel import DistributedDataParallel

from sparsecomm.checks import with_options
from sparsecomm.errors import InvalidInputError
from sparsecomm.reducer import Rebuilt
from sparsecomm.reducer.options import DENSITY, Schedule
from sparsecomm.signals import deferred
from sparsecomm.states.schema import State, StateDict
from sparsecomm.torch.exchange import Exchange, ExchangeOptions, Scaler, in_backward_pass, is_zero, queue_callback
from sparsecomm.torch.parameters import NamedParameters, is_sharded, parameters_of
from sparsecomm.transport import Comm

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["ShardedState", "SparseState", "keep_local", "register", "register_fsdp", "sparse_hook"]


@deferred
class SparseState(Exchange):
    """The state of `sparse_hook`: residuals by parameter, options, counters.

        state = SparseState(model.named_parameters())
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(state, sparse_hook)

    A gradient of zeros counts as absent, because DDP passes zeros for parameters that the rank did not use.

    DDP's ``join()`` is supported: a rank that has no more batches contributes nothing, and means divide by the number
    of all ranks. Its weights are out of date until ``join()`` ends, so leave ``check_weights_every`` at 0.

    A pickled state contains its options and what ``state_dict`` returns; `bind` the parameters afterwards.

    Args:
        named_parameters: of the model, before or after DDP wraps it, without parameters that DDP ignores.
        density: as in `sparsecomm.Reducer`.
        comm: as in `sparsecomm.sparse_allreduce`.
        scaler: the `torch.amp.GradScaler` in use. Residuals then follow the loss scale, and all ranks skip a step in
            which one rank's gradient overflows.
        check_weights_every: call `sparsecomm.check_weights` for the parameters, also frozen ones, before each step
            whose number is a multiple of this; 0: only before the first step and the first step after
            `load_state_dict`; ``None``: never. It must be the same on all ranks.
        options: those of `sparsecomm.Reducer` except ``op="sum"``: DDP averages.

    Raises:
        InvalidInputError: an argument is not supported.
    """

    @with_options(ExchangeOptions, Exchange.__init__)
    def __init__(
        self, named_parameters: NamedParameters, density: Schedule = DENSITY, **options: "Unpack[ExchangeOptions]"
    ) -> None:
        if options.get("op") == "sum":
            raise InvalidInputError("op='sum': DistributedDataParallel averages; expected mean or mean_of_contributors")
        comm, scaler = options.pop("comm", None), options.pop("scaler", None)  # not pickled
        self._settings: dict[str, Any] = {**options, "density": density}
        self._saved: State | None = None
        self.bind(named_parameters, comm=comm, scaler=scaler)
        self._reset_pass()

    def bind(self, named_parameters: NamedParameters, *, comm: Comm = None, scaler: Scaler | None = None) -> None:
        """Set the parameters of an unpickled state. Collective if the state has made a step."""
        super().__init__(named_parameters, comm=comm, scaler=scaler, **self._settings)
        if self._saved is not None:
            super().load_state_dict(self._saved)
        self._saved = None

    def rebuild(self, comm: Comm, *, joining: bool = False) -> Rebuilt:
        """Continue with other ranks: see `SparseOptimizer.rebuild`. Collective over them.

        A DDP model cannot be used after one of its ranks has died. Wrap the module in a new one, on a process group of
        the remaining ranks, and register this state with it. DDP then broadcasts the weights.
        """
        means = dict(self._means)
        rebuilt = super().rebuild(comm, joining=joining)
        if unsummed := self.reducer.unsummed:
            for name, parameter in self.named.items():
                if name not in unsummed:
                    parameter.grad = means[parameter].clone() if parameter in means else torch.zeros_like(parameter)
        self._reset_pass()
        return rebuilt

    def load_state_dict(self, state: State) -> None:
        """Load a state that `state_dict` returned: see `sparsecomm.Reducer.load_state_dict`. Collective."""
        super().load_state_dict(state)
        self._reset_pass()

    def __repr__(self) -> str:
        return f"SparseState({super().__repr__() if self.named else 'unpickled, without parameters'})"

    def __getstate__(self) -> StateDict:
        return {"options": self._settings, "saved": self.state_dict() if self.named and self.used else self._saved}

    def __setstate__(self, state: StateDict) -> None:
        self._settings, self._saved = state["options"], state["saved"]
        self.named, self.used = {}, False
        self._reset_pass()

    # -- a backward pass ----------------------------------------------------------------------------------------------

    def _reset_pass(self) -> None:
        self._futures: list[tuple[torch.futures.Future[torch.Tensor], torch.Tensor]] = []
        self._means: list[tuple[torch.Tensor, torch.Tensor]] = []  # parameters, and the tensors for their means
        self._in_pass = False  # a backward pass has begun, and DDP has not written all gradients yet

    def run_hook(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Push the gradients of a bucket of DDP. With the last one, wait for the means."""
        if bucket.index() == 0:
            self._means = []
            if self._in_pass:
                raise InvalidInputError(
                    "the backward pass before this one did not end, and its step cannot be repeated: wrap the model in "
                    "a new DistributedDataParallel, with a new state, and load a checkpoint on all ranks"
                )
            self._in_pass = True
        future = _future_of(bucket.buffer())
        self._futures.append((future, bucket.buffer()))
        try:
            gradients = bucket.gradients()
            zeros = _zeros_among(gradients)
            for parameter, gradient, zero in zip(bucket.parameters(), gradients, zeros, strict=True):
                gradient = _with_strides_of(gradient, parameter)
                self.push(self.name_of(parameter), gradient, absent=zero or not parameter.requires_grad)
                self._means.append((parameter, gradient))
            if bucket.is_last():
                self.wait()
        except BaseException as error:
            self._complete_futures(error)
            raise
        if not bucket.is_last():
            return future
        self._complete_futures(None)
        if not in_backward_pass():  # DDP's join() calls the hook with zeros on a rank that has no more batches
            self._means, self._in_pass = [], False
            return future
        # When this returns, DDP queues a callback that writes gradients. `_write_unused` must run after it.
        before = [(p.grad, p.grad._version if p.grad is not None else 0) for p, _ in self._means]
        queue_callback(partial(queue_callback, partial(self._write_unused, before)))
        return future

    def _write_unused(self, before: list[tuple[torch.Tensor | None, int]]) -> None:
        """Write the means of parameters that no rank used in this pass, which DDP leaves out.

        If they have gradients of an earlier pass, these were exchanged again, and residuals hold part of them.
        ``before`` holds the gradients and their versions before DDP wrote some of them.
        """
        last = self.reducer.last
        for (parameter, mean), (gradient, version) in zip(self._means, before, strict=True):
            if last is None or self.name_of(parameter) in last.without_gradient or not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = mean.clone()
            elif parameter.grad is gradient and gradient._version == version and gradient.data_ptr() != mean.data_ptr():
                gradient.copy_(mean)
        self._means, self._in_pass = [], False  # last, because an interrupted pass has not ended

    def _complete_futures(self, error: BaseException | None) -> None:
        futures, self._futures = self._futures, []
        for future, buffer in futures:
            if isinstance(error, Exception):
                future.set_exception(error)  # type: ignore[arg-type] # torch declares only its own errors
            else:
                future.set_result(buffer)


def _zeros_among(gradients: list[torch.Tensor]) -> list[bool]:
    """Return for each gradient whether it is zero. On a GPU, wait for all of them once."""
    if all(gradient.is_cpu for gradient in gradients):
        return [is_zero(gradient) for gradient in gradients]
    return (torch.stack([gradient.any() for gradient in gradients]) == 0).tolist()


def _future_of(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Return a future for a bucket's values, which synchronizes with their stream."""
    return torch.futures.Future(devices=None if buffer.device.type == "cpu" else [buffer.device])


def _with_strides_of(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a view of a gradient with its parameter's strides, as DDP stores it; the hook gets contiguous views."""
    if parameter.is_contiguous() or not torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return gradient
    return gradient.as_strided(parameter.shape, parameter.stride())


def sparse_hook(state: SparseState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Replace gradients by the mean over all ranks of their largest entries, for ``DDP.register_comm_hook``.

    The exchange of a bucket of ``state`` begins when its gradients are complete, and overlaps with the backward pass.
    The hook of DDP's last bucket waits for all exchanges.
    """
    return state.run_hook(bucket)


@with_options(ExchangeOptions, Exchange.__init__)
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
        density, scaler, check_weights_every, options: as in `SparseState`.

    Returns:
        The state, registered with ``ddp``.

    Raises:
        InvalidInputError: ``ddp`` is not a DDP model, or has a hook already, or an argument is not supported.
    """
    _check_free(ddp)
    if options.get("comm") is None:
        options["comm"] = ddp.process_group
    ignored = ddp.parameters_to_ignore
    # DDP puts a "." before the names of parameters that the module itself holds.
    named = [(n, p) for n, p in ddp.module.named_parameters() if (n if "." in n else f".{n}") not in ignored]
    state = SparseState(named, density, **options)
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


def _local_hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    if not in_backward_pass():
        raise InvalidInputError(
            "DistributedDataParallel.join() is not supported after keep_local(), because a rank that has no more "
            "batches would miss the exchanges of the optimizer; train on the same number of batches on all ranks"
        )
    future = _future_of(bucket.buffer())
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


# -- FSDP2 ------------------------------------------------------------------------------------------------------------


@with_options(ExchangeOptions, Exchange.__init__)
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
    state = ShardedState([(name, p) for name, p in parameters_of(model) if is_sharded(p)], density, **options)
    state.begin()
    return state


class ShardedState(Exchange):
    """The exchange of a model's shards across replicas, returned by `register_fsdp`. `remove` ends it.

    Under `no_sync` FSDP still sums within its group, so that no rank has to store a whole gradient. FSDP cannot
    continue in a shard group that has lost a rank. Ranks of the other groups call `rebuild`, each with the remaining
    ranks that hold the same shards.
    """

    def __repr__(self) -> str:
        return f"ShardedState({super().__repr__()})"
