"""The communication hook of DistributedDataParallel."""

# Without `from __future__ import annotations`: DDP reads the annotations of hooks, and wants types.

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined] # it is there, and listed nowhere
from torch.nn.parallel import DistributedDataParallel

from sparsecomm.checks import with_options
from sparsecomm.errors import InvalidInputError
from sparsecomm.reducer import Rebuilt, Reducer
from sparsecomm.reducer.options import DENSITY
from sparsecomm.reducer.schedule import Schedule
from sparsecomm.states.schema import State, StateDict
from sparsecomm.torch.parameters import (
    ExchangeOptions,
    NamedParameters,
    Parameters,
    Scaler,
    in_backward_pass,
    is_zero,
    queue_callback,
)
from sparsecomm.transport import Comm

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["SparseState", "keep_local", "register", "sparse_hook"]


class SparseState:
    """The state of `sparse_hook`: residuals by parameter, options, counters.

        state = SparseState(model.named_parameters())
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(state, sparse_hook)

    A gradient that is all zeros on a rank counts as none: DDP gives the hook zeros for parameters that the rank did not
    use. What waits in its residual stays there. A parameter that only some ranks used gets the mean, with zeros from
    the others; one that no rank used, or that is frozen, does not move.

    Gradients that you compute and throw away by ``zero_grad()`` enter the residuals and are applied later. Run such
    passes under ``ddp.no_sync()``, or call `discard` afterwards.

    DDP's ``join()`` is supported: a rank that has no more batches contributes nothing, and the others divide by the
    number of all ranks. Its weights are out of date until ``join()`` ends, so leave ``check_weights_every`` at 0.

    Leave out parameters that DDP ignores (``_ddp_params_and_buffers_to_ignore``); `register` does.

    This state has buckets of its own, which it fills in the reverse order of the parameters. So DDP may rebuild its
    buckets, as it does after the first iteration, and a run that goes on from a checkpoint does what it would have
    done. No iterations have to pass before sparsity begins. To begin with dense iterations, pass ``dense_steps``, or a
    schedule as ``density``: ``sparsecomm.Warmup(0.018, steps)``.

    ``state_dict`` and ``load_state_dict`` are for checkpoints, each rank its own (`sparsecomm.reshard` for another
    number of ranks). Pickling keeps the same; `bind` the parameters afterwards.

    Args:
        named_parameters: of the model, before or after DDP wraps it. They may be moved to another device later.
        density: as in `sparsecomm.Reducer`.
        comm: as in `sparsecomm.sparse_allreduce`.
        scaler: the `torch.amp.GradScaler` in use. What is kept is then rescaled when the loss scale changes, and an
            overflow on one rank is seen by all.
        check_weights_every: `sparsecomm.check_weights` of the parameters, also of frozen ones, before the first call of
            the first step, and of every step whose number it divides. 0: of the first step only, as also after
            `load_state_dict`. ``None``: never. The same on all ranks.
        options: those of `sparsecomm.Reducer`, with ``reorder=False`` by default, but not ``op="sum"``: DDP averages.

    Raises:
        InvalidInputError: an argument cannot be used.
    """

    @with_options(ExchangeOptions, Parameters.__init__, reorder=False)
    def __init__(
        self, named_parameters: NamedParameters, density: Schedule = DENSITY, **options: "Unpack[ExchangeOptions]"
    ) -> None:
        if options.get("op") == "sum":
            raise InvalidInputError("op='sum': DistributedDataParallel averages; expected mean or mean_of_contributors")
        comm, scaler = options.pop("comm", None), options.pop("scaler", None)  # which are not pickled
        self._settings: dict[str, Any] = {"reorder": False, **options, "density": density}
        self._parameters: Parameters | None = None
        self._saved: State | None = None
        self.bind(named_parameters, comm=comm, scaler=scaler)
        self._begin()

    def bind(self, named_parameters: NamedParameters, *, comm: Comm = None, scaler: Scaler | None = None) -> None:
        """Give an unpickled state its parameters. Collective, if it had made a step.

        Args:
            named_parameters, comm, scaler: as before it was pickled.

        Raises:
            InvalidInputError: they are not those of the state.
        """
        self._parameters = Parameters(named_parameters, comm=comm, scaler=scaler, **self._settings)
        if self._saved is not None:
            self._parameters.load_state_dict(self._saved)
        self._saved = None

    def rebuild(self, comm: Comm, *, joining: bool = False) -> Rebuilt:
        """Go on with the ranks of another communicator, when some were lost or are new. Collective over them.

        A DDP model that saw a rank die is of no use any more: drop it, wrap the module in a new one, on a process group
        of the ranks that go on, and register this state with it. Residuals and velocities of this rank stay. After a
        backward pass that failed, ``p.grad`` is the mean where the ranks had one, and zero otherwise: go on with the
        optimizer's ``step()``.

        Args:
            comm: the new process group, or what `sparsecomm.shrink` or `sparsecomm.grow` returned.
            joining: this rank is new; weights come by DDP's own broadcast, when it wraps the module.

        Raises:
            SparseCommError: as `sparsecomm.Reducer.rebuild`.
        """
        means = dict(self._means)
        rebuilt = self._bound.rebuild(comm, joining=joining)
        if unsummed := self.reducer.unsummed:
            for name, parameter in self._bound.named.items():
                if name not in unsummed:
                    parameter.grad = means[parameter].clone() if parameter in means else torch.zeros_like(parameter)
        self._begin()
        return rebuilt

    def discard(self, names: Iterable[str] | None = None) -> None:
        """Drop gradients that wait in residuals and were not applied yet. Call it on all ranks, between steps.

        Args:
            names: of the parameters; ``None``: all.

        Raises:
            InvalidInputError: a step is under way, or there is no parameter of such a name.
        """
        self._bound.discard(names)

    @property
    def reducer(self) -> Reducer:
        """The reducer, with its counters, buckets and residuals."""
        return self._bound.reducer

    def state_dict(self) -> StateDict:
        """Return what `sparsecomm.Reducer.state_dict` does; arrays are tensors in host memory."""
        return self._bound.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Go on from what `state_dict` returned: see `sparsecomm.Reducer.load_state_dict`. Collective."""
        self._bound.load_state_dict(state)
        self._begin()

    @property
    def _bound(self) -> Parameters:
        if self._parameters is None:
            raise InvalidInputError(
                "this SparseState was unpickled and has no parameters yet; call state.bind(model.named_parameters())"
            )
        return self._parameters

    def __repr__(self) -> str:
        return f"SparseState({'unpickled, without parameters' if self._parameters is None else self._parameters})"

    def __getstate__(self) -> StateDict:
        saved = self._saved if self._parameters is None or not self._parameters.used else self.state_dict()
        return {"options": self._settings, "saved": saved}

    def __setstate__(self, state: StateDict) -> None:
        self._settings, self._saved, self._parameters = state["options"], state["saved"], None
        self._begin()

    def _begin(self) -> None:
        self._futures: list[tuple[torch.futures.Future[torch.Tensor], torch.Tensor]] = []
        self._means: list[tuple[torch.Tensor, torch.Tensor]] = []  # parameters, and where their means will be
        self._in_pass = False  # a backward pass has begun, and the gradients do not stand where they belong yet

    def _reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        parameters = self._bound
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
            absent = _zeros_among(gradients)
            for parameter, gradient, none in zip(bucket.parameters(), gradients, absent, strict=True):
                gradient = _as_laid_out(gradient, parameter)
                push = parameters.push_nothing if none or not parameter.requires_grad else parameters.push
                push(parameters.name_of(parameter), gradient)
                self._means.append((parameter, gradient))
            if bucket.is_last():
                parameters.wait()
        except BaseException as error:
            self._end(error)
            raise
        if not bucket.is_last():
            return future
        self._end(None)
        if not in_backward_pass():  # DDP's join() calls this on a rank that has no more batches, with zeros
            self._means, self._in_pass = [], False
            return future
        # DDP queues a callback when this returns, and writes gradients in it: those that it leaves out come after that.
        before = [(p.grad, p.grad._version if p.grad is not None else 0) for p, _ in self._means]
        queue_callback(partial(queue_callback, partial(self._end_pass, before)))
        return future

    def _end_pass(self, before: list[tuple[torch.Tensor | None, int]]) -> None:
        """Write the means that DDP leaves out: of parameters that no rank used in this pass, but in one before it.

        Their gradients were still there, so they were exchanged again, and part of them now waits in residuals.

        Args:
            before: the gradients before DDP wrote to those of the others, with their versions.
        """
        means, self._means, self._in_pass = self._means, [], False
        last, name_of = self.reducer.last, self._bound.name_of
        for (parameter, mean), (gradient, version) in zip(means, before, strict=True):
            if last is None or name_of(parameter) in last.without_gradient or not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = mean.clone()
            elif parameter.grad is gradient and gradient._version == version and gradient.data_ptr() != mean.data_ptr():
                gradient.copy_(mean)

    def _end(self, error: BaseException | None) -> None:
        """Complete the futures of all buckets of this backward pass."""
        futures, self._futures = self._futures, []
        for future, buffer in futures:
            if isinstance(error, Exception):
                future.set_exception(error)  # type: ignore[arg-type] # so it is declared
            else:
                future.set_result(buffer)


def _zeros_among(gradients: list[torch.Tensor]) -> list[bool]:
    """Return which gradients are all zeros. On a GPU it waits for them once."""
    if all(gradient.is_cpu for gradient in gradients):
        return [is_zero(gradient) for gradient in gradients]
    return (torch.stack([gradient.any() for gradient in gradients]) == 0).tolist()


def _future_of(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Return a future for a bucket's values: who waits for it waits for their stream, too."""
    return torch.futures.Future(devices=None if buffer.device.type == "cpu" else [buffer.device])


def _as_laid_out(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a view of a gradient with its parameter's strides.

    DDP lays gradients out in memory as their parameters are, channels last for example, but shows them as contiguous.
    """
    if parameter.is_contiguous() or not torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return gradient
    return gradient.as_strided(parameter.shape, parameter.stride())


def sparse_hook(state: SparseState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Replace gradients by the mean over all ranks of their largest entries.

    For `DistributedDataParallel.register_comm_hook`. The exchange begins when a bucket of ``state`` is complete, and
    goes on during the backward pass; the hook of DDP's last bucket waits for it.
    """
    return state._reduce(bucket)


def _local_hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    if not in_backward_pass():
        raise InvalidInputError(
            "join() of a DistributedDataParallel model after keep_local(): a rank that has no more batches would miss "
            "the exchanges of the optimizer; train on the same number of batches on all ranks"
        )
    future = _future_of(bucket.buffer())
    future.set_result(bucket.buffer())
    return future


def keep_local(ddp: DistributedDataParallel) -> None:
    """Let DDP leave gradients as each rank has made them, where a framework wraps a model for which it is not needed.

    For `SparseAdamW` and `DiLoCo`, which exchange what they have to. Not for `DistributedOptimizer`: after each
    backward pass DDP writes to ``p.grad``, where that has its means; `register` does what it does. DDP's ``join()`` is
    not supported.

    Args:
        ddp: before its first backward pass.

    Raises:
        InvalidInputError: it is no DDP model, or has a hook already.
    """
    _check_free(ddp)
    ddp.register_comm_hook(None, _local_hook)


def _check_free(ddp: DistributedDataParallel) -> None:
    """Check that it is a model that DDP wraps, without a hook."""
    model: object = ddp
    if not isinstance(model, DistributedDataParallel):
        what = type(ddp).__name__
        sharded = what.startswith(("FSDP", "FullySharded"))
        hint = "; for replicas of a model that FSDP2 shards there is register_fsdp" if sharded else ""
        raise InvalidInputError(f"ddp: got {what}; expected torch.nn.parallel.DistributedDataParallel{hint}")
    if getattr(ddp, "_comm_hooks", ()):  # torch keeps them to itself; without, its own error says less
        raise InvalidInputError(
            "ddp: a communication hook is registered already, and DistributedDataParallel takes one; keep the state "
            "that the first register returned, or wrap the module in a new DistributedDataParallel"
        )


def _reduced_parameters(ddp: DistributedDataParallel) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the names and parameters of a model, without those that DDP was told to ignore."""
    ignored = ddp.parameters_to_ignore
    # DDP looks for ".weight" where a parameter is the model's own.
    return [(n, p) for n, p in ddp.module.named_parameters() if (n if "." in n else f".{n}") not in ignored]


@with_options(ExchangeOptions, Parameters.__init__, reorder=False)
def register(
    ddp: DistributedDataParallel, density: Schedule = DENSITY, **options: "Unpack[ExchangeOptions]"
) -> SparseState:
    """Let a model that is wrapped by DDP exchange its gradients sparsely.

        state = sparsecomm.torch.register(DistributedDataParallel(model))

    For SGD, with momentum or without. Leave the other arguments at their defaults, which are what our reports recommend
    (docs/choosing.md). For a dense baseline, pass ``density=1.0``: gradients are then as without this line. Adam and
    its variants divide by the size of gradients, and train worse with sparse means than with dense ones: use
    `SparseAdamW` for these, without DDP.

    Parameters that DDP ignores are left alone. For gradients that are thrown away, and for ``join()``, see
    `SparseState`.

    Args:
        ddp: before its first backward pass.
        comm: ``None``: the process group of ``ddp``.
        density, scaler, check_weights_every, options: as in `SparseState`.

    Returns:
        The state, which is registered already.

    Raises:
        InvalidInputError: it is no DDP model, has a hook already, or an argument cannot be used.
    """
    _check_free(ddp)
    if options.get("comm") is None:
        options["comm"] = ddp.process_group
    state = SparseState(_reduced_parameters(ddp), density, **options)
    ddp.register_comm_hook(state, sparse_hook)
    return state
