"""An optimizer that sums gradients over all ranks, for training loops without DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from sparsecomm.errors import InvalidInputError
from sparsecomm.reducer import Reducer, Step
from sparsecomm.reducer.schedule import Schedule
from sparsecomm.torch.parameters import Comm, Parameters, Scaler

__all__ = ["DistributedOptimizer"]

_KEY = "sparsecomm"  # in state_dict


def DistributedOptimizer(  # noqa: N802 - it makes an object of a class of that name, as Horovod's does
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
    density: Schedule = 0.001,
    *,
    comm: Comm = None,
    backward_passes_per_step: int = 1,
    scaler: Scaler | None = None,
    **options: Any,
) -> Any:
    """Wrap an optimizer, so that ``loss.backward()`` leaves the mean over all ranks in every ``p.grad``.

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = sparsecomm.torch.DistributedOptimizer(optimizer, model.named_parameters(), 0.001)
        for x, y in data:                     # each rank its own
            optimizer.zero_grad()
            loss(model(x), y).backward()      # exchange goes on meanwhile, and is done at the end
            optimizer.step()

    The result is an optimizer of the same class, with the same state and groups: schedulers, scalers and
    ``clip_grad_norm_`` work on it; make schedulers after wrapping. The weights must be the same on all ranks in the
    beginning: see `broadcast_parameters`.

    After a backward pass every parameter has a gradient, on every rank; where there was none it counts as zeros.
    ``synchronize()`` does the same for gradients that did not come from ``backward()``, and `step` calls it if need be.

    Args:
        optimizer: of these parameters, and perhaps of others, which are left alone.
        named_parameters: of the model.
        density: as in `sparsecomm.Reducer`.
        comm: an mpi4py communicator, a process group or a transport; ``None``: the default process group if
            torch.distributed is initialised, else COMM_WORLD.
        backward_passes_per_step: gradients of so many passes add up before they are exchanged. ``with
            optimizer.no_sync():`` leaves single passes out.
        scaler: as in `SparseState`.
        options: those of `sparsecomm.Reducer`, with ``op="mean"`` by default.

    Returns:
        The optimizer, with ``synchronize()``, ``no_sync()`` and ``reducer``; its ``state_dict()`` has this rank's
        residuals in it, under "sparsecomm".

    Raises:
        InvalidInputError: an argument cannot be used; momentum is asked for twice.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidInputError(f"optimizer: got {type(optimizer).__name__}; expected a torch.optim.Optimizer")
    if isinstance(optimizer, _Distributed):
        raise InvalidInputError("optimizer: it is wrapped already; expected a plain torch.optim.Optimizer")
    if "step" in vars(optimizer):
        raise InvalidInputError("optimizer: a scheduler holds its step already; wrap it before you make the scheduler")
    if not isinstance(backward_passes_per_step, int) or backward_passes_per_step < 1:
        raise InvalidInputError(f"backward_passes_per_step={backward_passes_per_step!r}: expected a number from 1 on")
    if options.get("momentum") and any(group.get("momentum") for group in optimizer.param_groups):
        raise InvalidInputError(
            "momentum is asked for twice: momentum correction applies it before the exchange, so the optimizer must "
            "have none; make it with momentum=0"
        )
    parameters = Parameters(named_parameters, comm=comm, scaler=scaler, density=density, **options)
    known = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    strangers = [name for name, parameter in parameters.named.items() if parameter not in known]
    if strangers:
        raise InvalidInputError(
            f"named_parameters: {strangers[0]!r} and perhaps others are not the optimizer's; expected those that it "
            "updates"
        )
    kind = type(optimizer)
    made: Any = type(f"Distributed{kind.__name__}", (_Distributed, kind), {})
    wrapped = made.__new__(made)
    wrapped.__dict__ = optimizer.__dict__  # the same state and groups, whoever holds the one or the other
    wrapped._attach(parameters, backward_passes_per_step)
    return wrapped


class _Distributed(torch.optim.Optimizer):
    """What is put before the class of an optimizer."""

    _parameters: Parameters

    def _attach(self, parameters: Parameters, passes: int) -> None:
        self._parameters, self._passes = parameters, passes
        self._passed = 0  # backward passes since the last exchange
        self._inside = False  # a backward pass has begun
        self._exchanging = True  # false within `no_sync`
        self._exchanged = False  # gradients are means, and `step` has not used them
        self.last_step: Step | None = None
        named: list[Any] = list(parameters.named.values())
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._ready) for parameter in named]

    @property
    def reducer(self) -> Reducer:
        """With its counters, groups and residuals."""
        return self._parameters.reducer

    def synchronize(self) -> Step:
        """Exchange what is in ``p.grad`` now. Collective."""
        parameters = self._parameters
        for name, parameter in parameters.missing:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
                parameters.push(name, None, parameter.grad)
            else:
                parameters.push(name, parameter.grad)
        try:
            self.last_step = parameters.wait()
        finally:
            self._passed = 0
        self._exchanged = True
        return self.last_step

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it gradients only add up on this rank. All ranks must do so for the same passes."""
        before, self._exchanging = self._exchanging, False
        try:
            yield
        finally:
            self._exchanging = before

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if closure is None and not self._exchanged:
            self.synchronize()
        self._exchanged = False
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's, and this rank's residuals."""
        return {**super().state_dict(), _KEY: self._parameters.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """
        Raises:
            InvalidInputError: there are no residuals in it, or they do not fit this model or number of ranks.
        """
        rest = dict(state_dict)
        if _KEY not in rest:
            raise InvalidInputError(
                f"state_dict: there is no {_KEY!r} in it: it is of a plain optimizer; expected what state_dict() of a "
                "DistributedOptimizer returned. To begin with empty residuals, load it before wrapping"
            )
        self._parameters.load_state_dict(rest.pop(_KEY))
        super().load_state_dict(rest)

    def _ready(self, parameter: torch.Tensor) -> None:
        """A backward pass has added to a gradient."""
        if not self._exchanging:
            return
        if not self._inside:
            self._inside, self._exchanged = True, False
            torch.autograd.Variable._execution_engine.queue_callback(self._end_of_pass)
        if self._passed + 1 == self._passes:
            assert parameter.grad is not None
            self._parameters.push(self._parameters.name_of(parameter), parameter.grad)

    def _end_of_pass(self) -> None:
        self._inside = False
        self._passed += 1
        if self._passed == self._passes:
            self.synchronize()
