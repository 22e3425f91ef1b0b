"""`SparseAdamW` for PyTorch, which converts tensors and lets `LazyAdamW` make the steps."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from torch._compile import _disable_dynamo  # `torch.compiler.disable` imports torch._dynamo: seconds

from sparsecomm.backends.adamw import Moments
from sparsecomm.checks import quote, to_bool, to_int
from sparsecomm.errors import InvalidInputError
from sparsecomm.optimizers.adamw import LazyAdamW, filled
from sparsecomm.optimizers.options import RULE, AdamWOptions, AdamWRule, AdamWSettings, settings_of
from sparsecomm.optimizers.state import read_moments
from sparsecomm.options import Unpack, with_options
from sparsecomm.reducer import Rebuilt, Reducer, Step
from sparsecomm.reducer.reducer import PreparedState
from sparsecomm.signals import deferred
from sparsecomm.states.loading import Prepared, Undo, reading
from sparsecomm.states.schema import State, StateDict
from sparsecomm.tensors import interop
from sparsecomm.torch.autograd import AutogradExchange
from sparsecomm.torch.exchange import is_only_making_state
from sparsecomm.torch.moments import (
    FIELDS,
    SeenState,
    has_moments,
    host_array,
    is_usable,
    moments_in,
    step_tensor,
    without_moments,
    zeros,
)
from sparsecomm.torch.optimizer import Loss, SparseOptimizer
from sparsecomm.torch.parameters import NamedParameters, local, model_of
from sparsecomm.transport import Comm

NamedGroups: TypeAlias = "NamedParameters | Iterable[dict[str, Any]]"
UNSUPPORTED = ("amsgrad", "foreach", "capturable", "differentiable", "fused")  # options of torch.optim.AdamW

_ADVICE = "make a new SparseAdamW, with all groups, on all ranks"


class SparseAdamW(SparseOptimizer):
    """A replacement for `torch.optim.AdamW` on slow links: it exchanges gradients itself, in 1/41 of the bytes.

        optimizer = sparsecomm.torch.SparseAdamW(model.named_parameters(), lr=1e-3)
        for x, y in data:                      # different data on each rank
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()                   # collective

    Use the learning rate and betas that you use with dense gradients: docs/reports/adamw.md compares both. By default a
    step updates about 9 % of the weights. A weight that was last updated 11 steps ago makes 11 steps of AdamW at once.
    At ``density=1.0`` this is `torch.optim.AdamW` with dense, exact sums. ``p.grad`` stays the gradient of this rank.
    Use the model itself, not `DistributedDataParallel`, which would sum gradients a second time (or call `keep_local`
    on it).

    By default, `step` exchanges gradients. Before it, you may accumulate gradients over several backward passes, and
    clip them (each rank by its own norm). You may use a `torch.amp.GradScaler` as usual: a rank whose gradients have
    overflowed contributes nothing to that step, and only its own scaler lowers its scale.

    Each weight has one owner, the rank that keeps its state: that of `torch.optim.AdamW` (``step``, ``exp_avg``,
    ``exp_avg_sq``), ``last_step``, an int32 tensor with the step of each weight's last update, and with several ranks
    ``compensation``, the rounding error of each weight. So 16-bit weights train as if float32 copies were kept.
    ``optimizer.state[p]`` has this rank's part: in the parameter's shape if the rank owns all of it, otherwise flat.
    Between steps, a program may change, replace or delete the state, on all ranks alike: the next step uses it. It may
    also put in the moments of whole parameters. To load a state of `torch.optim.AdamW`, call ``residuals_apart()``
    before ``load_state_dict()``; to make one, call `consolidate_state_dict`.

    Args:
        named_parameters: ``model.named_parameters()``; or groups, dictionaries with such pairs under "params" and
            their own settings, for example ``weight_decay=0`` for biases and norms.
        lr, betas, eps, weight_decay, maximize: as in `torch.optim.AdamW`, also by group. ``lr`` may be a tensor, which
            is read in each step. ``lr * weight_decay`` must be below 1, and ``eps`` above 0.
        amsgrad, foreach, capturable, differentiable, fused: not supported; true values raise an error.
        comm: as in `sparsecomm.Reducer`.
        overlap: exchange during backward passes, with the settings of that time. Then do not change gradients, weights
            or settings between ``backward()`` and `step`, accumulate under `no_sync`, and do not use a scaler.
        options: as in `sparsecomm.SparseAdamW`.

    Raises:
        InvalidInputError: an argument is not supported.
    """

    _exchange: AdamWExchange

    @with_options(AdamWOptions, AdamWRule, AdamWSettings)
    def __init__(
        self,
        named_parameters: NamedGroups,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        comm: Comm = None,
        overlap: bool = False,
        **options: Unpack[AdamWOptions],
    ) -> None:
        settings, rule_options = settings_of(SparseAdamW, options)
        defaults: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **rule_options}
        defaults |= {"amsgrad": amsgrad, "foreach": foreach, "capturable": capturable}
        defaults |= {"differentiable": differentiable, "fused": fused}
        _rule_of(defaults)
        model = model_of(named_parameters)  # before its generator ends
        groups, named = _groups_of(named_parameters)
        if named and all(name.startswith("module.") for name, _ in named):
            warnings.warn(
                "all names of parameters begin with 'module.', as in DistributedDataParallel, which sends dense "
                "gradients in every backward pass. SparseAdamW exchanges gradients by itself: pass "
                "model.named_parameters() of the plain model, and call that model",
                stacklevel=2,
            )
        self.overlap = to_bool("overlap", overlap)
        super().__init__(groups, defaults)
        self._exchange = AdamWExchange(self, named, settings, comm)
        self._exchange.model = model
        self._exchange.rules()
        self._exchange.begin(by_hooks=overlap)

    # `torch.amp.GradScaler` leaves it to `step` to divide gradients by the scale.
    _step_supports_amp_scaling = True

    @_disable_dynamo
    def step(self, closure: Callable[[], Loss] | None = None) -> Loss:
        """Exchange gradients, unless backward passes have done so, and update the parameters. Collective.

        If a gradient of some rank is not finite, no rank changes anything.

        Raises:
            WeightMismatchError: weights or units differ between ranks.
            InvalidInputError: a setting or a state is not supported, or has changed since gradients were exchanged.
            SparseCommError: as in `sparsecomm.Reducer.wait`. The gradients are in the residuals.
        """
        exchange = self._exchange
        scale, overflow = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)  # of a GradScaler
        if not exchange.attached:
            raise InvalidInputError("step after remove(), which ended the exchange; create a new SparseAdamW")
        if self.overlap and overflow is not None:
            raise InvalidInputError("overlap=True does not support a GradScaler; leave overlap out, or use bfloat16")
        exchange.check_unchanged()
        exchange.check_consistent()
        exchange.rules()
        loss = None
        if closure is not None:
            if not self.overlap:
                exchange.exchanged = False
            with torch.enable_grad():
                loss = closure()
        if is_only_making_state():
            exchange.make_empty_state()
            return loss
        if exchange.exchanged:
            exchange.adopt_state(changeable=False)
        exchange.exchange(1.0 if scale is None else 1 / float(scale), drop=overflow is not None and bool(overflow))
        exchange.apply()
        return loss

    def state_dict(self) -> StateDict:
        """Return this rank's state: see `SparseOptimizer`. If residuals are kept apart, so are moments."""
        saved = super().state_dict()
        if self._residuals_apart:
            saved["state"] = {i: without_moments(entry) for i, entry in saved["state"].items()}
        return saved

    def consolidate_state_dict(self, to: int = 0) -> StateDict | None:
        """Return a state with whole moments on rank ``to``, and ``None`` on other ranks. Collective, between steps.

        `torch.optim.AdamW` can load it. So can this optimizer, on all ranks and on any number of them, after
        ``residuals_apart()``.
        """
        exchange, size = self._exchange, self.reducer.transport.size
        if (target := to_int(to)) is None or target >= size:
            raise InvalidInputError(f"to={quote(to)}: must be a rank from 0 to {size - 1}")
        if exchange.reducer.pending:
            raise InvalidInputError("consolidate_state_dict in the middle of a step; call step() first")
        states = exchange.consolidated(target)
        if exchange.reducer.transport.rank != target:
            return None
        saved = torch.optim.Optimizer.state_dict(self)
        return {**saved, "state": {i: states.get(id(entry), entry) for i, entry in saved["state"].items()}}

    def _load_own(self, state_dict: State, prepared: PreparedState | None = None) -> None:
        """Load groups by PyTorch, but states here: PyTorch would convert moments to the dtype of the weights.

        A state without moments, whose moments are apart, leaves moments as they are.
        """
        saved, groups = copy.deepcopy((state_dict["state"], state_dict["param_groups"]))
        before = self.state
        torch.optim.Optimizer.load_state_dict(self, {"state": {}, "param_groups": groups})
        for group, saved_group in zip(self.param_groups, groups, strict=True):
            for p, i in zip(group["params"], saved_group["params"], strict=True):
                if entry := saved.get(i):
                    moments = before.get(p, {}) if prepared is None and entry.keys().isdisjoint(FIELDS) else {}
                    self.state[p] = self._exchange.usable_state(p, {**entry, **moments}, prepared)


def _groups_of(named_parameters: Any) -> tuple[list[dict[str, Any]], list[tuple[str, torch.nn.Parameter]]]:
    """Return the groups for PyTorch, and the names and parameters of all groups."""
    if isinstance(named_parameters, Iterable) and not isinstance(named_parameters, Mapping):
        named_parameters = list(named_parameters)
    by_group, groups, named = named_parameters, [], []
    if not (isinstance(by_group, list) and by_group and all(isinstance(group, dict) for group in by_group)):
        by_group = [{"params": by_group}]
    for group in by_group:
        pairs = interop.named(group.get("params"), "named_parameters")
        groups.append({**group, "params": [parameter for _, parameter in pairs]})
        named += pairs
    return groups, named


def _rule_of(group: Mapping[str, Any]) -> AdamWRule:
    """Return the settings of a group, checked."""
    for name in UNSUPPORTED:
        if group.get(name):
            raise InvalidInputError(f"{name}={group[name]!r} is not supported by SparseAdamW; leave it out")
    settings = {name: group[name] for name in RULE if name in group}
    if isinstance(settings["lr"], torch.Tensor) and settings["lr"].numel() == 1:
        settings["lr"] = settings["lr"].item()
    return AdamWRule(**settings)


@deferred
class AdamWExchange(AutogradExchange):
    """The exchange of a `SparseAdamW`. The moments of this rank's parts are tensors in the optimizer's state."""

    always_skips_nonfinite = True
    compared = ("step",)

    def __init__(self, optimizer: SparseAdamW, named: NamedParameters, settings: AdamWSettings, comm: Comm) -> None:
        options = settings.reducer_options
        del options["skip_nonfinite"]  # `always_skips_nonfinite` implies it
        super().__init__(named, comm=comm, check_weights_every=settings.check_weights_every, **options)
        self._optimizer = weakref.ref(optimizer)
        self._adamw: LazyAdamW | None = None
        self._weights: dict[str, torch.Tensor] | None = None  # contiguous copies or views while a step changes them
        self._replicated = self.with_frozen(self.named)
        self._adopted: dict[str, SeenState] = {}  # by name, the state that each tensor's moments share memory with
        self._by_group: list[tuple[AdamWRule, list[int]]] = []  # rules and parameters' ids; `_rules` was made from them
        self._rules: dict[str, AdamWRule] = {}
        self._open_rules = self._rules  # of the step that was exchanged last

    @property
    def adamw(self) -> LazyAdamW:
        if self._adamw is None:
            self._adamw = LazyAdamW(self._contiguous(), super().reducer, self._check_every, self._new_state)
        return self._adamw

    @property
    def reducer(self) -> Reducer:
        return self.adamw.reducer

    @property
    def optimizer(self) -> SparseAdamW:
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    # -- a step -------------------------------------------------------------------------------------------------------

    def exchange(self, scale: float = 1.0, *, drop: bool = False) -> None:
        """Exchange all ranks' gradients times ``scale``, unless backward passes have done so. Collective.

        With ``drop``, this rank contributes no gradients.
        """
        if self.exchanged:
            return
        rules = self._rules_of_step()
        gradients = {name: None if drop else self._shard(name, self._gradient_of(p)) for name, p in self.named.items()}
        weights = self._contiguous()
        self.ending_step(partial(self.adamw.exchange, gradients, weights, self._replicated, rules, scale))
        if self.adamw.missing:
            self.make_empty_state()
            self._reset(exchanged=True)

    def apply(self) -> None:
        """Update the parameters by the latest exchange. After an interrupt, call it again to continue."""
        last = self.reducer.last
        if self.exchanged and last is not None:
            if last.usable and last is not self.adamw.done and self.rules() != self._open_rules:
                raise InvalidInputError(
                    "param_groups: settings changed after the gradients were exchanged, when owners had made this step "
                    "with the old ones; change lr and other settings before the backward pass. Set the old values to "
                    "complete this step"
                )
            self._update(last)
        self.exchanged = False

    def _update(self, last: Step) -> None:
        if self._weights is None:
            self._weights = self._contiguous()
        self.adamw.update(self._weights, last)
        for name, parameter in self.named.items():
            shard = self._local(parameter)
            if shard.data_ptr() != self._weights[name].data_ptr():
                shard.copy_(self._weights[name])  # not recorded by autograd
        self._write_steps()
        self._weights = None

    def synchronize(self) -> Step:
        """Exchange gradients: called by the user, or with ``overlap`` at the end of a backward pass."""
        self.check_consistent()
        self.exchange()
        return self.reducer.last or Step(self.reducer.step, self.reducer.density, usable=False)

    def push(self, name: str, gradient: torch.Tensor, *, absent: bool = False) -> None:
        """Push a gradient during a backward pass. If moments are missing, leave it to `synchronize`."""
        if not self.reducer.pending:
            self.adamw.open(self._contiguous(), self._replicated, self._rules_of_step())
        if not self.adamw.missing:
            self.adamw.push(name, self._shard(name, gradient), self._open_rules[name])

    def _rules_of_step(self) -> dict[str, AdamWRule]:
        """Adopt the optimizer's state. Return the rules of the open step, or of the next one if none is open."""
        pending = self.reducer.pending
        self.adopt_state(changeable=not pending)
        if not pending:
            self._open_rules = self.rules()
        return self._open_rules

    def _shard(self, name: str, gradient: torch.Tensor | None) -> torch.Tensor | None:
        return None if gradient is None else self._local_gradient(name, gradient).contiguous()

    def _leave_to_step(self) -> None:
        """Do not exchange here: `step` makes the same exchange."""

    def _gradient_ready(self, parameter: torch.Tensor) -> None:
        last = self.reducer.last if self.connected else None
        if self.exchanged and last is not None and last.usable and self._pass_id is None and self.exchanging:
            raise InvalidInputError(
                "a backward pass began before step() applied the previous exchange. Call step() after each backward "
                "pass, or use no_sync() for passes that only accumulate gradients"
            )
        super()._gradient_ready(parameter)

    def rules(self) -> dict[str, AdamWRule]:
        """Return the checked rule of each parameter. Programs and schedulers change groups between steps."""
        groups = self.optimizer.param_groups
        by_group = [(_rule_of(group), [*map(id, group["params"])]) for group in groups]
        if by_group != self._by_group:
            rules: dict[str, AdamWRule] = {}
            for group, (rule, _) in zip(groups, by_group, strict=True):
                for p in group["params"]:
                    name = self.names.get(id(p))
                    if name is None:
                        raise InvalidInputError(
                            f"param_groups: got a new parameter of shape {tuple(p.shape)}; {_ADVICE}"
                        )
                    if self.named.get(name) is p:  # not frozen
                        rules[name] = rule
            if missing := [name for name in self.named if name not in rules]:
                raise InvalidInputError(f"param_groups: {missing[0]} is in no group any more; {_ADVICE}")
            self._rules, self._by_group = rules, by_group
        return self._rules

    # -- the state ----------------------------------------------------------------------------------------------------

    def adopt_state(self, *, changeable: bool = True) -> None:
        """Use the state in the optimizer, which programs change, replace and delete between steps.

        ``changeable``: whether it may have changed. Otherwise owners have made a step with it.
        """
        adamw, state = self.adamw, self.optimizer.state
        for name, parameter in self.named.items():
            entry, before = state.get(parameter), self._adopted.get(name)
            now = SeenState.of(entry, self.sharded) if entry else None
            same = before.equals(now) if before and now else before is now
            if same and (name in adamw.moments or not self._has_units(name)):
                continue
            if not changeable:
                raise InvalidInputError(
                    f"optimizer.state: the state of {name} changed after gradients were exchanged and before step(); "
                    "change it only after step(), on all ranks"
                )
            if entry and has_moments(entry):
                entry |= self.usable_state(parameter, entry)
                adamw.replace(name, moments_in(entry), int(entry["step"]))
            elif name in adamw.moments or self._has_units(name):
                adamw.replace(name, None, 0)
            self._note(name)

    def _has_units(self, name: str) -> bool:
        """Return whether units have begun, so that moments may begin with zeros."""
        return name in self.reducer.bucket(name).begun

    def usable_state(
        self, parameter: torch.Tensor, entry: Mapping[str, Any], prepared: PreparedState | None = None
    ) -> dict[str, Any]:
        """Return the checked state of a parameter, with this rank's part of the moments in tensors that steps can use.

        Args:
            parameter: a parameter of the optimizer.
            entry: its state, with moments of this rank's part or of the whole parameter, as of dense AdamW.
            prepared: the state of the reducer that is loaded with it. If `reshard` has made this state, it contains
                moments of whole parameters, which replace those in ``entry``.
        """
        name = self.names[id(parameter)]
        if self.named.get(name) is not parameter or not has_moments(entry):
            return dict(entry)
        spec, bucket = self.adamw.specs[name], prepared.buckets.by_name[name] if prepared else self.reducer.bucket(name)
        part = bucket.part(name, self.reducer.transport.rank)
        saved = prepared.fields["moments"].get(name, {}) if prepared else {}
        if saved and "part" not in saved:  # `reshard` has made them
            entry = without_moments(entry)
        else:
            saved = self._saved_moments(name, entry, tuple(saved.get("part", part)))
        eps = None if not spec.size or name in bucket.begun else self.rules()[name].eps
        moments, count, exponents = read_moments(saved, spec, part, eps)
        with self.adamw.on_stream(name):
            if exponents is not None:
                bucket.use_exponents(name, exponents)
            compensated = self.reducer.transport.size > 1 or moments.compensation is not None
            new = zeros(parameter, part[1] - part[0], compensated)
            unusable = {key: tensor for key, tensor in new.items() if not is_usable(entry.get(key), tensor)}
            used = {**entry, "step": step_tensor(count), **unusable}
            filled(moments_in(used), moments)
        return used

    def _saved_moments(self, name: str, entry: Mapping[str, Any], part: tuple[int, int]) -> dict[str, Any]:
        """Return a parameter's state as `read_moments` takes it: this rank's part, unless all tensors are whole."""
        before, shape = self._adopted.get(name), self.adamw.specs[name].shape
        with reading(f"optimizer.state of {name}", "the state of torch.optim.AdamW for this parameter"):
            hosts = [host_array(entry.get(key)) for key in FIELDS]
            if hosts[2] is not None and hosts[2].dtype.kind == "f":  # dense AdamW has loaded both, and updated neither
                hosts[2:] = None, None if hosts[3] is None else np.zeros_like(hosts[3])
            are_parts = any(host is not None and host.shape != shape for host in hosts)
            if are_parts:
                hosts = [h.reshape(-1)[slice(*part)] if h is not None and h.shape == shape else h for h in hosts]
            saved: dict[str, Any] = {"part": part} if are_parts else {}
            saved |= zip(Moments._fields, hosts, strict=True)
            step, last = float(entry["step"]), saved["last"]
            known = before is not None and before.tensors[3] is entry.get("last_step")
            if last is not None and known and step.is_integer():  # the program may have changed the step alone
                moved = int(step) - self.adamw.steps[name]
                saved["last"] = np.where(last > 0, (last + moved).clip(0, max(0, int(step))), 0)
            saved["step"] = int(step) if step.is_integer() else step
        return saved

    def _note(self, name: str) -> None:
        """Note the state of a parameter, to notice when it changes."""
        self._adopted.pop(name, None)
        if entry := self.optimizer.state.get(self.named[name]):
            self._adopted[name] = SeenState.of(entry, self.sharded)

    def _new_state(self, name: str, compensated: bool) -> Moments:
        """Set a parameter's state in the optimizer to zeros, and return its moments."""
        parameter, state, (begin, end) = self.named[name], self.optimizer.state, self.adamw.part(name)
        fields = zeros(parameter, end - begin, compensated)
        state[parameter] = {**without_moments(state[parameter]), "step": step_tensor(0), **fields}
        self._note(name)
        return moments_in(fields)

    def _write_steps(self) -> None:
        """Write the numbers of steps into the state, without a new version of the tensors."""
        for name in self.adamw.moments:
            step: torch.Tensor = self.optimizer.state[self.named[name]]["step"]
            step.numpy()[...] = self.adamw.steps[name]

    def make_empty_state(self) -> None:
        """Make states without moments if there are none, for PyTorch to load into."""
        if not self.optimizer.state:
            for name, parameter in self.named.items():
                self.optimizer.state[parameter] = {"step": step_tensor(0)}
                self._note(name)

    def on_state_loaded(self) -> None:
        super().on_state_loaded()
        self._weights, self._adopted = None, {}
        self.adamw.adopt({}, {})
        self.adopt_state()

    def state_dict(self) -> StateDict:
        """Return the reducer's state, with this rank's moments by name, which share memory with `optimizer.state`."""
        state = super().state_dict()
        if self._weights is None and self._optimizer() is not None:
            self.adopt_state()
        adamw = self.adamw
        adamw.check_complete()
        for name in adamw.moments:
            tensors = self._adopted[name].tensors[1:]  # the optimizer may be gone
            flat = [None if t is None else local(t).cpu().view(-1) for t in tensors]
            fields = dict(zip(Moments._fields, flat, strict=True))
            state["moments"][name] = {**fields, "step": adamw.steps[name], "part": list(adamw.parts[name])}
        return state

    def load_state_dict(self, state: State) -> None:
        """Load a state that `state_dict` returned, with its moments. Collective."""

        def prepare(undo: Undo) -> Prepared:
            prepared, states, loaded = self.prepare_state(state), self.optimizer.state, dict[str, dict[str, Any]]()
            for name, saved in prepared.fields["moments"].items():
                fields = {key: saved[field] for key, field in zip(FIELDS, Moments._fields, strict=True)}
                loaded[name] = self.usable_state(self.named[name], {**fields, "step": saved["step"]}, prepared)

            def commit() -> None:
                for name, parameter in self.named.items():
                    states[parameter] = {**without_moments(states.get(parameter, {})), **loaded.get(name, {})}
                prepared.commit()

            steps = {name: int(entry["step"]) for name, entry in loaded.items()}
            return Prepared({**prepared.common, "moments": steps}, commit)

        self.load_with(prepare, ["moments"])

    def rebuild(self, comm: Comm, *, joining: bool = False) -> Rebuilt:
        if self.connected:
            self.adopt_state(changeable=not self.exchanged)
            if self.exchanged and self.reducer.last is not None:
                self._update(self.reducer.last)  # before parts change
        rebuilt = self.adamw.rebuild(comm, partial(super().rebuild, comm, joining=joining))
        self._write_steps()
        return rebuilt

    def consolidated(self, to: int) -> dict[int, dict[str, Any]]:
        """Return states with whole moments on rank ``to``, by the ids of those in the optimizer. Collective."""
        self.rules()  # which checks that no parameter is missing
        self.adopt_state()
        adamw, transport, states = self.adamw, self.reducer.transport, dict[int, dict[str, Any]]()
        adamw.check_complete()
        for name in adamw.moments:
            parameter = self.named[name]
            entry = self.optimizer.state[parameter]
            with adamw.on_stream(name):
                moments, _ = adamw.gather(name, transport)
                if transport.rank == to:
                    tensors = zeros(parameter, adamw.specs[name].size, bool(moments.compensation.any()))
                    filled(moments_in(tensors), moments)
                    step = {"step": step_tensor(adamw.steps[name])}
                    states[id(entry)] = {**without_moments(entry), **tensors, **step}
        return states
