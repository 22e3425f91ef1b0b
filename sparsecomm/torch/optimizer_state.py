"""The state of a torch optimizer: to put it back as it was, to compare it between ranks, to convert and to try it."""

from __future__ import annotations

import copy
import inspect
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from sparsecomm.checks import quote
from sparsecomm.errors import InvalidInputError
from sparsecomm.torch.shards import local

__all__ = [
    "comparable",
    "follows_gradient",
    "in_order_of",
    "is_void",
    "mapped",
    "names_in_order",
    "snapshot",
    "try_step",
]


def snapshot(optimizer: torch.optim.Optimizer, *ours: type) -> Callable[[], None]:
    """Return what gives an optimizer back the groups, state and attributes that it has now.

    `torch.optim.Optimizer.load_state_dict` puts new objects in their places and leaves these as they are. A class with
    a method of its own may write into tensors, so copies of them are kept.

    Args:
        ours: classes whose ``load_state_dict`` only calls torch's.
    """
    state = optimizer.state
    containers: list[Any] = [vars(optimizer), state, *optimizer.param_groups]
    containers += [each for each in state.values() if isinstance(each, dict)]
    kept = [(container, dict(container)) for container in containers]
    plain = (torch.optim.Optimizer, *ours)
    own = any("load_state_dict" in vars(kind) for kind in type(optimizer).__mro__ if kind not in plain)
    found = [each for _, held in kept[1:] for each in held.values() if own and isinstance(each, torch.Tensor)]
    tensors = [(tensor, tensor.detach().clone()) for tensor in found]

    def undo() -> None:
        for container, before in kept:
            container.clear()
            container.update(before)
        with torch.no_grad():
            for tensor, values in tensors:
                tensor.copy_(values)

    return undo


def is_void(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether a step does nothing, without rates and gradients: ``get_state_dict`` of PyTorch makes such steps.

    They are no steps of the training: what would be exchanged in one, from residuals, would be lost.
    """
    gradients = (local(p.grad) for p in parameters if p.grad is not None)
    return not any(group.get("lr", 1) for group in optimizer.param_groups) and not any(g.any() for g in gradients)


def names_in_order(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[str]:
    """Return the names of an optimizer's parameters in the order in which its state numbers them.

    Args:
        names: by ``id(parameter)``. A parameter without a name gets an empty one.
    """
    return [names.get(id(p), "") for group in optimizer.param_groups for p in group["params"]]


def in_order_of(optimizer: torch.optim.Optimizer, names: list[str], state: Mapping[str, Any], saved: Any) -> Any:
    """Return an optimizer's state with its parameters in another order: that of ``optimizer``.

    `torch.optim.Optimizer.load_state_dict` only looks at positions.

    Args:
        optimizer: which is to load the state.
        names: of its parameters, as `names_in_order` returns them.
        state: what ``state_dict`` of such an optimizer returned.
        saved: the names of its parameters then.

    Raises:
        InvalidInputError: a group of the state has other parameters than the group of the optimizer.
    """
    if len(state["param_groups"]) != len(optimizer.param_groups):
        return state  # the optimizer refuses it
    groups, begin = [], 0
    for number, (ours, theirs) in enumerate(zip(optimizer.param_groups, state["param_groups"], strict=True)):
        end = begin + len(ours["params"])
        wanted, keys = names[begin:end], theirs["params"]
        found = [saved[key] for key in keys]
        if sorted(wanted) != sorted(found):
            lacks, has = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
            raise InvalidInputError(
                f"state_dict: parameter group {number} lacks {quote(lacks)} and has {quote(has)} besides; expected the "
                "parameters of the optimizer's group of the same number"
            )
        positions: dict[str, list[Any]] = {}
        for name, key in zip(found, keys, strict=True):
            positions.setdefault(name, []).append(key)
        groups.append({**theirs, "params": [positions[name].pop(0) for name in wanted]})
        begin = end
    return {**state, "param_groups": groups}


def comparable(optimizer: torch.optim.Optimizer, named: Mapping[str, torch.Tensor]) -> object:
    """Return the groups' settings, and the state of named parameters and of none, as plain values for a checksum.

    What is neither a tensor nor a plain value stands for its type alone.
    """
    state = {name: optimizer.state[p] for name, p in sorted(named.items()) if p in optimizer.state}
    groups = [{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups]
    foreign = [{key: value} for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)]
    return _plain([state, groups, foreign])


def _plain(value: Any) -> object:
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    plain = value is None or isinstance(value, (bool, int, float, str, torch.Tensor))
    return value if plain else type(value).__name__


def mapped(value: Any, kind: type, convert: Callable[[Any], Any]) -> Any:
    """Return nested dictionaries, lists and tuples with what is of a kind converted."""
    if isinstance(value, kind):
        return convert(value)
    if isinstance(value, dict):
        return {key: mapped(each, kind, convert) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(each, kind, convert) for each in value)
    return value


@torch.no_grad()
def try_step(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Step one element of each parameter, by a copy of the optimizer: it raises what a step would, and changes nothing.

    A parameter whose state holds tensors of other shapes than its own, but for single numbers, is tried as a whole.
    """
    memo: dict[int, Any] = {}
    stepped = set(map(id, parameters))
    for group in optimizer.param_groups:
        for p in group["params"]:
            tensors = [each for each in optimizer.state.get(p, {}).values() if isinstance(each, torch.Tensor)]
            whole = any(each.shape != p.shape and each.numel() != 1 for each in tensors) and id(p) in stepped
            memo[id(p)] = mine = torch.nn.Parameter(p.detach().clone() if whole else _first(p), p.requires_grad)
            mine.grad = torch.zeros_like(mine) if id(p) in stepped else None
            if not whole:
                memo |= {id(each): _first(each) for each in tensors if each.shape == p.shape}
    tried = object.__new__(type(optimizer))
    hooks = {key: OrderedDict[Any, Any]() for key in vars(optimizer) if key.startswith("_optimizer_step")}
    kept = {key: value for key, value in vars(optimizer).items() if key != "step"}  # schedulers put one there
    groups, states = copy.deepcopy((optimizer.param_groups, optimizer.state), memo)
    vars(tried).update({**kept, **hooks, "param_groups": groups, "state": states})
    tried.step()


def follows_gradient(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer's steps are proportional to its gradients, as those of SGD with momentum are.

    It makes steps of one weight with a new optimizer of the same class and settings. Where that raises, settings that
    are called "betas" tell.
    """
    try:
        once, twice = (_last_step(optimizer, gradient) for gradient in (1.0, 2.0))
    except Exception:
        return not any("betas" in group for group in optimizer.param_groups)
    return math.isclose(twice, 2 * once, rel_tol=0.01)


def _last_step(optimizer: torch.optim.Optimizer, gradient: float) -> float:
    """Return how far a new optimizer moves a weight in the last of several steps with the same gradient."""
    like = local(optimizer.param_groups[0]["params"][0])
    weight = torch.nn.Parameter(like.new_zeros([1] * like.ndim, dtype=torch.float32))
    known = inspect.signature(type(optimizer)).parameters
    settings = {**optimizer.defaults, "weight_decay": 0.0}
    if settings.get("lr") is not None:  # schedules may begin at 0
        settings["lr"] = 1.0
    tried = type(optimizer)([weight], **{name: value for name, value in settings.items() if name in known})
    for _ in range(8):  # RAdam's first steps are proportional to the gradient
        before = weight.item()
        weight.grad = torch.full_like(weight, gradient)
        tried.step()
    return weight.item() - before


def _first(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1)[:1].clone()
