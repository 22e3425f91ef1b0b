"""AdamW whose gradients are summed over all ranks by few entries of few bits: see `sparsecomm.adamw`."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

import torch

from sparsecomm.adamw import DENSITY
from sparsecomm.checks import flag, shown, whole
from sparsecomm.errors import InvalidInputError
from sparsecomm.reducer.options import OnStep
from sparsecomm.reducer.schedule import Schedule
from sparsecomm.reducer.state import State, StateDict
from sparsecomm.signatures import with_options
from sparsecomm.tensors import interop
from sparsecomm.torch.adamw_exchange import FIELDS, AdamWExchange, begun, rule_of
from sparsecomm.torch.optimizer import Loss, SparseOptimizer
from sparsecomm.torch.parameters import NamedParameters, Parameters, Scaler
from sparsecomm.torch.shards import local
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
    """Loads a state as `SparseAdamW` has it: moments stay in the type in which they are summed."""

    _exchange: AdamWExchange

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "state": {}})  # which would convert moments, and keep those of others
        saved, named = state_dict["state"], self._exchange.named
        if not begun(saved.values()):
            return
        names = {id(parameter): name for name, parameter in named.items()}
        pairs = zip(self.param_groups, state_dict["param_groups"], strict=True)
        held = {id(p): saved.get(i) for ours, its in pairs for p, i in zip(ours["params"], its["params"], strict=True)}
        if any(its is not None for its in held.values()) and any(held.get(id(p)) is None for p in named.values()):
            raise InvalidInputError("state: some parameters have moments, and others none; expected all, or none")
        for parameter in named.values():
            if held[id(parameter)] is not None:
                self.state[parameter] = _checked(held[id(parameter)], parameter, names[id(parameter)])


class SparseAdamW(SparseOptimizer, _State):
    """AdamW for slow links, in place of `torch.optim.AdamW`: it exchanges gradients itself, in 1/40 of the bytes.

        optimizer = sparsecomm.torch.SparseAdamW(model.named_parameters(), lr=1e-3)
        for x, y in data:                      # each rank its own
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()                   # collective

    A transformer trains as with dense gradients (docs/reports/adamw.md), which it does not where `DistributedOptimizer`
    gives Adam sparse means. In a step some 9 % of the weights are updated, each by as many steps of AdamW as it waited.
    Take the learning rate that is best with dense gradients, or up to 1.5 times that.

    Weights, moments, and for each weight the step that updated it last, must be the same on all ranks: see
    `broadcast_parameters` for the beginning. The first step checks that they are. ``p.grad`` stays what this rank has
    made of it. Use the model itself, not `DistributedDataParallel`, which would sum gradients besides.

    By default `step` exchanges, so that between it and ``backward()`` gradients may add up over several passes, and be
    clipped (each rank's, by its own norm), and a `torch.amp.GradScaler` works as ever: a rank whose gradients have
    overflowed contributes nothing to that step, and only its own scaler lowers its scale. With ``overlap`` the exchange
    goes on while the backward pass does.

    Of DTensors, as FSDP2 makes them, shards are exchanged: ``comm`` is a process group of ranks that hold the same
    ones.

    Memory, besides gradients: residual, two moments, and an int32 for each weight.

    Args:
        named_parameters: ``model.named_parameters()``, or groups: dictionaries with such pairs as "params", and with
            settings of their own. One group with ``weight_decay=0`` for biases and norms is usual.
        lr, betas, eps, weight_decay: as in `torch.optim.AdamW`, by group. ``lr * weight_decay`` is below 1. A rate in a
            tensor is read in each step.
        density: of what is sent, both ways, as in `sparsecomm.SparseAdamW`.
        comm, wire, bucket_bytes, on_step: as in `sparsecomm.Reducer`. ``wire="packed"`` for float64.
        overlap: exchange while backward passes go on, by hooks. Then gradients cannot be changed after ``backward()``,
            and with a scaler pass it as ``scaler``: an overflow on one rank makes all scalers skip the step.
        backward_passes_per_step: with ``overlap``, gradients of so many passes add up before they are exchanged.
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
        *,
        density: Schedule = DENSITY,
        overlap: bool = False,
        backward_passes_per_step: int = 1,
        **options: Unpack[AdamWOptions],
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        rule_of(defaults)
        groups, named = _groups_of(named_parameters)
        if (passes := whole(backward_passes_per_step, 1)) is None:
            raise InvalidInputError(
                f"backward_passes_per_step={shown(backward_passes_per_step)}: expected a number from 1 on"
            )
        self.overlap = flag("overlap", overlap)
        if not overlap and (passes > 1 or options.get("scaler") is not None):
            raise InvalidInputError(
                "backward_passes_per_step and scaler are for overlap=True; without it, call backward() as often as you "
                "like before step(), and scaler.step(optimizer)"
            )
        if unknown := sorted(options.keys() - AdamWOptions.__annotations__.keys()):
            raise InvalidInputError(
                f"{unknown[0]} is no option of SparseAdamW; expected some of {', '.join(AdamWOptions.__annotations__)}"
            )
        self._made = False
        super().__init__(groups, defaults)
        self._made = True
        self._exchange = AdamWExchange(self, named, density, passes=passes, **options)
        self._exchange._rules()  # refuses settings of groups
        self._exchange.begin(by_hooks=overlap)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether `torch.amp.GradScaler` leaves it to `step` to divide gradients by the scale."""
        return not self.overlap

    def _own(self, state_dict: State) -> StateDict:
        groups = copy.deepcopy(state_dict["param_groups"])
        return {"state": state_dict["state"], "param_groups": groups}  # moments are copied when they are checked

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse, once it is made: all ranks' exchange is of the parameters that it was made with."""
        if self._made:
            raise InvalidInputError("add_param_group: make a new SparseAdamW, with all groups, on all ranks")
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Loss] | None = None) -> Loss:
        """Exchange gradients, unless backward passes have, and update the parameters. Collective.

        A gradient that is not finite on some rank leaves all weights as they are, on all ranks.

        Raises:
            WeightMismatchError: weights or moments are not the same on all ranks.
            SparseCommError: as `sparsecomm.Reducer.wait`. Gradients wait in residuals.
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


def _checked(state: Mapping[str, Any], parameter: torch.Tensor, name: str) -> dict[str, Any]:
    """Return copies of the moments of a parameter that were saved, on its device.

    Raises:
        InvalidInputError: they cannot be its moments.
    """
    step = state["step"]
    real = torch.float64 if parameter.dtype is torch.float64 else torch.float32
    found = {}
    for field, dtype in zip(FIELDS, (real, real, torch.int32), strict=True):
        saved = state[field]
        if saved.shape != parameter.shape or saved.is_floating_point() != dtype.is_floating_point:
            raise InvalidInputError(
                f"state: {field} of {name} is {saved.dtype} of shape {tuple(saved.shape)}; expected {dtype} of shape "
                f"{tuple(parameter.shape)}"
            )
        found[field] = saved.detach().to(device=parameter.device, dtype=dtype, copy=True).contiguous()
    mean, squares, last = (_extremes(local(found[field]), none) for field, none in zip(FIELDS, (0, 1, 0), strict=True))
    if not (type(step) is int and last[0] >= 0 and last[1] <= step):
        raise InvalidInputError(f"state: last_step of {name}: expected whole numbers from 0 to the step, {step!r:.40}")
    if not (all(map(math.isfinite, mean)) and squares[0] > 0 and squares[1] < math.inf):
        raise InvalidInputError(f"state: moments of {name}: expected finite numbers, and squares above 0")
    return {"step": step, **found}


def _extremes(tensor: torch.Tensor, of_none: float) -> tuple[float, float]:
    """Return the smallest and the largest element, by one pass; both are NaN if there is one."""
    if not tensor.numel():
        return of_none, of_none
    smallest, largest = tensor.aminmax()
    return smallest.item(), largest.item()
