"""Trial steps of a PyTorch optimizer: does a step raise, is it proportional to the gradient, does it do nothing?"""

from __future__ import annotations

import copy
import inspect
import math
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch

from sparsecomm.torch.shards import local

__all__ = ["follows_gradient", "is_void", "try_step"]


def is_void(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether a step does nothing: all learning rates and gradients are zero.

    ``get_state_dict`` of PyTorch makes such steps. They are not steps of the training, so nothing must be exchanged in
    them: entries of residuals would be lost.
    """
    gradients = (local(p.grad) for p in parameters if p.grad is not None)
    return not any(group.get("lr", 1) for group in optimizer.param_groups) and not any(g.any() for g in gradients)


@torch.no_grad()
def try_step(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Make a step with a copy of an optimizer, on one element of each parameter. Nothing changes.

    A parameter whose state has tensors of other shapes than the parameter and of more than one element is copied as a
    whole.

    Args:
        optimizer: the optimizer.
        parameters: the parameters that take part in the step.

    Raises:
        Exception: the exception that a step of the optimizer would raise.
    """
    copies: dict[int, Any] = {}  # for `deepcopy`, by ``id``
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


def follows_gradient(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the steps of an optimizer are proportional to its gradients, as those of SGD with momentum are.

    The answer comes from steps on one weight by a new optimizer of the same class and settings. If these raise, an
    optimizer with a setting "betas" is taken for one whose steps are not proportional.
    """
    try:
        once, twice = (_last_step(optimizer, gradient) for gradient in (1.0, 2.0))
    except Exception:
        return not any("betas" in group for group in optimizer.param_groups)
    return math.isclose(twice, 2 * once, rel_tol=0.01)


def _last_step(optimizer: torch.optim.Optimizer, gradient: float) -> float:
    """Return the change of a weight in the last of several steps with the same gradient, by a new optimizer."""
    like = local(optimizer.param_groups[0]["params"][0])
    weight = torch.nn.Parameter(like.new_zeros([1] * like.ndim, dtype=torch.float32))
    known = inspect.signature(type(optimizer)).parameters
    settings = {**optimizer.defaults, "weight_decay": 0.0}
    if settings.get("lr") is not None:  # a schedule may begin at 0
        settings["lr"] = 1.0
    trial = type(optimizer)([weight], **{name: value for name, value in settings.items() if name in known})
    for _ in range(8):  # the first steps of RAdam are proportional to the gradient
        before = weight.item()
        weight.grad = torch.full_like(weight, gradient)
        trial.step()
    return weight.item() - before


def _first(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1)[:1].clone()
