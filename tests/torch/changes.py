"""Changes that programs make to an optimizer between two steps, and trainings with them, in a process that is one rank.

`WAYS` are found in other people's code: resets and pruning as in ReLoRA, dormant neurons, shared memory as in A3C,
offloading as in trainers of large models, averages of weights, snapshots, and schedulers of settings. The oracle is
`torch.optim.AdamW` on the mean of all ranks' gradients, with the same change.
"""

from __future__ import annotations

import collections
import copy
import faulthandler
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sparsecomm.errors import InvalidInputError
from sparsecomm.torch import SparseAdamW

SHAPES = {"matrix": (120, 34), "bias": (14,), "kernel": (5, 3, 4, 2), "number": ()}  # each rank owns some of it
MOMENTS = "exp_avg", "exp_avg_sq"
STEPS, CHANGED = 12, 6  # the change is made before this step
DENSITIES = 1.0, 0.09
LIMIT = 60  # seconds for a way
TOLERANCE = 1e-6  # of weights and moments at density 1.0


@dataclass
class Training:
    """A model and its optimizer: `SparseAdamW`, or the dense one of the oracle."""

    sparse: bool
    model: nn.ParameterDict
    optimizer: Any
    snapshot: Any = None  # of weights and optimizer, deep copies from before step 3
    memo: dict[str, Any] = field(default_factory=dict)  # from a change to its `later`
    random: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(5))  # the same on all ranks

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.values())

    @property
    def states(self) -> list[dict[str, Any]]:
        return [self.optimizer.state[p] for p in self.parameters]

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups  # type: ignore[no-any-return]

    def make_whole(self) -> None:
        """Replace moments by whole tensors, as after loading a state of dense AdamW. Programs may put them there."""
        if self.sparse:
            transport = self.optimizer.reducer.transport
            whole = [self.optimizer.consolidate_state_dict(to) for to in range(transport.size)][transport.rank]
            for group, its in zip(self.groups, whole["param_groups"], strict=True):
                for parameter, i in zip(group["params"], its["params"], strict=True):
                    if i in whole["state"]:
                        self.optimizer.state[parameter] = whole["state"][i]

    def each_moment(self) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
        """Yield the state of a parameter, with the key and the value of each moment."""
        for state in self.states:
            for key in MOMENTS:
                yield state, key, state[key]

    def replace(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Put new tensors in the places of all moments."""
        for state, key, value in self.each_moment():
            state[key] = change(value)


@dataclass
class Way:
    change: Callable[[Training], None]
    whole: bool = False  # whether the change needs whole moments
    at: int = CHANGED  # the step before which it is made
    later: Callable[[Training], None] | None = None  # made three steps after it
    refusable: bool = False  # all ranks may raise an InvalidInputError instead


WAYS: dict[str, Way] = {}


def way(**options: Any) -> Callable[[Callable[[Training], None]], Callable[[Training], None]]:
    def add(change: Callable[[Training], None]) -> Callable[[Training], None]:
        WAYS[change.__name__] = Way(change, **options)
        return change

    return add


@way()
def nothing(t: Training) -> None:
    pass


# -- resets -----------------------------------------------------------------------------------------------------------


@way()
def moments_zeroed_in_place(t: Training) -> None:
    for _, _, value in t.each_moment():
        value.zero_()


@way()
def moments_replaced_by_zeros(t: Training) -> None:
    t.replace(torch.zeros_like)


@way()
def one_moment_replaced(t: Training) -> None:
    for state in t.states:
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])


@way()
def moments_and_step_replaced(t: Training) -> None:
    t.replace(torch.zeros_like)
    for state in t.states:
        state["step"] = torch.tensor(0.0)


@way()
def step_zeroed_in_place(t: Training) -> None:
    for state in t.states:
        state["step"].zero_()


@way()
def step_set_forward(t: Training) -> None:
    for state in t.states:
        state["step"] += 1000


@way()
def step_as_int64(t: Training) -> None:
    for state in t.states:
        state["step"] = torch.tensor(2)


@way()
def step_as_python_int(t: Training) -> None:
    for state in t.states:
        state["step"] = 2 if t.sparse else torch.tensor(2.0)  # PyTorch refuses it


@way()
def states_deleted(t: Training) -> None:
    for group in t.groups:
        for parameter in group["params"]:
            del t.optimizer.state[parameter]


@way()
def one_state_deleted(t: Training) -> None:
    del t.optimizer.state[t.model["matrix"]]


@way()
def one_state_left(t: Training) -> None:
    for name, parameter in t.model.items():
        if name != "kernel":
            t.optimizer.state.pop(parameter)


@way()
def states_cleared(t: Training) -> None:
    t.optimizer.state.clear()


@way()
def each_state_cleared(t: Training) -> None:
    for state in t.states:
        state.clear()


@way()
def each_state_replaced_by_an_empty_one(t: Training) -> None:
    for parameter in t.parameters:
        t.optimizer.state[parameter] = {}


@way()
def a_new_defaultdict(t: Training) -> None:
    t.optimizer.state = collections.defaultdict(dict)


@way()
def a_plain_dict(t: Training) -> None:
    t.optimizer.state = dict(t.optimizer.state)


@way()
def an_empty_state_dict_loaded(t: Training) -> None:
    if t.sparse:
        t.optimizer.residuals_apart()
    t.optimizer.load_state_dict({"state": {}, "param_groups": t.optimizer.state_dict()["param_groups"]})


@way()
def setstate(t: Training) -> None:
    t.optimizer.__setstate__({"state": collections.defaultdict(dict), "param_groups": t.groups})


@way(at=0)
def states_made_before_the_first_step(t: Training) -> None:
    for parameter in t.parameters:
        state = t.optimizer.state[parameter]
        state["step"] = torch.tensor(0.0)
        for key in MOMENTS:
            state[key] = torch.full_like(parameter, 0.25).detach().share_memory_()  # type: ignore[no-untyped-call]


# -- changes in part --------------------------------------------------------------------------------------------------


@way(whole=True)
def pruned_at_random_in_place(t: Training) -> None:
    for _, _, value in t.each_moment():
        value.mul_(torch.rand(value.shape, generator=t.random) > 0.5)


@way(whole=True)
def pruned_by_magnitude_in_place(t: Training) -> None:
    for _, _, value in t.each_moment():
        value.mul_(value.abs() > value.abs().flatten().quantile(0.5))


@way(whole=True)
def pruned_into_new_tensors(t: Training) -> None:
    t.replace(lambda value: value * (torch.rand(value.shape, generator=t.random) > 0.5))


@way(whole=True)
def rows_zeroed(t: Training) -> None:
    for key in MOMENTS:
        t.optimizer.state[t.model["matrix"]][key][3:9] = 0


@way()
def moments_zeroed_through_state_dict(t: Training) -> None:
    for key in MOMENTS:
        t.optimizer.state_dict()["state"][0][key].zero_()


@way(whole=True)
def rows_permuted(t: Training) -> None:
    order = torch.randperm(len(t.model["matrix"]), generator=t.random)
    t.model["matrix"].data = t.model["matrix"].data[order]
    state = t.optimizer.state[t.model["matrix"]]
    for key in MOMENTS:
        state[key] = state[key][order]


@way()
def moments_scaled(t: Training) -> None:
    for state in t.states:
        state["exp_avg"].mul_(0.5)
        state["exp_avg_sq"] = state["exp_avg_sq"] * 0.25


@way()
def moments_of_a_dense_optimizer(t: Training) -> None:
    other = torch.optim.AdamW(copies := [nn.Parameter(p.detach().clone()) for p in t.parameters], lr=0.01)
    for _ in range(4):
        for copied in copies:
            copied.grad = torch.randn(copied.shape, generator=t.random)
        other.step()
    for parameter, copied in zip(t.parameters, copies, strict=True):
        t.optimizer.state[parameter] = other.state[copied]


@way(whole=True)
def a_key_added(t: Training) -> None:
    for state in t.states:
        state["average"] = state["exp_avg"].clone()


# -- other memory, dtypes and layouts ---------------------------------------------------------------------------------


@way()
def offloaded_and_back(t: Training) -> None:
    for state in t.states:
        for key, value in state.items():
            state[key] = value.to("cpu", copy=True)
    t.replace(lambda value: torch.from_numpy(value.numpy().copy()) * 0.5)


@way(later=lambda t: t.replace(lambda value: value.clone() * 0.5))
def offloaded_twice(t: Training) -> None:
    t.replace(lambda value: value.clone() * 0.5)


@way()
def data_of_moments_replaced(t: Training) -> None:
    for _, _, value in t.each_moment():
        value.data = value.data * 0.5


@way()
def data_of_moments_freed_and_back(t: Training) -> None:
    kept = [(value, value.data * 0.5) for _, _, value in t.each_moment()]
    for value, _ in kept:
        value.data = torch.empty(0)
    for value, data in kept:
        value.data = data


@way()
def moments_in_shared_memory(t: Training) -> None:
    for _, _, value in t.each_moment():
        value.share_memory_().mul_(0.5)  # type: ignore[no-untyped-call]


@way(whole=True)
def in_one_flat_tensor(t: Training) -> None:
    for key in MOMENTS:
        flat = torch.cat([state[key].reshape(-1) for state in t.states]) * 0.5
        for state, part in zip(t.states, flat.split([state[key].numel() for state in t.states]), strict=True):
            state[key] = part.view(state[key].shape)


@way()
def cast_to_bfloat16_and_back(t: Training) -> None:
    t.replace(torch.Tensor.bfloat16)
    t.replace(torch.Tensor.float)


@way(refusable=True)
def moments_left_in_bfloat16(t: Training) -> None:
    t.replace(torch.Tensor.bfloat16)
    if not t.sparse:  # PyTorch cannot mix dtypes in a step
        t.replace(torch.Tensor.float)


@way(refusable=True)
def moments_left_in_float64(t: Training) -> None:
    t.replace(lambda value: value.double() * 0.5)
    if not t.sparse:
        t.replace(torch.Tensor.float)


def _strides(shape: torch.Size) -> list[int]:
    """Return the strides of a tensor whose dimensions lie in memory in reverse order."""
    return [math.prod(shape[:i]) for i in range(len(shape))]


@way(whole=True)
def moments_of_other_strides(t: Training) -> None:
    t.replace(lambda value: torch.empty_strided(value.shape, _strides(value.shape)).copy_(value * 0.5))


@way()
def moments_that_require_gradients(t: Training) -> None:
    t.replace(lambda value: (value * 0.5).detach().requires_grad_())
    t.replace(torch.Tensor.detach)


# -- checkpoints and snapshots ----------------------------------------------------------------------------------------


@way()
def its_own_state_loaded(t: Training) -> None:
    t.optimizer.load_state_dict(copy.deepcopy(t.optimizer.state_dict()))


@way()
def rolled_back(t: Training) -> None:
    weights, state = t.snapshot
    t.model.load_state_dict(weights)
    t.optimizer.load_state_dict(state)


@way()
def state_of_a_dense_optimizer_loaded(t: Training) -> None:
    dense = trained(AsOracle(P=2, steps=CHANGED)).optimizer.state_dict()
    if t.sparse:
        t.optimizer.residuals_apart()
    t.optimizer.load_state_dict(dense)


@way()
def changed_and_loaded(t: Training) -> None:
    t.replace(lambda value: value * 0.5)
    state = copy.deepcopy(t.optimizer.state_dict())
    t.optimizer.state.clear()
    t.optimizer.load_state_dict(state)


# -- groups and settings ----------------------------------------------------------------------------------------------


def setting(**values: Any) -> Callable[[Training], None]:
    def change(t: Training) -> None:
        for group in t.groups:
            group.update(copy.deepcopy(values))

    return change


def _fill_learning_rates(t: Training) -> None:
    for group in t.groups:
        group["lr"].fill_(0.01)


WAYS["other_betas"] = Way(setting(betas=(0.5, 0.9)))
WAYS["betas_in_a_list"] = Way(setting(betas=[0.5, 0.9]))
WAYS["other_eps"] = Way(setting(eps=1e-2))
WAYS["other_weight_decay"] = Way(setting(weight_decay=0.5))
WAYS["no_weight_decay"] = Way(setting(weight_decay=0))
WAYS["maximize"] = Way(setting(maximize=True), later=setting(maximize=False))
WAYS["learning_rate_0"] = Way(setting(lr=0.0), later=setting(lr=0.03))
WAYS["learning_rate_as_a_tensor"] = Way(setting(lr=torch.tensor(0.03)), later=_fill_learning_rates)
WAYS["all_settings"] = Way(setting(lr=0.03, betas=(0.5, 0.9), eps=1e-2, weight_decay=0.5), later=setting(lr=0.01))


@way()
def parameters_swapped_between_groups(t: Training) -> None:
    first, second = t.groups
    first["params"], second["params"] = second["params"], first["params"]


@way()
def one_parameter_moved(t: Training) -> None:
    t.groups[1]["params"].append(t.groups[0]["params"].pop(0))


@way()
def groups_merged(t: Training) -> None:
    t.groups[0]["params"] += t.groups.pop()["params"]


@way()
def a_group_split(t: Training) -> None:
    t.groups.append({**t.groups[0], "params": [t.groups[0]["params"].pop()], "lr": 0.05})


@way()
def groups_reversed(t: Training) -> None:
    t.groups.reverse()


@way()
def groups_replaced_by_copies(t: Training) -> None:
    t.optimizer.param_groups = [{**group, "params": list(group["params"]), "lr": 0.03} for group in t.groups]


@way(whole=True)
def states_swapped_between_parameters(t: Training) -> None:
    p = t.model["bias"]
    t.optimizer.state[p] = {key: value.flip(0) if value.ndim else value for key, value in t.optimizer.state[p].items()}


def _unfreeze(t: Training) -> None:
    t.model["matrix"].requires_grad_(True)


@way(later=_unfreeze)
def frozen_for_three_steps(t: Training) -> None:
    t.model["matrix"].requires_grad_(False)
    t.model["matrix"].grad = None


# -- weights ----------------------------------------------------------------------------------------------------------


@way()
def data_replaced(t: Training) -> None:
    for parameter in t.parameters:
        parameter.data = parameter.data * 0.5


@way()
def data_in_one_flat_tensor(t: Training) -> None:
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in t.parameters]) * 0.5
    for parameter, part in zip(t.parameters, flat.split([p.numel() for p in t.parameters]), strict=True):
        parameter.data = part.view(parameter.shape)


@way()
def weights_changed_in_place(t: Training) -> None:
    with torch.no_grad():
        for parameter in t.parameters:
            parameter.mul_(0.5).add_(0.125)


@way()
def weights_loaded(t: Training) -> None:
    t.model.load_state_dict({name: value * 0.5 for name, value in t.model.state_dict().items()})


@way()
def weights_in_shared_memory(t: Training) -> None:
    t.model.share_memory()


@way()
def channels_last(t: Training) -> None:
    kernel = t.model["kernel"]
    kernel.data = kernel.data.to(memory_format=torch.channels_last)


@way()
def transposed_strides(t: Training) -> None:
    matrix = t.model["matrix"]
    matrix.data = matrix.data.t().contiguous().t()


def _restore(t: Training) -> None:
    for parameter, data in zip(t.parameters, t.memo["data"], strict=True):
        parameter.data = data


@way(later=_restore)
def averages_swapped_in_and_out(t: Training) -> None:
    t.memo["data"] = [parameter.data for parameter in t.parameters]
    for parameter in t.parameters:
        parameter.data = parameter.data * 0.5


@way(refusable=True)
def all_in_float64(t: Training) -> None:
    t.model.to(torch.float64)
    t.replace(torch.Tensor.double)


def _back_in_float32(t: Training) -> None:
    t.model.float()
    t.replace(torch.Tensor.float)


@way(refusable=True, later=_back_in_float32)
def in_float64_for_three_steps(t: Training) -> None:
    all_in_float64(t)


@way(refusable=True)
def a_parameter_replaced_by_another(t: Training) -> None:
    """As in Gaussian splatting: a new parameter gets the state of the old one."""
    old, new = t.model["matrix"], nn.Parameter(t.model["matrix"].detach() * 0.5)
    t.optimizer.state[new] = t.optimizer.state.pop(old)
    params = t.groups[0]["params"]
    params[next(i for i, parameter in enumerate(params) if parameter is old)] = new
    t.model["matrix"] = new


@way(whole=True, refusable=True)
def rows_removed(t: Training) -> None:
    """The parameter stays, as when heads are pruned."""
    matrix = t.model["matrix"]
    matrix.data, matrix.grad = matrix.data[:16], None
    state = t.optimizer.state[matrix]
    for key in MOMENTS:
        state[key] = state[key][:16]


# -- trainings --------------------------------------------------------------------------------------------------------


@dataclass
class AsOracle:
    """A training on the mean of the gradients of ``P`` ranks, without an exchange."""

    P: int
    steps: int = STEPS


def gradients(step: int, rank: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(1000 * step + rank)
    sizes = {"matrix": 1.0, "bias": 1e-3, "kernel": 0.1, "number": 50.0}
    sign = 1 if step < CHANGED else -0.25  # which shows what is remembered of earlier steps
    return {name: sign * sizes[name] * (torch.randn(s, generator=random) + 0.5) for name, s in SHAPES.items()}


def trained(how: AsOracle | dict[str, Any], each: Way | None = None) -> Training:
    """Return a training that has ended. ``how``: as the oracle, or options of `SparseAdamW`."""
    random = torch.Generator().manual_seed(1)
    model = nn.ParameterDict()
    for name, shape in SHAPES.items():
        model[name] = nn.Parameter(torch.randn(shape, generator=random))
    groups: list[dict[str, Any]] = [
        {"params": [(name, model[name]) for name in names], "lr": lr, "weight_decay": decay}
        for names, lr, decay in ((("matrix", "kernel"), 0.02, 0.1), (("bias", "number"), 0.01, 0.0))
    ]
    if isinstance(how, AsOracle):
        groups = [group | {"params": [parameter for _, parameter in group["params"]]} for group in groups]
        t, steps = Training(False, model, torch.optim.AdamW(groups)), how.steps
    else:
        t, steps = Training(True, model, SparseAdamW(groups, **how)), STEPS
    for step in range(steps):
        if step == 3:
            t.snapshot = copy.deepcopy((t.model.state_dict(), t.optimizer.state_dict()))
        if each is not None and step == each.at:
            if each.whole:
                t.make_whole()
            each.change(t)
            t.memo["state"] = copy.deepcopy(as_saved(t))
        if each is not None and each.later is not None and step == each.at + 3:
            each.later(t)
        t.optimizer.zero_grad()
        ranks = range(how.P) if isinstance(how, AsOracle) else [dist.get_rank()]
        backward(t.model, [gradients(step, rank) for rank in ranks])
        t.optimizer.step()
    return t


def backward(model: nn.ParameterDict, given: list[dict[str, torch.Tensor]]) -> None:
    """Make a backward pass whose gradients are the mean of the given ones."""
    terms = []
    for name, parameter in model.items():
        if parameter.requires_grad:
            mean = (torch.stack([each[name] for each in given]).sum(0) / len(given)).to(parameter.dtype)
            mean = mean[: parameter.shape[0]] if parameter.ndim else mean
            terms.append((parameter * mean).sum().double())
    torch.stack(terms).sum().backward()  # type: ignore[no-untyped-call]


def as_saved(t: Training) -> list[dict[str, torch.Tensor]]:
    """Return step, moments and added values of each parameter as a checkpoint has them; zeros where it has none.

    The moments of all ranks are on rank 0; on other ranks there are no states.
    """
    saved = t.optimizer.consolidate_state_dict() if t.sparse else t.optimizer.state_dict()
    if saved is None:
        return []
    numbers: dict[torch.Tensor, int] = {}
    for ours, its in zip(t.groups, saved["param_groups"], strict=True):
        numbers.update(zip(ours["params"], its["params"], strict=True))
    found = []
    for parameter in t.parameters:
        state = {"step": 0.0, **{key: torch.zeros(parameter.shape) for key in MOMENTS}}
        state |= saved["state"].get(numbers[parameter], {})
        own = "last_step", "compensation"
        found.append({key: torch.as_tensor(state[key]).detach().double() for key in state if key not in own})
    return found


def differences(mine: Training, oracle: Training) -> list[str]:
    """Return what differs: weights at the end, and checkpoints after the change and at the end."""
    found = []
    pairs = {f"{name} of the weights": (mine.model[name].detach(), p.detach()) for name, p in oracle.model.items()}
    for when, (ours, its) in {
        "after the change": (mine.memo["state"], oracle.memo["state"]),
        "at the end": (as_saved(mine), as_saved(oracle)),
    }.items():
        for name, own, other in zip(SHAPES, ours, its, strict=False):
            if own.keys() != other.keys():
                found.append(f"the state of {name} {when} has {sorted(own)}, not {sorted(other)}")
            pairs |= {f"{key} of {name} {when}": (own[key], value) for key, value in other.items() if key in own}
    for what, (value, expected) in pairs.items():
        size = max(float(expected.double().abs().max()), 1e-12)
        if value.shape != expected.shape:
            found.append(f"{what}: shape {tuple(value.shape)}, not {tuple(expected.shape)}")
        elif not (error := float((value.double() - expected.double()).abs().max()) / size) <= TOLERANCE:
            found.append(f"{what}: {error:.1e} away")
    return found


# -- a rank -----------------------------------------------------------------------------------------------------------


def of_this_rank(each: Way, options: dict[str, Any], oracle: Training) -> tuple[list[str], list[bytes], bool]:
    """Return what went wrong on this rank, its weights, and whether it refused the change."""
    try:
        t = trained(options, each)
    except Exception as error:
        refused = each.refusable and isinstance(error, InvalidInputError)
        return [] if refused else [f"{type(error).__name__}: {str(error)[:300]}"], [], refused
    weights = [p.detach().double().numpy().tobytes() for p in t.parameters]
    wrong = [f"{n} is not finite" for n, p in t.model.items() if not p.isfinite().all()]
    return wrong or (differences(t, oracle) if options["density"] == 1.0 else []), weights, False


def main(folder: str, *names: str) -> None:
    """Try ways, and print a line of JSON for each: what went wrong in which training."""
    os.environ.update(SPARSECOMM_PROFILE="none", SPARSECOMM_TIMEOUT="10", GLOO_SOCKET_IFNAME="lo")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank, P = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(Path(folder) / "store"), P)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=P, timeout=timedelta(seconds=60))
    for name in names:
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        wrong, oracle = {}, trained(AsOracle(P), WAYS[name])
        for density in DENSITIES:
            for overlap in (False, True):
                options = {"density": density, "overlap": overlap, "comm": dist.new_group(backend="gloo")}
                ranks: list[Any] = [None] * P
                dist.all_gather_object(ranks, of_this_rank(WAYS[name], options, oracle))
                found = [f"rank {r}: {each}" for r, (what, _, _) in enumerate(ranks) for each in what]
                if len({tuple(weights) for _, weights, _ in ranks}) > 1:
                    found.append("weights differ between ranks")
                if len({refused for _, _, refused in ranks}) > 1:
                    found.append("refused on some ranks only")
                wrong[f"density {density}{', overlap' * overlap}"] = found
        if rank == 0:
            print(json.dumps({"way": name, "wrong": wrong}), flush=True)
    dist.barrier()
    os._exit(0)
