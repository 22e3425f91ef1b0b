"""Changes that programs make to an optimizer between two steps, and training with these changes.

`WAYS` come from published code: resets and pruning as in ReLoRA, dormant neurons, shared memory as in A3C,
offloading as in trainers of large models, averages of weights, snapshots, and schedulers of settings. The oracle is
`torch.optim.AdamW` on the mean of all ranks' gradients, with the same change.
"""

from __future__ import annotations

import collections
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from sparsecomm.torch import SparseAdamW

SHAPES = {"matrix": (120, 34), "bias": (14,), "kernel": (5, 3, 4, 2), "number": ()}  # each rank owns a part
MOMENTS = "exp_avg", "exp_avg_sq"
STEPS, CHANGED, LATER = 8, 4, 2  # steps, step before which the change is made, steps until `Way.later`
TOLERANCE = 1e-5  # relative, for weights and moments at density 1.0


@dataclass
class Training:
    """A model and its optimizer: `SparseAdamW`, or the dense one of the oracle."""

    sparse: bool
    model: nn.ParameterDict
    optimizer: Any
    snapshot: Any = None  # deep copies of weights and optimizer from before a step
    memo: dict[str, Any] = field(default_factory=dict)  # passed from a change to its `later`
    random: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(5))  # the same on all ranks

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.values())

    @property
    def states(self) -> list[dict[str, Any]]:
        return [self.optimizer.state[p] for p in self.parameters]

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def make_whole(self) -> None:
        """Replace moments with whole tensors, as after loading a state of dense AdamW."""
        if self.sparse:
            transport = self.optimizer.reducer.transport
            state = [self.optimizer.consolidate_state_dict(to) for to in range(transport.size)][transport.rank]
            for group, saved_group in zip(self.groups, state["param_groups"], strict=True):
                for parameter, i in zip(group["params"], saved_group["params"], strict=True):
                    if i in state["state"]:
                        self.optimizer.state[parameter] = state["state"][i]

    def each_moment(self) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
        """Yield each moment as (state of its parameter, key, value)."""
        for state in self.states:
            for key in MOMENTS:
                yield state, key, state[key]

    def replace(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace each moment with a new tensor."""
        for state, key, value in self.each_moment():
            state[key] = change(value)


Change = Callable[[Training], Any]


@dataclass
class Way:
    change: Change
    later: Change | None = None  # another change, `LATER` steps after the first
    at: int = CHANGED  # step before which the change is made
    refusable: bool = False  # all ranks may raise an InvalidInputError instead
    whole: bool = False  # whether the change needs whole moments


# -- changes of several lines -----------------------------------------------------------------------------------------


def in_place(change: Callable[[torch.Tensor], Any]) -> Change:
    """Return a change of each moment in place."""
    return lambda t: [change(value) for _, _, value in t.each_moment()]


def new(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Return a change that replaces each moment with a new tensor."""
    return lambda t: t.replace(change)


def states(change: Callable[[dict[str, Any]], Any]) -> Change:
    return lambda t: [change(state) for state in t.states]


def step(make: Callable[[], Any]) -> Change:
    return states(lambda state: state.update(step=make()))


def setting(**values: Any) -> Change:
    return lambda t: [group.update(copy.deepcopy(values)) for group in t.groups]


def data(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda t: [setattr(parameter, "data", change(parameter.data)) for parameter in t.parameters]


def stored(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda t: setattr(t.model[name], "data", change(t.model[name].data))


def at_random(t: Training, value: torch.Tensor) -> torch.Tensor:
    return torch.rand(value.shape, generator=t.random) > 0.5


def empty_state_loaded(t: Training) -> None:
    if t.sparse:
        t.optimizer.residuals_apart()
    t.optimizer.load_state_dict({"state": {}, "param_groups": t.optimizer.state_dict()["param_groups"]})


def states_made(t: Training) -> None:
    for p in t.parameters:
        moments = {key: torch.full_like(p, 0.25).detach().share_memory_() for key in MOMENTS}
        t.optimizer.state[p].update(step=torch.tensor(0.0), **moments)


def parts_of_one(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return half of each value, as parts of one flat tensor."""
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors]) * 0.5
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def moments_in_one(t: Training) -> None:
    for key in MOMENTS:
        for state, part in zip(t.states, parts_of_one([state[key] for state in t.states]), strict=True):
            state[key] = part


def in_another_type(change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Give moments another dtype; PyTorch cannot mix dtypes in a step."""
    return lambda t: t.replace(lambda value: change(value) if t.sparse else change(value).float())


def as_reversed(value: torch.Tensor) -> torch.Tensor:
    """Return half of a tensor's values, with dimensions in reverse order in memory."""
    strides = [math.prod(value.shape[:i]) for i in range(value.ndim)]
    return torch.empty_strided(value.shape, strides).copy_(value * 0.5)


def rolled_back(t: Training) -> None:
    weights, state = t.snapshot
    t.model.load_state_dict(weights)
    t.optimizer.load_state_dict(state)


def dense_state_loaded(t: Training) -> None:
    dense = trained(range(2), steps=CHANGED).optimizer.state_dict()
    if t.sparse:
        t.optimizer.residuals_apart()
    t.optimizer.load_state_dict(dense)


def groups_swapped(t: Training) -> None:
    first, second = t.groups
    first["params"], second["params"] = second["params"], first["params"]


def group_split(t: Training) -> None:
    t.groups.append({**t.groups[0], "params": [t.groups[0]["params"].pop()], "lr": 0.05})


def frozen(t: Training) -> None:
    t.model["matrix"].requires_grad_(False)
    t.model["matrix"].grad = None


def averages_swapped_in(t: Training) -> None:
    t.memo["data"] = [parameter.data for parameter in t.parameters]
    data(lambda value: value * 0.5)(t)


def averages_swapped_out(t: Training) -> None:
    for parameter, value in zip(t.parameters, t.memo["data"], strict=True):
        parameter.data = value


def all_of(dtype: torch.dtype) -> Change:
    return lambda t: [t.model.to(dtype), t.replace(lambda value: value.to(dtype))]


def parameter_replaced(t: Training) -> None:
    """A new parameter gets the state of the old one, as in Gaussian splatting."""
    old, new = t.model["matrix"], nn.Parameter(t.model["matrix"].detach() * 0.5)
    t.optimizer.state[new] = t.optimizer.state.pop(old)
    params = t.groups[0]["params"]
    params[next(i for i, parameter in enumerate(params) if parameter is old)] = new
    t.model["matrix"] = new


def rows_removed(t: Training) -> None:
    """The parameter object stays, as when attention heads are pruned."""
    matrix = t.model["matrix"]
    matrix.data, matrix.grad = matrix.data[:16], None
    state = t.optimizer.state[matrix]
    for key in MOMENTS:
        state[key] = state[key][:16]


# -- all changes ------------------------------------------------------------------------------------------------------

GROUPS = {
    "parameters_swapped_between_groups": Way(groups_swapped),
    "one_parameter_moved": Way(lambda t: t.groups[1]["params"].append(t.groups[0]["params"].pop(0))),
    "a_group_split": Way(group_split),
}
WEIGHTS = {
    "data_replaced": Way(data(lambda value: value * 0.5)),
    "weights_in_shared_memory": Way(lambda t: t.model.share_memory()),
    "averages_swapped_in_and_out": Way(averages_swapped_in, later=averages_swapped_out),
    "channels_last": Way(stored("kernel", lambda value: value.to(memory_format=torch.channels_last))),
}
WAYS: dict[str, Way] = {
    "moments_zeroed_in_place": Way(in_place(torch.Tensor.zero_)),
    "moments_replaced_by_zeros": Way(new(torch.zeros_like)),
    "step_zeroed_in_place": Way(states(lambda state: state["step"].zero_())),
    "step_set_forward": Way(states(lambda state: state["step"].add_(1000))),
    "step_as_python_int": Way(lambda t: step(lambda: 2 if t.sparse else torch.tensor(2.0))(t)),  # PyTorch refuses ints
    "states_deleted": Way(lambda t: [t.optimizer.state.pop(p) for group in t.groups for p in group["params"]]),
    "one_state_deleted": Way(lambda t: t.optimizer.state.pop(t.model["matrix"])),
    "states_cleared": Way(lambda t: t.optimizer.state.clear()),
    "a_new_defaultdict": Way(lambda t: setattr(t.optimizer, "state", collections.defaultdict(dict))),
    "an_empty_state_dict_loaded": Way(empty_state_loaded),
    "setstate": Way(
        lambda t: t.optimizer.__setstate__({"state": collections.defaultdict(dict), "param_groups": t.groups})
    ),
    "states_made_before_the_first_step": Way(states_made, at=0),
    "pruned_in_place": Way(lambda t: in_place(lambda value: value.mul_(at_random(t, value)))(t), whole=True),
    "offloaded_twice": Way(new(lambda value: value.clone() * 0.5), later=new(lambda value: value.clone() * 0.5)),
    "moments_in_shared_memory": Way(in_place(lambda value: value.share_memory_().mul_(0.5))),
    "in_one_flat_tensor": Way(moments_in_one, whole=True),
    "moments_left_in_bfloat16": Way(in_another_type(torch.Tensor.bfloat16), refusable=True),
    "moments_of_other_strides": Way(new(as_reversed), whole=True),
    "its_own_state_loaded": Way(lambda t: t.optimizer.load_state_dict(copy.deepcopy(t.optimizer.state_dict()))),
    "rolled_back": Way(rolled_back),
    "state_of_a_dense_optimizer_loaded": Way(dense_state_loaded),
    "no_weight_decay": Way(setting(weight_decay=0)),
    "maximize": Way(setting(maximize=True), later=setting(maximize=False)),
    "learning_rate_as_a_tensor": Way(
        setting(lr=torch.tensor(0.03)), later=lambda t: [group["lr"].fill_(0.01) for group in t.groups]
    ),
    "all_settings": Way(setting(lr=0.03, betas=(0.5, 0.9), eps=1e-2, weight_decay=0.5), later=setting(lr=0.01)),
    "nothing": Way(lambda t: None),
    "frozen_for_two_steps": Way(frozen, later=lambda t: t.model["matrix"].requires_grad_(True)),
    "all_in_float64": Way(all_of(torch.float64), refusable=True),
    "a_parameter_replaced_by_another": Way(parameter_replaced, refusable=True),
    "rows_removed": Way(rows_removed, refusable=True, whole=True),
    **GROUPS,
    **WEIGHTS,
}


# -- training ---------------------------------------------------------------------------------------------------------


def gradients(step: int, rank: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(1000 * step + rank)
    sizes = {"matrix": 1.0, "bias": 1e-3, "kernel": 0.1, "number": 50.0}
    sign = 1 if step < CHANGED else -0.25  # the change of sign reveals remembered gradients
    return {name: sign * sizes[name] * (torch.randn(s, generator=random) + 0.5) for name, s in SHAPES.items()}


def trained(ranks: Sequence[int], way: Way = Way(lambda t: None), steps: int = STEPS, **options: Any) -> Training:  # noqa: B008
    """Train on the mean of the gradients of ``ranks``, and return the training.

    ``options`` are those of `SparseAdamW`; without any, PyTorch's optimizer trains.
    """
    random = torch.Generator().manual_seed(1)
    model = nn.ParameterDict()
    for name, shape in SHAPES.items():
        model[name] = nn.Parameter(torch.randn(shape, generator=random))
    groups: list[dict[str, Any]] = [
        {"params": [(name, model[name]) for name in names], "lr": lr, "weight_decay": decay}
        for names, lr, decay in ((("matrix", "kernel"), 0.02, 0.1), (("bias", "number"), 0.01, 0.0))
    ]
    if options:
        t = Training(True, model, SparseAdamW(groups, **options))
    else:
        groups = [group | {"params": [parameter for _, parameter in group["params"]]} for group in groups]
        t = Training(False, model, torch.optim.AdamW(groups))
    for step in range(steps):
        if step == 2:
            t.snapshot = copy.deepcopy((t.model.state_dict(), t.optimizer.state_dict()))
        if step == way.at:
            if way.whole:
                t.make_whole()
            way.change(t)
            t.memo["state"] = copy.deepcopy(as_saved(t))
        if way.later is not None and step == way.at + LATER:
            way.later(t)
        t.optimizer.zero_grad()
        backward(t.model, [gradients(step, rank) for rank in ranks])
        t.optimizer.step()
    t.memo["end"] = as_saved(t)
    return t


def backward(model: nn.ParameterDict, by_rank: list[dict[str, torch.Tensor]]) -> None:
    """Make a backward pass whose gradients are the mean over ranks."""
    terms = []
    for name, parameter in model.items():
        if parameter.requires_grad:
            mean = (torch.stack([gradients[name] for gradients in by_rank]).sum(0) / len(by_rank)).to(parameter.dtype)
            mean = mean[: parameter.shape[0]] if parameter.ndim else mean
            terms.append((parameter * mean).sum().double())
    torch.stack(terms).sum().backward()  # type: ignore[no-untyped-call]


def as_saved(t: Training) -> list[dict[str, torch.Tensor]]:
    """Return each parameter's step, moments and added values as in a checkpoint; zeros if there are none.

    Rank 0 has the moments of all ranks; other ranks return no states.
    """
    saved = t.optimizer.consolidate_state_dict() if t.sparse else t.optimizer.state_dict()
    if saved is None:
        return []
    numbers: dict[torch.Tensor, int] = {}
    for group, saved_group in zip(t.groups, saved["param_groups"], strict=True):
        numbers.update(zip(group["params"], saved_group["params"], strict=True))
    states = []
    for parameter in t.parameters:
        state = {"step": 0.0, **{key: torch.zeros(parameter.shape) for key in MOMENTS}}
        state |= saved["state"].get(numbers[parameter], {})
        own = "last_step", "compensation"
        states.append({key: torch.as_tensor(state[key]).detach().double() for key in state if key not in own})
    return states


def differences(mine: Training, oracle: Training) -> list[str]:
    """Compare final weights, and checkpoints after the change and at the end; return the differences."""
    problems = []
    pairs = {f"{name} of the weights": (mine.model[name].detach(), p.detach()) for name, p in oracle.model.items()}
    for when, (states, expected_states) in {
        "after the change": (mine.memo["state"], oracle.memo["state"]),
        "at the end": (mine.memo["end"], oracle.memo["end"]),
    }.items():
        for name, own, other in zip(SHAPES, states, expected_states, strict=False):
            if own.keys() != other.keys():
                problems.append(f"the state of {name} {when} has {sorted(own)}, not {sorted(other)}")
            pairs |= {f"{key} of {name} {when}": (own[key], value) for key, value in other.items() if key in own}
    for what, (value, expected) in pairs.items():
        size = max(float(expected.double().abs().max()), 1e-12)
        if value.shape != expected.shape:
            problems.append(f"{what}: shape {tuple(value.shape)}, not {tuple(expected.shape)}")
        elif not (error := float((value.double() - expected.double()).abs().max()) / size) <= TOLERANCE:
            problems.append(f"{what}: {error:.1e} away")
    return problems
