"""The exchange of a `SparseAdamW` of PyTorch: pushes gradients, and applies sums by `sparsecomm.optimizers.adamw`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from sparsecomm import transport
from sparsecomm.backends.adamw import Moments
from sparsecomm.errors import InvalidInputError
from sparsecomm.optimizers.adamw import EXCHANGE, AdamWRule, LazyAdamW, read_moments
from sparsecomm.reducer import Rebuilt, Step
from sparsecomm.reducer.bucket import TensorSpec
from sparsecomm.reducer.schedule import Schedule
from sparsecomm.states.loading import Prepared
from sparsecomm.states.schema import State, StateDict
from sparsecomm.tensors.arrays import Array, from_host
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.torch.exchange import Exchange
from sparsecomm.torch.parameters import NamedParameters
from sparsecomm.torch.shards import gradient_of, is_sharded, local
from sparsecomm.transport import Comm

__all__ = ["UNSUPPORTED", "AdamWExchange", "has_moments", "rule_of"]

FIELDS = ("exp_avg", "exp_avg_sq", "last_step")  # of a parameter's state, beside "step"
UNSUPPORTED = ("amsgrad", "foreach", "capturable", "differentiable", "fused")  # options of torch.optim.AdamW


class AdamWExchange(Exchange):
    """The gradients of the parameters of a `SparseAdamW`, and the steps that their sums make.

    The moments are the optimizer's state. This module is compiled, as `Exchange`.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, named: NamedParameters, density: Schedule, **settings: Any
    ) -> None:
        """Check the arguments: a `SparseAdamW`, and the rest as in `Exchange`."""
        super().__init__(named, density, **{**EXCHANGE, **settings})
        self._optimizer, self._skip_nonfinite = weakref.ref(optimizer), True
        self._adamw: LazyAdamW | None = None
        self._weights: dict[str, torch.Tensor] | None = None  # contiguous, while a step changes them

    @property
    def adamw(self) -> LazyAdamW:
        """The moments and the arithmetic."""
        if self._adamw is None:
            self._adamw = LazyAdamW(self._contiguous(), self.reducer, transport.transport_of(self.comm), self._zeros)
        return self._adamw

    def _contiguous(self) -> dict[str, torch.Tensor]:
        return {name: local(parameter).contiguous() for name, parameter in self.named.items()}

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, which must be alive."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    # -- a step -------------------------------------------------------------------------------------------------------

    def exchange(self, scale: float = 1.0, *, drop: bool = False) -> None:
        """Sum all gradients, unless backward passes have done so. Collective.

        Args:
            scale: a factor of the gradients.
            drop: leave out the gradients of this rank.
        """
        if self.exchanged:
            return
        gradients = {name: None if drop else self._mine(name, gradient_of(p)) for name, p in self.named.items()}
        self._begin_step()
        begun = self.adamw.begin(gradients, self._rules(), scale)
        if not self.reducer.pending:
            super()._end_opening()
        if begun:
            for name, gradient in gradients.items():
                if not self.reducer.parts(name):
                    self.adamw.push(name, gradient, self._rules()[name], scale)
            self.wait()
        else:
            self.show_zeros()
            self._pass, self._passed, self.exchanged = None, 0, True
            self._tell_scaler()

    def apply(self) -> None:
        """Update the parameters by the latest exchange, once. After an interrupt, call it again: it goes on."""
        last = self.reducer.last
        if not self.exchanged or last is None:
            self.exchanged = False
            return
        if self._weights is None:
            self._weights = self._contiguous()
        self.adamw.update(self._weights, self._rules(), last)
        for name, parameter in self.named.items():
            shard = local(parameter)
            if shard.data_ptr() != self._weights[name].data_ptr():
                shard.copy_(self._weights[name])  # outside the graph
        self._show_steps()
        self._weights, self.exchanged = None, False

    def _accept(self, sums: Mapping[str, SparseVector], largest: float) -> bool:
        """Return whether a step leaves all finite: see `LazyAdamW.accept`."""
        return self.adamw.accept(self._contiguous(), self._rules(), sums, largest)

    def synchronize(self) -> Step:
        """Exchange gradients, as a backward pass does at its end, or `SparseAdamW.step`."""
        self.check_whole()
        self.exchange(self._unscale())
        last = self.reducer.last
        return Step(self.reducer.step, self.reducer.density, usable=False) if last is None else last

    def push(self, name: str, gradient: torch.Tensor) -> None:
        """Push a gradient that a backward pass has made. Before there are moments, this is left to its end."""
        self._begin_step()
        if self.adamw.moments:
            self.adamw.push(name, self._mine(name, gradient), self._rules()[name], self._unscale())

    def _mine(self, name: str, gradient: torch.Tensor | None) -> torch.Tensor | None:
        return None if gradient is None else self._gradient(name, gradient).contiguous()

    def _begin_step(self) -> None:
        """Before the first push: check weights and moments, if that is due, and tell other ranks the settings."""
        if not self.reducer.pending:
            self._check_weights()
            self.reducer.label = self.adamw.label(self._rules())

    def _end_opening(self) -> None:
        """Leave this to `exchange` where first moments are still to be made."""
        if self.adamw.moments:
            super()._end_opening()

    def _ready(self, parameter: torch.Tensor) -> None:
        last = self.reducer.last if self.used else None
        if self.exchanged and last is not None and last.usable and self._pass is None and self.exchanging:
            raise InvalidInputError(
                "a backward pass has begun before step() applied what the one before it exchanged. Call step() after "
                "each pass, or use backward_passes_per_step, or no_sync() for passes that only accumulate"
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
        """Do nothing: residuals have no loss scale."""

    def _rules(self) -> dict[str, AdamWRule]:
        """Return the settings of each parameter."""
        rules: dict[str, AdamWRule] = {}
        for group in self.optimizer.param_groups:
            rule = rule_of(group)
            rules |= {self._names[id(p)]: rule for p in group["params"] if id(p) in self._names}
        return rules

    def _replicated(self) -> Mapping[str, object]:
        return {**self.named, **self.adamw.replicated()}

    # -- moments ------------------------------------------------------------------------------------------------------

    def _zeros(self, spec: TensorSpec) -> Moments:
        """Make the state of a parameter."""
        parameter = self.named[spec.name]
        real = torch.float64 if parameter.dtype is torch.float64 else torch.float32
        made = [_zeros_like(parameter, dtype) for dtype in (real, real, torch.int32)]
        self.optimizer.state[parameter] = {"step": _step(0), **dict(zip(FIELDS, made, strict=True))}
        return Moments(*map(_flat, made))

    def _show_steps(self) -> None:
        for name in self.adamw.moments:
            self.optimizer.state[self.named[name]]["step"] = _step(self.adamw.steps[name])

    def show_zeros(self) -> bool:
        """Give the optimizer a state before there are moments, into which a saved one may be loaded.

        `torch.distributed.checkpoint` makes a step of zeros, at a rate of 0, for that.

        Returns:
            Whether there are no moments.
        """
        if not self.adamw.moments and not self.optimizer.state:
            for spec in self.adamw.specs.values():
                self._zeros(spec)
        return not self.adamw.moments

    def load_moments(self, saved: Mapping[torch.Tensor, Any]) -> None:
        """Replace the optimizer's state by a saved one, by parameter. That of `torch.optim.AdamW` will do, too.

        Raises:
            InvalidInputError: it does not fit. The state has changed in part.
        """
        if not has_moments(saved.values()):
            return
        if lacking := [name for name, parameter in self.named.items() if not saved.get(parameter)]:
            raise InvalidInputError(f"state: {lacking[0]} has no moments, and others have; expected all, or none")
        for name, spec in self.adamw.specs.items():
            state = saved[self.named[name]]
            fields = {field: _host(state.get(key)) for field, key in zip(Moments._fields, FIELDS, strict=True)}
            step = float(state["step"])
            found, count = read_moments({**fields, "step": int(step) if step.is_integer() else step}, spec)
            for ours, theirs in zip(self._zeros(spec), found, strict=True):
                ours[:] = from_host(theirs, ours)
            self.optimizer.state[self.named[name]]["step"] = _step(count)

    def adopt(self) -> None:
        super().adopt()
        state = self.optimizer.state
        held = {name: state[p] for name, p in self.named.items() if p in state}
        if not has_moments(held.values()):
            held = {}
        moments = {name: Moments(*(_flat(its[field]) for field in FIELDS)) for name, its in held.items()}
        self.adamw.adopt(moments, {name: int(its["step"]) for name, its in held.items()})

    def state_dict(self) -> StateDict:
        if self._adamw is not None:
            self._adamw.check_whole()
        return super().state_dict()

    def rebuild(self, comm: Comm, *, joining: bool = False) -> Rebuilt:
        rebuilt = super().rebuild(comm, joining=joining)
        self.adamw.comm = transport.transport_of(comm)
        self.adamw.spread(transport.transport_of(comm), rebuilt)
        self._show_steps()
        return rebuilt

    def prepare_state(self, state: State) -> Prepared:
        prepared = super().prepare_state(state)

        def commit() -> None:
            prepared.commit()
            self._weights = None
            self.adopt()

        return Prepared(prepared.common, commit)


def rule_of(group: Mapping[str, Any]) -> AdamWRule:
    """Return the settings of a group.

    Raises:
        InvalidInputError: one of them cannot be used.
    """
    for name in UNSUPPORTED:
        if group.get(name):
            raise InvalidInputError(f"{name}={group[name]!r} is not supported by SparseAdamW; leave it out")
    rate = group["lr"]
    if isinstance(rate, torch.Tensor) and rate.numel() == 1:
        rate = rate.item()
    return AdamWRule.of(rate, group["betas"], group["eps"], group["weight_decay"], group.get("maximize", False))


def has_moments(states: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether states of parameters have moments. Zeros, as before the first gradient, are none."""
    return any(state and (float(state["step"]) or bool(local(state["exp_avg_sq"]).any())) for state in states)


def _zeros_like(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return contiguous zeros. In host memory NumPy allocates them, because it asks Linux for huge pages."""
    if parameter.device.type == "cpu" and not is_sharded(parameter):
        return torch.from_numpy(np.zeros(tuple(parameter.shape), str(dtype).removeprefix("torch.")))
    return torch.zeros_like(parameter.detach(), dtype=dtype, memory_format=torch.contiguous_format)


def _step(count: int) -> torch.Tensor:
    return torch.tensor(float(count), dtype=torch.float32, device="cpu")


def _host(tensor: torch.Tensor | None) -> Array | None:
    """Return a saved tensor, or its shard, as an array in host memory."""
    if tensor is None:
        return None  # which only "last_step" may be
    host = local(tensor).cpu()
    return (host.float() if host.is_floating_point() and host.itemsize < 4 else host).numpy()


def _flat(tensor: torch.Tensor) -> Array:
    """Return the elements of a contiguous tensor, or of its shard, as a flat array of NumPy or CuPy: a view."""
    flat = local(tensor).view(-1)
    if flat.device.type == "cpu":
        return flat.numpy()
    import cupy

    array: Array = cupy.from_dlpack(flat)
    return array
