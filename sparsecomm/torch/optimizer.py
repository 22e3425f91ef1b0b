"""An optimizer that sums gradients over all ranks, for training loops without DistributedDataParallel."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import torch

from sparsecomm.checks import quote, to_int, with_options
from sparsecomm.errors import InvalidInputError
from sparsecomm.reducer import Rebuilt, Reducer, Step
from sparsecomm.reducer.options import DENSITY
from sparsecomm.reducer.schedule import Schedule
from sparsecomm.states.loading import Prepared, Undo, reading
from sparsecomm.states.schema import State, StateDict
from sparsecomm.torch.exchange import Exchange
from sparsecomm.torch.optimizer_state import (
    comparable,
    follows_gradient,
    in_order_of,
    is_void,
    names_in_order,
    snapshot,
)
from sparsecomm.torch.parameters import ExchangeOptions, NamedParameters, Parameters
from sparsecomm.transport import Comm

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["DistributedOptimizer", "SparseOptimizer"]

KEY = "sparsecomm"  # in state_dict
NAMES = "parameter_names"  # in state_dict, in the order in which the optimizer numbers its parameters
Loss: TypeAlias = Any  # what a closure returns: a tensor or a number


@with_options(ExchangeOptions, Parameters.__init__)
def DistributedOptimizer(  # noqa: N802 - it makes an object of a class of that name, as Horovod's does
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters,
    density: Schedule = DENSITY,
    *,
    backward_passes_per_step: int = 1,
    **options: Unpack[ExchangeOptions],
) -> SparseOptimizer:
    """Wrap an optimizer, so that ``loss.backward()`` leaves the mean over all ranks in every ``p.grad``.

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = sparsecomm.torch.DistributedOptimizer(optimizer, model.named_parameters())
        for x, y in data:                     # each rank its own
            optimizer.zero_grad()
            loss(model(x), y).backward()      # exchange goes on meanwhile, and is done at the end
            optimizer.step()

    The result is an optimizer of the same class, with the same state and groups: schedulers, scalers and
    ``clip_grad_norm_`` work on it; make schedulers after wrapping. The weights must be the same on all ranks in the
    beginning: see `broadcast_parameters`. The first backward pass checks that they are.

    Two backward passes before a step: the second adds to the mean of the first, and the sum is exchanged; nothing is
    lost or counted twice, but it costs two exchanges, and velocities (``momentum=``) take part in both: use
    ``backward_passes_per_step`` or ``no_sync`` instead.

    For SGD, with momentum or without. Adam and its kin divide by the size of gradients, and sparse means mislead them:
    `SparseAdamW` is for these, and a warning says so.

    Exchange ends with ``remove()``, or when this optimizer and the one that was given are both gone.

    A parameter that is frozen, or for which no rank has a gradient, does not move, and what waits in its residual stays
    there. If only some ranks have a gradient, it counts as zeros on the others, and all get the mean. ``synchronize()``
    exchanges gradients that did not come from ``backward()``, and `step` calls it if need be.

    Gradients that you compute and throw away by ``zero_grad()`` enter the residuals and are applied later. Run such
    passes under ``optimizer.no_sync()``, or call ``optimizer.discard()`` afterwards.

    Args:
        optimizer: of these parameters, and perhaps of others, which are left alone.
        named_parameters: of the model.
        density: as in `sparsecomm.Reducer`.
        comm: as in `sparsecomm.sparse_allreduce`.
        backward_passes_per_step: gradients of so many passes add up before they are exchanged. ``with
            optimizer.no_sync():`` leaves single passes out.
        scaler, check_weights_every: as in `SparseState`.
        options: those of `sparsecomm.Reducer`, with ``op="mean"`` by default.

    Returns:
        The optimizer, with ``synchronize()``, ``no_sync()``, ``discard()``, ``remove()`` and ``reducer``; its
        ``state_dict()`` has this rank's residuals in it, under "sparsecomm".

    Raises:
        InvalidInputError: an argument cannot be used; momentum is asked for twice.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidInputError(f"optimizer: got {type(optimizer).__name__}; expected a torch.optim.Optimizer")
    before: Exchange | None = vars(optimizer).get("_exchange")
    if before is not None and before.attached:
        raise InvalidInputError("optimizer: it is wrapped already; use what DistributedOptimizer returned")
    if "step" in vars(optimizer):
        raise InvalidInputError("optimizer: a scheduler holds its step already; wrap it before you make the scheduler")
    if (passes := to_int(backward_passes_per_step, 1)) is None:
        raise InvalidInputError(
            f"backward_passes_per_step={quote(backward_passes_per_step)}: expected a number from 1 on"
        )
    if options.get("momentum") and any(group.get("momentum") for group in optimizer.param_groups):
        raise InvalidInputError(
            "momentum is asked for twice: momentum correction applies it before the exchange, so the optimizer must "
            "have none; make it with momentum=0"
        )
    _warn_of_adam(optimizer, density)
    exchange = Exchange(named_parameters, density, passes=passes, **options)
    known = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if strangers := [name for name, parameter in exchange.named.items() if parameter not in known]:
        raise InvalidInputError(
            f"named_parameters: {strangers[0]!r} and perhaps others are not the optimizer's; expected those that it "
            "updates"
        )
    exchange.begin()
    kind = type(optimizer)
    made: type[SparseOptimizer] = type(f"Distributed{kind.__name__}", (SparseOptimizer, kind), {})
    wrapped = made.__new__(made)
    wrapped.__dict__ = optimizer.__dict__  # the same state and groups, whether one holds this optimizer or that
    wrapped._exchange = exchange
    return wrapped


def _warn_of_adam(optimizer: torch.optim.Optimizer, density: Schedule) -> None:
    """Warn if sparse means mislead an optimizer: its steps are not proportional to the gradient."""
    if not (isinstance(density, float) and density == 1.0) and not follows_gradient(optimizer):
        warnings.warn(
            f"{type(optimizer).__name__} divides gradients by the size of earlier ones, or uses their signs alone. The "
            "entries of sparse means are rare and large, so models train worse than with dense means. Use "
            "sparsecomm.torch.SparseAdamW instead, or local steps (sparsecomm.torch.DiLoCo). You can ignore this at "
            "densities near 1",
            stacklevel=3,
        )


class SparseOptimizer(torch.optim.Optimizer):
    """An optimizer that exchanges gradients, as `DistributedOptimizer` returns it: a subclass of the wrapped one's."""

    _exchange: Exchange
    _apart = False  # residuals are in no state of it

    @property
    def reducer(self) -> Reducer:
        """The reducer, with its counters, buckets and residuals."""
        return self._exchange.reducer

    def synchronize(self) -> Step:
        """Replace what is in ``p.grad`` now by the mean over all ranks. Collective.

        Raises:
            SparseCommError: as `sparsecomm.Reducer.wait`.
        """
        return self._exchange.synchronize()

    def rebuild(self, comm: Comm, *, joining: bool = False) -> Rebuilt:
        """Go on with the ranks of another communicator, when some were lost or are new. Collective over them.

        Residuals and velocities of this rank stay. After a backward pass that failed, ``p.grad`` is the mean where the
        ranks had agreed on it, and zero otherwise: those gradients wait in residuals. So go on with ``step()``, which
        does the same on all ranks, and loses nothing.

        Args:
            comm: as in `DistributedOptimizer`: what `sparsecomm.shrink` or `sparsecomm.grow` returned, or a process
                group of the ranks that go on.
            joining: this rank is new; weights and this optimizer's own state are to come by broadcast.

        Raises:
            SparseCommError: as `sparsecomm.Reducer.rebuild`.
        """
        return self._exchange.rebuild(comm, joining=joining)

    def discard(self, names: Iterable[str] | None = None) -> None:
        """Drop gradients that wait in residuals and were not applied yet. Call it on all ranks, between steps.

        Args:
            names: of the parameters; ``None``: all.

        Raises:
            InvalidInputError: a step is under way, or there is no parameter of such a name.
        """
        self._exchange.discard(names)

    def no_sync(self) -> AbstractContextManager[None]:
        """Let backward passes within it only add to this rank's gradients: on all ranks, for the same passes."""
        return self._exchange.no_sync()

    def remove(self) -> None:
        """Exchange nothing any more: leave the model as it was before. What waits in residuals is dropped."""
        self._exchange.remove()

    def step(self, closure: Callable[[], Loss] | None = None) -> Loss:
        """Update the parameters; exchange gradients first, if no backward pass has done so. See the optimizer's own."""
        exchange = self._exchange

        def evaluate() -> Loss:
            assert closure is not None
            exchange.exchanged = False
            loss = closure()
            if not exchange.exchanged:
                exchange.synchronize()
            return loss

        if not exchange.attached:
            return super().step(closure)
        exchange.check_frozen()
        exchange.check_whole()
        if closure is None and not exchange.exchanged and not is_void(self, exchange.named.values()):
            exchange.synchronize()
        try:
            loss = super().step(None if closure is None else evaluate)
        except BaseException:
            exchange.divided, exchange.exchanged = exchange.exchanged, False
            raise
        exchange.exchanged = False
        return loss

    step.hooked = True  # type: ignore[attr-defined] # the step within runs the hooks of steps: once is enough

    def residuals_apart(self) -> Exchange:
        """Leave residuals out of `state_dict` and `load_state_dict` from now on, and return what has them.

        For frameworks that save the state of rank 0 and load it on all ranks, and for ``get_state_dict`` of
        `torch.distributed.checkpoint`. What is returned has ``state_dict`` and ``load_state_dict``, for each rank's
        own; see `sparsecomm.torch.save` and `Stateful`.
        """
        self._apart = True
        return self._exchange

    def state_dict(self) -> StateDict:
        """Return the optimizer's state, and this rank's residuals under "sparsecomm", unless they are kept apart.

        The names of the parameters are in it, so that the state can be loaded if the model declares its layers in
        another order.
        """
        own: StateDict = {**super().state_dict(), NAMES: names_in_order(self, self._exchange.names)}
        return own if self._apart else {**own, KEY: self._exchange.state_dict()}

    def load_state_dict(self, state_dict: State) -> None:
        """Go on from what `state_dict` returned on this rank. Collective: all ranks load, or none.

        The state of each parameter is found by its name; by its position, if the state has no names.

        The optimizer loads its own part before the ranks compare what they have; if one refuses, it is given back what
        it had. The settings of its groups and the state of the named parameters must be alike on all ranks. Where
        residuals are kept apart, the optimizer's own part is all, and nothing is compared.

        Raises:
            InvalidInputError: there are no residuals in it, or they do not fit this model or number of ranks; or those
                of another rank do not; or the optimizer refuses its own part. Nothing has changed on any rank.
            CollectiveMismatchError: another rank does not load, but goes on.
        """
        exchange, load = self._exchange, super().load_state_dict
        if self._apart:
            load(self._own(self._by_name(state_dict)))
            exchange.adopt()
            return

        def prepare(undo: Undo) -> Prepared:
            rest = dict(state_dict)
            if KEY not in rest:
                raise InvalidInputError(
                    f"state_dict: there are no residuals ({KEY!r}) in it: it is of a plain optimizer, or a framework "
                    "has left them out. Expected what state_dict() of this kind of optimizer returned. To go on "
                    "without, or to load them by themselves, call residuals_apart() before"
                )
            kept = exchange.prepare_state(rest.pop(KEY))
            undo.append(snapshot(self, SparseOptimizer))
            with reading("the optimizer's own part", "that of the same optimizer over the same parameters"):
                load(self._own(self._by_name(rest)))
                own = comparable(self, exchange.named)
            return Prepared({**kept.common, "optimizer": own}, kept.commit)

        exchange.load_with(prepare, ["optimizer"])

    def _own(self, state_dict: State) -> StateDict:
        """Return the optimizer's own part of a state, for it to keep: torch's ``load_state_dict`` does not copy."""
        return copy.deepcopy({key: value for key, value in state_dict.items() if key != KEY})

    def _by_name(self, state_dict: State) -> StateDict:
        """Return a state with its parameters in the order of this optimizer's."""
        rest = dict(state_dict)
        saved = rest.pop(NAMES, None)
        return rest if saved is None else in_order_of(self, names_in_order(self, self._exchange.names), rest, saved)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise InvalidInputError(
            "an optimizer that exchanges gradients cannot be copied or pickled: its hooks are those of one model. Save "
            "its state_dict(), or copy the model, and wrap a plain optimizer of the copy"
        )
