"""Cases for the DDP hook and `DistributedOptimizer`, on every rank: see `test_training.py`."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam

import sparsecomm as sc
from sparsecomm.torch import DistributedOptimizer, SparseState, sparse_hook
from tests.torch.training_ranks import (
    ODD,
    RANK,
    SHAPES,
    SMALL,
    WAYS,
    Chosen,
    Fails,
    P,
    Training,
    all_residuals,
    alone,
    case,
    case_of_several,
    gradients,
    gradients_by_rank,
    same_everywhere,
    sgd,
    soon,
    timeout,
)

# Parameters that each rank does not use, by step.
UNUSED: list[dict[int, str]] = [
    {},
    {ODD: "ad"},
    {0: "e", ODD: "b"},
    dict.fromkeys(range(P), "ad"),
    {**dict.fromkeys(range(P), "a"), ODD: "ae"},
    {},
]


@case
def weights_are_the_oracles() -> None:
    """DDP rebuilds its buckets meanwhile, which differ from the state's. Ranks do not use some parameters."""
    large, unused, static = {"bucket_cap_mb": 25}, {"find_unused_parameters": True}, {"static_graph": True}
    momentum: Any = lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)  # noqa: E731
    settings: list[tuple[str, str, Any, dict[str, Any], bool]] = [
        ("hook", "split", sgd, large, True),
        ("hook", "allgather", sgd, {}, False),
        ("hook of views", "split", sgd, {}, False),
        ("hook of views", "split", sgd, unused, True),
        ("hook", "allgather", sgd, static, True),
        ("hook of views", "split", sgd, static, False),
        ("optimizer", "split", sgd, {}, True),
        ("optimizer", "allgather", momentum, {}, False),
        ("optimizer", "split", lambda p: Adam(p, lr=0.1), {}, True),
    ]
    for way, algorithm, make, ddp, none in settings:
        training, buckets = Training(way, make=make, ddp=ddp, algorithm=algorithm), [0]
        if way != "optimizer":
            state: Any = training.exchange
            reduce = state.run_hook
            state.run_hook = lambda bucket, to=buckets, go=reduce: to.append(bucket.index()) or go(bucket)
        for step, without in enumerate(UNUSED if none and (way == "optimizer" or ddp is unused) else [{}] * 4):
            training.follow(gradients_by_rank(step, without), none)
        assert (max(buckets) > 0) == (way != "optimizer" and ddp is not large)
        same_everywhere(training.model)
        assert isinstance(training.optimizer, type(make(training.model.parameters())))


@case
def every_type() -> None:
    half, brain, single, double = torch.float16, torch.bfloat16, torch.float32, torch.float64
    mixed = [brain, single, double, half]
    of_hook = [("hook", dtypes) for dtypes in ([half], [brain], [double], [single, half], mixed)]
    for way, dtypes in (*of_hook, ("optimizer", mixed)):
        training = Training(way, Chosen(dtypes=dtypes))
        for step in range(3):
            training.follow(gradients_by_rank(step))


@case
def frozen_and_tied_parameters() -> None:
    """One parameter has two names. A frozen one gets no gradient and must stay frozen."""
    for way in WAYS:
        model = Chosen()
        model.a.requires_grad_(False)
        model.tied = model.d
        training = Training(way, model)
        assert not {"a", "tied"} & set(training.exchange.reducer.names)
        for step in range(3):
            training.step({**gradients(step, RANK), "tied": gradients(step + 7, RANK)["d"]})
            other = [gradients(step + 7, rank)["d"] for rank in range(P)]
            training.compare([{**g, "d": g["d"] + d} for g, d in zip(gradients_by_rank(step), other, strict=True)])
            assert [name for name, p in model.named_parameters() if p.grad is None] == ["a"]
        model.a.requires_grad_(True)
        with pytest.raises(sc.InvalidInputError, match="a was frozen, and requires a gradient now"):
            training.step(gradients(9, RANK))


@case
def passes_add_up() -> None:
    """Accumulation works with no_sync, with backward_passes_per_step, and with a step before all passes are made."""
    counts: list[tuple[str, int | None]] = [*((way, None) for way in WAYS), ("optimizer", 2), ("optimizer", 3)]
    for way, passes in counts:
        options: dict[str, Any] = {} if passes is None else {"backward_passes_per_step": passes}
        training = Training(way, ddp={"find_unused_parameters": True}, **options)
        no_sync: Any = training.optimizer.no_sync if way == "optimizer" else getattr(training.run, "no_sync", None)
        for step in range(3):
            first, second = gradients_by_rank(step, {ODD: "a"}), gradients_by_rank(step + 9, {0: "a", ODD: "e"})
            training.optimizer.zero_grad()
            with no_sync() if passes is None else nullcontext():
                training.backward(first[RANK])
            assert all(torch.equal(getattr(training.model, n).grad, g) for n, g in first[RANK].items())
            training.backward(second[RANK])
            training.update()
            pairs = zip(first, second, strict=True)
            zero = torch.zeros(())
            training.compare([{n: a.get(n, zero) + b.get(n, zero) for n in {**a, **b}} for a, b in pairs])


# -- checkpoints ------------------------------------------------------------------------------------------------------


@case
def a_pickled_state_goes_on_with_another_model() -> None:
    training = Training("hook")
    for step in range(4):
        if step == 2:
            bound, model = pickle.loads(pickle.dumps(training.exchange)), Chosen()
            with pytest.raises(sc.InvalidInputError, match="bind"):
                bound.reducer  # noqa: B018
            model.load_state_dict(training.model.state_dict())
            bound.bind(model.named_parameters())
            training.model, training.exchange, training.optimizer = model, bound, sgd(model.parameters())
            training.run = DistributedDataParallel(model, bucket_cap_mb=SMALL)
            training.run.register_comm_hook(bound, sparse_hook)
        training.follow(gradients_by_rank(step))


# -- loss scaling -----------------------------------------------------------------------------------------------------


def scaled(way: str, scale: float = 16.0) -> Training:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)
    return Training(way, ddp={"find_unused_parameters": True}, scaler=scaler)


@case
def an_infinity_on_one_rank() -> None:
    """All ranks skip the step and halve the scale. Finite gradients stay in residuals, so nothing is lost."""
    cases = [("a", ""), ("d", "a"), ("e", "b")]
    for way, (infinite, unused) in zip(WAYS, cases, strict=True):
        training = scaled(way)
        for step in range(7):
            by_rank = gradients_by_rank(step, dict.fromkeys(range(P), unused) if step % 3 == 2 else {})
            if step != 2:
                training.follow(by_rank)
                continue
            before, weights = all_residuals(training.state()), same_everywhere(training.model)
            by_rank[ODD][infinite].view(-1)[-1] = torch.inf
            training.step(by_rank[RANK])
            after = all_residuals(training.state())
            for name in SHAPES:
                new = [g[name].reshape(-1).numpy() for g in by_rank if name in g and g[name].isfinite().all()]
                total = sum(residuals[name] for residuals in before) + sum(new)
                assert np.array_equal(total, sum(residuals[name] for residuals in after)), (way, name)
            assert np.array_equal(same_everywhere(training.model), weights)
            assert training.scaler.get_scale() == 8
            training.oracle.residuals = [{n: x.astype(np.float32) for n, x in mine.items()} for mine in after]
        assert training.scaler.get_scale() == 16  # halved, then doubled after three steps
        assert training.exchange.reducer.counters.skipped == 1


@case
def the_scale_comes_back() -> None:
    """Training from a checkpoint continues with a scaler of another scale."""
    for way, later in [*product(WAYS[::2], (16.0, 2.0)), (WAYS[1], 2.0)]:
        training = scaled(way)
        for step in range(4):
            if step == 2:
                before, training = training, scaled(way, later)
                training.model.load_state_dict(before.model.state_dict())
                training.load(before.state())
                training.oracle = before.oracle
            training.follow(gradients_by_rank(step))


@case
def every_optimizer_hears_of_an_infinity() -> None:
    """One scaler serves an optimizer per parameter: none applies gradients that returned to residuals."""
    for way in WAYS[:2]:
        training = scaled(way)
        optimizers: list[Any] = [sgd([p]) for p in training.model.parameters()]
        before = same_everywhere(training.model)
        by_rank = gradients_by_rank(0)
        by_rank[ODD]["d"][0] = torch.inf
        training.backward(by_rank[RANK])
        for optimizer in optimizers:
            training.scaler.step(optimizer)
        assert np.array_equal(same_everywhere(training.model), before)
        residuals = all_residuals(training.state())
        assert np.array_equal(sum(k["a"] for k in residuals), sum(g["a"].reshape(-1).numpy() for g in by_rank))


@case
def a_copy_of_the_model_exchanges_nothing() -> None:
    for way in WAYS[::2]:
        training = Training(way)
        training.step(gradients(0, RANK))
        alone(copy.deepcopy(training.model))


# -- errors -----------------------------------------------------------------------------------------------------------


@case
def a_group_that_was_destroyed() -> None:
    for way, steps in product(WAYS[::2], (0, 1)):
        group = dist.new_group(backend="gloo")
        training = Training(way, ddp={"process_group": group}, comm=group)
        for step in range(steps):
            training.step(gradients(step, RANK))
        loss = training.run(gradients(9, RANK))
        dist.barrier()
        dist.destroy_process_group(group)
        with soon(), pytest.raises(sc.InvalidInputError, match="destroyed"):
            loss.backward()


@case_of_several
def a_backward_pass_that_fails_on_one_rank() -> None:
    """The rank raises the original error; the other ranks raise after the timeout."""
    for way in WAYS[::2]:
        group = dist.new_group(backend="gloo")
        training = Training(way, ddp={"process_group": group}, comm=group)
        training.step(gradients(0, RANK))
        training.optimizer.zero_grad()
        loss = training.run(gradients(1, RANK))
        with timeout(1), soon():
            if RANK == ODD:
                with pytest.raises(ValueError, match="planted"):
                    Fails.apply(loss).backward()
            else:
                residuals = {name: k.clone() for name, k in training.state()["residuals"].items()}
                with pytest.raises(sc.TransportError):
                    loss.backward()
                for name, now in training.state()["residuals"].items():  # this rank's gradients are not lost
                    assert torch.equal(now, residuals[name] + gradients(1, RANK)[name])
        dist.barrier()


@case
def arguments_that_cannot_be_used() -> None:
    """Arguments of both ways; each way's own arguments are tested in its file."""
    named = list(Chosen().named_parameters())
    for way, (parameters, options, match) in product(
        WAYS[::2],
        [
            (named, {"skip_nonfinite": True}, "skip_nonfinite is not an option"),
            (named, {"nonsense": 1}, "nonsense"),
            ([*named, ("a", nn.Parameter(torch.ones(3)))], {}, "'a' appears twice"),
            ([("a", nn.Parameter(torch.ones(3), requires_grad=False))], {}, "at least one parameter must require"),
            ([p for _, p in named], {}, "Parameter in it; expected names and tensors"),
        ],
    ):
        first: Any = () if way == "hook" else (sgd([p for _, p in named]),)
        with pytest.raises((sc.InvalidInputError, TypeError), match=match):
            (SparseState if way == "hook" else DistributedOptimizer)(*first, parameters, **options)
    assert not any(p._post_accumulate_grad_hooks for _, p in named)
