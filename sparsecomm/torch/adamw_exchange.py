"""The exchange of a `SparseAdamW` of PyTorch. It converts tensors; the steps are made by `LazyAdamW`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from sparsecomm import transport
from sparsecomm.backends.adamw import Moments
from sparsecomm.errors import InvalidInputError
from sparsecomm.optimizers.adamw import OPTIONS, LazyAdamW, read_moments
from sparsecomm.optimizers.rule import AdamWRule
from sparsecomm.reducer import Rebuilt, Step
from sparsecomm.reducer.bucket import TensorSpec
from sparsecomm.reducer.options import Schedule
from sparsecomm.signals import deferred
from sparsecomm.states.schema import StateDict
from sparsecomm.tensors.arrays import Array, from_host
from sparsecomm.torch.exchange import Exchange
from sparsecomm.torch.parameters import NamedParameters
from sparsecomm.torch.shards import gradient_of, is_sharded, local
from sparsecomm.transport import Comm

__all__ = ["UNSUPPORTED", "AdamWExchange", "rule_of"]

FIELDS = ("exp_avg", "exp_avg_sq", "last_step")  # of a parameter's state, beside "step"
UNSUPPORTED = ("amsgrad", "foreach", "capturable", "differentiable", "fused")  # options of torch.optim.AdamW


@deferred
class AdamWExchange(Exchange):
    """The exchange of the parameters of a `SparseAdamW`. The moments are the state of the optimizer."""

    always_skips_nonfinite = True

    def __init__(
        self, optimizer: torch.optim.Optimizer, named: NamedParameters, density: Schedule, **options: Any
    ) -> None:
        """Check the arguments: a `SparseAdamW`, and the rest as in `Exchange`."""
        super().__init__(named, density, dense_below=OPTIONS["dense_below"], **options)
        self._optimizer = weakref.ref(optimizer)
        self._adamw: LazyAdamW | None = None
        self._weights: dict[str, torch.Tensor] | None = None  # contiguous, while a step changes them

    @property
    def adamw(self) -> LazyAdamW:
        """The moments, and their steps."""
        if self._adamw is None:
            self._adamw = LazyAdamW(self._contiguous(), self.reducer, self._check_every, self._zeros)
        return self._adamw

    def _contiguous(self) -> dict[str, torch.Tensor]:
        return {name: local(parameter).contiguous() for name, parameter in self.named.items()}

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    # -- a step -------------------------------------------------------------------------------------------------------

    def exchange(self, scale: float = 1.0, *, drop: bool = False) -> None:
        """Sum all gradients, unless a backward pass has done so. Collective.

        Args:
            scale: a factor of the gradients.
            drop: leave out the gradients of this rank.
        """
        if self.exchanged:
            return
        gradients = {name: None if drop else self._mine(name, gradient_of(p)) for name, p in self.named.items()}

        def wait() -> Step:
            done = self.adamw.exchange(gradients, self._contiguous(), self._replicated, self._rules(), scale)
            return self._not_begun() if done is None else done

        self.ending_step(wait)
        if not self.adamw.moments:
            self.make_empty_state()
            self._reset(exchanged=True)

    def _not_begun(self) -> Step:
        return Step(self.reducer.step, self.reducer.density, usable=False)

    def apply(self) -> None:
        """Update the parameters by the latest exchange, once. After an interrupt, call it again to continue."""
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
        self._write_steps()
        self._weights, self.exchanged = None, False

    def synchronize(self) -> Step:
        """Exchange gradients, as `SparseAdamW.step` does, or the end of a backward pass with ``overlap``."""
        self.check_consistent()
        self.exchange()
        return self.reducer.last or self._not_begun()

    def push(self, name: str, gradient: torch.Tensor, *, absent: bool = False) -> None:
        """Push a gradient during a backward pass. Before there are moments, the end of the pass does it."""
        self.adamw.open(self._replicated, self._rules())
        if self.adamw.moments:
            self.adamw.push(name, self._mine(name, gradient), self._rules()[name])

    def _mine(self, name: str, gradient: torch.Tensor | None) -> torch.Tensor | None:
        return None if gradient is None else self._dense(name, gradient).contiguous()

    @deferred
    def _ready(self, parameter: torch.Tensor) -> None:
        last = self.reducer.last if self.used else None
        if self.exchanged and last is not None and last.usable and self._pass is None and self.exchanging:
            raise InvalidInputError(
                "a backward pass has begun before step() applied what the one before it exchanged. Call step() after "
                "each pass, or use no_sync() for passes that only accumulate gradients"
            )
        super()._ready(parameter)

    def _rules(self) -> dict[str, AdamWRule]:
        """Return the settings of each parameter."""
        rules: dict[str, AdamWRule] = {}
        for group in self.optimizer.param_groups:
            rule = rule_of(group)
            rules |= {self._names[id(p)]: rule for p in group["params"] if id(p) in self._names}
        return rules

    @property
    def _replicated(self) -> dict[str, object]:
        return self.with_frozen(self.named)

    # -- moments ------------------------------------------------------------------------------------------------------

    def _zeros(self, spec: TensorSpec) -> Moments:
        """Make the state of a parameter, and return its moments."""
        parameter = self.named[spec.name]
        real = torch.float64 if parameter.dtype is torch.float64 else torch.float32
        tensors = [_zeros_like(parameter, dtype) for dtype in (real, real, torch.int32)]
        self.optimizer.state[parameter] = {"step": _step(0), **dict(zip(FIELDS, tensors, strict=True))}
        return Moments(*map(_flat, tensors))

    def _write_steps(self) -> None:
        for name in self.adamw.moments:
            self.optimizer.state[self.named[name]]["step"] = _step(self.adamw.steps[name])

    def make_empty_state(self) -> bool:
        """Make a state of zeros before there are moments, into which a saved state may be loaded.

        `torch.distributed.checkpoint` makes a step of zeros, at a learning rate of 0, for that.

        Returns:
            Whether there are no moments.
        """
        if not self.adamw.moments and not self.optimizer.state:
            for spec in self.adamw.specs.values():
                self._zeros(spec)
        return not self.adamw.moments

    def load_moments(self, saved: Mapping[torch.Tensor, Any]) -> None:
        """Replace the optimizer's state by a saved state by parameter, also of `torch.optim.AdamW`.

        Raises:
            InvalidInputError: it does not fit. The state has changed in part.
        """
        if not _has_moments(saved.values()):
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
        self._weights = None
        state = self.optimizer.state
        states = {name: state[p] for name, p in self.named.items() if p in state}
        if not _has_moments(states.values()):
            states = {}
        moments = {name: Moments(*(_flat(its[field]) for field in FIELDS)) for name, its in states.items()}
        self.adamw.adopt(moments, {name: int(its["step"]) for name, its in states.items()})

    def state_dict(self) -> StateDict:
        if self._adamw is not None:
            self._adamw.check_complete()
        return super().state_dict()

    def rebuild(self, comm: Comm, *, joining: bool = False) -> Rebuilt:
        rebuilt = super().rebuild(comm, joining=joining)
        self.adamw.spread(transport.transport_of(comm), rebuilt)
        self._write_steps()
        return rebuilt


def rule_of(group: Mapping[str, Any]) -> AdamWRule:
    """Return the settings of a group.

    Raises:
        InvalidInputError: a setting is not supported.
    """
    for name in UNSUPPORTED:
        if group.get(name):
            raise InvalidInputError(f"{name}={group[name]!r} is not supported by SparseAdamW; leave it out")
    rate = group["lr"]
    if isinstance(rate, torch.Tensor) and rate.numel() == 1:
        rate = rate.item()
    return AdamWRule.of(rate, group["betas"], group["eps"], group["weight_decay"], group.get("maximize", False))


def _has_moments(states: Iterable[Mapping[str, Any]]) -> bool:
    """Return whether states of parameters have moments. States of zeros, as before the first gradient, have none."""
    return any(state and (float(state["step"]) or bool(local(state["exp_avg_sq"]).any())) for state in states)


def _zeros_like(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return contiguous zeros. In host memory NumPy allocates them, because it asks Linux for huge pages."""
    if parameter.device.type == "cpu" and not is_sharded(parameter):
        return torch.from_numpy(np.zeros(tuple(parameter.shape), str(dtype).removeprefix("torch.")))
    return torch.zeros_like(parameter.detach(), dtype=dtype, memory_format=torch.contiguous_format)


def _step(count: int) -> torch.Tensor:
    return torch.tensor(float(count), dtype=torch.float32, device="cpu")


def _host(tensor: torch.Tensor | None) -> Array | None:
    """Return a saved tensor, or its shard, as an array in host memory; ``None`` for a missing "last_step"."""
    if tensor is None:
        return None
    host = local(tensor).cpu()
    return (host.float() if host.is_floating_point() and host.itemsize < 4 else host).numpy()


def _flat(tensor: torch.Tensor) -> Array:
    """Return a contiguous tensor, or its shard, as a flat array of NumPy or CuPy without a copy."""
    flat = local(tensor).view(-1)
    if flat.device.type == "cpu":
        return flat.numpy()
    import cupy

    array: Array = cupy.from_dlpack(flat)
    return array
