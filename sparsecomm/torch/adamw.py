"""`SparseAdamW` for PyTorch, by the rule of `sparsecomm.optimizers.adamw`."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

import torch

from sparsecomm.checks import quote, to_bool, to_int, with_options
from sparsecomm.errors import InvalidInputError
from sparsecomm.optimizers.adamw import DENSITY
from sparsecomm.reducer.options import OnStep
from sparsecomm.reducer.schedule import Schedule
from sparsecomm.states.schema import State, StateDict
from sparsecomm.tensors import interop
from sparsecomm.torch.adamw_exchange import AdamWExchange, rule_of
from sparsecomm.torch.optimizer import Loss, SparseOptimizer
from sparsecomm.torch.optimizer_state import is_void
from sparsecomm.torch.parameters import NamedParameters, Parameters, Scaler
from sparsecomm.transport import Comm
from sparsecomm.wire import WireName

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Unpack

__all__ = ["SparseAdamW"]

NamedGroups: TypeAlias = "NamedParameters | Iterable[dict[str, Any]]"


class AdamWOptions(TypedDict, total=False):
    """Keyword arguments of `SparseAdamW` that go to its `sparsecomm.Reducer`, and into its checks."""

    comm: Comm
    wire: WireName
    bucket_bytes: int | None
    scaler: Scaler | None
    check_weights_every: int | None
    on_step: OnStep | None


class _State(torch.optim.Optimizer):
    """Loads moments in their own type. Torch would convert them to the type of the weights."""

    _exchange: AdamWExchange

    def load_state_dict(self, state_dict: StateDict) -> None:
        super().load_state_dict({**state_dict, "state": {}})
        saved, groups = state_dict["state"], zip(self.param_groups, state_dict["param_groups"], strict=True)
        self._exchange.load_moments(
            {p: saved.get(i, {}) for ours, its in groups for p, i in zip(ours["params"], its["params"], strict=True)}
        )


class SparseAdamW(SparseOptimizer, _State):
    """AdamW for slow links, in place of `torch.optim.AdamW`: it exchanges gradients itself, in 1/40 of the bytes.

        optimizer = sparsecomm.torch.SparseAdamW(model.named_parameters(), lr=1e-3)
        for x, y in data:                      # different data on each rank
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()                   # collective

    Use the learning rate and betas that you use with dense gradients: docs/reports/adamw.md compares both. By default a
    step updates about 9 % of the weights, each by as many steps of AdamW as it has waited. At ``density=1.0`` this is
    `torch.optim.AdamW` with dense, exact sums.

    Weights and moments must be the same on all ranks: call `broadcast_parameters` at the beginning. The first step
    checks this. ``p.grad`` stays the gradient of this rank. Use the model itself, not `DistributedDataParallel`, which
    would sum gradients a second time (or call `keep_local` on it).

    By default `step` exchanges gradients. So you may accumulate gradients over several backward passes, clip them (each
    rank by its own norm), and use a `torch.amp.GradScaler` as usual: a rank whose gradients have overflowed contributes
    nothing to that step, and only its own scaler lowers its scale. With ``overlap`` the exchange runs during the
    backward pass.

    A parameter for which no rank has a gradient does not change, as in PyTorch. Its residual is kept until it has a
    gradient again, or until `discard`.

    DTensors, as FSDP2 makes them, are exchanged by shards: pass as ``comm`` a process group of ranks that hold the same
    shards.

    The state of a parameter is that of `torch.optim.AdamW` (``step``, ``exp_avg``, ``exp_avg_sq``) and ``last_step``:
    for each weight the step of its last update, int32. A residual is kept beside it. To load a state of
    `torch.optim.AdamW`, call ``residuals_apart()`` before ``load_state_dict()``.

    Args:
        named_parameters: ``model.named_parameters()``, or groups: dictionaries with such pairs as "params", and
            settings of their own, for example ``weight_decay=0`` for biases and norms.
        lr, betas, eps, weight_decay, maximize: as in `torch.optim.AdamW`, also by group. ``lr`` may be a tensor, which
            is read in each step. ``lr * weight_decay`` must be below 1, and ``eps`` above 0.
        amsgrad, foreach, capturable, differentiable, fused: not supported: true values are refused.
        density: the part of the entries that is sent, both ways: a float in (0, 1], or a function of the step's number.
        dense_steps: the number of steps at the beginning with density 1.0.
        comm, wire, bucket_bytes, on_step: as in `sparsecomm.Reducer`.
        overlap: exchange during backward passes, by hooks. You cannot change gradients after ``backward()`` then. Pass
            a scaler as ``scaler``: an overflow on one rank makes all scalers skip the step.
        backward_passes_per_step: with ``overlap``, accumulate gradients over so many passes before the exchange.
        scaler: with ``overlap``, the `torch.amp.GradScaler` in use.
        check_weights_every: as in `SparseState`; moments are compared as well.

    Raises:
        InvalidInputError: an argument cannot be used.
    """

    _exchange: AdamWExchange

    @with_options(AdamWOptions, Parameters.__init__)
    def __init__(
        self,
        named_parameters: NamedGroups,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        density: Schedule = DENSITY,
        dense_steps: int = 0,
        overlap: bool = False,
        backward_passes_per_step: int = 1,
        **options: Unpack[AdamWOptions],
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
        }
        defaults |= {"maximize": maximize, "foreach": foreach, "capturable": capturable}
        defaults |= {"differentiable": differentiable, "fused": fused}
        rule_of(defaults)
        groups, named = _groups_of(named_parameters)
        if (passes := to_int(backward_passes_per_step, 1)) is None:
            raise InvalidInputError(f"backward_passes_per_step={quote(backward_passes_per_step)}: must be at least 1")
        self.overlap = to_bool("overlap", overlap)
        if not overlap and (passes > 1 or options.get("scaler") is not None):
            raise InvalidInputError(
                "backward_passes_per_step and scaler require overlap=True; without it, call backward() as often as you "
                "like before step(), and scaler.step(optimizer)"
            )
        if unknown := sorted(options.keys() - AdamWOptions.__annotations__.keys()):
            raise InvalidInputError(
                f"{unknown[0]} is no option of SparseAdamW; expected some of {', '.join(AdamWOptions.__annotations__)}"
            )
        self._made = False
        super().__init__(groups, defaults)
        self._made = True
        self._exchange = AdamWExchange(self, named, density, dense_steps=dense_steps, passes=passes, **options)
        for group in self.param_groups:
            rule_of(group)
        self._exchange.begin(by_hooks=overlap)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether `torch.amp.GradScaler` leaves it to `step` to divide gradients by the scale."""
        return not self.overlap

    def _own(self, state_dict: State) -> StateDict:
        groups = copy.deepcopy(state_dict["param_groups"])
        return {"state": state_dict["state"], "param_groups": groups}  # moments are copied when they are loaded

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse new groups: all ranks exchange the parameters that the optimizer was made with."""
        if self._made:
            raise InvalidInputError("add_param_group: make a new SparseAdamW, with all groups, on all ranks")
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Loss] | None = None) -> Loss:
        """Exchange gradients, unless backward passes have, and update the parameters. Collective.

        If a gradient of some rank is not finite, no rank changes anything.

        Raises:
            WeightMismatchError: weights or moments differ between ranks.
            SparseCommError: as `sparsecomm.Reducer.wait`. The gradients are in the residuals then.
        """
        exchange = self._exchange
        if not exchange.attached:
            raise InvalidInputError("step after remove(), which has ended the exchange; make a new SparseAdamW")
        exchange.check_frozen()
        exchange.check_whole()
        loss = None
        if closure is not None:
            if not self.overlap:
                exchange.exchanged = False
            with torch.enable_grad():
                loss = closure()
        scale, overflow = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)  # of a GradScaler
        if not exchange.exchanged and is_void(self, exchange.named.values()) and exchange.show_zeros():
            return loss
        exchange.exchange(1.0 if scale is None else 1 / float(scale), drop=overflow is not None and bool(overflow))
        exchange.apply()
        return loss


def _groups_of(named_parameters: Any) -> tuple[list[dict[str, Any]], list[tuple[str, torch.nn.Parameter]]]:
    """Return torch's groups, and all names with their parameters."""
    given = named_parameters
    if isinstance(given, Iterable) and not isinstance(given, Mapping):
        given = list(given)
    grouped = isinstance(given, list) and given and all(isinstance(each, dict) for each in given)
    groups, named = [], []
    for group in given if grouped else [{"params": given}]:
        pairs = interop.named(group.get("params"), "named_parameters")
        groups.append({**group, "params": [parameter for _, parameter in pairs]})
        named += pairs
    return groups, named
