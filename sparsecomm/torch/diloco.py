"""DiLoCo for PyTorch: local steps of a model, averaged sparsely once per round."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils.dlpack import from_dlpack

from sparsecomm.errors import InvalidInputError
from sparsecomm.local_steps import LocalSteps
from sparsecomm.local_steps.adapter import Adapter
from sparsecomm.local_steps.defaults import DEFAULTS, LocalStepsOptions
from sparsecomm.options import Unpack, with_options
from sparsecomm.reducer import Rebuilt
from sparsecomm.reducer.options import Schedule
from sparsecomm.signals import deferred
from sparsecomm.states.loading import Prepared, Undo, reading
from sparsecomm.states.schema import State, StateDict
from sparsecomm.tensors.arrays import Array
from sparsecomm.torch.exchange import is_only_making_state
from sparsecomm.torch.optimizer_state import mapped, snapshot, try_step
from sparsecomm.torch.parameters import TrainedParameters, buffers_of, local, parameters_of
from sparsecomm.transport import Comm

if TYPE_CHECKING:
    from typing_extensions import Self


@deferred
class DiLoCo(Adapter):
    """Trains a model by local steps. Once per round, averages the ranks' changes of the parameters sparsely.

        inner = torch.optim.AdamW(model.parameters(), lr=4e-4)
        diloco = sparsecomm.torch.DiLoCo(model, inner, sync_every=30)
        for x, y in data:                                     # different data on each rank
            inner.zero_grad()
            loss(model(x), y).backward()                      # without DDP
            inner.step()                                      # also exchanges, at the end of a round

    `sparsecomm.LocalSteps` has the defaults, and describes rounds, schedules, frozen parameters, errors and NaN;
    ``inner.step()`` raises its errors. Parameters that are frozen when DiLoCo is created, and buffers such as running
    means, are not exchanged. DiLoCo exchanges until `remove`, or to the end of a ``with`` block.

    If there are several inner optimizers, pass the one that steps last. `torch.amp.GradScaler` skips steps on single
    ranks, which makes rounds uneven: train in bfloat16, or with ``by_speed``. With FSDP2 or tensor parallelism, each
    rank exchanges its shards with the ranks of ``comm``, which hold the same shards. Leave the replicating dimension
    out of FSDP's mesh, so that only DiLoCo averages over replicas.

    Args:
        model: a model with the same weights on all ranks (`broadcast_parameters`). The first local step compares them.
        inner_optimizer: an optimizer of the model's parameters. Each of its steps is a local step.
        outer_optimizer: an optimizer over ``model.parameters()``, such as ``torch.optim.SGD(model.parameters(), lr=0.7,
            momentum=0.9, nesterov=True)`` (Douillard et al., 2023). It must update elements independently, as SGD and
            Adam do. Until `remove`, its groups hold the global parameters in float32 or float64, or this rank's shards
            of them. ``None``: global = global - mean, and residuals replace momentum (SparseLoCo: Sarfi et al., 2025).
        density: as in `sparsecomm.LocalSteps`; 1.0 is dense DiLoCo with exact means.
        fragments: the number of fragments; or a list with a module, or names of parameters, for each fragment.
        comm: the ranks that train together, or hold the same shards; ``None``: all.
        options: of `sparsecomm.LocalSteps` and `sparsecomm.Reducer`, with the defaults of the former. ``clip`` is not
            supported with DTensors.

    Raises:
        InvalidInputError: an argument is invalid, or ranks of ``comm`` hold different shards.
    """

    @with_options(LocalStepsOptions, LocalSteps, **DEFAULTS)
    def __init__(
        self,
        model: nn.Module,
        inner_optimizer: torch.optim.Optimizer,
        outer_optimizer: torch.optim.Optimizer | None = None,
        density: Schedule = 64 / 4096,
        *,
        fragments: int | Sequence[nn.Module | Sequence[str]] = 1,
        comm: Comm = None,
        **options: Unpack[LocalStepsOptions],
    ) -> None:
        for name, optimizer in (("inner_optimizer", inner_optimizer), ("outer_optimizer", outer_optimizer)):
            if not isinstance(optimizer, torch.optim.Optimizer) and (optimizer is not None or name[0] == "i"):
                raise InvalidInputError(f"{name}: got {type(optimizer).__name__}; expected a torch.optim.Optimizer")
        if outer_optimizer is inner_optimizer:
            raise InvalidInputError("outer_optimizer is inner_optimizer; expected another optimizer, or None")
        with ExitStack() as undo:  # closed by `remove`, or by an error in this block
            self._parameters = TrainedParameters(parameters_of(model), comm, options.get("clip"))
            named = self._parameters.named
            stepped = {parameter for group in inner_optimizer.param_groups for parameter in group["params"]}
            if stepped.isdisjoint(named.values()):
                raise InvalidInputError("inner_optimizer: it has none of the model's parameters")
            self._orders = {name: _memory_order(name, parameter) for name, parameter in named.items()}
            outer = None
            if outer_optimizer is not None:
                outer = TorchOuter(outer_optimizer, named, self._views())
                undo.callback(outer.give_back)
            self._core = LocalSteps(
                self._views(), density, fragments=_names(fragments, named), outer=outer, comm=comm, **options
            )
            undo.callback(self._core.rest)
            undo.callback(inner_optimizer.register_step_post_hook(lambda *_: self._step()).remove)
            self._undo = undo.pop_all()
        self._parameters.watch(inner_optimizer, *([] if self._parameters.sharded else [model]))  # FSDP swaps parameters
        self._compared = False

    def _views(self) -> dict[str, torch.Tensor]:
        """Return contiguous views of the local parameters, to be written in place. Autograd does not record it."""
        to_local = local if self._parameters.sharded else torch.Tensor.detach
        return {name: to_local(p).permute(self._orders[name]) for name, p in self._parameters.named.items()}

    def _with_locals(self, call: Callable[[dict[str, torch.Tensor]], Any]) -> Any:
        """Call a function with the views, or with copies that it may write if the program has changed memory orders."""
        views = self._views()
        contiguous = {name: view.contiguous() for name, view in views.items()}
        try:
            return call(contiguous)
        finally:
            for name, view in views.items():
                if contiguous[name] is not view:
                    view.copy_(contiguous[name])

    # -- local steps ---------------------------------------------------------------------------------------------------

    @deferred
    def _step(self) -> None:
        """Count a step of the inner optimizer. Before the first one is counted, compare the ranks' weights."""
        self._parameters.check_unchanged()
        if is_only_making_state():
            return
        if not self._compared:
            self._parameters.connect()
            first = self._core.reducers[0]
            first.buffers = partial(buffers_of, self._parameters.model)
            first.check_weights(0, lambda: self._parameters.with_frozen(self.global_parameters()))
            self._compared = True
        self._with_locals(self._core.step)

    def finish(self) -> None:
        """Wait for the exchanges in flight, and apply them now. Collective."""
        self._with_locals(self._core.finish)

    def global_parameters(self) -> dict[str, torch.Tensor]:
        """Return the global parameters, or this rank's shards of them: the model to evaluate and to save.

        They are views in float32 (float64 for float64), which change with every exchange.
        """
        inverses = {name: np.argsort(order).tolist() for name, order in self._orders.items()}
        arrays = self._core.global_parameters()
        return {name: from_dlpack(array).permute(inverses[name]) for name, array in arrays.items()}

    @torch.no_grad()
    def write_global_parameters(self) -> None:
        """Write the global parameters to the model. After `finish`, this is the trained model."""
        parameters = self.global_parameters()
        for name, parameter in self._parameters.named.items():
            local(parameter).copy_(parameters[name])

    def remove(self) -> None:
        """Stop exchanging, and put the model's parameters back into the outer optimizer.

        Residuals and the results of exchanges in flight are dropped: call `finish` first.
        """
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Call `finish`, unless an exception ends the block, and `remove`."""
        try:
            if kind is None:
                self.finish()
        finally:
            self.remove()

    # -- states and other ranks ----------------------------------------------------------------------------------------

    def state_dict(self) -> StateDict:
        """Return this rank's state, with arrays as tensors: see `sparsecomm.LocalSteps.state_dict`.

        Save the model and the inner optimizer, too, on each rank, because they differ within a round.
        """
        state: StateDict = mapped(self._core.state_dict(), np.ndarray, torch.from_numpy)
        return state

    def load_state_dict(self, state: State) -> None:
        """Load what `state_dict` returned on this rank, or `sparsecomm.reshard` made. Collective.

        Load the model and the inner optimizer, too. After resharding in the middle of a round, do not
        load the model: call `write_global_parameters` after this.
        """

        def prepare(undo: Undo) -> Prepared:
            with reading("it", "what DiLoCo.state_dict() returned"):
                on_host = mapped(dict(state), torch.Tensor, torch.Tensor.cpu)
            prepared = self._core.prepare_state(on_host, undo)

            def commit() -> None:
                prepared.commit()
                self._compared = True

            return Prepared(prepared.common, commit)

        self._core.load_with(prepare)

    def rebuild(self, comm: Comm, *, joining: bool = False) -> Rebuilt:
        """Continue with the ranks of another communicator: see `sparsecomm.LocalSteps.rebuild`. Collective over them.

        If this rank is new (``joining``), its model is set to the global parameters.
        """
        self._parameters.check_comm(comm)
        self._parameters.comm = comm
        self._parameters.connect()
        rebuilt: Rebuilt = self._with_locals(lambda parameters: self._core.rebuild(comm, parameters, joining=joining))
        self._compared = True
        return rebuilt


def _memory_order(name: str, parameter: torch.Tensor) -> list[int]:
    """Return the permutation of dimensions that makes a tensor contiguous; not the identity for channels last."""
    t = local(parameter)
    strides = t.stride()
    by_stride = sorted(range(t.ndim), key=lambda d: (-strides[d], d))
    for order in (list(range(t.ndim)), by_stride):
        if t.permute(order).is_contiguous():
            return order
    raise InvalidInputError(
        f"{name}: its memory has gaps or overlaps (shape {tuple(t.shape)}, strides {strides}); give the parameter "
        "memory of its own, by parameter.data.clone()"
    )


def _names(fragments: Any, named: dict[str, torch.Tensor]) -> Any:
    """Return fragments with modules replaced by the names of their parameters."""
    if isinstance(fragments, (nn.Module, str)) or not isinstance(fragments, Iterable):
        return fragments
    by_id = {id(parameter): name for name, parameter in named.items()}
    parts = list(fragments)
    for i, module in enumerate(parts):
        if isinstance(module, nn.Module):
            parts[i] = [by_id.get(id(parameter)) for parameter in module.parameters() if parameter.requires_grad]
            if None in parts[i]:
                raise InvalidInputError(
                    f"fragments: {type(module).__name__} has parameters that do not belong to the model"
                )
    return parts


class TorchOuter:
    """A `sparsecomm.OuterOptimizer` that steps the global parameters with a PyTorch optimizer.

    Until `give_back`, its groups hold stand-ins for the model's parameters. In a step, the stand-ins of exchanged
    parameters share the memory of the global ones, and have the means as gradients. Others have no gradient.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, named: Mapping[str, torch.Tensor], views: Mapping[str, torch.Tensor]
    ) -> None:
        """Replace the parameters ``named`` in an optimizer. ``views`` are their local shards, for shapes and types."""
        known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if missing := [name for name, parameter in named.items() if id(parameter) not in known]:
            raise InvalidInputError(
                f"outer_optimizer: it lacks {missing[0]!r}; create it over model.parameters(). If another DiLoCo uses "
                "it, call remove() of that DiLoCo first"
            )
        self._optimizer = optimizer
        self._standins = {name: nn.Parameter(v if v.dtype == torch.float64 else v.float()) for name, v in views.items()}
        self._replace(dict(zip(map(id, named.values()), self._standins.values(), strict=True)))
        self._replaced = {id(s): p for s, p in zip(self._standins.values(), named.values(), strict=True)}

    def give_back(self) -> None:
        """Put the model's parameters into the optimizer's groups again."""
        self._replace(self._replaced)

    # See `sparsecomm.OuterOptimizer` for these methods.

    def step(self, name: str, parameter: Array, gradient: Array) -> None:
        self.step_together({name: (parameter, gradient)})

    def step_together(self, arrays: Mapping[str, tuple[Array, Array]]) -> None:
        try:
            for name, (parameter, gradient) in arrays.items():
                standin = self._standins[name]
                standin.data = from_dlpack(parameter).view(standin.shape)
                standin.grad = from_dlpack(gradient).view(standin.shape)
            self._optimizer.step()
        finally:
            for name in arrays:
                self._standins[name].grad = None

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = copy.deepcopy(mapped(self._optimizer.state_dict(), torch.Tensor, torch.Tensor.cpu))
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        try:
            self._optimizer.load_state_dict(copy.deepcopy(mapped(dict(state), np.ndarray, torch.from_numpy)))
            try_step(self._optimizer, self._standins.values())
        except Exception as error:
            raise InvalidInputError(
                f"outer state: loading it, and making a step with it, raised {type(error).__name__}: {error}; expected "
                f"the state of a {type(self._optimizer).__name__} over the same parameters"
            ) from error

    def snapshot(self) -> Callable[[], None]:
        return snapshot(self._optimizer)

    def _replace(self, by_id: Mapping[int, torch.Tensor]) -> None:
        """Replace the parameters with these ids in groups and state."""
        for group in self._optimizer.param_groups:
            group["params"] = [by_id.get(id(parameter), parameter) for parameter in group["params"]]
        state = self._optimizer.state
        for parameter in [parameter for parameter in state if id(parameter) in by_id]:
            state[by_id[id(parameter)]] = state.pop(parameter)
