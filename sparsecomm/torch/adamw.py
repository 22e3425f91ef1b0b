"""`SparseAdamW` for PyTorch, which converts tensors and lets `LazyAdamW` make the steps."""

from __future__ import annotations

import copy
import operator
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypedDict

import numpy as np
import torch
from torch._compile import _disable_dynamo  # `torch.compiler.disable` imports torch._dynamo: seconds

from sparsecomm.backends.adamw import Moments
from sparsecomm.checks import to_bool, with_options
from sparsecomm.errors import InvalidInputError, did_you_mean
from sparsecomm.optimizers.adamw import DENSITY, OPTIONS, AdamWRule, LazyAdamW, read_moments
from sparsecomm.reducer import Rebuilt, Step
from sparsecomm.reducer.options import OnStep, Schedule
from sparsecomm.signals import deferred
from sparsecomm.states.loading import reading
from sparsecomm.states.schema import State, StateDict
from sparsecomm.tensors import interop
from sparsecomm.tensors.arrays import Array
from sparsecomm.tensors.interop import from_host
from sparsecomm.torch.autograd import AutogradExchange
from sparsecomm.torch.exchange import GradientExchange, is_only_making_state
from sparsecomm.torch.optimizer import Loss, SparseOptimizer
from sparsecomm.torch.parameters import NamedParameters, is_sharded, local, model_of
from sparsecomm.transport import Comm, transport_of
from sparsecomm.wire import WireName

if TYPE_CHECKING:
    from typing_extensions import Unpack

NamedGroups: TypeAlias = "NamedParameters | Iterable[dict[str, Any]]"
FIELDS = ("exp_avg", "exp_avg_sq", "last_step")  # `Moments` in a parameter's state, beside "step"
UNSUPPORTED = ("amsgrad", "foreach", "capturable", "differentiable", "fused")  # options of torch.optim.AdamW

_ADVICE = "make a new SparseAdamW, with all groups, on all ranks"


class AdamWOptions(TypedDict, total=False):
    """Keyword arguments that `SparseAdamW` passes on to its `sparsecomm.Reducer`, and to the checks of weights."""

    comm: Comm
    wire: WireName
    bucket_bytes: int | None
    check_weights_every: int | None
    on_step: OnStep | None


class SparseAdamW(SparseOptimizer):
    """A replacement for `torch.optim.AdamW` on slow links: it exchanges gradients itself, in 1/42 of the bytes.

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

    A parameter has the state of `torch.optim.AdamW` (``step``, ``exp_avg``, ``exp_avg_sq``) and ``last_step``, an int32
    tensor with the step of each weight's last update. Between steps, a program may change, replace or delete what is in
    ``optimizer.state``, on all ranks alike: the next step uses it. If a state is deleted, or its ``exp_avg_sq`` is
    changed in place, the residual of the parameter is dropped. To load a state of `torch.optim.AdamW`, call
    ``residuals_apart()`` before ``load_state_dict()``.

    Args:
        named_parameters: ``model.named_parameters()``; or groups, dictionaries with such pairs under "params" and
            their own settings, for example ``weight_decay=0`` for biases and norms.
        lr, betas, eps, weight_decay, maximize: as in `torch.optim.AdamW`, also by group. ``lr`` may be a tensor, which
            is read in each step. ``lr * weight_decay`` must be below 1, and ``eps`` above 0.
        amsgrad, foreach, capturable, differentiable, fused: not supported; true values raise an error.
        density: the share of the entries that is sent and received: a float in (0, 1], or a function of the step
            number.
        dense_steps, comm, wire, bucket_bytes, on_step: as in `sparsecomm.Reducer`.
        overlap: exchange during backward passes. Then do not change gradients after ``backward()``, accumulate them
            under `no_sync`, and do not use a scaler.
        check_weights_every: as in `SparseState`; moments are compared as well.

    Raises:
        InvalidInputError: an argument is not supported.
    """

    _exchange: AdamWExchange

    @with_options(AdamWOptions, GradientExchange.__init__)
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
        dense_steps: int | None = None,
        overlap: bool = False,
        **options: Unpack[AdamWOptions],
    ) -> None:
        defaults: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        defaults |= {"amsgrad": amsgrad, "maximize": maximize, "foreach": foreach, "capturable": capturable}
        defaults |= {"differentiable": differentiable, "fused": fused}
        AdamWRule.of(*settings_of(defaults))
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
        if unknown := sorted(options.keys() - AdamWOptions.__annotations__.keys()):
            known = [*defaults, "density", "dense_steps", "overlap", *AdamWOptions.__annotations__]
            raise InvalidInputError(
                f"{unknown[0]} is not an option of SparseAdamW; expected some of {', '.join(known)}"
                f"{did_you_mean(unknown[0], known)}"
            )
        super().__init__(groups, defaults)
        self._exchange = AdamWExchange(self, named, density, dense_steps=dense_steps, **options)
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
            WeightMismatchError: weights or moments differ between ranks.
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

    def _load_own(self, state_dict: State) -> None:
        """Load groups by PyTorch, but states here: PyTorch would convert moments to the dtype of the weights."""
        saved, groups = copy.deepcopy((state_dict["state"], state_dict["param_groups"]))
        torch.optim.Optimizer.load_state_dict(self, {"state": {}, "param_groups": groups})
        for ours, its in zip(self.param_groups, groups, strict=True):
            for p, i in zip(ours["params"], its["params"], strict=True):
                if entry := saved.get(i):
                    self.state[p] = self._exchange.usable_state(p, entry)


def _groups_of(named_parameters: Any) -> tuple[list[dict[str, Any]], list[tuple[str, torch.nn.Parameter]]]:
    """Return groups as PyTorch takes them, and all names with their parameters."""
    if isinstance(named_parameters, Iterable) and not isinstance(named_parameters, Mapping):
        named_parameters = list(named_parameters)
    by_group, groups, named = named_parameters, [], []
    if not (isinstance(by_group, list) and by_group and all(isinstance(each, dict) for each in by_group)):
        by_group = [{"params": by_group}]
    for group in by_group:
        pairs = interop.named(group.get("params"), "named_parameters")
        groups.append({**group, "params": [parameter for _, parameter in pairs]})
        named += pairs
    return groups, named


def settings_of(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the arguments of `AdamWRule.of` for a group."""
    for name in UNSUPPORTED:
        if group.get(name):
            raise InvalidInputError(f"{name}={group[name]!r} is not supported by SparseAdamW; leave it out")
    rate = group["lr"]
    if isinstance(rate, torch.Tensor) and rate.numel() == 1:
        rate = rate.item()
    betas = tuple(group["betas"]) if isinstance(group["betas"], list) else group["betas"]
    return rate, betas, group["eps"], group["weight_decay"], group.get("maximize", False)


@deferred
class AdamWExchange(AutogradExchange):
    """The exchange of a `SparseAdamW`. Its moments are tensors in the optimizer's state."""

    always_skips_nonfinite = True

    def __init__(self, optimizer: SparseAdamW, named: NamedParameters, density: Schedule, **options: Any) -> None:
        super().__init__(named, density, dense_below=OPTIONS["dense_below"], **options)
        self._optimizer = weakref.ref(optimizer)
        self._adamw: LazyAdamW | None = None
        self._weights: dict[str, torch.Tensor] | None = None  # contiguous copies or views while a step changes them
        self._replicated = self.with_frozen(self.named)
        self._adopted: dict[str, Seen] = {}  # by name, the state that each tensor's moments share memory with
        self._by_group: list[tuple[AdamWRule, list[int]]] = []  # rules and parameters' ids; `_rules` was made from them
        self._rules: dict[str, AdamWRule] = {}

    @property
    def adamw(self) -> LazyAdamW:
        if self._adamw is None:
            self._adamw = LazyAdamW(self._contiguous(), self.reducer, self._check_every, self._new_state)
        return self._adamw

    def _contiguous(self) -> dict[str, torch.Tensor]:
        return {name: self._local(parameter).contiguous() for name, parameter in self.named.items()}

    @property
    def optimizer(self) -> SparseAdamW:
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    # -- a step -------------------------------------------------------------------------------------------------------

    def exchange(self, scale: float = 1.0, *, drop: bool = False) -> None:
        """Sum all ranks' gradients times ``scale``, unless backward passes have summed them. Collective.

        With ``drop``, this rank contributes no gradients.
        """
        if self.exchanged:
            return
        rules = self.rules()
        self.adopt_state(changeable=not self.reducer.pending)
        gradients = {name: None if drop else self._shard(name, self._gradient_of(p)) for name, p in self.named.items()}
        weights = self._contiguous()
        self.ending_step(partial(self.adamw.exchange, gradients, weights, self._replicated, rules, scale))
        if self.adamw.missing:
            self.make_empty_state()
            self._reset(exchanged=True)

    def apply(self) -> None:
        """Update the parameters by the latest exchange. After an interrupt, call it again to continue."""
        last = self.reducer.last
        if not self.exchanged or last is None:
            self.exchanged = False
            return
        if self._weights is None:
            self._weights = self._contiguous()
        self.adamw.update(self._weights, self.rules(), last)
        for name, parameter in self.named.items():
            shard = self._local(parameter)
            if shard.data_ptr() != self._weights[name].data_ptr():
                shard.copy_(self._weights[name])  # not recorded by autograd
        self._write_steps()
        self._weights, self.exchanged = None, False

    def synchronize(self) -> Step:
        """Exchange gradients: called by the user, or with ``overlap`` at the end of a backward pass."""
        self.check_consistent()
        self.exchange()
        return self.reducer.last or Step(self.reducer.step, self.reducer.density, usable=False)

    def push(self, name: str, gradient: torch.Tensor, *, absent: bool = False) -> None:
        """Push a gradient during a backward pass. If moments are missing, leave it to `synchronize`."""
        if not self.reducer.pending:
            self.rules()
            self.adopt_state()
        rules = self._rules
        self.adamw.open(self._replicated, rules)
        if not self.adamw.missing:
            self.adamw.push(name, self._shard(name, gradient), rules[name])

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
        by_group = [(AdamWRule.of(*settings_of(group)), [*map(id, group["params"])]) for group in groups]
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

        ``changeable``: whether it may have changed. Otherwise gradients have been exchanged in its units.
        """
        adamw, state = self.adamw, self.optimizer.state
        for name, parameter in self.named.items():
            entry, before = state.get(parameter), self._adopted.get(name)
            if before is None if not entry else before is not None and before.is_in(self._seen(entry)):
                continue
            if not changeable:
                raise InvalidInputError(
                    f"optimizer.state: the state of {name} changed after gradients were exchanged and before step(); "
                    "change it only after step(), on all ranks"
                )
            moments, step = None, 0
            if entry and _has_moments(entry):
                entry |= self.usable_state(parameter, entry)
                moments, step = Moments(*(_flat(entry[field]) for field in FIELDS)), int(entry["step"])
            known = moments is not None and before is not None and before.units_are_known()
            adamw.replace(name, moments, step, keep_residual=known)
            self._note(name)

    def usable_state(self, parameter: torch.Tensor, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return the checked state of a parameter, also of dense AdamW, with moments that steps can use."""
        name = self.names[id(parameter)]
        if self.named.get(name) is not parameter or not _has_moments(entry):
            return dict(entry)
        before = self._adopted.get(name)
        with reading(f"optimizer.state of {name}", "the state of torch.optim.AdamW for this parameter"):
            hosts = [_host(entry.get(key)) for key in FIELDS]
            found: dict[str, Any] = dict(zip(Moments._fields, hosts, strict=True))
            step = float(entry["step"])
            last, known = found["last"], before is not None and before.tensors[-1] is entry.get("last_step")
            if last is not None and known and step.is_integer():  # the program may have changed the step alone
                moved = int(step) - self.adamw.steps[name]
                found["last"] = np.where(last > 0, (last + moved).clip(0, max(0, int(step))), 0)
            found["step"] = int(step) if step.is_integer() else step
        moments, count = read_moments(found, self.adamw.specs[name])
        used = {**entry, "step": _step_tensor(count)}
        for key, array, dtype in zip(FIELDS, moments, _dtypes(parameter), strict=True):
            usable = _is_usable(entry.get(key), parameter, dtype)
            if not usable:
                used[key] = _zeros_like(parameter, dtype)
            if not usable or key == "last_step":
                flat = _flat(used[key])
                flat[:] = from_host(array, flat)
        return used

    def _note(self, name: str) -> None:
        """Note the state of a parameter, to notice when it changes."""
        self._adopted.pop(name, None)
        if entry := self.optimizer.state.get(self.named[name]):
            self._adopted[name] = self._seen(entry)

    def _seen(self, entry: Mapping[str, Any]) -> Seen:
        tensors: list[Any] = [entry.get("step"), *map(entry.get, FIELDS)]
        shards = [local(t) for t in tensors if isinstance(t, torch.Tensor)] if self.sharded else tensors
        try:
            return Seen(tensors, [(t.data_ptr(), t._version) for t in shards])
        except (AttributeError, RuntimeError):  # not a tensor, or one of inference mode
            return Seen(tensors, [])

    def _new_state(self, name: str) -> Moments:
        """Set a parameter's state in the optimizer to zeros, and return its moments."""
        parameter = self.named[name]
        tensors = [_zeros_like(parameter, dtype) for dtype in _dtypes(parameter)]
        self.optimizer.state[parameter] = {"step": _step_tensor(0), **dict(zip(FIELDS, tensors, strict=True))}
        self._note(name)
        return Moments(*map(_flat, tensors))

    def _write_steps(self) -> None:
        """Write the numbers of steps into the state, without a new version of the tensors."""
        for name in self.adamw.moments:
            step: torch.Tensor = self.optimizer.state[self.named[name]]["step"]
            step.numpy()[...] = self.adamw.steps[name]

    def make_empty_state(self) -> None:
        """Make a state of zeros if there is none, for PyTorch to load into."""
        if not self.optimizer.state:
            for name in self.named:
                self._new_state(name)

    def on_state_loaded(self) -> None:
        super().on_state_loaded()
        self._weights, self._adopted = None, {}
        self.adamw.adopt({}, {})  # residuals are in the units of the state that is adopted now
        self.adopt_state()

    def state_dict(self) -> StateDict:
        if self._adamw is not None:
            if self._weights is None and self._optimizer() is not None and not self.reducer.pending:
                self.adopt_state()
                self.adamw.convert_residuals(self.rules())
            self._adamw.check_complete()
        return super().state_dict()

    def rebuild(self, comm: Comm, *, joining: bool = False) -> Rebuilt:
        rebuilt = super().rebuild(comm, joining=joining)
        self.adopt_state()
        self.adamw.broadcast(transport_of(comm), rebuilt)
        self._write_steps()
        return rebuilt


class Seen(NamedTuple):
    """The state of a parameter as it was seen last."""

    tensors: list[Any]  # the step, and `FIELDS`
    marks: list[tuple[int, int]]  # address and version of each tensor; PyTorch counts changes in place as versions

    def is_in(self, other: Seen) -> bool:
        """Return whether nothing has changed since."""
        return self.marks == other.marks and all(map(operator.is_, self.tensors, other.tensors))

    def units_are_known(self) -> bool:
        """Return whether the second moments were not changed in place. They may have been replaced."""
        return bool(self.marks) and local(self.tensors[2])._version == self.marks[2][1]


def _has_moments(entry: Mapping[str, Any]) -> bool:
    """Return whether a parameter's state has moments. A state of zeros, before the first gradient, does not count."""
    squares = entry.get("exp_avg_sq")
    return not isinstance(squares, torch.Tensor) or bool(entry.get("step", 1)) or bool(local(squares).any())


def _dtypes(parameter: torch.Tensor) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Return the dtypes of `FIELDS`."""
    real = torch.float64 if parameter.dtype is torch.float64 else torch.float32
    return real, real, torch.int32


def _is_usable(tensor: Any, parameter: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether steps can change a tensor of a parameter's state in place."""
    if not isinstance(tensor, torch.Tensor) or is_sharded(tensor) != is_sharded(parameter) or tensor.is_inference():
        return False
    shard = local(tensor)
    fits = (shard.dtype, shard.device, shard.layout) == (dtype, local(parameter).device, torch.strided)
    return fits and shard.is_contiguous() and not shard.is_neg()


def _zeros_like(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return contiguous zeros. NumPy allocates them in host memory, because it asks Linux for huge pages."""
    if parameter.device.type == "cpu" and not is_sharded(parameter):
        return torch.from_numpy(np.zeros(tuple(parameter.shape), str(dtype).removeprefix("torch.")))
    return torch.zeros_like(parameter.detach(), dtype=dtype, memory_format=torch.contiguous_format)


def _step_tensor(count: int) -> torch.Tensor:
    return torch.tensor(float(count), dtype=torch.float32, device="cpu")


def _host(tensor: Any) -> Array | None:
    """Return a tensor of a state, or this rank's shard, as an array in host memory; ``None`` if it is missing."""
    if tensor is None:
        return None
    host = local(tensor).to_dense().cpu().resolve_neg()
    return (host.float() if host.is_floating_point() and host.itemsize < 4 else host).numpy()


def _flat(tensor: torch.Tensor) -> Array:
    """Return a contiguous tensor, or this rank's shard, as a flat NumPy or CuPy array that shares its memory."""
    flat = local(tensor).view(-1)
    if flat.device.type == "cpu":
        return flat.numpy()
    import cupy

    array: Array = cupy.from_dlpack(flat)
    return array
