"""What the frameworks have in common: a model in DDP, and optimizers that may exchange gradients themselves."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from sparsecomm.errors import InvalidInputError
from sparsecomm.reducer import Reducer
from sparsecomm.torch import SparseAdamW, SparseOptimizer, keep_local, load, register, save

__all__ = ["Attached", "attach"]

_log = logging.getLogger("sparsecomm")


class Attached:
    """A training whose gradients are exchanged sparsely.

    Attributes:
        objects: by name, what each rank has to save.
        reducers: with counters, buckets and residuals.
    """

    def __init__(self, objects: dict[str, Any], reducers: tuple[Reducer, ...]) -> None:
        self.objects, self.reducers = objects, reducers

    @property
    def step(self) -> int:
        """How many steps have been made."""
        return max(reducer.step for reducer in self.reducers)

    def save(self, folder: Path) -> None:
        """Save what each rank has not sent yet. Collective."""
        save(folder, self.step, self.objects)

    def load(self, folder: Path) -> None:
        """Load it again, on any number of ranks. Collective. Where there is nothing, say so, and begin without."""
        if load(folder, self.objects) is None:
            _log.warning(
                "%s has no residuals that all ranks see: what was not sent before it was saved is lost", folder
            )


def attach(ddp: object, optimizers: Iterable[object], density: Any, options: dict[str, Any]) -> Attached:
    """Let a training exchange gradients sparsely: by its optimizers, if these do, or by a hook.

    Args:
        ddp: the model, in DDP.
        optimizers: of the training, not wrapped.
        density, options: as in `sparsecomm.torch.register`; not looked at where optimizers exchange.

    Raises:
        InvalidInputError: the model is not in DDP, or has a hook already; or only some of the optimizers exchange.
    """
    given = list(optimizers)
    sparse = [optimizer for optimizer in given if isinstance(optimizer, SparseAdamW)]
    if wrapped := [each for each in given if isinstance(each, SparseOptimizer) and each not in sparse]:
        raise InvalidInputError(
            f"{type(wrapped[0]).__name__} is a DistributedOptimizer, and the model in DistributedDataParallel, which "
            "would write to gradients after it; expected the optimizer that it wraps, and a hook exchanges gradients"
        )
    if sparse and len(sparse) < len(given):
        others = [type(optimizer).__name__ for optimizer in given if optimizer not in sparse]
        raise InvalidInputError(
            f"{type(sparse[0]).__name__} exchanges gradients, and {others[0]} does not; expected one kind of optimizers"
        )
    if not isinstance(ddp, DistributedDataParallel) and isinstance(ddp, torch.nn.Module):
        raise InvalidInputError(
            f"the model is {type(ddp).__name__}, and not in DistributedDataParallel: this is one process alone; start "
            "several, by torchrun --nproc_per_node, or one by torchrun --nproc_per_node 1, which sends nothing"
        )
    assert isinstance(ddp, DistributedDataParallel)
    if not sparse:
        state = register(ddp, density, **options)
        return Attached({"hook": state}, (state.reducer,))
    keep_local(ddp)
    apart = {f"optimizer {number}": optimizer.residuals_apart() for number, optimizer in enumerate(sparse)}
    return Attached(apart, tuple(optimizer.reducer for optimizer in sparse))
