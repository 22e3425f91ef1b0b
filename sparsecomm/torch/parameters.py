"""The gradients of a model's parameters, on their way into a `Reducer` and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from sparsecomm.errors import InvalidInputError
from sparsecomm.reducer import Reducer, Step
from sparsecomm.transport import Transport

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Comm", "Parameters", "Scaler", "pairs_of", "queue_callback", "ranks_of"]

Comm = Any  # an mpi4py communicator, a transport, a process group of torch.distributed, or None


class Scaler(Protocol):
    """What is used of `torch.amp.GradScaler`."""

    def get_scale(self) -> float: ...


class Parameters:
    """Named parameters, and the `Reducer` of their gradients, which is made when it is first needed.

    By then the parameters are where they will be trained: frameworks move them after they were named.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, torch.nn.Parameter]],
        *,
        comm: Comm = None,
        scaler: Scaler | None = None,
        **options: Any,
    ) -> None:
        """``options``: those of `Reducer`, but ``tensors``, ``comm`` and ``skip_nonfinite``."""
        for name in ("tensors", "comm", "skip_nonfinite"):
            if name in options:
                raise InvalidInputError(f"{name} is not an option here; expected those of sparsecomm.Reducer otherwise")
        self.named, self._frozen = _trained(named)
        self._names: dict[torch.Tensor, str] = {parameter: name for name, parameter in self.named.items()}
        self._comm, self._scaler, self._options = comm, scaler, options
        self._scale: float | None = None  # of the loss, in what the reducer keeps
        self._reducer: Reducer | None = None
        self._pushed: set[str] = set()
        self._outs: list[torch.Tensor] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # gradients that are not contiguous, and theirs
        Reducer({"x": torch.zeros(1)}, skip_nonfinite=False, **options)  # wrong options are refused here, not later

    @property
    def reducer(self) -> Reducer:
        if self._reducer is None:
            tensors = {name: parameter.detach() for name, parameter in self.named.items()}
            self._reducer = Reducer(
                {name: t if t.is_contiguous() else t.contiguous() for name, t in tensors.items()},
                comm=ranks_of(self._comm),
                skip_nonfinite=self._scaler is not None,
                **self._options,
            )
        return self._reducer

    @property
    def pending(self) -> bool:
        """Whether a step has begun that did not end."""
        return bool(self._pushed)

    @property
    def used(self) -> bool:
        """Whether there is a reducer yet."""
        return self._reducer is not None

    def name_of(self, parameter: torch.Tensor) -> str:
        """
        Raises:
            InvalidInputError: it is none of these.
        """
        found = self._names.get(parameter)
        if found is None:
            raise InvalidInputError(
                f"a gradient came for a parameter of shape {tuple(parameter.shape)} that is none of the "
                f"{len(self._names)} that were named; expected those of model.named_parameters(), of this very model"
            )
        return found

    def check_frozen(self) -> None:
        """
        Raises:
            InvalidInputError: a parameter is trained, and was not when this was made; ranks would drift apart.
        """
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise InvalidInputError(
                    f"{name} was frozen when its optimizer was wrapped, so its gradient is not exchanged, and now it "
                    "requires one; call remove(), and wrap the optimizer anew after each change of what is trained"
                )

    @property
    def missing(self) -> list[tuple[str, torch.Tensor]]:
        """Those of which no gradient was pushed in this step."""
        return [(name, parameter) for name, parameter in self.named.items() if name not in self._pushed]

    def push(self, name: str, gradient: torch.Tensor | None, out: torch.Tensor | None = None) -> None:
        """A gradient is there; ``out``: where the mean goes if there is none."""
        if gradient is not None and gradient.layout is not torch.strided:
            raise InvalidInputError(
                f"the gradient of {name} is sparse ({gradient.layout}), which is not supported; expected a dense one: "
                "make the layer with sparse=False (its zeros cost nothing here)"
            )
        if not self._pushed:
            self._follow_scale()
        gradient = None if gradient is None else gradient.detach()
        target = gradient if out is None else out.detach()
        if target is not None and not target.is_contiguous():
            copy = target.contiguous()
            self._copies.append((target, copy))
            gradient, target = (None if gradient is None else copy), copy
        self.reducer.push(name, gradient, target)
        self._pushed.add(name)
        if target is not None:
            self._outs.append(target)

    def wait(self) -> Step:
        """Until the means have replaced the gradients."""
        try:
            step = self.reducer.wait()
            if not step.usable:  # what one scaler watches may belong to several optimizers: each must see it
                for out in self._outs:
                    out.view(-1)[:1] = torch.nan
            return step
        finally:
            for gradient, copy in self._copies:
                gradient.copy_(copy)
            self._copies.clear()
            self._outs.clear()
            self._pushed.clear()

    def _follow_scale(self) -> None:
        """What is kept is of the scale of the gradients that join it."""
        if self._scaler is None:
            return
        scale = float(self._scaler.get_scale())
        if self._scale is not None and scale != self._scale:
            self.reducer.scale(scale / self._scale)
        self._scale = scale

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As `Reducer.state_dict`, with tensors in host memory, and the loss scale."""
        state = self.reducer.state_dict()
        for kind in ("residuals", "velocities"):
            state[kind] = {name: torch.from_numpy(array) for name, array in state[kind].items()}
        return {**state, "loss_scale": self._scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.reducer.load_state_dict(state)
        self._scale = state.get("loss_scale")


def pairs_of(named: Any, argument: str) -> list[tuple[str, Any]]:
    """Names and what has them, of a mapping or of pairs.

    Raises:
        InvalidInputError: they are no pairs of a text and something.
    """
    if not isinstance(named, Iterable):
        raise InvalidInputError(
            f"{argument}: got {type(named).__name__}; expected pairs, as model.named_parameters() gives"
        )
    pairs = list(named.items() if isinstance(named, Mapping) else named)
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            got = f"a {type(pair).__name__}" if isinstance(pair, torch.Tensor) else repr(pair)
            raise InvalidInputError(f"{argument}: got {got}; expected pairs, as model.named_parameters() gives")
    return pairs


def queue_callback(callback: Callable[[], None]) -> None:
    """Call it when the backward pass is done, of which this is called, after what is to be called then already."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _trained(named: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Those that get gradients, and those that are frozen, without the prefix that wrappers put before all names."""
    pairs = pairs_of(named, "named_parameters")
    while pairs and all(name.startswith("module.") for name, _ in pairs):
        pairs = [(name.removeprefix("module."), parameter) for name, parameter in pairs]
    found: dict[str, torch.Tensor] = {}
    frozen: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, parameter in pairs:
        if not isinstance(parameter, torch.Tensor):
            raise InvalidInputError(
                f"named_parameters: {name} is of type {type(parameter).__name__}; expected pairs, as "
                "model.named_parameters() gives"
            )
        if id(parameter) in seen:  # it has two names
            continue
        seen.add(id(parameter))
        if not parameter.requires_grad:
            frozen[name] = parameter
            continue
        if hasattr(parameter, "to_local"):
            raise InvalidInputError(
                f"{name} is a DTensor, whose gradient is sharded (FSDP or tensor parallel): each rank holds another "
                "part of it, and there is nothing to sum; use DistributedDataParallel"
            )
        if name in found:
            raise InvalidInputError(f"named_parameters: the name {name!r} is there twice; expected each once")
        found[name] = parameter
    if not found:
        raise InvalidInputError("named_parameters: none requires a gradient; expected one at least")
    return found, frozen


def ranks_of(comm: Comm) -> MPI.Intracomm | Transport | None:
    """``None`` is the default process group if there is one, else COMM_WORLD."""
    from sparsecomm.torch import transport

    if isinstance(comm, dist.ProcessGroup):
        return transport.of(comm)
    if comm is None and dist.is_available() and dist.is_initialized():
        return transport.of(None)
    return comm  # type: ignore[no-any-return]
