"""`DiLoCo` on simulated ranks, compared with a plain loop, in addition to `tests/local_steps/test_contract.py`.

For shards see `training_shards.py`.
"""

from __future__ import annotations

import copy
import io
from functools import cache
from typing import Any

import pytest

pytest.importorskip("torch.distributed")

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import sparsecomm as sc
from sparsecomm.torch import DiLoCo, register_fsdp
from sparsecomm.transport import simulated

P = 2  # sums of two do not depend on their order
STEPS = 13
OUTER: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
}


def network(dtype: Any) -> nn.Module:
    return copy.deepcopy(_network(dtype))


@cache  # simulated ranks share torch's random generator
def _network(dtype: Any) -> nn.Module:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    model = nn.Sequential(conv, nn.Linear(6, 5), nn.Linear(5, 2)).to(dtype)
    model[1].bias.requires_grad_(False)
    return model


def inner_of(model: nn.Module) -> Any:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.5)


def local_step(model: nn.Module, optimizer: Any, step: int, rank: int) -> None:
    """Take a local step that differs between ranks."""
    random = torch.Generator().manual_seed(1000 * step + rank)
    for parameter in model.parameters():
        if parameter.requires_grad:
            drawn = torch.randn(parameter.shape, generator=random)
            parameter.grad = torch.empty_like(parameter).copy_(drawn)
    optimizer.step()


def fragments_of(model: nn.Module, way: str) -> tuple[Any, list[list[str]]]:
    """Return the argument of `DiLoCo`, and the names of each fragment."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    if way == "one":
        return 1, [names]
    if way == "names":
        parts = [names[2:], names[:2]]
        return parts, parts
    return list(model), [[name for name in names if name.startswith(f"{i}.")] for i in range(len(model))]  # type: ignore[arg-type, call-overload]


def plain_loop(dtype: Any, way: str, outer: Any, every: int) -> list[list[Any]]:
    """Return the weights of all ranks after dense DiLoCo, as in the papers."""
    models = [network(dtype) for _ in range(P)]
    optimizers = [inner_of(model) for model in models]
    named = [dict(model.named_parameters()) for model in models]
    masters = {n: nn.Parameter(p.detach().float().clone()) for n, p in named[0].items() if p.requires_grad}
    outer_optimizer = outer(masters.values())
    parts = fragments_of(models[0], way)[1]
    for step in range(1, STEPS + 1):
        for rank in range(P):
            local_step(models[rank], optimizers[rank], step, rank)
        for i, part in enumerate(parts):
            if (step - (i + 1) * every // len(parts)) % every:
                continue
            for name in part:
                moved = [masters[name].detach() - worker[name].detach().float() for worker in named]
                masters[name].grad = sum(moved[1:], moved[0]) / P
            outer_optimizer.step()
            for name in part:
                masters[name].grad = None
                for worker in named:
                    worker[name].data.copy_(masters[name].data)
    return [[p.detach() for p in model.parameters()] for model in models]


def made(transport: Any, outer: Any = None, dtype: Any = torch.float32, way: str = "one", **options: Any) -> Any:
    """Return a model, its inner and outer optimizers, and the exchange."""
    model = network(dtype)
    inner, over = inner_of(model), None if outer is None else outer(model.parameters())
    return (
        model,
        inner,
        over,
        DiLoCo(model, inner, over, fragments=fragments_of(model, way)[0], comm=transport, **options),
    )


@pytest.mark.parametrize(
    ("dtype", "way", "outer", "every", "stop"),
    [(torch.bfloat16, "modules", "sgd", 4, 7), (torch.float32, "names", "adam", 3, 5)],
)
def test_at_density_1_it_is_the_plain_loop(dtype: Any, way: str, outer: str, every: int, stop: int) -> None:
    """Weights are equal bit for bit, with a checkpoint after ``stop`` local steps."""

    def train(transport: Any) -> list[Any]:
        options = {"dtype": dtype, "way": way, "sync_every": every, "density": 1.0}
        model, inner, _, diloco = made(transport, OUTER[outer], **options)
        for step in range(1, STEPS + 1):
            local_step(model, inner, step, transport.rank)
            if step == stop:
                saved = io.BytesIO()
                torch.save((model.state_dict(), inner.state_dict(), diloco.state_dict()), saved)
                saved.seek(0)
                states = torch.load(saved, weights_only=True)
                diloco.remove()
                model, inner, _, diloco = made(transport, OUTER[outer], **options)
                for stateful, state in zip((model, inner, diloco), states, strict=True):
                    stateful.load_state_dict(state)
        assert (diloco.round, diloco.local_step) == divmod(STEPS, every)
        assert not any(reducer.residual(name).any() for reducer in diloco.reducers for name in reducer.names)
        return [p.detach() for p in model.parameters()]

    expected = plain_loop(dtype, way, OUTER[outer], every)
    results = simulated.run(P, train)
    for rank in range(P):
        for theirs, mine in zip(expected[rank], results[rank].value, strict=True):
            assert torch.equal(theirs, mine)


def test_a_block_ends_with_the_global_parameters() -> None:
    """The defaults are sparse, and an exchange is under way. Afterwards the optimizers are plain ones again."""

    def program(transport: Any) -> list[Any]:
        model, inner, outer, diloco = made(transport, OUTER["sgd"], sync_every=4, fragment_sync_delay=3)
        outer.register_step_pre_hook(lambda *_: outer_steps.append(transport.rank))
        with diloco:
            for step in range(1, 6):
                local_step(model, inner, step, transport.rank)
            (reducer,) = diloco.reducers
            assert reducer.counters.steps == 1
        assert reducer.counters.steps == 2
        assert outer.param_groups[0]["params"] == list(model.parameters())
        assert all(outer.state[p]["momentum_buffer"].shape == p.shape for p in inner.param_groups[0]["params"][1:])
        globals_ = diloco.global_parameters()
        assert all(torch.equal(p, globals_[name]) for name, p in model.named_parameters() if name in globals_)
        diloco.discard("0.weight")
        assert not reducer.residual("0.weight").any()
        local_step(model, inner, 7, transport.rank)
        assert reducer.counters.steps == 2
        return list(globals_.values())

    outer_steps: list[int] = []
    mine, theirs = (result.value for result in simulated.run(P, program))
    assert all(map(torch.equal, mine, theirs))
    assert sorted(outer_steps) == [0, 0, 1, 1]  # one per exchange, not one per parameter


def test_a_step_that_pytorch_makes_to_get_a_state_is_no_local_step() -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        model = network(torch.float32)
        inner = inner_of(model)
        with DiLoCo(model, inner, sync_every=3, comm=transport) as diloco:
            get_optimizer_state_dict(model, inner)
            assert inner.state  # AdamW's zeros
            assert diloco.local_step == 0
            local_step(model, inner, 0, transport.rank)
            assert diloco.local_step == 1
            for group in inner.param_groups:  # as in a learning rate warm-up
                group["lr"] = 0.0
            local_step(model, inner, 1, transport.rank)
            assert diloco.local_step == 2

    simulated.run(P, program)


def test_weights_that_differ() -> None:
    def program(transport: Any) -> None:
        model = network(torch.float32)
        with torch.no_grad():
            model[1].bias += transport.rank  # a frozen parameter
        inner = inner_of(model)
        DiLoCo(model, inner, comm=transport)
        local_step(model, inner, 0, transport.rank)

    with pytest.raises(sc.WeightMismatchError, match=r"1\.bias.* rank 1 differ from rank 0"):
        simulated.run(P, program)


def test_wrong_arguments_leave_all_as_it_was() -> None:
    model, other = network(torch.float32), nn.Linear(3, 3)
    inner, outer = inner_of(model), OUTER["sgd"](model.parameters())
    half = torch.optim.SGD(list(model.parameters())[:2], lr=0.1)
    inners: list[tuple[Any, Any, dict[str, Any], str]] = [
        (model, None, {}, "inner_optimizer: got Sequential"),
        (inner, "sgd", {}, "outer_optimizer: got str"),
        (inner, inner, {}, "outer_optimizer is inner_optimizer"),
        (torch.optim.SGD(other.parameters()), outer, {}, "inner_optimizer: it has none of the model's"),
        (inner, half, {}, r"outer_optimizer: it lacks '1\.weight'"),
        (inner, outer, {"fragments": [other]}, "fragments: Linear has parameters that do not belong to the model"),
        (inner, outer, {"fragments": [model[0], model[0], model[1:]]}, "repeated"),
        (inner, outer, {"fragments": 6}, "fragments=6: must be from 1 to 5"),
    ]
    for inner_optimizer, outer_optimizer, options, match in inners:
        with pytest.raises(sc.InvalidInputError, match=match):
            DiLoCo(model, inner_optimizer, outer_optimizer, **options)
        assert outer.param_groups[0]["params"] == list(model.parameters())
    no_model: Any = model.parameters()
    for make in (lambda: DiLoCo(no_model, inner, outer), lambda: register_fsdp(no_model)):
        with pytest.raises(sc.InvalidInputError, match="model: got generator; expected a torch"):
            make()
    diloco = DiLoCo(model, inner, outer)
    with pytest.raises(sc.InvalidInputError, match=r"outer_optimizer: it lacks .*another DiLoCo"):
        DiLoCo(model, inner, outer)
    diloco.remove()
    model[0].weight = nn.Parameter(torch.ones(4, 8)[:, ::2])
    with pytest.raises(sc.InvalidInputError, match=r"0\.weight: its memory has gaps or overlaps"):
        DiLoCo(model, torch.optim.SGD(model.parameters()))
