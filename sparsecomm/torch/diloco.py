"""DiLoCo: local steps of a model, whose sum is exchanged sparsely once in a round."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils.dlpack import from_dlpack

from sparsecomm.checks import with_options
from sparsecomm.errors import InvalidInputError
from sparsecomm.local_steps import LocalSteps
from sparsecomm.local_steps.defaults import DEFAULTS
from sparsecomm.reducer import Rebuilt, Reducer
from sparsecomm.reducer.options import ReducerOptions
from sparsecomm.reducer.schedule import Schedule
from sparsecomm.states.loading import Prepared, Undo, reading
from sparsecomm.states.schema import State, StateDict
from sparsecomm.tensors.arrays import Array
from sparsecomm.torch.optimizer_state import is_void, mapped, snapshot, try_step
from sparsecomm.torch.parameters import TrainedParameters, parameters_of
from sparsecomm.torch.shards import local
from sparsecomm.transport import Comm

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

__all__ = ["DiLoCo"]


class DiLoCo:
    """Trains a model by local steps, and exchanges sparsely what they did, once in a round of ``sync_every`` steps.

        inner = torch.optim.AdamW(model.parameters(), lr=4e-4)
        diloco = sparsecomm.torch.DiLoCo(model, inner, sync_every=30)
        for x, y in data:                                     # each rank its own
            inner.zero_grad()
            loss(model(x), y).backward()                      # no DDP: gradients stay here
            inner.step()                                      # the exchange is within, at the end of a round

    The difference between the global parameters, which all ranks hold alike, and this rank's own is the
    pseudo-gradient: the ranks average it, ``outer_optimizer`` steps the global parameters by the mean, and training
    goes on from them (Douillard et al., 2023). Without an outer optimizer, what was not sent takes the place of its
    momentum (SparseLoCo: Sarfi et al., 2025). `sparsecomm.LocalSteps` has the defaults, and says more, also of errors
    and NaN; ``inner.step()`` raises those of an exchange.

    The exchange goes on until `remove`, or to the end of a ``with`` block. Of several inner optimizers give the one
    that steps last. `torch.amp.GradScaler` skips steps on single ranks, which makes rounds uneven: train in bfloat16,
    or with ``by_speed``.

    A model that FSDP2 shards, or with tensor parallelism: each rank exchanges its shards with the ranks of ``comm``,
    which hold the same ones. Leave the dimension that replicates out of FSDP's mesh: gradients are then means over the
    shards of this replica, and DiLoCo is what brings replicas together.

    Parameters that are frozen when DiLoCo is made, and buffers such as running means, are left alone. A parameter that
    you freeze later, or that gets no gradient in a round on any rank, does not move in the exchanges that follow: see
    `sparsecomm.LocalSteps`, which compares values and does not look at ``requires_grad``.

    Args:
        model: the same on all ranks: see `broadcast_parameters`. The first local step checks that it is.
        inner_optimizer: of its parameters; any. Each of its steps is a local step.
        outer_optimizer: made over ``model.parameters()``, such as ``torch.optim.SGD(model.parameters(), lr=0.7,
            momentum=0.9, nesterov=True)``. It is stepped here, with parameters of its own in its groups: the global
            ones, in float32 at least, of DTensors this rank's shards; so it must treat elements one by one, as SGD and
            Adam do. Its groups may be changed, by schedulers for example. ``None``: global = global - mean.
        density: share of the entries that each rank selects, or a function of a fragment's exchange, counted from 0. At
            1.0 this is dense DiLoCo with exact means, whatever ``algorithm`` and ``wire`` are.
        sync_every: local steps of a round; with ``by_speed`` of a rank on average.
        by_speed, round_seconds, deadline: for ranks that are not equally fast, and such that are late: as in
            `sparsecomm.LocalSteps`. Train until `round` says that it is enough, not for a number of steps.
        fragments: parts of the model that are synchronised in turn: how many; or for each a module, or the names of
            parameters.
        fragment_sync_delay: local steps between the beginning of an exchange and its application.
        fragment_update_alpha: how much of the local parameters is kept where an exchange is applied; with a delay, 0
            forgets the local steps since the exchange began.
        comm: of the ranks that train together; ``None``: all. Of shards: the ranks that hold the same ones.
        options: those of `sparsecomm.Reducer`, with other defaults: see `sparsecomm.LocalSteps`; but of DTensors not
            ``clip``.

    Raises:
        InvalidInputError: an argument cannot be used, or ``comm`` has ranks of different shards.
    """

    @with_options(ReducerOptions, Reducer.__init__, **DEFAULTS)
    def __init__(
        self,
        model: nn.Module,
        inner_optimizer: torch.optim.Optimizer,
        outer_optimizer: torch.optim.Optimizer | None = None,
        density: Schedule = 64 / 4096,
        *,
        sync_every: int = 30,
        by_speed: bool = False,
        round_seconds: float | None = None,
        deadline: float | None = None,
        fragments: int | Sequence[nn.Module | Sequence[str]] = 1,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
        comm: Comm = None,
        **options: Unpack[ReducerOptions],
    ) -> None:
        for name, optimizer in (("inner_optimizer", inner_optimizer), ("outer_optimizer", outer_optimizer)):
            if not isinstance(optimizer, torch.optim.Optimizer) and (optimizer is not None or name[0] == "i"):
                raise InvalidInputError(f"{name}: got {type(optimizer).__name__}; expected a torch.optim.Optimizer")
        if outer_optimizer is inner_optimizer:
            raise InvalidInputError("outer_optimizer is inner_optimizer; expected one of its own, or None")
        with ExitStack() as undo:  # what `remove` does, and an error within
            self._parameters = TrainedParameters(parameters_of(model), comm, options.get("clip"))
            named = self._parameters.named
            stepped = {parameter for group in inner_optimizer.param_groups for parameter in group["params"]}
            if stepped.isdisjoint(named.values()):
                raise InvalidInputError("inner_optimizer: it has none of the model's parameters; expected one of them")
            self._orders = {name: _order(name, parameter) for name, parameter in named.items()}
            outer = None
            if outer_optimizer is not None:
                outer = TorchOuter(outer_optimizer, named, self._views())
                undo.callback(outer.give_back)
            self._local_steps = LocalSteps(
                self._views(),
                density,
                sync_every=sync_every,
                by_speed=by_speed,
                round_seconds=round_seconds,
                deadline=deadline,
                fragments=_names(fragments, named),
                fragment_sync_delay=fragment_sync_delay,
                fragment_update_alpha=fragment_update_alpha,
                outer=outer,
                comm=comm,
                **options,
            )
            undo.callback(self._local_steps.rest)
            undo.callback(inner_optimizer.register_step_post_hook(lambda inner, *_: self._step(inner)).remove)
            self._undo = undo.pop_all()
        self._compared = False

    # -- what it has ---------------------------------------------------------------------------------------------------

    @property
    def local_step(self) -> int:
        """How many local steps of this round have been taken."""
        return self._local_steps.local_step

    @property
    def round(self) -> int:
        """The number of this round, from 0."""
        return self._local_steps.round

    @property
    def steps(self) -> tuple[int, ...]:
        """How many local steps each rank takes in this round, by rank."""
        return self._local_steps.steps

    @property
    def left_out(self) -> tuple[int, ...]:
        """Ranks that had not come in time to the exchange that was applied last; the same on all ranks."""
        return self._local_steps.left_out

    @property
    def reducers(self) -> tuple[Reducer, ...]:
        """The reducer of each fragment, with its counters and residuals."""
        return self._local_steps.reducers

    @property
    def fragments(self) -> tuple[tuple[str, ...], ...]:
        """The names of each fragment's parameters."""
        return self._local_steps.fragments

    def global_parameters(self) -> dict[str, torch.Tensor]:
        """Return the global parameters: the model to evaluate and to save, the same on all ranks (of DTensors: shards).

        They are views in float32, or float64, which change with every exchange.
        """
        found = {}
        for name, array in self._local_steps.global_parameters().items():
            order = self._orders[name]
            found[name] = from_dlpack(array).permute([order.index(d) for d in range(len(order))])
        return found

    @torch.no_grad()
    def write_global_parameters(self) -> None:
        """Write the global parameters to the model, of DTensors this rank's shards: the result, after `finish`."""
        parameters = self.global_parameters()
        for name, parameter in self._parameters.named.items():
            local(parameter).copy_(parameters[name])

    def report(self) -> str:
        """Return a small table, of this rank: see `sparsecomm.LocalSteps.report`."""
        return self._local_steps.report()

    def __repr__(self) -> str:
        return f"DiLoCo({self._local_steps})"

    # -- local steps ---------------------------------------------------------------------------------------------------

    def _step(self, inner: torch.optim.Optimizer) -> None:
        """Count a local step, which the inner optimizer has made; before the first, compare what ranks began with."""
        if is_void(inner, self._parameters.named.values()):
            return
        if not self._compared:
            self._parameters.connect()
            reducer = self._local_steps.reducers[0]
            self._parameters.check_weights(self.global_parameters(), reducer)
            self._compared = True
            reducer.end_opening()
        self._local_steps.step(self._views())

    def finish(self) -> None:
        """Wait for the exchanges that are under way, and apply them now. Begin none. Collective.

        Raises:
            SparseCommError: as `sparsecomm.LocalSteps.finish`.
        """
        self._local_steps.finish(self._views())

    def rest(self) -> None:
        """Let this rank be waited for until the next local step: see `sparsecomm.LocalSteps.rest`."""
        self._local_steps.rest()

    def discard(self, names: Iterable[str] | None = None) -> None:
        """Drop what waits in residuals, of all parameters or of these names: see `sparsecomm.LocalSteps.discard`."""
        self._local_steps.discard(names)

    def remove(self) -> None:
        """Exchange nothing any more: the inner optimizer is an optimizer, and the outer one has its parameters back.

        What waits in residuals is dropped, and so is what exchanges under way bring: call `finish` first.
        """
        self._undo.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Finish, unless an exception ends the block; and remove."""
        try:
            if kind is None:
                self.finish()
        finally:
            self.remove()

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """Return what this rank needs to go on, as `sparsecomm.LocalSteps.state_dict`; arrays are tensors.

        The outer optimizer's state is in it. The model's and the inner optimizer's are not: save them beside it, on
        each rank, since ranks differ in the middle of a round.
        """
        state: StateDict = mapped(self._local_steps.state_dict(), np.ndarray, torch.from_numpy)
        return state

    def load_state_dict(self, state: State) -> None:
        """Go on from what `state_dict` returned on this rank, or `sparsecomm.reshard` made. Collective.

        Load the model and the inner optimizer, too; for another number of ranks, from the middle of a round, the
        global parameters into the model.

        Raises:
            InvalidInputError, CollectiveMismatchError: as `sparsecomm.LocalSteps.load_state_dict`.
        """

        def prepare(undo: Undo) -> Prepared:
            with reading("it", "what DiLoCo.state_dict() returned"):
                on_host = mapped(dict(state), torch.Tensor, torch.Tensor.cpu)
            made = self._local_steps.prepare_state(on_host, undo)

            def commit() -> None:
                made.commit()
                self._compared = True

            return Prepared(made.common, commit)

        self._local_steps.load_with(prepare)

    def rebuild(self, comm: Comm, *, joining: bool = False) -> Rebuilt:
        """Go on with the ranks of another communicator, when some were lost or are new. Collective over them.

        All ranks then have the global parameters and the outer optimizer's state of the lowest rank that is not new.
        Survivors keep their residuals and what they did in this round; the model of a new rank is set to the global
        parameters. See `sparsecomm.LocalSteps.rebuild`.

        Args:
            comm: the new process group, or what `sparsecomm.shrink` or `sparsecomm.grow` returned.
            joining: this rank is new.

        Raises:
            SparseCommError: as `sparsecomm.LocalSteps.rebuild`.
        """
        self._parameters.check_comm(comm)
        self._parameters.comm = comm
        self._parameters.connect()
        rebuilt = self._local_steps.rebuild(comm, self._views(), joining=joining)
        self._compared = True
        return rebuilt

    def _views(self) -> dict[str, torch.Tensor]:
        """Return the local parameters, outside the graph: contiguous memory, which is written in place."""
        return {name: local(p).permute(self._orders[name]) for name, p in self._parameters.named.items()}


def _order(name: str, parameter: torch.Tensor) -> list[int]:
    """Return in which order of dimensions the memory of a tensor is contiguous: channels last, for example."""
    t = local(parameter)
    strides = t.stride()
    order = sorted(range(t.ndim), key=lambda d: (-strides[d], d))
    for found in (list(range(t.ndim)), order):
        if t.permute(found).is_contiguous():
            return found
    raise InvalidInputError(
        f"{name}: its memory, of shape {tuple(t.shape)} and strides {strides}, has gaps or overlaps; expected a "
        "parameter of its own memory: make it anew, by parameter.data.clone()"
    )


def _names(fragments: Any, named: dict[str, torch.Tensor]) -> Any:
    """Return fragments by the names of their parameters, where modules were given."""
    if isinstance(fragments, (nn.Module, str)) or not isinstance(fragments, Iterable):
        return fragments
    by_id = {id(parameter): name for name, parameter in named.items()}
    found = []
    for part in fragments:
        if isinstance(part, nn.Module):
            names = [by_id.get(id(parameter)) for parameter in part.parameters() if parameter.requires_grad]
            if None in names:
                raise InvalidInputError(f"fragments: {type(part).__name__} has parameters that are not the model's")
            part = names
        found.append(part)
    return found


class TorchOuter:
    """Steps the global parameters by an optimizer that was made over a model's: see `sparsecomm.OuterOptimizer`.

    In its groups stand parameters of its own, until `give_back`. In each step those of an exchange are the global
    arrays, and have the means as their gradients; the others have none, so the optimizer leaves them alone.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, named: Mapping[str, torch.Tensor], views: Mapping[str, torch.Tensor]
    ) -> None:
        """Take the optimizer.

        Args:
            optimizer: over all parameters of ``named``; others, such as frozen ones, are left alone.
            named: the parameters, by name.
            views: their memory on this rank, for types, shapes and devices.

        Raises:
            InvalidInputError: it lacks one of the parameters, or belongs to local steps already.
        """
        known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if strangers := [name for name, parameter in named.items() if id(parameter) not in known]:
            raise InvalidInputError(
                f"outer_optimizer: it lacks {strangers[0]!r}, and perhaps others; expected one that was made over "
                "model.parameters(), and is not used by another DiLoCo (call its remove() first)"
            )
        self._optimizer = optimizer
        # In the type in which sums are made.
        self._own = {name: nn.Parameter(v if v.dtype == torch.float64 else v.float()) for name, v in views.items()}
        self._exchange(dict(zip(map(id, named.values()), self._own.values(), strict=True)))
        self._theirs = {id(own): parameter for own, parameter in zip(self._own.values(), named.values(), strict=True)}

    def give_back(self) -> None:
        """Put the model's parameters into the optimizer's groups again."""
        self._exchange(self._theirs)

    def step(self, name: str, parameter: Array, gradient: Array) -> None:
        """See `sparsecomm.OuterOptimizer`."""
        self.step_together({name: (parameter, gradient)})

    def step_together(self, arrays: Mapping[str, tuple[Array, Array]]) -> None:
        """See `sparsecomm.OuterOptimizer`: one step of the optimizer."""
        try:
            for name, (parameter, gradient) in arrays.items():
                own = self._own[name]
                own.data = from_dlpack(parameter).view(own.shape)
                own.grad = from_dlpack(gradient).view(own.shape)
            self._optimizer.step()
        finally:
            for name in arrays:
                self._own[name].grad = None

    def state_dict(self) -> dict[str, Any]:
        """See `sparsecomm.OuterOptimizer`. Tensors are in host memory."""
        state: dict[str, Any] = copy.deepcopy(mapped(self._optimizer.state_dict(), torch.Tensor, torch.Tensor.cpu))
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `sparsecomm.OuterOptimizer`; check that the optimizer can step with it. Arrays are NumPy's or tensors."""
        try:
            self._optimizer.load_state_dict(copy.deepcopy(mapped(dict(state), np.ndarray, torch.from_numpy)))
            try_step(self._optimizer, self._own.values())
        except Exception as error:
            raise InvalidInputError(
                f"outer state: to load it, and make a step with it, raises {type(error).__name__}: {error}; expected "
                f"that of a {type(self._optimizer).__name__} over the same parameters"
            ) from error

    def snapshot(self) -> Callable[[], None]:
        """Return what gives the optimizer back the state that it has now."""
        return snapshot(self._optimizer)

    def _exchange(self, others: Mapping[int, torch.Tensor]) -> None:
        """Put other parameters in the place of those with these ids, in groups and state."""
        for group in self._optimizer.param_groups:
            group["params"] = [others.get(id(parameter), parameter) for parameter in group["params"]]
        state = self._optimizer.state
        for parameter in [parameter for parameter in state if id(parameter) in others]:
            state[others[id(parameter)]] = state.pop(parameter)
