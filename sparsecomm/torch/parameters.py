"""Named parameters, whose gradients go into a `Reducer` and come back as means."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
import torch

from sparsecomm import transport
from sparsecomm.checks import to_float, with_options
from sparsecomm.errors import InvalidInputError
from sparsecomm.reducer import Rebuilt, Reducer, Step
from sparsecomm.reducer.bucket import TensorSpec
from sparsecomm.reducer.options import ReducerOptions
from sparsecomm.reducer.schedule import Schedule
from sparsecomm.reducer.state import REDUCER
from sparsecomm.states.loading import Prepared, Undo
from sparsecomm.states.schema import State, StateDict, common
from sparsecomm.states.weights import check_due, check_every
from sparsecomm.tensors import interop
from sparsecomm.tensors.dtypes import FLOAT32, FLOAT64
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.torch.optimizer_state import mapped
from sparsecomm.torch.shards import HYBRID, check_replicated, compare, described, is_sharded, local
from sparsecomm.transport import Comm, Transport

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "ExchangeOptions",
    "NamedParameters",
    "Parameters",
    "TrainedParameters",
    "in_backward_pass",
    "is_zero",
    "parameters_of",
    "queue_callback",
    "unwrapped_names",
]

NamedParameters: TypeAlias = "Iterable[tuple[str, torch.nn.Parameter]]"


def _is_scale(value: object, _: object) -> bool:
    return value is None or (type(value) in (int, float) and 0 < to_float(value) < math.inf)


SCHEMA = REDUCER.extended("SparseState", {"loss_scale": common("a number above 0, or None", _is_scale)})

# The attributes in which wrappers hold the module that they wrap: parts of the names of its parameters.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


class Scaler(Protocol):
    """The part of `torch.amp.GradScaler` that is used."""

    def get_scale(self) -> float:
        """Return the scale of the loss."""


class ExchangeOptions(ReducerOptions, total=False):
    """Keyword arguments that functions only hand on to `Parameters`; `SparseState` documents them."""

    comm: Comm
    scaler: Scaler | None
    check_weights_every: int | None


class TrainedParameters:
    """Parameters that ranks train together: all hold the same ones, or the same shards of DTensors.

    Attributes:
        named: the parameters that get gradients, by name, without the prefix of wrappers.
        comm: of the ranks.
    """

    def __init__(self, named: NamedParameters, comm: Comm, clip: object = None) -> None:
        """Check the arguments. Nothing is sent.

        Args:
            named: names and parameters. Those that are frozen are only compared.
            comm: of the ranks.
            clip: as in `Reducer`.

        Raises:
            InvalidInputError: an argument cannot be used, or gradients of shards are to be clipped.
        """
        self.named, self._frozen = _trained_and_frozen(named)
        if refused := [name for name, parameter in self.named.items() if parameter.is_complex()]:
            dtype = self.named[refused[0]].dtype
            raise InvalidInputError(
                f"{refused[0]} is {dtype}, of which no entries are the largest; expected real parameters: train "
                "torch.view_as_real() of them, or leave them out and freeze them"
            )
        self._sharded = any(map(is_sharded, self.named.values()))
        self.check_comm(comm)
        self.comm = comm
        if clip is not None and self._sharded:
            raise InvalidInputError(
                "clip: this rank has the norm of its shards only, and not that of the gradient; expected None with "
                "DTensors: clip the mean, by torch.nn.utils.clip_grad_norm_"
            )

    def check_comm(self, comm: Comm) -> None:
        """Check that the ranks of a communicator hold the same shards, as far as the meshes tell. Nothing is sent."""
        check_replicated(self.named, comm)

    def connect(self) -> Transport:
        """Return the transport of the ranks. Collective, if there are DTensors.

        Raises:
            CollectiveMismatchError: they hold different shards.
        """
        comm = transport.transport_of(self.comm)
        shards = [described(name, parameter) for name, parameter in self.named.items() if is_sharded(parameter)]
        if shards and comm.size > 1:
            compare(
                comm,
                ["shards", *shards],
                f"the ranks of comm hold different shards; rank {comm.rank} has {len(shards)} DTensors, the first of "
                f"them {shards[0]}. Expected ranks that hold the same: {HYBRID}",
            )
        return comm

    def check_weights(self, tensors: Mapping[str, object], reducer: Reducer) -> None:
        """Check that all ranks have these tensors alike, and the frozen parameters that are not sharded. Collective.

        It is an opening call of ``reducer``.
        """
        whole = {name: parameter for name, parameter in self._frozen.items() if not is_sharded(parameter)}
        reducer.check_weights({**tensors, **whole})


class Parameters(TrainedParameters):
    """Named parameters, and the `Reducer` of their gradients, which is made when it is first needed.

    By then the parameters are where they will be trained: frameworks move them after they were named.

    This module is compiled, so that no signal handler comes between the end of the reducer's step and what follows it.
    """

    @with_options(ReducerOptions, Reducer.__init__)
    def __init__(
        self,
        named: NamedParameters,
        density: Schedule,
        *,
        comm: Comm = None,
        scaler: Scaler | None = None,
        check_weights_every: int | None = 0,
        **options: Unpack[ReducerOptions],
    ) -> None:
        """Check the arguments.

        Args:
            named: names and parameters; gradients of those that are frozen are left out. Of DTensors it is the shards
                on this rank that are summed.
            density, options: as in `Reducer`.
            comm, scaler, check_weights_every: as in `sparsecomm.torch.SparseState`.

        Raises:
            InvalidInputError: an argument cannot be used.
        """
        for name in ("tensors", "skip_nonfinite"):
            if name in options:
                raise InvalidInputError(f"{name} is not an option here; expected those of sparsecomm.Reducer otherwise")
        self._check_every = check_every(check_weights_every)
        self._checked: int | None = None  # the step in which weights were compared last, since they were made or loaded
        super().__init__(named, comm, options.get("clip"))
        self._names = {id(parameter): name for name, parameter in self.named.items()}
        self._density, self._options, self._scaler = density, options, scaler
        self._scale: float | None = None  # of the loss, in what the reducer keeps
        self._skip_nonfinite, self._warned = scaler is not None, False
        self._reducer: Reducer | None = None
        self._outs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # where means go, and contiguous memory for them
        # Wrong options are refused here, not in the first step. The parameters may not be on their device yet.
        Reducer({name: _spec_on_host(name, parameter) for name, parameter in self.named.items()}, density, **options)

    @property
    def reducer(self) -> Reducer:
        """The reducer, which this makes if there is none yet. The first use is collective."""
        if self._reducer is None:
            self._reducer = Reducer(
                {name: local(parameter).contiguous() for name, parameter in self.named.items()},
                self._density,
                comm=self.connect(),
                skip_nonfinite=self._skip_nonfinite,
                **self._options,
            )
        return self._reducer

    @property
    def used(self) -> bool:
        """Whether there is a reducer yet."""
        return self._reducer is not None

    def __repr__(self) -> str:
        if self._reducer is None:
            return f"{len(self.named)} parameters, density={self._density!r}, no step yet"
        return repr(self._reducer)

    @property
    def names(self) -> Mapping[int, str]:
        """The names of all parameters, also of frozen ones, by ``id(parameter)``."""
        return self._names | {id(parameter): name for name, parameter in self._frozen.items()}

    def name_of(self, parameter: torch.Tensor) -> str:
        """Return the name of a parameter.

        Raises:
            InvalidInputError: it is none of these.
        """
        found = self._names.get(id(parameter))
        if found is None:
            raise InvalidInputError(
                f"a gradient came for a parameter of shape {tuple(parameter.shape)} that is none of the "
                f"{len(self._names)} that were named; expected those of model.named_parameters(), of this very model"
            )
        return found

    def check_frozen(self) -> None:
        """Check that parameters that were frozen when this was made still are; ranks would drift apart.

        Raises:
            InvalidInputError: one of them requires a gradient now.
        """
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise InvalidInputError(
                    f"{name} was frozen when the optimizer or the model was wrapped, so its gradient is not exchanged, "
                    "but it requires a gradient now; wrap anew after unfreezing (call remove() of the old wrapper), "
                    "or wrap before you freeze"
                )

    # -- a step -------------------------------------------------------------------------------------------------------

    def push(self, name: str, gradient: torch.Tensor) -> None:
        """Hand over the gradient of a parameter, into which the mean goes: see `Reducer.push`.

        Args:
            gradient: of the parameter's shape and of any strides, a DTensor if the parameter is.

        Raises:
            InvalidInputError: the gradient is a sparse tensor, or was pushed already, or a parameter that was frozen
                when this was made requires a gradient now.
            WeightMismatchError: this is the first gradient of a step in which weights are checked, and they differ.
        """
        target = self._gradient(name, gradient)
        reducer = self._open_step()
        mean = target.contiguous()  # itself, if it is so
        if not reducer.parts(name):  # else it is refused
            self._outs[name] = target, mean
        reducer.push(name, mean)

    def push_nothing(self, name: str, out: torch.Tensor) -> None:
        """Say that this rank has no gradient for a parameter in this step. What waits in its residual stays there.

        Args:
            out: as the gradient of `push`. The mean is written to it if another rank has a gradient.

        Raises:
            InvalidInputError, WeightMismatchError: as `push`.
        """
        target = self._gradient(name, out)
        reducer = self._open_step()
        mean = target if target.is_contiguous() else torch.zeros_like(target, memory_format=torch.contiguous_format)
        if not reducer.parts(name):
            self._outs[name] = target, mean
        reducer.push(name, None, mean)

    def _open_step(self) -> Reducer:
        """Return the reducer. Check what is due, and follow the loss scale, before the first gradient of a step."""
        reducer = self.reducer
        if not reducer.pending:
            self.check_frozen()
            self._check_weights()
            self._follow_scale()
            self._outs = {}
        return reducer

    def discard(self, names: Iterable[str] | None = None) -> None:
        """Drop what waits in residuals (and velocities) and was not applied yet: see `Reducer.discard`.

        Call it on all ranks, between steps.

        Args:
            names: of the parameters; ``None``: all.

        Raises:
            InvalidInputError: a step is under way, or there is no parameter of such a name.
        """
        if self.used:
            self.reducer.discard(names)

    def _gradient(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """Return what this rank has of a gradient.

        Raises:
            InvalidInputError: it is a sparse tensor.
        """
        if gradient.layout is not torch.strided:
            raise InvalidInputError(
                f"the gradient of {name} is sparse ({gradient.layout}), which is not supported; expected a dense one: "
                "make the layer with sparse=False (its zeros cost nothing here)"
            )
        return local(gradient) if self._sharded else gradient.detach()

    def wait(self) -> Step:
        """Wait until the means have replaced the gradients, and end the step: see `Reducer.wait`, also for errors.

        An interrupt comes before the step has ended, and this may be called again; or after all that is done then.
        """
        reducer = self.reducer
        number = reducer.step
        try:
            done = reducer.wait(self._accept)
        finally:
            if reducer.step != number:
                self._end_step(reducer.last)
        if done.nonfinite and not self._warned:
            self._warned = True
            warnings.warn(
                f"gradients of step {done.number} were not finite on some rank; such entries were dropped from the "
                "residuals. If you use a torch.amp.GradScaler, pass it as scaler=: residuals then follow the loss "
                "scale, and no gradient of a skipped step is lost",
                stacklevel=2,
            )
        return done

    _accept: Callable[[Mapping[str, SparseVector], float], bool] | None = None  # of `Reducer.wait`

    def _end_step(self, last: Step | None) -> None:
        """Put the means of a step where they belong, when it has ended; ``None``: it has failed."""
        for name, (target, mean) in self._outs.items():
            if last is not None and name in last.without_gradient:  # it stays as it was
                continue
            if last is not None and not last.usable:  # one scaler may watch several optimizers: each must see it
                mean.view(-1)[:1] = torch.nan
            if mean is not target:
                target.copy_(mean)
        self._outs = {}

    def _check_weights(self) -> None:
        """Check that all ranks have the same weights, before the first call of a step, if that is due in it."""
        if check_due(self._check_every, self.reducer.step, self._checked):
            self.check_weights(self._replicated(), self.reducer)
            self._end_opening()

    def _end_opening(self) -> None:
        """Note that all calls that precede the first gradient of the step have gone well."""
        self._checked = self.reducer.step
        self.reducer.end_opening()

    def _replicated(self) -> Mapping[str, object]:
        """Return what all ranks must have alike, by name."""
        return self.named

    def _follow_scale(self) -> None:
        """Give what is kept the loss scale of the gradients that are about to be added to it."""
        if self._scaler is not None:
            scale = float(self._scaler.get_scale())
            if self._scale is not None and scale != self._scale:
                self.reducer.scale(scale / self._scale)
            self._scale = scale

    # -- other ranks --------------------------------------------------------------------------------------------------

    def rebuild(self, comm: Comm, *, joining: bool = False) -> Rebuilt:
        """Go on with other ranks: see `Reducer.rebuild`. Gradients of which the last step made no mean become zero."""
        self.check_comm(comm)
        ranks, self.comm = transport.transport_of(comm), comm
        if self.used:
            self.connect()
        self._checked = None  # on all ranks, since those that join compare weights
        rebuilt = self.reducer.rebuild(ranks, joining=joining)
        self._outs = {}
        for name in self.reducer.unsummed:
            if self.named[name].requires_grad:
                self.named[name].grad = torch.zeros_like(self.named[name])
        return rebuilt

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """Return what `Reducer.state_dict` does, with tensors in host memory, and the loss scale."""
        state: StateDict = mapped(self.reducer.state_dict(), np.ndarray, torch.from_numpy)
        return {**state, "format": SCHEMA.format, "loss_scale": self._scale}

    def load_state_dict(self, state: State) -> None:
        """Go on from what `state_dict` returned: see `Reducer.load_state_dict`. Collective."""
        self.load_with(lambda undo: self.prepare_state(state))

    def load_with(self, prepare: Callable[[Undo], Prepared], keys: Iterable[str] = ()) -> None:
        """Load a state with what an integration adds to it: see `Reducer.load_with`. Collective."""
        self.reducer.load_with(prepare, ["loss_scale", *keys])

    def prepare_state(self, state: State) -> Prepared:
        """Convert and check a state, for `load_with`. Nothing is sent, nothing changes."""
        kept = self.reducer.prepare_state(state, SCHEMA)
        scale = None if kept.fields["loss_scale"] is None else float(kept.fields["loss_scale"])

        def commit() -> None:
            kept.commit()
            self._checked = None  # weights have been loaded as well
            self._scale = scale
            self._outs = {}

        return Prepared({**kept.common, "loss_scale": scale or 0.0}, commit)


def parameters_of(model: object) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the names and parameters of a model.

    Raises:
        InvalidInputError: it is none.
    """
    if not isinstance(model, torch.nn.Module):
        raise InvalidInputError(f"model: got {type(model).__name__}; expected a torch.nn.Module")
    return list(model.named_parameters())


def unwrapped_names(names: Iterable[str]) -> list[str]:
    """Return the names of parameters as the model has them without its wrappers.

    Removes the parts that `torch.compile`, activation checkpointing and FSDP add to a name, wherever they are, and
    "module.", which DistributedDataParallel adds, at the beginning of all names.
    """
    found = [".".join(part for part in name.split(".") if part not in _WRAPPERS) for name in names]
    while found and all(name.startswith("module.") for name in found):
        found = [name.removeprefix("module.") for name in found]
    return found


def _spec_on_host(name: str, parameter: torch.Tensor) -> TensorSpec:
    accumulator = FLOAT64 if parameter.dtype is torch.float64 else FLOAT32
    return TensorSpec(name, tuple(parameter.shape), accumulator, interop.CPU)


def _trained_and_frozen(named: object) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    pairs = interop.named(named, "named_parameters")
    names = unwrapped_names(name for name, _ in pairs)
    pairs = [(name, parameter) for name, (_, parameter) in zip(names, pairs, strict=True)]
    first: dict[int, tuple[str, object]] = {}  # names of each parameter, which may have several
    for name, parameter in pairs:
        first.setdefault(id(parameter), (name, parameter))
    trained: dict[str, torch.Tensor] = {}
    frozen: dict[str, torch.Tensor] = {}
    for name, parameter in first.values():
        if not isinstance(parameter, torch.Tensor):
            what = f"{name} is of type {type(parameter).__name__}"
            raise InvalidInputError(f"named_parameters: {what}; expected pairs, as model.named_parameters() gives")
        if parameter.requires_grad and name in trained:
            raise InvalidInputError(f"named_parameters: the name {name!r} is there twice; expected each once")
        (trained if parameter.requires_grad else frozen)[name] = parameter
    if not trained:
        raise InvalidInputError("named_parameters: none requires a gradient; expected one at least")
    return trained, frozen


def is_zero(gradient: torch.Tensor) -> bool:
    """Return whether all elements are zeros. Of other gradients it reads few elements, as a rule.

    On a GPU it waits for the gradient.
    """
    if not gradient.is_cpu or not gradient.is_contiguous():
        return not gradient.any()
    flat = gradient.view(-1)
    begin, length = 0, 16
    while begin < flat.numel():
        if flat[begin : begin + length].any():
            return False
        begin, length = begin + length, 8 * length
    return True


def in_backward_pass() -> bool:
    """Return whether this thread is in a backward pass, in which callbacks can be queued."""
    return torch._C._current_graph_task_id() >= 0


def queue_callback(callback: Callable[[], None]) -> None:
    """Have ``callback`` called at the end of the backward pass that is under way, after those that are queued."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
