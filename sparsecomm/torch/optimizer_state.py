"""Convert, compare, reorder and restore the state of any PyTorch optimizer, and try a step on a copy."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

from sparsecomm.checks import quote
from sparsecomm.errors import InvalidInputError
from sparsecomm.states.schema import StateDict


def mapped(value: Any, kind: type, convert: Callable[[Any], Any]) -> Any:
    """Return nested dictionaries, lists and tuples with every object of type ``kind`` converted."""
    if isinstance(value, kind):
        return convert(value)
    if isinstance(value, dict):
        return {key: mapped(each, kind, convert) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(each, kind, convert) for each in value)
    return value


def snapshot(optimizer: torch.optim.Optimizer, *ours: type) -> Callable[[], None]:
    """Return a function that restores the groups, the state and the attributes of an optimizer.

    `torch.optim.Optimizer.load_state_dict` replaces values without writing into them, so references suffice. A class
    outside of ``ours`` that overrides this method may write into tensors, so these are copied.
    """
    state = optimizer.state
    containers: list[Any] = [vars(optimizer), state, *optimizer.param_groups]
    containers += [each for each in state.values() if isinstance(each, dict)]
    saved = [(container, dict(container)) for container in containers]
    plain = (torch.optim.Optimizer, *ours)
    overridden = any("load_state_dict" in vars(kind) for kind in type(optimizer).__mro__ if kind not in plain)
    values = [value for _, items in saved[1:] for value in items.values()] if overridden else []
    tensors = [(tensor, tensor.detach().clone()) for tensor in values if isinstance(tensor, torch.Tensor)]

    def restore() -> None:
        for container, items in saved:
            container.clear()
            container.update(items)
        with torch.no_grad():
            for tensor, copied in tensors:
                tensor.copy_(copied)

    return restore


def reorder(optimizer: torch.optim.Optimizer, names: Mapping[int, str], state: StateDict, saved: Any) -> StateDict:
    """Reorder a ``state_dict`` for an optimizer, because PyTorch matches parameters by position.

    ``names`` are the optimizer's, by ``id(parameter)``; ``saved`` are the names in the state, in its order. A parameter
    without a name counts as one with an empty name.
    """
    if len(state["param_groups"]) != len(optimizer.param_groups):
        return state  # `load_state_dict` refuses it
    groups = []
    for number, (ours, theirs) in enumerate(zip(optimizer.param_groups, state["param_groups"], strict=True)):
        wanted = [names.get(id(p), "") for p in ours["params"]]
        positions: dict[str, list[Any]] = {}
        for key in theirs["params"]:
            positions.setdefault(saved[key], []).append(key)
        found = [name for name, keys in positions.items() for _ in keys]
        if sorted(wanted) != sorted(found):
            missing, unexpected = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
            raise InvalidInputError(
                f"state_dict: parameter group {number} lacks {quote(missing)}; unexpected: {quote(unexpected)}; load "
                "the state of an optimizer with the same parameters in each group"
            )
        groups.append({**theirs, "params": [positions[name].pop(0) for name in wanted]})
    return {**state, "param_groups": groups}


def comparable(
    optimizer: torch.optim.Optimizer, named: Mapping[str, torch.Tensor], keys: Collection[str] | None = None
) -> object:
    """Return the settings of the groups and the state of the named parameters, as plain values for a checksum.

    State that belongs to no parameter is included. Other objects are represented by the name of their type. ``keys``:
    the keys in the state of parameters, unless all.
    """
    states = {name: optimizer.state[p] for name, p in sorted(named.items()) if p in optimizer.state}
    state = {n: {k: v for k, v in each.items() if keys is None or k in keys} for n, each in states.items()}
    names = {id(p): name for name, p in named.items()}
    groups = [{**group, "params": [names.get(id(p)) for p in group["params"]]} for group in optimizer.param_groups]
    foreign = [{key: value} for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)]
    return _plain([state, groups, foreign])


def _plain(value: Any) -> object:
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    plain = value is None or isinstance(value, (bool, int, float, str, torch.Tensor))
    return value if plain else type(value).__name__


@torch.no_grad()
def try_step(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Step these parameters with a copy of an optimizer, to raise what the step raises. Nothing changes.

    The copy has only the first element of each parameter, unless the parameter's state has a tensor with several
    elements and a shape of its own, as in Adafactor.
    """
    copies: dict[int, Any] = {}  # the memo of `deepcopy`
    stepped = set(map(id, parameters))
    for group in optimizer.param_groups:
        for p in group["params"]:
            tensors = [each for each in optimizer.state.get(p, {}).values() if isinstance(each, torch.Tensor)]
            whole = any(each.shape != p.shape and each.numel() != 1 for each in tensors) and id(p) in stepped
            copies[id(p)] = copied = torch.nn.Parameter(p.detach().clone() if whole else _first(p), p.requires_grad)
            copied.grad = torch.zeros_like(copied) if id(p) in stepped else None
            if not whole:
                copies |= {id(each): _first(each) for each in tensors if each.shape == p.shape}
    trial = object.__new__(type(optimizer))
    hooks = {key: OrderedDict[Any, Any]() for key in vars(optimizer) if key.startswith("_optimizer_step")}
    attributes = {key: value for key, value in vars(optimizer).items() if key != "step"}  # set by schedulers
    groups, states = copy.deepcopy((optimizer.param_groups, optimizer.state), copies)
    vars(trial).update({**attributes, **hooks, "param_groups": groups, "state": states})
    trial.step()


def _first(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1)[:1].clone()
