"""Cases, on every rank, of PyTorch's features for models and optimizers, as in the table in docs/guides/pytorch.md:
`torch.compile`, activation checkpointing, static graphs, narrow gradients, fused and foreach optimizers.
"""

from __future__ import annotations

import copy
import os
import shutil
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import sparsecomm as sc
from sparsecomm.torch import DiLoCo, DistributedOptimizer, SparseAdamW, broadcast_parameters, keep_local, register
from tests.thinning import covering_array
from tests.torch.training_ranks import RANK, P, all_gather, case

ALL = "SPARSECOMM_TEST_ALL" in os.environ
case_of_all = case if ALL else lambda function: function
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


def network(dtype: torch.dtype = torch.float32, reentrant: bool | None = None, blocks: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    middle = [Block(16, reentrant) for _ in range(blocks)]
    return nn.Sequential(nn.Linear(12, 16), *middle, nn.Linear(16, 5)).to(dtype)


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def by_aot(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager")


def by_block(model: nn.Sequential) -> nn.Sequential:
    for layer in model:
        layer.compile(backend="eager")
    return model


# The ways that each feature works with.
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
    blocks: int = 2,
    make: Any = lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    ddp: bool = False,
    compile_step: Callable[[Any], Any] = lambda step: step,
    compile_training: Callable[[Any], Any] = lambda train: train,
    passes: int = 1,
    **settings: Any,
) -> torch.Tensor:
    """Return the weights after some steps. Check that they are the same on all ranks."""
    model = network(dtype, reentrant, blocks)
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
    no_sync = run.no_sync if way == "hook" else getattr(optimizer, "no_sync", nullcontext)
    step = compile_step(optimizer.step)

    def train(*batches: torch.Tensor) -> None:
        optimizer.zero_grad()
        for x in batches[1:]:
            with no_sync():
                run(x).square().mean().backward()
        run(batches[0]).square().mean().backward()
        step()

    random, train = torch.Generator().manual_seed(RANK), compile_training(train)
    for _ in range(STEPS):
        train(*torch.randn(passes, 6, 12, generator=random).to(dtype))
    if way == "DiLoCo":
        assert diloco.round == STEPS // 2
        diloco.write_global_parameters()
    else:
        assert (state if way == "hook" else optimizer).reducer.step == STEPS
    weights = _flat(model)
    for other in all_gather(weights):
        assert torch.equal(other, weights)
    assert not torch.equal(weights, _flat(network(dtype, blocks=blocks)))
    torch._dynamo.reset()
    return weights


def _flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1).float() for p in model.parameters()])


@cache
def as_others(way: str, passes: int = 1, blocks: int = 2) -> torch.Tensor:
    """Return the weights after training without compilation."""
    return trained(way, passes=passes, blocks=blocks)


@case
def compiled_models_train_as_others() -> None:
    """`make test-all` runs all combinations."""
    rows = [("hook", "blocks"), ("SparseAdamW, overlap", "model in DDP")]
    if ALL:
        rows = [(way, compiler) for compiler, (_, ways) in COMPILERS.items() for way in ways]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for way, compiler in rows:
            near = 0.05 if compiler == "aot" else 0
            result = trained(way, **COMPILERS[compiler][0])
            torch.testing.assert_close(result, as_others(way), atol=near, rtol=near)


BACKENDS = "eager", "aot_eager", "inductor"
COMPILED = "step", "training", "training and backward passes"


@case
def compiled_programs_train_as_others() -> None:
    """`make test-all` runs all combinations."""
    rows = [row for row in product(WAYS, COMPILED, (1, 2), BACKENDS) if row[:2] != ("hook", COMPILED[2])]
    if not ALL:
        few = [row for row in rows if row[3] == "eager" and row[1] != COMPILED[2]]
        rows = [few[i] for i in covering_array(few, 1)]
    if shutil.which("g++") is None:
        rows = [row for row in rows if row[3] != "inductor"]  # Inductor compiles C++
    with warnings.catch_warnings(), torch._inductor.config.patch(compile_threads=1):
        warnings.simplefilter("ignore")
        for way, what, passes, backend in rows:
            compiler = partial(torch.compile, backend=backend)
            settings = {"compile_step" if what == "step" else "compile_training": compiler}
            with torch._dynamo.config.patch(compiled_autograd=what == COMPILED[2]):
                result = trained(way, passes=passes, blocks=0, **settings)
            torch.testing.assert_close(result, as_others(way, passes, 0), atol=1e-5, rtol=1e-5)


@case_of_all
def every_call_works_in_a_compiled_function() -> None:
    model = network(blocks=0)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)

    def program(x: torch.Tensor) -> list[torch.Tensor]:
        broadcast_parameters(model.state_dict(), P - 1)
        sc.check_weights(model.state_dict())
        total = x * 2
        sc.sparse_allreduce(total, 40, out=total)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), 1.0)
        model(x[:12] + total[:12]).sum().backward()
        optimizer.zero_grad()
        with optimizer.no_sync():
            model(x[:12]).sum().backward()
        local = model[0].bias.grad.clone()
        optimizer.synchronize()
        optimizer.discard()
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.remove()
        with DiLoCo(model, inner, sync_every=1, density=1.0) as diloco:
            inner.step()
            diloco.finish()
            global_bias = diloco.global_parameters()["0.bias"] + 0
            diloco.write_global_parameters()
        return [total, local, model[0].bias.grad, global_bias, model[0].bias.detach()]

    x = torch.arange(1.0, 41) * (RANK + 1)
    state = copy.deepcopy(model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = program(x)
        assert expected[0].tolist() == [(i + 1) * P * (P + 1) for i in range(40)]
        model.load_state_dict(state)
        model.zero_grad()
        for result, exact in zip(torch.compile(program, backend="aot_eager")(x), expected, strict=True):
            torch.testing.assert_close(result, exact)
    torch._dynamo.reset()


@case_of_all
def what_compiled_autograd_cannot_do() -> None:
    model = network(blocks=0)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())

    def program(model: nn.Module) -> None:
        model(torch.ones(12)).sum().backward()

    with warnings.catch_warnings(record=True) as caught, torch._dynamo.config.patch(compiled_autograd=True):
        warnings.simplefilter("always")
        compiled_program = torch.compile(program, backend="eager")
        compiled_program(model)
        with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
            ddp = DistributedDataParallel(network(blocks=0))
            register(ddp)
            with pytest.raises(sc.InvalidInputError, match="python_reducer"):
                compiled_program(ddp)
            ddp = DistributedDataParallel(network(blocks=0))
            keep_local(ddp)
            compiled_program(ddp)
            torch.testing.assert_close([p.grad for p in ddp.parameters()], [p.grad for p in model.parameters()])
    assert any("means only in step() or synchronize()" in str(warning.message) for warning in caught)
    torch._dynamo.reset()
    optimizer.remove()


@case
def activations_that_are_computed_again() -> None:
    for way in WAYS:
        expected = as_others(way)
        assert torch.equal(trained(way, reentrant=False), expected)
        if way in ("DistributedOptimizer", "SparseAdamW, overlap"):
            with pytest.raises(sc.InvalidInputError, match="use_reentrant=False"):
                trained(way, reentrant=True)
        else:
            assert torch.equal(trained(way, reentrant=True), expected)


@case_of_all
def narrow_gradients() -> None:
    for dtype, way in product((torch.bfloat16, torch.float16), WAYS):
        if way != "DiLoCo" or dtype is torch.bfloat16:
            assert trained(way, dtype=dtype).isfinite().all()


@case_of_all
def fused_and_foreach_optimizers() -> None:
    for way in ("hook", "DistributedOptimizer", "DiLoCo"):
        plain = trained(way, make=lambda p: torch.optim.SGD(p, lr=0.1, foreach=False))
        for make in (lambda p: torch.optim.SGD(p, lr=0.1, foreach=True), lambda p: torch.optim.SGD(p, 0.1, fused=True)):
            torch.testing.assert_close(trained(way, make=make), plain)
