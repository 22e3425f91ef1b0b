"""The communication hook of DistributedDataParallel."""

# Without `from __future__ import annotations`: DDP reads the annotations of hooks, and wants types.

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined] # it is there, and listed nowhere
from torch.nn.parallel import DistributedDataParallel

from sparsecomm.errors import InvalidInputError
from sparsecomm.reducer import Reducer
from sparsecomm.reducer.schedule import Schedule
from sparsecomm.torch.parameters import Comm, Parameters, Scaler, queue_callback

__all__ = ["SparseState", "register", "sparse_hook"]


class SparseState:
    """State of `sparse_hook`: residuals by parameter, options, counters.

        state = SparseState(model.named_parameters(), density=0.001)
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(state, sparse_hook)

    A parameter that no rank used in a step counts as zeros; if its residual holds something that is sent, it gets a
    gradient all the same.

    Parameters are grouped by this state, in the reverse order of their names, not by DDP: DDP may rebuild its buckets,
    as it does after the first iteration, and a run that goes on from a checkpoint does what it would have done. No
    iterations have to pass before sparsity begins; for a warm-up pass a schedule as ``density``:
    ``sparsecomm.Warmup(0.001, steps, dense_steps=...)``.

    ``state_dict`` and ``load_state_dict`` are for checkpoints, each rank its own (`sparsecomm.reshard` for another
    number of ranks). Pickling keeps the same; `bind` the parameters afterwards.

    Args:
        named_parameters: of the model, before or after DDP wraps it. They may be moved to another device later.
        density: as in `sparsecomm.Reducer`.
        comm: a process group, an mpi4py communicator or a transport; ``None``: the default process group.
        scaler: the `torch.amp.GradScaler` in use. What is kept is then rescaled when the loss scale changes, and an
            overflow on one rank is seen by all.
        options: those of `sparsecomm.Reducer`.

    Raises:
        InvalidInputError: an argument cannot be used.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        density: Schedule = 0.001,
        *,
        comm: Comm = None,
        scaler: Scaler | None = None,
        **options: Any,
    ) -> None:
        if "op" in options:
            raise InvalidInputError("op is not an option here: DistributedDataParallel means the mean")
        self._options: dict[str, Any] = {"reorder": False, "density": density, **options}
        self._saved: Mapping[str, Any] | None = None
        self._parameters: Parameters | None = Parameters(
            named_parameters, comm=comm, scaler=scaler, op="mean", **self._options
        )
        self._begin()

    def bind(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        *,
        comm: Comm = None,
        scaler: Scaler | None = None,
    ) -> None:
        """Give an unpickled state its parameters. Collective, if it had made a step."""
        self._parameters = Parameters(named_parameters, comm=comm, scaler=scaler, op="mean", **self._options)
        if self._saved is not None:
            self._parameters.load_state_dict(self._saved)
        self._saved = None

    @property
    def reducer(self) -> Reducer:
        """With its counters, groups and residuals."""
        return self._bound.reducer

    def state_dict(self) -> dict[str, Any]:
        """See `sparsecomm.Reducer.state_dict`; arrays are tensors in host memory."""
        return self._bound.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `sparsecomm.Reducer.load_state_dict`."""
        self._bound.load_state_dict(state)

    @property
    def _bound(self) -> Parameters:
        if self._parameters is None:
            raise InvalidInputError(
                "this SparseState was unpickled and has no parameters yet; call state.bind(model.named_parameters())"
            )
        return self._parameters

    def __getstate__(self) -> dict[str, Any]:
        saved = self._saved if self._parameters is None or not self._parameters.used else self.state_dict()
        return {"options": self._options, "saved": saved}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._options, self._saved = state["options"], state["saved"]
        self._parameters = None
        self._begin()

    def _begin(self) -> None:
        self._futures: list[tuple[torch.futures.Future[torch.Tensor], torch.Tensor]] = []
        self._means: list[tuple[torch.Tensor, torch.Tensor]] = []  # parameters, and where theirs will be

    def _reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        parameters = self._bound
        if bucket.index() == 0:
            self._means = []
            if parameters.pending:
                raise InvalidInputError(
                    "the backward pass before this one did not end, and its step cannot be repeated: wrap the model in "
                    "a new DistributedDataParallel, with a new state, and load a checkpoint on all ranks"
                )
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._futures.append((future, bucket.buffer()))
        try:
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                gradient = _as_laid_out(gradient, parameter)
                parameters.push(parameters.name_of(parameter), gradient)
                self._means.append((parameter, gradient))
            if not bucket.is_last():
                return future
            parameters.wait()
        except BaseException as error:
            self._end(error)
            raise
        self._end(None)
        # DDP queues a callback when this returns, and writes gradients in it: those for the unused come after that.
        queue_callback(partial(queue_callback, self._keep_unused))
        return future

    def _keep_unused(self) -> None:
        """DDP skips what no rank has used, and its mean may hold what waited in residuals, or the NaN of a scaler."""
        means, self._means = self._means, []
        for parameter, mean in means:
            if parameter.grad is None:
                if mean.any():
                    parameter.grad = mean.clone()
            elif parameter.grad.data_ptr() != mean.data_ptr():
                parameter.grad.copy_(mean)

    def _end(self, error: BaseException | None) -> None:
        """All buckets of this backward pass are done."""
        futures, self._futures = self._futures, []
        for future, buffer in futures:
            if isinstance(error, Exception):
                future.set_exception(error)  # type: ignore[arg-type] # so it is declared
            else:
                future.set_result(buffer)


def _as_laid_out(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """DDP lays a gradient out in memory as its parameter is, channels last for example, but shows it as contiguous."""
    if parameter.is_contiguous() or not torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return gradient
    return gradient.as_strided(parameter.shape, parameter.stride())


def sparse_hook(state: SparseState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """For `DistributedDataParallel.register_comm_hook`: the mean over all ranks of the largest entries.

    Exchange begins when a group of parameters is complete, and goes on during the backward pass; the hook of the last
    bucket waits for it.
    """
    return state._reduce(bucket)


def register(
    ddp: DistributedDataParallel,
    density: Schedule = 0.001,
    *,
    comm: Comm = None,
    scaler: Scaler | None = None,
    **options: Any,
) -> SparseState:
    """Let a model that is wrapped by DDP exchange its gradients sparsely.

        state = sparsecomm.torch.register(DistributedDataParallel(model), 0.001)

    Args:
        ddp: before its first backward pass.
        comm: ``None``: the process group of ``ddp``.
        density, scaler, options: as in `SparseState`.

    Raises:
        InvalidInputError: it is no DDP model, or an argument cannot be used.
    """
    model: object = ddp
    if not isinstance(model, DistributedDataParallel):
        what = type(ddp).__name__
        sharded = what.startswith(("FSDP", "FullySharded"))
        hint = "; FSDP shards gradients between ranks, which leaves nothing to sum" if sharded else ""
        raise InvalidInputError(f"ddp: got {what}; expected torch.nn.parallel.DistributedDataParallel{hint}")
    group = ddp.process_group if comm is None else comm
    state = SparseState(ddp.module.named_parameters(), density, comm=group, scaler=scaler, **options)
    ddp.register_comm_hook(state, sparse_hook)
    return state
