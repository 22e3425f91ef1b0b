"""The exchange of a `SparseAdamW`: gradients over the root of second moments go in, steps of AdamW come of it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from sparsecomm import transport
from sparsecomm.adamw import DEFAULTS, AdamWRule, LazyAdamW
from sparsecomm.backends.base import Moments
from sparsecomm.calls.loading import Prepared
from sparsecomm.errors import InvalidInputError
from sparsecomm.reducer import Rebuilt, Step
from sparsecomm.reducer.bucket import TensorSpec
from sparsecomm.reducer.schedule import Schedule
from sparsecomm.reducer.state import State, StateDict
from sparsecomm.tensors.arrays import Array
from sparsecomm.torch.exchange import Exchange
from sparsecomm.torch.parameters import NamedParameters
from sparsecomm.torch.shards import gradient_of, local
from sparsecomm.transport import Comm

__all__ = ["FIELDS", "AdamWExchange", "begun", "rule_of"]

FIELDS = ("exp_avg", "exp_avg_sq", "last_step")  # of a parameter's state: the moments, as torch names them, and `last`


class AdamWExchange(Exchange):
    """The gradients of the parameters of a `SparseAdamW`, and the steps that their sums make.

    This module is compiled, as `Exchange`.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, named: NamedParameters, density: Schedule, **settings: Any
    ) -> None:
        """Check the arguments.

        Args:
            optimizer: a `SparseAdamW`, whose state the moments are.
            named, density, settings: as in `Exchange`.
        """
        super().__init__(named, density, **{**DEFAULTS, **settings})
        self._optimizer, self._skip_nonfinite = weakref.ref(optimizer), True
        self._adamw: LazyAdamW | None = None
        self._whole: dict[str, torch.Tensor] | None = None  # contiguous weights, while a step changes them

    @property
    def adamw(self) -> LazyAdamW:
        """The moments, and the arithmetic."""
        if self._adamw is None:
            reducer = self.reducer
            shards = {name: local(parameter).contiguous() for name, parameter in self.named.items()}
            self._adamw = LazyAdamW(shards, reducer, transport.of(self.comm), self._zeros)
        return self._adamw

    # -- a step -------------------------------------------------------------------------------------------------------

    def exchange(self, scale: float = 1.0, *, drop: bool = False) -> None:
        """Sum all gradients, unless backward passes have done so. Collective.

        Args:
            scale: what they are to be multiplied by.
            drop: this rank has none that can be used.
        """
        if self.exchanged:
            return
        gradients = {name: None if drop else gradient_of(parameter) for name, parameter in self.named.items()}
        self._begin_step()
        if self.adamw.moments or self._make_moments(gradients, scale):
            for name, gradient in gradients.items():
                if not self.reducer.parts(name):
                    self._push(name, gradient, scale)
            self.wait()
        else:
            self._show_zeros()
            self._pass, self._passed, self.exchanged = None, 0, True
            self._tell_scaler()

    def apply(self) -> None:
        """Update the parameters by what was exchanged last, once. Interrupted, it may be called again, and goes on."""
        last, optimizer = self.reducer.last, self._optimizer()
        if not self.exchanged or last is None or optimizer is None:
            self.exchanged = False
            return
        if self._whole is None:
            self._whole = {name: local(parameter).contiguous() for name, parameter in self.named.items()}
        self.adamw.update(self._whole, self._rules(), last)
        for name, parameter in self.named.items():
            shard = local(parameter)
            if shard.data_ptr() != self._whole[name].data_ptr():
                shard.copy_(self._whole[name])  # which no graph sees
            optimizer.state[parameter]["step"] = self.adamw.step
        self._whole, self.exchanged = None, False

    def synchronize(self) -> Step:
        """Exchange gradients, as a backward pass does at its end, or `SparseAdamW.step`."""
        self.check_whole()
        self.exchange(self._unscale())
        last = self.reducer.last
        return Step(self.reducer.step, self.reducer.density, usable=False) if last is None else last

    def push(self, name: str, gradient: torch.Tensor) -> None:
        """Push a gradient that a backward pass has made; before there are moments, leave that to its end."""
        self._begin_step()
        if self.adamw.moments:
            self._push(name, gradient, self._unscale())

    def _push(self, name: str, gradient: torch.Tensor | None, scale: float) -> None:
        mine = None if gradient is None else self._gradient(name, gradient).contiguous()
        self.adamw.push(name, mine, self._rules()[name], scale)

    def _make_moments(self, gradients: Mapping[str, torch.Tensor | None], scale: float) -> bool:
        shards = {name: None if g is None else self._gradient(name, g).contiguous() for name, g in gradients.items()}
        return self.adamw.begin(shards, scale)

    def _begin_step(self) -> None:
        """Check weights and moments, if that is due, and tell other ranks the settings, before anything is pushed."""
        if not self.reducer.pending:
            self._check_weights()
            self.reducer.label = self.adamw.label(self._rules())

    def _ready(self, parameter: torch.Tensor) -> None:
        last = self.reducer.last if self.used else None
        if self.exchanged and last is not None and last.usable and self._pass is None and self.exchanging:
            raise InvalidInputError(
                "a backward pass has begun before step() has used what the one before it has exchanged; expected a "
                "step after each, or backward_passes_per_step, or no_sync() for passes that only add"
            )
        super()._ready(parameter)

    def _end_step(self, last: Step | None) -> None:
        super()._end_step(last)
        if last is not None and not last.usable:
            self._tell_scaler()

    def _tell_scaler(self) -> None:
        """Let this rank's scaler see, by a gradient, that all ranks skip a step."""
        if self._scaler is not None:
            for parameter in self.named.values():
                if parameter.grad is not None and parameter.grad.numel():
                    local(parameter.grad).fill_(torch.nan)

    def _unscale(self) -> float:
        return 1.0 if self._scaler is None else 1 / float(self._scaler.get_scale())

    def _follow_scale(self) -> None:
        """Do nothing: what is kept has no loss scale."""

    def _rules(self) -> dict[str, AdamWRule]:
        """Return the settings of each parameter."""
        optimizer = self._optimizer()
        assert optimizer is not None
        rules: dict[str, AdamWRule] = {}
        for group in optimizer.param_groups:
            rule = rule_of(group)
            rules |= {self._names[id(p)]: rule for p in group["params"] if id(p) in self._names}
        return rules

    def _replicated(self) -> Mapping[str, object]:
        return {**self.named, **self.adamw.replicated()}

    # -- moments, which are the optimizer's state ---------------------------------------------------------------------

    def _zeros(self, spec: TensorSpec) -> Moments:
        """Make the state of a parameter."""
        optimizer, parameter = self._optimizer(), self.named[spec.name]
        assert optimizer is not None
        real = torch.float64 if parameter.dtype is torch.float64 else torch.float32
        made = [
            torch.zeros_like(parameter.detach(), dtype=dtype, memory_format=torch.contiguous_format)
            for dtype in (real, real, torch.int32)
        ]
        optimizer.state[parameter] = {"step": 0, **dict(zip(FIELDS, made, strict=True))}
        return Moments(*map(_flat, made))

    def _show_zeros(self) -> None:
        """Give the optimizer a state where there are no moments yet, into which others may load what was saved.

        `torch.distributed.checkpoint` makes a step of zeros for that.
        """
        optimizer = self._optimizer()
        if optimizer is not None and not optimizer.state:
            for spec in self.adamw.specs.values():
                self._zeros(spec)

    def adopt(self) -> None:
        super().adopt()
        optimizer = self._optimizer()
        assert optimizer is not None
        held = {name: optimizer.state[p] for name, p in self.named.items() if p in optimizer.state}
        if not begun(held.values()):
            held = {}
        moments = {name: Moments(*(_flat(state[field]) for field in FIELDS)) for name, state in held.items()}
        self.adamw.adopt(moments, max((state["step"] for state in held.values()), default=0))

    def state_dict(self) -> StateDict:
        if self._adamw is not None:
            self._adamw.check_whole()
        return super().state_dict()

    def rebuild(self, comm: Comm, *, joining: bool = False) -> Rebuilt:
        rebuilt = super().rebuild(comm, joining=joining)
        self.adamw.comm = transport.of(comm)
        self.adamw.spread(transport.of(comm), rebuilt)
        optimizer = self._optimizer()
        if optimizer is not None:
            for name in self.adamw.moments:
                optimizer.state[self.named[name]]["step"] = self.adamw.step
        return rebuilt

    def prepare_state(self, state: State) -> Prepared:
        prepared = super().prepare_state(state)

        def commit() -> None:
            prepared.commit()
            self._whole = None
            self.adopt()

        return Prepared(prepared.common, commit)


def rule_of(group: Mapping[str, Any]) -> AdamWRule:
    """Return the settings of a group.

    Raises:
        InvalidInputError: one of them cannot be used.
    """
    rate = group["lr"]
    if isinstance(rate, torch.Tensor) and rate.numel() == 1:
        rate = rate.item()
    return AdamWRule.of(rate, group["betas"], group["eps"], group["weight_decay"])


def begun(states: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether states of parameters have moments; not if they are zeros, as before the first gradient."""
    return any(state["step"] or bool(local(state["exp_avg_sq"]).any()) for state in states)


def _flat(tensor: torch.Tensor) -> Array:
    """Return the elements of a contiguous tensor, or of its shard, as a flat array of NumPy or CuPy: a view."""
    flat = local(tensor).view(-1)
    if flat.device.type == "cpu":
        return flat.numpy()
    import cupy

    array: Array = cupy.from_dlpack(flat)
    return array
