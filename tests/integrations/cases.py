"""Common parts of the case programs, which run their cases on each rank and print which passed."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import sparsecomm as sc

FEATURES, OUTPUTS = 30, 40
_cases: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {}


def case(**values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as a case for each combination of argument values. Its first argument is a folder."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        for combination in product(*values.values()):
            name = "-".join([function.__name__, *map(str, combination)])
            _cases[name] = function, dict(zip(values, combination, strict=True))
        return function

    return add


def main() -> None:
    """Run all cases, or those with ``argv[2]`` in their names, in folders of ``argv[1]``."""
    some = sys.argv[2] if len(sys.argv) > 2 else ""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    name = "none"
    try:
        for name, (function, values) in _cases.items():
            if some not in name:
                continue
            began = time.monotonic()
            function(Path(sys.argv[1], name), **values)
            print(f"rank {rank}: passed {name} {time.monotonic() - began:.1f} s\n", end="", flush=True)
    except BaseException:
        print(f"rank {rank}: failed {name}\n{traceback.format_exc()}", flush=True)
        os._exit(1)  # other ranks may wait for this one
    if dist.is_initialized():
        dist.destroy_process_group()


def module() -> nn.Module:
    """Return a small model, the same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, OUTPUTS), nn.Tanh(), nn.Linear(OUTPUTS, OUTPUTS))


def rows(count: int = 64) -> torch.Tensor:
    """Return inputs, the same on all ranks."""
    return torch.randn(count, FEATURES, generator=torch.Generator().manual_seed(5))


def batch(step: int) -> torch.Tensor:
    """Return this rank's inputs of a step."""
    return torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(100 * dist.get_rank() + step))


def weights(model: nn.Module) -> torch.Tensor:
    """Return all weights, after a check that they are the same on all ranks."""
    own = nn.utils.parameters_to_vector(p.detach() for p in model.parameters()).clone()
    sc.check_weights({"weights": own})
    return own


def residuals(attached: Any) -> dict[str, np.ndarray]:
    """Return copies of this rank's residuals."""
    return {
        f"{number} {name}": np.array(values)
        for number, reducer in enumerate(attached.reducers)
        for name, values in reducer.state_dict()["residuals"].items()
    }


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


def same_sum(folder: Path, own: dict[str, np.ndarray]) -> None:
    """Check that the residuals of all ranks add up to those that two ranks have passed before."""
    saved_by = folder.with_suffix(".sum")
    total = {name: torch.from_numpy(values) for name, values in own.items()}
    for values in total.values():
        dist.all_reduce(values)
    if dist.get_world_size() == 2:
        on_rank_0(torch.save, total, saved_by)
        return
    expected = torch.load(saved_by)
    assert all(torch.allclose(total[name], expected[name], atol=1e-6) for name in expected)
    assert any(values.any() for values in total.values())


def on_rank_0(action: Callable[..., object], *arguments: Any) -> None:
    """Call a function on rank 0 while the other ranks wait."""
    dist.barrier()
    if dist.get_rank() == 0:
        action(*arguments)
    dist.barrier()


def move(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(source, target)


@contextmanager
def warned() -> Iterator[list[str]]:
    """Collect this library's warnings."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("sparsecomm")
    log.addHandler(handler)
    try:
        yield messages
    finally:
        log.removeHandler(handler)


@contextmanager
def refused(words: str) -> Iterator[None]:
    """Expect an error with these words."""
    with pytest.raises(sc.InvalidInputError) as raised:
        yield
    assert words in str(raised.value), raised.value


def only_rank_0_warned(messages: list[str], words: str) -> None:
    """Check that rank 0 has given this warning only, and other ranks none."""
    assert bool(messages) == (dist.get_rank() == 0)
    assert all(words in message for message in messages), messages
