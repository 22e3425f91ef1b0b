"""`SparseAdamW` for PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

import torch

from sparsecomm.checks import to_bool, with_options
from sparsecomm.errors import InvalidInputError
from sparsecomm.optimizers.rule import DENSITY
from sparsecomm.reducer.options import OnStep, Schedule
from sparsecomm.states.schema import State
from sparsecomm.tensors import interop
from sparsecomm.torch.adamw_exchange import AdamWExchange, rule_of
from sparsecomm.torch.exchange import Exchange
from sparsecomm.torch.optimizer import Loss, SparseOptimizer
from sparsecomm.torch.parameters import NamedParameters
from sparsecomm.torch.trial_steps import is_void
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
    check_weights_every: int | None
    on_step: OnStep | None


class SparseAdamW(SparseOptimizer):
    """AdamW for slow links, in place of `torch.optim.AdamW`: it exchanges gradients itself, in 1/42 of the bytes.

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
    backward pass; accumulate gradients under `no_sync`, and use no scaler.

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
        density: the share of the entries that is sent, both ways: a float in (0, 1], or a function of the step number.
        dense_steps: the number of steps at the beginning with density 1.0.
        comm, wire, bucket_bytes, on_step: as in `sparsecomm.Reducer`.
        overlap: exchange during backward passes, by hooks. You cannot change gradients after ``backward()`` then.
        check_weights_every: as in `SparseState`; moments are compared as well.

    Raises:
        InvalidInputError: an argument is not supported.
    """

    _exchange: AdamWExchange

    @with_options(AdamWOptions, Exchange.__init__)
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
        **options: Unpack[AdamWOptions],
    ) -> None:
        defaults: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"amsgrad": amsgrad, "maximize": maximize, "foreach": foreach, "capturable": capturable}
        defaults |= {"differentiable": differentiable, "fused": fused}
        rule_of(defaults)
        groups, named = _groups_of(named_parameters)
        self.overlap = to_bool("overlap", overlap)
        if unknown := sorted(options.keys() - AdamWOptions.__annotations__.keys()):
            raise InvalidInputError(
                f"{unknown[0]} is not an option of SparseAdamW; expected some of "
                f"{', '.join(AdamWOptions.__annotations__)}"
            )
        self._complete = False
        super().__init__(groups, defaults)
        self._complete = True
        self._exchange = AdamWExchange(self, named, density, dense_steps=dense_steps, **options)
        for group in self.param_groups:
            rule_of(group)
        self._exchange.begin(by_hooks=overlap)

    # `torch.amp.GradScaler` leaves it to `step` to divide gradients by the scale.
    _step_supports_amp_scaling = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse new groups: all ranks exchange the parameters that the optimizer was made with."""
        if self._complete:
            raise InvalidInputError("add_param_group: make a new SparseAdamW, with all groups, on all ranks")
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Loss] | None = None) -> Loss:
        """Exchange gradients, unless backward passes have, and update the parameters. Collective.

        If a gradient of some rank is not finite, no rank changes anything.

        Raises:
            WeightMismatchError: weights or moments differ between ranks.
            SparseCommError: as `sparsecomm.Reducer.wait`. The gradients are in the residuals.
        """
        exchange = self._exchange
        scale, overflow = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)  # of a GradScaler
        if not exchange.attached:
            raise InvalidInputError("step after remove(), which has ended the exchange; make a new SparseAdamW")
        if self.overlap and overflow is not None:
            raise InvalidInputError("overlap=True does not support a GradScaler; leave overlap out, or use bfloat16")
        exchange.check_frozen()
        exchange.check_consistent()
        loss = None
        if closure is not None:
            if not self.overlap:
                exchange.exchanged = False
            with torch.enable_grad():
                loss = closure()
        if not exchange.exchanged and is_void(self, exchange.named.values()) and exchange.make_empty_state():
            return loss
        exchange.exchange(1.0 if scale is None else 1 / float(scale), drop=overflow is not None and bool(overflow))
        exchange.apply()
        return loss

    def _load_own(self, state_dict: State) -> None:
        """Load groups, and moments in their own dtype: torch would convert them to the dtype of the weights."""
        saved, groups = state_dict["state"], copy.deepcopy(state_dict["param_groups"])
        torch.optim.Optimizer.load_state_dict(self, {"state": {}, "param_groups": groups})
        pairs = zip(self.param_groups, groups, strict=True)
        self._exchange.load_moments(
            {p: saved.get(i, {}) for ours, its in pairs for p, i in zip(ours["params"], its["params"], strict=True)}
        )


def _groups_of(named_parameters: Any) -> tuple[list[dict[str, Any]], list[tuple[str, torch.nn.Parameter]]]:
    """Return torch's groups, and all names with their parameters."""
    if isinstance(named_parameters, Iterable) and not isinstance(named_parameters, Mapping):
        named_parameters = list(named_parameters)
    given, groups, named = named_parameters, [], []
    if not (isinstance(given, list) and given and all(isinstance(each, dict) for each in given)):
        given = [{"params": given}]
    for group in given:
        pairs = interop.named(group.get("params"), "named_parameters")
        groups.append({**group, "params": [parameter for _, parameter in pairs]})
        named += pairs
    return groups, named
