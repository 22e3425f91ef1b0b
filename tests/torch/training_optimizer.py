"""Cases of `DistributedOptimizer` alone, on every rank: see `test_training.py`."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import sparsecomm as sc
from sparsecomm.torch import DistributedOptimizer
from sparsecomm.transport.process_group import of
from tests.torch.training_ranks import (
    EXACT,
    ODD,
    RANK,
    Chosen,
    Fails,
    Oracle,
    P,
    all_gather,
    case,
    gradients,
    gradients_by_rank,
    same_everywhere,
    sgd,
    soon,
    state_of,
    timeout,
    train,
    wrapped,
)


@case
def gradients_that_did_not_come_from_backward() -> None:
    """`step` exchanges them, once; `synchronize` does it before."""
    model = Chosen()
    oracle, optimizer = Oracle(model), wrapped(model)
    for step in range(4):
        for name, p in model.named_parameters():
            p.grad = torch.empty_like(p).copy_(gradients(step, RANK)[name])
        if step % 2:
            assert optimizer.synchronize().number == step
        optimizer.step()
        oracle.step(gradients_by_rank(step))
        oracle.check(model, state_of(optimizer))
    optimizer.zero_grad()
    optimizer.step()  # without a backward pass: what waits goes on
    oracle.step([{}] * P)
    oracle.check(model, state_of(optimizer))


@case
def closures() -> None:
    """A closure's gradients are exchanged as often as it is called, and whether or not it makes a backward pass."""
    model = Chosen()
    oracle, optimizer = Oracle(model), wrapped(model)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(gradients(step, RANK))
        if step % 2:
            loss.backward()
            return loss
        for name, p in model.named_parameters():
            p.grad = torch.empty_like(p).copy_(gradients(step, RANK)[name])
        return loss

    for step in range(4):
        assert optimizer.step(closure).ndim == 0
        oracle.step(gradients_by_rank(step))
        oracle.check(model, state_of(optimizer))
    for name, p in model.named_parameters():  # after a closure too, step exchanges what is new
        p.grad = torch.empty_like(p).copy_(gradients(8, RANK)[name])
    optimizer.step()
    oracle.step(gradients_by_rank(8))
    oracle.check(model, state_of(optimizer))

    torch.manual_seed(0)
    line = nn.Linear(5, 1)
    several = wrapped(line, lambda p: torch.optim.LBFGS(p, max_iter=4), density=1.0)
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(RANK))

    def of_line() -> torch.Tensor:
        several.zero_grad()
        loss = line(x).square().mean()
        loss.backward()
        return loss

    several.step(of_line)
    assert several.reducer.step > 1


@case
def two_backward_passes_before_a_step() -> None:
    """The second adds to the mean of the first, and both are exchanged: nothing is lost, or counted twice."""
    model = Chosen()
    oracle, optimizer = Oracle(model), wrapped(model)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(gradients(step, RANK))
        loss.backward(retain_graph=True)
        oracle.exchange(gradients_by_rank(step))
        means = {name: p.grad for name, p in oracle.named.items()}
        if P != 3:  # a third is not exact
            loss.backward()
            oracle.step([{n: means[n] + g for n, g in mine.items()} for mine in gradients_by_rank(step)])
        else:
            oracle.optimizer.step()
        optimizer.step()
        oracle.check(model, state_of(optimizer))


@case
def two_networks() -> None:
    """As in a GAN: two optimizers, and passes that reach both networks."""
    first, second = Chosen(), Chosen()
    oracles = Oracle(first), Oracle(second)
    optimizers = wrapped(first), wrapped(second)
    for step in range(3):
        for mine in (0, 1):
            for optimizer in optimizers:
                optimizer.zero_grad()
            (first(gradients(step, RANK)) + second(gradients(step + 9, RANK))).backward()
            for oracle, which in zip(oracles, (step, step + 9), strict=True):
                oracle.exchange(gradients_by_rank(which))
            optimizers[mine].step()
            oracles[mine].optimizer.step()
            same_everywhere(first)
            same_everywhere(second)
    for model, oracle, optimizer in zip((first, second), oracles, optimizers, strict=True):
        oracle.check(model, state_of(optimizer))


@case
def schedulers_and_clipping() -> None:
    model = Chosen()
    oracle, optimizer = Oracle(model), wrapped(model)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in (optimizer, oracle.optimizer)]
    for step in range(3):
        optimizer.zero_grad()
        model(gradients(step, RANK)).backward()
        oracle.exchange(gradients_by_rank(step))
        for each in (model, oracle.model):
            nn.utils.clip_grad_norm_(each.parameters(), 2.0)
        optimizer.step()
        oracle.optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        oracle.check(model, state_of(optimizer))
    assert optimizer.param_groups[0]["lr"] == 0.5 / 8
    plain = sgd(model.parameters())
    torch.optim.lr_scheduler.StepLR(plain, 1)
    with pytest.raises(sc.InvalidInputError, match="before you make the scheduler"):
        DistributedOptimizer(plain, model.named_parameters())


# -- state -------------------------------------------------------------------------------------------------------------


@case
def states_that_do_not_fit() -> None:
    model = Chosen()
    optimizer = wrapped(model)
    plain = sgd(Chosen().parameters())
    for state, match in (
        (plain.state_dict(), "it is of a plain optimizer"),
        ({**plain.state_dict(), "sparsecomm": {}}, "expected what Reducer.state_dict"),
        (wrapped(Chosen({"a": (20, 14)})).state_dict(), "lack 'b'"),
    ):
        with pytest.raises(sc.InvalidInputError, match=match):
            optimizer.load_state_dict(state)
    theirs = all_gather(optimizer.state_dict())
    if P > 1:
        with pytest.raises(sc.InvalidInputError, match=f"is that of rank {(RANK + 1) % P}"):
            optimizer.load_state_dict(theirs[(RANK + 1) % P])
    optimizer.load_state_dict(theirs[RANK])


@case
def hooks_of_steps_run_once() -> None:
    model = Chosen()
    optimizer = wrapped(model)
    optimizer.load_state_dict(optimizer.state_dict())
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    train(model, gradients(0, RANK), optimizer)
    assert calls == ["before", "after"]


@case
def the_optimizer_that_was_given() -> None:
    """It shares groups and state, and steps with the same gradients."""
    model = Chosen()
    plain = SGD(model.parameters(), lr=0.5, momentum=0.5)
    oracle = Oracle(model, make=lambda p: SGD(p, lr=0.5, momentum=0.5))
    optimizer = DistributedOptimizer(plain, model.named_parameters(), algorithm="split", **EXACT)
    for step in range(4):
        train(model, gradients(step, RANK), (optimizer, plain)[step % 2])
        oracle.step(gradients_by_rank(step))
        oracle.check(model, state_of(optimizer))
    optimizer.param_groups[0]["lr"] = 7
    assert plain.param_groups[0]["lr"] == 7
    assert plain.state[model.a]["momentum_buffer"] is optimizer.state[model.a]["momentum_buffer"]


@case
def copies() -> None:
    model = Chosen()
    optimizer = wrapped(model)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(sc.InvalidInputError, match="cannot be copied or pickled"):
            copied(optimizer)
    train(model, gradients(0, RANK), optimizer)
    if RANK == ODD:  # a copy of the model exchanges nothing
        twin = copy.deepcopy(model)
        twin.zero_grad()
        twin(gradients(1, RANK)).backward()
        assert torch.equal(twin.a.grad, gradients(1, RANK)["a"])


# -- the end -----------------------------------------------------------------------------------------------------------


def alone(model: Chosen) -> None:
    """One rank makes a pass, and nobody waits."""
    if RANK == ODD:
        with soon():
            model.zero_grad()
            model(gradients(1, RANK)).backward()
            assert torch.equal(model.a.grad, gradients(1, RANK)["a"])


@case
def what_is_dropped_is_freed() -> None:
    model = Chosen()
    optimizer = wrapped(model)
    train(model, gradients(0, RANK), optimizer)
    watched = [weakref.ref(x) for x in (optimizer, optimizer.reducer, model, model.a)]
    gc.disable()
    del optimizer
    assert [w() is None for w in watched] == [True, True, False, False]  # at once, as it must be on all ranks
    gc.enable()
    alone(model)
    again = wrapped(model)
    train(model, gradients(0, RANK), again)
    del model, again
    gc.collect()
    assert [w() for w in watched] == [None] * 4


@case
def an_optimizer_that_is_removed() -> None:
    model = Chosen()
    plain = sgd(model.parameters())
    optimizer = DistributedOptimizer(plain, model.named_parameters(), **EXACT)
    for given in (plain, optimizer):
        with pytest.raises(sc.InvalidInputError, match="wrapped already"):
            DistributedOptimizer(given, model.named_parameters())
    with pytest.raises(sc.InvalidInputError, match="gradient of a is exchanged by another DistributedOptimizer"):
        wrapped(model)
    optimizer.remove()
    alone(model)
    if RANK == ODD:
        optimizer.step()
    again = DistributedOptimizer(plain, model.named_parameters(), check_weights_every=None, **EXACT)
    train(model, gradients(2, RANK), again)  # of weights that differ
    assert again.reducer.step == 1
    optimizer.remove()  # it shares all it has with the others
    alone(model)


@case
def the_one_that_was_given_keeps_the_exchange_alive() -> None:
    model = Chosen()
    plain = sgd(model.parameters())
    oracle = Oracle(model)
    DistributedOptimizer(plain, model.named_parameters(), algorithm="split", **EXACT)
    train(model, gradients(0, RANK), plain)
    oracle.step(gradients_by_rank(0))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), oracle.model.parameters(), strict=True))


# -- errors ------------------------------------------------------------------------------------------------------------


@case
def wrong_arguments() -> None:
    model = Chosen()
    named = list(model.named_parameters())
    momentum = SGD(model.parameters(), lr=0.1, momentum=0.9)
    for optimizer, options, match in (
        (model, {}, "got Chosen; expected a torch.optim.Optimizer"),
        (momentum, {"momentum": 0.9}, "momentum is asked for twice"),
        (sgd(model.parameters()), {"backward_passes_per_step": 0}, "backward_passes_per_step=0"),
        (sgd([model.a]), {}, "'b' and perhaps others are not the optimizer's"),
    ):
        with pytest.raises(sc.InvalidInputError, match=match):
            DistributedOptimizer(optimizer, named, **options)  # type: ignore[arg-type]
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


@case
def sparse_gradients() -> None:
    """All ranks have them: they are refused before anything is sent. One rank has: the others wait for it in vain."""
    group = dist.new_group(backend="gloo")
    of(group)
    for who in (range(P), [ODD]):
        embedding = nn.Embedding(50, 4, sparse=RANK in who)
        optimizer = wrapped(embedding, comm=group)  # exchange ends with it
        loss = embedding(torch.tensor([RANK, 3])).sum()
        with timeout(1), soon():
            if RANK in who:
                with pytest.raises(sc.InvalidInputError, match=r"the gradient of weight is sparse .* sparse=False"):
                    loss.backward()
            else:
                # who times out first tells the others, and they may hear of it before their own time is up
                with pytest.raises(sc.TransportError, match=r"waited 1 s for rank|left call"):
                    loss.backward()
        optimizer.remove()
        dist.barrier()


@case
def a_parameter_that_changes_its_shape() -> None:
    model = Chosen({"a": (4, 5)})
    optimizer = wrapped(model)
    train(model, {"a": torch.ones(4, 5)}, optimizer)
    optimizer.zero_grad()
    model.a.data = torch.ones(5, 5)
    with pytest.raises(sc.InvalidInputError, match=r"a: got shape \(5, 5\).*expected shape \(4, 5\)"):
        model({"a": torch.ones(5, 5)}).backward()


@case
def a_backward_pass_that_fails_everywhere() -> None:
    """What came before it is exchanged by `synchronize`; to go on without is an error that says so."""
    model = Chosen()
    oracle, optimizer = Oracle(model), wrapped(model)
    train(model, gradients(0, RANK), optimizer)
    oracle.step(gradients_by_rank(0))
    optimizer.zero_grad()
    part, rest = ({n: g for n, g in gradients(1, RANK).items() if n in names} for names in ("ab", "cde"))
    loss = Fails.apply(model(part))  # autograd goes backward from what was computed last
    with pytest.raises(ValueError, match="planted"):
        (loss + model(rest)).backward()
    assert [n for n, p in model.named_parameters() if p.grad is not None] == ["c", "d", "e"]
    with pytest.raises(sc.InvalidInputError, match=r"call synchronize\(\)"):
        model(part).backward()
    model.a.grad = model.b.grad = None
    optimizer.synchronize()
    optimizer.step()
    oracle.step([{n: g for n, g in mine.items() if n in "cde"} for mine in gradients_by_rank(1)])
    oracle.check(model, state_of(optimizer))
    train(model, gradients(2, RANK), optimizer)
    oracle.step(gradients_by_rank(2))
    oracle.check(model, state_of(optimizer))


@case
def passes_within_passes() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = wrapped(model)
    x = torch.ones(2, 4, requires_grad=True)
    model[2](checkpoint(model[1], model[0](x), use_reentrant=False)).sum().backward()
    assert optimizer.reducer.step == 1
    with pytest.raises(sc.InvalidInputError, match="use_reentrant=False"):
        model[2](checkpoint(model[1], model[0](x), use_reentrant=True)).sum().backward()
