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
        return {key: mapped(item, kind, convert) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(item, kind, convert) for item in value)
    return value


def snapshot(optimizer: torch.optim.Optimizer, *known: type) -> Callable[[], None]:
    """Return a function that restores the groups, the state and the attributes of an optimizer.

    `torch.optim.Optimizer` and the ``known`` classes load a state by replacing values, so references to the old values
    suffice. Another class may override ``load_state_dict`` and write into tensors, so its tensors are copied.
    """
    state = optimizer.state
    containers: list[Any] = [vars(optimizer), state, *optimizer.param_groups]
    containers += [entry for entry in state.values() if isinstance(entry, dict)]
    saved = [(container, dict(container)) for container in containers]
    others = [kind for kind in type(optimizer).__mro__ if kind not in (torch.optim.Optimizer, *known)]
    overridden = any("load_state_dict" in vars(kind) for kind in others)
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
    for number, (group, saved_group) in enumerate(zip(optimizer.param_groups, state["param_groups"], strict=True)):
        wanted = [names.get(id(p), "") for p in group["params"]]
        positions: dict[str, list[Any]] = {}
        for key in saved_group["params"]:
            positions.setdefault(saved[key], []).append(key)
        present = [name for name, keys in positions.items() for _ in keys]
        if sorted(wanted) != sorted(present):
            missing, unexpected = sorted(set(wanted) - set(present)), sorted(set(present) - set(wanted))
            raise InvalidInputError(
                f"state_dict: parameter group {number} lacks {quote(missing)}; unexpected: {quote(unexpected)}; load "
                "the state of an optimizer with the same parameters in each group"
            )
        groups.append({**saved_group, "params": [positions[name].pop(0) for name in wanted]})
    return {**state, "param_groups": groups}


def comparable(
    optimizer: torch.optim.Optimizer, named: Mapping[str, torch.Tensor], keys: Collection[str] | None = None
) -> object:
    """Return the settings of the groups and the state of the named parameters, as plain values for a checksum.

    State that belongs to no parameter is included. Other objects are represented by the name of their type. ``keys``:
    the keys in the state of parameters, unless all.
    """
    states = {name: optimizer.state[p] for name, p in sorted(named.items()) if p in optimizer.state}
    state = {n: {k: v for k, v in entry.items() if keys is None or k in keys} for n, entry in states.items()}
    names = {id(p): name for name, p in named.items()}
    groups = [{**group, "params": [names.get(id(p)) for p in group["params"]]} for group in optimizer.param_groups]
    foreign = [{key: value} for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)]
    return _plain([state, groups, foreign])


def _plain(value: Any) -> object:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
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
            tensors = [value for value in optimizer.state.get(p, {}).values() if isinstance(value, torch.Tensor)]
            all_of_it = any(t.shape != p.shape and t.numel() != 1 for t in tensors) and id(p) in stepped
            copies[id(p)] = copied = torch.nn.Parameter(p.detach().clone() if all_of_it else _first(p), p.requires_grad)
            copied.grad = torch.zeros_like(copied) if id(p) in stepped else None
            if not all_of_it:
                copies |= {id(t): _first(t) for t in tensors if t.shape == p.shape}
    trial = object.__new__(type(optimizer))
    hooks = {key: OrderedDict[Any, Any]() for key in vars(optimizer) if key.startswith("_optimizer_step")}
    attributes = {key: value for key, value in vars(optimizer).items() if key != "step"}  # set by schedulers
    groups, states = copy.deepcopy((optimizer.param_groups, optimizer.state), copies)
    vars(trial).update({**attributes, **hooks, "param_groups": groups, "state": states})
    trial.step()


def _first(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1)[:1].clone()
