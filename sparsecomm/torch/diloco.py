"""DiLoCo: local steps of a model, whose sum is exchanged sparsely once in a round."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils.dlpack import from_dlpack

from sparsecomm import transport
from sparsecomm.api import check_weights
from sparsecomm.calls.loading import Prepared, Undo, reading
from sparsecomm.errors import InvalidInputError
from sparsecomm.local_steps import LocalSteps
from sparsecomm.local_steps.defaults import DEFAULTS
from sparsecomm.reducer import Rebuilt, Reducer
from sparsecomm.reducer.options import ReducerOptions
from sparsecomm.reducer.schedule import Schedule
from sparsecomm.reducer.state import State, StateDict
from sparsecomm.signatures import with_options
from sparsecomm.torch.optimizer_state import mapped
from sparsecomm.torch.outer import TorchOuter
from sparsecomm.torch.parameters import check_no_clip, trained
from sparsecomm.torch.replicas import Replicas
from sparsecomm.torch.shards import check_alike, check_replicated, is_sharded, local
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
    that steps last. `torch.amp.GradScaler` skips steps on single ranks, which makes rounds uneven: train in bfloat16.

    A model that FSDP2 shards, or with tensor parallelism: each rank exchanges its shards with the ranks of ``comm``,
    which hold the same ones. On a mesh that replicates, FSDP's own sum across the replicas is switched off: gradients
    are then means over the shards of this replica, and DiLoCo is what brings replicas together.

    Frozen parameters and buffers, such as running means, are left alone.

    Args:
        model: the same on all ranks: see `broadcast_parameters`. The first local step checks that it is.
        inner_optimizer: of its parameters; any. Each of its steps is a local step.
        outer_optimizer: made over ``model.parameters()``, such as ``torch.optim.SGD(model.parameters(), lr=0.7,
            momentum=0.9, nesterov=True)``. It is stepped here, with parameters of its own in its groups: the global
            ones, in float32 at least, of DTensors this rank's shards; so it must treat elements one by one, as SGD and
            Adam do. Its groups may be changed, by schedulers for example. ``None``: global = global - mean.
        density: of what each rank selects, or a function of a fragment's exchange, counted from 0.
        sync_every: local steps of a round.
        fragments: parts of the model that are synchronised in turn: how many; or for each a module, or the names of
            parameters.
        fragment_sync_delay: local steps between the beginning of an exchange and its application.
        fragment_update_alpha: how much of the local parameters is kept where an exchange is applied.
        comm: of the ranks that train together; ``None``: all, or the replicas of the mesh that shards the model.
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
            self._replicas = Replicas(model, comm)  # FSDP's own sum across them is off from here on
            undo.callback(self._replicas.join)
            self._named, self._frozen = trained(model.named_parameters())
            stepped = {parameter for group in inner_optimizer.param_groups for parameter in group["params"]}
            if not any(parameter in stepped for parameter in self._named.values()):
                raise InvalidInputError("inner_optimizer: it has none of the model's parameters; expected one of them")
            self._check_comm(self._replicas.comm)
            check_no_clip(options.get("clip"), self._named.values())
            self._orders = {name: _order(name, parameter) for name, parameter in self._named.items()}
            outer = None
            if outer_optimizer is not None:
                outer = TorchOuter(outer_optimizer, self._named, self._views())
                undo.callback(outer.give_back)
            self._local_steps = LocalSteps(
                self._views(),
                density,
                sync_every=sync_every,
                fragments=_names(fragments, self._named),
                fragment_sync_delay=fragment_sync_delay,
                fragment_update_alpha=fragment_update_alpha,
                outer=outer,
                comm=self._replicas.comm,
                **options,
            )
            undo.callback(inner_optimizer.register_step_post_hook(lambda *_: self._step()).remove)
            self._undo = undo.pop_all()
        self._comm, self._compared = self._replicas.comm, False

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

    def __repr__(self) -> str:
        return f"DiLoCo({self._local_steps})"

    # -- local steps ---------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """Count a local step, which the inner optimizer has made."""
        if not self._compared:
            self._compare()
        self._local_steps.step(self._views())

    def finish(self) -> None:
        """Wait for the exchanges that are under way, and apply them now. Begin none. Collective.

        Raises:
            SparseCommError: as `sparsecomm.LocalSteps.finish`.
        """
        self._local_steps.finish(self._views())

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
        inner = self._local_steps

        def prepare(undo: Undo) -> Prepared:
            with reading("it", "what DiLoCo.state_dict() returned"):
                found = dict(state)
                outer = found.pop("outer", None)
                arrays = {**mapped(found, torch.Tensor, _numpy), "outer": outer}
            made = inner.prepare_state(arrays, undo)

            def commit() -> None:
                made.commit()
                self._compared = True

            return Prepared(made.common, commit)

        inner.load_with(prepare)

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
        self._check_comm(comm)
        self._comm = comm
        check_alike(self._named, transport.of(comm))
        rebuilt = self._local_steps.rebuild(comm, self._views(), joining=joining)
        self._compared = True
        return rebuilt

    # -- within --------------------------------------------------------------------------------------------------------

    def _views(self) -> dict[str, torch.Tensor]:
        """Return the local parameters, outside the graph: contiguous memory, which is written in place."""
        return {name: local(parameter).permute(self._orders[name]) for name, parameter in self._named.items()}

    def _check_comm(self, comm: Comm) -> None:
        check_replicated(self._named, comm, summed_here=self._replicas.summed_here)

    def _compare(self) -> None:
        """Check that all ranks began with the same weights, and with the same shards."""
        ranks = transport.of(self._comm)
        check_alike(self._named, ranks)
        whole = {name: parameter for name, parameter in self._frozen.items() if not is_sharded(parameter)}
        check_weights({**self.global_parameters(), **whole}, comm=ranks)
        self._compared = True


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


def _names(fragments: object, named: dict[str, torch.Tensor]) -> Any:
    """Return fragments by the names of their parameters, where modules were given."""
    if isinstance(fragments, nn.Module) or not isinstance(fragments, Iterable) or isinstance(fragments, str):
        return fragments
    by_id = {id(parameter): name for name, parameter in named.items()}
    found = []
    for part in fragments:
        if isinstance(part, nn.Module):
            mine = (id(parameter) for parameter in part.parameters() if parameter.requires_grad)
            with suppress(KeyError):
                part = [by_id[each] for each in mine]
            if isinstance(part, nn.Module):
                raise InvalidInputError(f"fragments: {type(part).__name__} has parameters that are not the model's")
        found.append(part)
    return found


def _numpy(tensor: torch.Tensor) -> Any:
    return tensor.detach().cpu().numpy()
