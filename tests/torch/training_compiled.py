"""Cases of what PyTorch does to models and optimizers, on every rank, as docs/guides/frameworks.md has it in a table:
`torch.compile`, activation checkpointing, static graphs, narrow gradients, fused and foreach optimizers.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import sparsecomm as sc
from sparsecomm.torch import DiLoCo, DistributedOptimizer, SparseAdamW, SparseState, keep_local, register
from tests.thinning import covering_array
from tests.torch.training_ranks import RANK, all_gather, case

STEPS = 4
WAYS = ("hook", "DistributedOptimizer", "SparseAdamW", "SparseAdamW, overlap", "DiLoCo")
OPTIONS: dict[str, Any] = {"density": 0.2, "dense_below": 0}


class Block(nn.Module):
    def __init__(self, width: int, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant, self.one, self.two = reentrant, nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is None:
            return x + self._inner(x)
        return x + checkpoint(self._inner, x, use_reentrant=self.reentrant)

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self.two(torch.relu(self.one(x)))
        return inner


def network(dtype: torch.dtype = torch.float32, reentrant: bool | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), Block(16, reentrant), Block(16, reentrant), nn.Linear(16, 5)).to(dtype)


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def by_aot(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager")


def by_block(model: nn.Sequential) -> nn.Sequential:
    for layer in model:
        layer.compile(backend="eager")
    return model


# For which ways each is possible.
COMPILERS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "model": ({"before": compiled}, WAYS),
    "blocks": ({"before": by_block}, WAYS),
    "aot": ({"before": by_aot}, WAYS),
    "static graph": ({"before": by_block, "static_graph": True}, ("hook",)),
    "DDP": ({"after": compiled, "ddp": True}, tuple(way for way in WAYS if way != "DistributedOptimizer")),
    "model in DDP": ({"before": compiled, "ddp": True}, tuple(way for way in WAYS if way != "DistributedOptimizer")),
}


def trained(
    way: str,
    before: Callable[[Any], Any] = lambda model: model,
    after: Callable[[Any], Any] = lambda model: model,
    *,
    dtype: torch.dtype = torch.float32,
    reentrant: bool | None = None,
    make: Any = lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    ddp: bool = False,
    **settings: Any,
) -> torch.Tensor:
    """Return the weights after some steps; they are the same on all ranks."""
    model = network(dtype, reentrant)
    named = list(model.named_parameters())
    optimizer: Any = make(model.parameters())
    run: Any = before(model)
    if way == "hook" or ddp:
        run = DistributedDataParallel(run, **settings)
    if way == "hook":
        state = register(run, **OPTIONS)
        assert state.reducer.names == [name for name, _ in named]
    elif ddp:
        keep_local(run)
    run = after(run)
    if way == "DistributedOptimizer":
        optimizer = DistributedOptimizer(optimizer, named, **OPTIONS)
    elif way.startswith("SparseAdamW"):
        optimizer = SparseAdamW(named, lr=0.01, density=0.2, overlap=way.endswith("overlap"))
    elif way == "DiLoCo":
        diloco = DiLoCo(model, optimizer, sync_every=2)
    random = torch.Generator().manual_seed(RANK)
    for _ in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(6, 12, generator=random).to(dtype)
        run(x).square().mean().backward()
        optimizer.step()
    if way == "DiLoCo":
        diloco.write_global_parameters()
    weights = torch.cat([p.detach().reshape(-1).float() for _, p in named])
    for other in all_gather(weights):
        assert torch.equal(other, weights)
    assert not torch.equal(weights, torch.cat([p.detach().reshape(-1).float() for p in network(dtype).parameters()]))
    torch._dynamo.reset()
    return weights


@case
def compiled_models_train_as_others() -> None:
    """All combinations in `make test-all`; otherwise each way and each compiler in some."""
    rows = [(way, compiler) for compiler, (_, ways) in COMPILERS.items() for way in ways]
    if "SPARSECOMM_TEST_ALL" not in os.environ:
        rows = [rows[i] for i in covering_array(rows, 1)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for way, compiler in rows:
            near = 0.05 if compiler == "aot" else 0
            found = trained(way, **COMPILERS[compiler][0])
            torch.testing.assert_close(found, trained(way), atol=near, rtol=near)


@case
def activations_that_are_computed_again() -> None:
    for way in WAYS:
        expected = trained(way)
        assert torch.equal(trained(way, reentrant=False), expected)
        if way in ("DistributedOptimizer", "SparseAdamW, overlap"):
            with pytest.raises(sc.InvalidInputError, match="use_reentrant=False"):
                trained(way, reentrant=True)
        else:
            assert torch.equal(trained(way, reentrant=True), expected)


@case
def narrow_gradients() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for way in WAYS:
            if way != "DiLoCo" or dtype is torch.bfloat16:
                assert trained(way, dtype=dtype).isfinite().all()


@case
def fused_and_foreach_optimizers() -> None:
    for way in ("hook", "DistributedOptimizer", "DiLoCo"):
        plain = trained(way, make=lambda p: torch.optim.SGD(p, lr=0.1, foreach=False))
        for make in (lambda p: torch.optim.SGD(p, lr=0.1, foreach=True), lambda p: torch.optim.SGD(p, 0.1, fused=True)):
            torch.testing.assert_close(trained(way, make=make), plain)


@case
def complex_parameters_are_refused() -> None:
    model = nn.Linear(3, 3, dtype=torch.complex64)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for make in (
        lambda: DistributedOptimizer(sgd, model.named_parameters()),
        lambda: SparseAdamW(model.named_parameters()),
        lambda: DiLoCo(model, sgd, sync_every=2),
        lambda: SparseState(model.named_parameters()),
    ):
        with pytest.raises(sc.InvalidInputError, match="complex64"):
            make()
