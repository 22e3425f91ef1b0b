"""`DistributedOptimizer`, which averages gradients over all ranks without DistributedDataParallel."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NoReturn, TypeAlias, cast

import torch
from torch._compile import _disable_dynamo  # `torch.compiler.disable` imports torch._dynamo: seconds

from sparsecomm.checks import quote, to_int
from sparsecomm.errors import InvalidInputError, listed
from sparsecomm.options import Unpack, check_options, with_options
from sparsecomm.reducer import Rebuilt, Reducer, Step
from sparsecomm.reducer.options import DENSITY, Schedule
from sparsecomm.reducer.reducer import PreparedState
from sparsecomm.states.loading import Prepared, Undo, reading
from sparsecomm.states.schema import State, StateDict
from sparsecomm.torch.autograd import AutogradExchange
from sparsecomm.torch.exchange import ExchangeOptions, GradientExchange, is_only_making_state
from sparsecomm.torch.optimizer_state import comparable, reorder, snapshot
from sparsecomm.torch.parameters import NamedParameters
from sparsecomm.transport import Comm

KEY = "sparsecomm"  # in state_dict
NAMES = "parameter_names"  # in state_dict, in the optimizer's order of parameters
Loss: TypeAlias = Any  # what a closure returns: a tensor or a number


@with_options(ExchangeOptions, GradientExchange.__init__)
def DistributedOptimizer(  # noqa: N802 - named like Horovod's
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters,
    density: Schedule = DENSITY,
    *,
    backward_passes_per_step: int = 1,
    **options: Unpack[ExchangeOptions],
) -> SparseOptimizer:
    """Let an optimizer exchange gradients: ``loss.backward()`` leaves the mean over all ranks in every ``p.grad``.

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = sparsecomm.torch.DistributedOptimizer(optimizer, model.named_parameters())
        for x, y in data:                     # different data on each rank
            optimizer.zero_grad()
            loss(model(x), y).backward()      # the exchange overlaps with it, and is complete at its end
            optimizer.step()

    It returns the same optimizer, which is then also a `SparseOptimizer`. Schedulers, scalers and ``clip_grad_norm_``
    work as before; create schedulers afterwards. Use it for SGD, with or without momentum. It warns about Adam and its
    variants; use `SparseAdamW` for these.

    If you run two backward passes before a step, the second adds to the mean of the first, and the sum is exchanged.
    This is correct, but costs two exchanges, and velocities (``momentum=``) take part in both: use
    ``backward_passes_per_step`` or ``no_sync`` instead. Use ``use_reentrant=False`` for activation checkpointing.

    ``synchronize()`` exchanges gradients that did not come from ``backward()``; `step` calls it if necessary. Call
    ``remove()`` or delete the optimizer, on all ranks, to end the exchange.

    Args:
        optimizer: an optimizer of these parameters. Gradients of its other parameters are not exchanged.
        named_parameters: ``model.named_parameters()``.
        backward_passes_per_step: the number of backward passes whose gradients add up before an exchange.
        options: those of `SparseState`, also ``op="sum"``.

    Returns:
        The optimizer. Its ``state_dict()`` contains this rank's residuals under "sparsecomm".

    Raises:
        InvalidInputError: an argument is not supported, or both optimizer and options have momentum.
    """
    check_options(DistributedOptimizer, options)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidInputError(f"optimizer: got {type(optimizer).__name__}; expected a torch.optim.Optimizer")
    before: AutogradExchange | None = vars(optimizer).get("_exchange")
    if before is not None and before.attached:
        raise InvalidInputError("optimizer: it is wrapped already; wrap each optimizer once")
    if "step" in vars(optimizer):
        raise InvalidInputError("optimizer: a scheduler has replaced its step; wrap it before you make the scheduler")
    if (passes := to_int(backward_passes_per_step, 1)) is None:
        raise InvalidInputError(f"backward_passes_per_step={quote(backward_passes_per_step)}: must be at least 1")
    if options.get("momentum") and any(group.get("momentum") for group in optimizer.param_groups):
        raise InvalidInputError(
            "momentum is set twice: momentum correction applies it before the exchange, so make the optimizer with "
            "momentum=0"
        )
    if not (isinstance(density, float) and density == 1.0) and not _follows_gradient(optimizer):
        warnings.warn(
            f"{type(optimizer).__name__} divides gradients by the size of earlier ones, or uses only their signs. The "
            "entries of sparse means are rare and large, so models train worse than with dense means. Use "
            "sparsecomm.torch.SparseAdamW or local steps (sparsecomm.torch.DiLoCo) instead. You can ignore this at "
            "densities near 1",
            stacklevel=2,
        )
    exchange = AutogradExchange(named_parameters, density, passes=passes, **options)
    known = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if unknown := [name for name, parameter in exchange.named.items() if parameter not in known]:
        raise InvalidInputError(
            f"named_parameters: {listed(unknown)} are not parameters of the optimizer; pass only parameters that it has"
        )
    exchange.watch(optimizer)
    exchange.begin()
    if not isinstance(optimizer, SparseOptimizer):
        kind = type(optimizer)
        optimizer.__class__ = type(f"Distributed{kind.__name__}", (SparseOptimizer, kind), {})
    sparse = cast("SparseOptimizer", optimizer)
    sparse._exchange = exchange
    return sparse


def _follows_gradient(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer's steps are proportional to gradients, judging by its class."""
    known = next(kind for kind in type(optimizer).__mro__ if kind.__module__.startswith("torch.optim"))
    if known is torch.optim.Optimizer:
        return not any({"betas", "eps"} & group.keys() for group in optimizer.param_groups)  # they divide by magnitudes
    return issubclass(known, (torch.optim.SGD, torch.optim.ASGD, torch.optim.LBFGS))


class SparseOptimizer(torch.optim.Optimizer):
    """An optimizer that exchanges gradients: `SparseAdamW`, or the result of `DistributedOptimizer`."""

    _exchange: AutogradExchange
    _residuals_apart = False  # whether `state_dict` leaves out residuals

    @property
    def reducer(self) -> Reducer:
        """The reducer, with its counters, buckets and residuals."""
        return self._exchange.reducer

    def synchronize(self) -> Step:
        """Replace gradients by their means over all ranks. Collective; raises the errors of `Reducer.wait`."""
        return self._exchange.synchronize()

    def rebuild(self, comm: Comm, *, joining: bool = False) -> Rebuilt:
        """Continue with the ranks of another communicator, after some were lost or have joined. Collective over them.

        Residuals and velocities of this rank stay. After a backward pass that failed, ``p.grad`` is the mean if the
        ranks had agreed on it. Otherwise it is zero, and the gradient is in the residual. Continue with ``step()``.

        Args:
            comm: from `sparsecomm.shrink` or `sparsecomm.grow`, or a process group of the remaining ranks.
            joining: whether this rank is new. You must broadcast weights and the optimizer's own state to it.
        """
        return self._exchange.rebuild(comm, joining=joining)

    def discard(self, names: Iterable[str] | None = None) -> None:
        """Set residuals and velocities to zero: see `Reducer.discard`. Call it on all ranks, between steps."""
        self._exchange.discard(names)

    def no_sync(self) -> AbstractContextManager[None]:
        """Let backward passes only add to this rank's gradients. Use it on all ranks for the same passes."""
        return self._exchange.no_sync()

    def remove(self) -> None:
        """End the exchange, and leave the model as it was before. Residuals are dropped."""
        self._exchange.remove()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse new groups until `remove`, because the set of exchanged parameters is fixed."""
        exchange = vars(self).get("_exchange")
        if exchange is not None and exchange.attached:
            raise InvalidInputError(
                "add_param_group: the new parameters would not be exchanged. On all ranks, call remove(), add the "
                "group, and wrap the optimizer again; or make a new SparseAdamW with all groups"
            )
        super().add_param_group(param_group)

    @_disable_dynamo
    def step(self, closure: Callable[[], Loss] | None = None) -> Loss:
        """Exchange gradients, unless a backward pass has done so, and make the optimizer's own step."""
        exchange = self._exchange

        def evaluate() -> Loss:
            assert closure is not None
            exchange.exchanged = False
            loss = closure()
            if not exchange.exchanged:
                exchange.synchronize()
            return loss

        if not exchange.attached or is_only_making_state():
            return super().step(closure)
        exchange.check_unchanged()
        exchange.check_consistent()
        if closure is None and not exchange.exchanged:
            exchange.synchronize()
        try:
            loss = super().step(None if closure is None else evaluate)
        except BaseException:
            exchange.step_failed, exchange.exchanged = exchange.exchanged, False
            raise
        exchange.exchanged, exchange.num_steps = False, exchange.num_steps + 1
        return loss

    step.hooked = True  # type: ignore[attr-defined] # so PyTorch does not add step hooks here: `super().step` runs them

    def residuals_apart(self) -> AutogradExchange:
        """Leave residuals out of `state_dict` and `load_state_dict` from now on, and return the object that has them.

        The moments of `SparseAdamW`, which differ between ranks, go with them. Use it with frameworks that save the
        state of rank 0 and load it on all ranks, and with ``get_state_dict`` of `torch.distributed.checkpoint`. Save
        the returned object on each rank by `sparsecomm.torch.save` or `Stateful`.
        """
        self._residuals_apart = True
        return self._exchange

    def state_dict(self) -> StateDict:
        """Return the optimizer's state, with this rank's residuals under "sparsecomm" unless they are kept apart."""
        names = [self._exchange.names.get(id(p), "") for group in self.param_groups for p in group["params"]]
        own: StateDict = {**super().state_dict(), NAMES: names}
        return own if self._residuals_apart else {**own, KEY: self._exchange.state_dict()}

    def load_state_dict(self, state_dict: State) -> None:
        """Load a state that `state_dict` returned on this rank. Collective: all ranks load, or none.

        Parameters are matched by name, or by position if the state has no names. The settings of groups and the state
        of the named parameters must be equal on all ranks. If residuals are kept apart, only the optimizer's own state
        is loaded, and nothing is compared between ranks.

        Raises:
            InvalidInputError: the state of some rank has no residuals, or does not fit this model, optimizer or world
                size. Nothing has changed on any rank.
            CollectiveMismatchError: another rank does not load a state.
        """
        exchange = self._exchange
        if self._residuals_apart:
            self._load_own(self._reorder_by_name(state_dict))
            exchange.on_state_loaded()
            return

        def prepare(undo: Undo) -> Prepared:
            rest = dict(state_dict)
            if KEY not in rest:
                raise InvalidInputError(
                    f"state_dict: it has no residuals ({KEY!r}): a plain optimizer saved it, or a framework left them "
                    "out. Pass what state_dict() of this kind of optimizer returned. To continue without residuals, or "
                    "to load them separately, call residuals_apart() first"
                )
            prepared = exchange.prepare_state(rest.pop(KEY))
            undo.append(snapshot(self, SparseOptimizer))
            with reading("the optimizer's own part", "the state of the same optimizer over the same parameters"):
                self._load_own(self._reorder_by_name(rest), prepared)
                own = comparable(self, exchange.named, exchange.compared)
            return Prepared({**prepared.common, "optimizer": own}, prepared.commit)

        exchange.load_with(prepare, ["optimizer"])

    def _load_own(self, state_dict: State, prepared: PreparedState | None = None) -> None:
        """Load the optimizer's own state, with that of the reducer. PyTorch's ``load_state_dict`` makes no copy."""
        super().load_state_dict(copy.deepcopy({key: value for key, value in state_dict.items() if key != KEY}))

    def _reorder_by_name(self, state_dict: State) -> StateDict:
        rest = dict(state_dict)
        saved = rest.pop(NAMES, None)
        return rest if saved is None else reorder(self, self._exchange.names, rest, saved)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise InvalidInputError(
            "an optimizer that exchanges gradients cannot be copied or pickled, because its hooks belong to one model. "
            "Save its state_dict(), or copy the model and wrap a plain optimizer of the copy"
        )
