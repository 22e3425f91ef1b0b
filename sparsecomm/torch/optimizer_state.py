"""The state of a PyTorch optimizer: restore it, reorder it, compare it between ranks, and convert its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from sparsecomm.checks import quote
from sparsecomm.errors import InvalidInputError

__all__ = ["comparable", "in_order_of", "mapped", "names_in_order", "snapshot"]


def snapshot(optimizer: torch.optim.Optimizer, *ours: type) -> Callable[[], None]:
    """Return a function that restores the groups, the state and the attributes of an optimizer.

    `torch.optim.Optimizer.load_state_dict` replaces these objects without changing them, so references suffice. A
    class that overrides this method may write into tensors, so their values are copied.

    Args:
        optimizer: the optimizer.
        ours: classes whose ``load_state_dict`` only calls PyTorch's.
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


def names_in_order(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[str]:
    """Return the names of an optimizer's parameters in the order in which its state numbers them.

    Args:
        optimizer: the optimizer.
        names: the names by ``id(parameter)``. A parameter without a name gets an empty one.
    """
    return [names.get(id(p), "") for group in optimizer.param_groups for p in group["params"]]


def in_order_of(optimizer: torch.optim.Optimizer, names: list[str], state: Mapping[str, Any], saved: Any) -> Any:
    """Return an optimizer's state with its parameters in the order of ``optimizer``.

    `torch.optim.Optimizer.load_state_dict` looks only at positions.

    Args:
        optimizer: the optimizer that loads the state.
        names: the names of its parameters, as `names_in_order` returns them.
        state: the return value of ``state_dict`` of such an optimizer.
        saved: the names of the parameters when the state was saved, in order.

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
            missing, unexpected = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
            raise InvalidInputError(
                f"state_dict: parameter group {number} lacks {quote(missing)}; unexpected: {quote(unexpected)}; load "
                "the state of an optimizer with the same parameters in each group"
            )
        positions: dict[str, list[Any]] = {}
        for name, key in zip(found, keys, strict=True):
            positions.setdefault(name, []).append(key)
        groups.append({**theirs, "params": [positions[name].pop(0) for name in wanted]})
        begin = end
    return {**state, "param_groups": groups}


def comparable(optimizer: torch.optim.Optimizer, named: Mapping[str, torch.Tensor]) -> object:
    """Return the settings of the groups and the state of the named parameters, as plain values for a checksum.

    Entries of the state that belong to no parameter are included. An object that is neither a tensor nor a plain value
    is replaced by the name of its type.
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
    """Return nested dictionaries, lists and tuples with every object of type ``kind`` converted."""
    if isinstance(value, kind):
        return convert(value)
    if isinstance(value, dict):
        return {key: mapped(each, kind, convert) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(each, kind, convert) for each in value)
    return value
