"""Cases for `DistributedOptimizer` only, on every rank: see `test_training.py`."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import LBFGS, SGD, Adam

import sparsecomm as sc
from sparsecomm.torch import DistributedOptimizer
from sparsecomm.transport.process_group import of
from tests.torch.training_ranks import (
    EXACT,
    ODD,
    RANK,
    Chosen,
    Fails,
    P,
    Training,
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


@case
def gradients_that_did_not_come_from_backward() -> None:
    """`step` exchanges them once, or `synchronize` does before it."""
    training = Training()
    for step in range(4):
        training.set(gradients(step, RANK))
        if step % 2:
            assert training.optimizer.synchronize().number == step
        training.update()
        training.compare(gradients_by_rank(step))
    training.optimizer.zero_grad()
    training.update()  # without a backward pass: residuals stay
    training.compare([{}] * P)


@case
def closures() -> None:
    """A closure's gradients are exchanged at each call, with or without a backward pass."""
    training = Training()

    def closure() -> torch.Tensor:
        training.optimizer.zero_grad()
        loss: torch.Tensor = training.model(gradients(step, RANK))
        if step % 2:
            loss.backward()
        else:
            training.set(gradients(step, RANK))
        return loss

    for step in range(4):
        assert training.optimizer.step(closure).ndim == 0
        training.compare(gradients_by_rank(step))
    training.set(gradients(8, RANK))  # step exchanges new gradients after a closure, too
    training.update()
    training.compare(gradients_by_rank(8))

    torch.manual_seed(0)
    several = Training(model=nn.Linear(5, 1), make=lambda p: LBFGS(p, max_iter=4), density=1.0)
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(RANK))

    def of_line() -> torch.Tensor:
        several.optimizer.zero_grad()
        loss: torch.Tensor = several.model(x).square().mean()
        loss.backward()
        return loss.detach()  # PyTorch 2.8 warns of losses with gradients

    several.optimizer.step(of_line)
    assert several.exchange.reducer.step > 1


@case
def two_backward_passes_before_a_step() -> None:
    """The second pass adds to the mean of the first. Both are exchanged, and nothing is counted twice."""
    training = Training()
    oracle = training.oracle
    for step in range(3):
        training.optimizer.zero_grad()
        loss = training.model(gradients(step, RANK))
        loss.backward(retain_graph=True)
        oracle.exchange(gradients_by_rank(step))
        means = {name: p.grad for name, p in oracle.named.items()}
        if P != 3:  # thirds are not exact
            loss.backward()
            oracle.exchange([{n: means[n] + g for n, g in mine.items()} for mine in gradients_by_rank(step)])
        oracle.optimizer.step()
        training.update()
        training.check()


@case
def two_networks() -> None:
    """As in a GAN, backward passes of two optimizers reach both networks."""
    both = first, second = Training(), Training()
    for step in range(3):
        for mine in both:
            for training in both:
                training.optimizer.zero_grad()
            (first.model(gradients(step, RANK)) + second.model(gradients(step + 9, RANK))).backward()
            for training, number in ((first, step), (second, step + 9)):
                training.oracle.exchange(gradients_by_rank(number))
            mine.update()
            mine.oracle.optimizer.step()
            for training in both:
                same_everywhere(training.model)
    for training in both:
        training.check()


# -- the wrapped optimizer --------------------------------------------------------------------------------------------


@case
def hooks_of_steps_run_once() -> None:
    training = Training()
    training.optimizer.load_state_dict(training.optimizer.state_dict())
    calls: list[str] = []
    training.optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    training.optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    training.step(gradients(0, RANK))
    assert calls == ["before", "after"]


@case
def the_optimizer_that_was_given() -> None:
    """The wrapped optimizer steps with the same gradients, and keeps the exchange alive."""
    plain: list[torch.optim.Optimizer] = []
    training = Training(make=lambda p: plain.append(SGD(p, lr=0.5, momentum=0.5)) or plain[-1])
    for step in range(4):
        training.optimizer = (training.exchange, plain[-1])[step % 2]
        if step == 3:
            training.exchange = plain[-1]
        training.follow(gradients_by_rank(step))


@case
def copies() -> None:
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(sc.InvalidInputError, match="cannot be copied or pickled"):
            copied(Training().optimizer)


# -- the end ----------------------------------------------------------------------------------------------------------


@case
def what_is_dropped_is_freed() -> None:
    training = Training()
    training.step(gradients(0, RANK))
    model = training.model
    watched = [weakref.ref(x) for x in (training.optimizer, training.exchange.reducer, model, model.a)]
    gc.disable()
    del training
    assert [w() is None for w in watched] == [True, True, False, False]  # freed at once, as on all ranks
    gc.enable()
    alone(model)
    again = Training(model=model)
    again.step(gradients(0, RANK))
    del model, again
    gc.collect()
    assert [w() for w in watched] == [None] * 4


@case
def an_optimizer_that_is_removed() -> None:
    model = Chosen()
    plain = sgd(model.parameters())
    optimizer = DistributedOptimizer(plain, model.named_parameters(), **EXACT)
    for inner in (plain, optimizer):
        with pytest.raises(sc.InvalidInputError, match="wrapped already"):
            DistributedOptimizer(inner, model.named_parameters())
    with pytest.raises(sc.InvalidInputError, match=r"gradient of a is exchanged already.*DistributedOptimizer"):
        Training(model=model)
    optimizer.remove()
    alone(model)
    if RANK == ODD:
        optimizer.step()
    again = Training(model=model, make=lambda _: plain, check_weights_every=None)
    again.step(gradients(2, RANK))  # with different weights
    assert again.exchange.reducer.step == 1
    optimizer.remove()  # it shares its objects with the others
    alone(model)


# -- errors -----------------------------------------------------------------------------------------------------------


@case_of_several
def settings_that_differ() -> None:
    """The error names the setting. Ranks continue when settings agree again. Settings without effect may differ."""
    for make, ours, theirs in (
        (SGD, {"lr": torch.tensor(0.5)}, {"lr": torch.tensor(0.25)}),
        (SGD, {"lr": 0.5, "nesterov": False}, {"lr": 0.5, "nesterov": True}),
        (Adam, {"lr": 0.5, "betas": [0.5, 0.75]}, {"lr": 0.5, "betas": (0.25, 0.75)}),
    ):
        training = Training(make=lambda p, make=make, first=ours: make([{"params": p[:2]}, {"params": p[2:]}], **first))
        groups, option = training.optimizer.param_groups, [*ours][-1]
        for name, changed in ("", groups), (" of c", groups[1:]):
            for group in groups:
                group.update(ours, foreach=None if RANK == ODD else False)
            training.step(gradients(0, RANK))
            for group in changed:
                group.update(theirs if RANK == ODD else {})
            message = rf"{option}{name} is (\S+|\(.*\)) on rank \d and (?!\1)(\S+|\(.*\)) on rank \d"
            with soon(), pytest.raises(sc.CollectiveMismatchError, match=message):
                training.backward(gradients(0, RANK))


@case
def wrong_arguments() -> None:
    model = Chosen()
    named = list(model.named_parameters())
    momentum, scheduled = SGD(model.parameters(), lr=0.1, momentum=0.9), sgd(model.parameters())
    torch.optim.lr_scheduler.StepLR(scheduled, 1)
    for optimizer, options, match in (
        (scheduled, {}, "before you make the scheduler"),
        (model, {}, "got Chosen; expected a torch.optim.Optimizer"),
        (momentum, {"momentum": 0.9}, "momentum is set twice"),
        (sgd(model.parameters()), {"backward_passes_per_step": 0}, "backward_passes_per_step=0"),
        (sgd(model.parameters()), {"warmup": 3}, "warmup is not an option of DistributedOptimizer; .* 'dense_steps'"),
        (sgd([model.a]), {}, "'b'.* are not parameters of the optimizer"),
    ):
        with pytest.raises(sc.InvalidInputError, match=match):
            DistributedOptimizer(optimizer, named, **options)  # type: ignore[arg-type]
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


@case
def sparse_gradients() -> None:
    """On all ranks, they are refused before anything is sent. On one rank, the others time out."""
    group = dist.new_group(backend="gloo")
    of(group)
    for who in (range(P), [ODD]):
        training = Training(model=nn.Embedding(50, 4, sparse=RANK in who), comm=group)
        loss = training.model(torch.tensor([RANK, 3])).sum()
        with timeout(1), soon():
            if RANK in who:
                with pytest.raises(sc.InvalidInputError, match=r"the gradient of weight is sparse .* sparse=False"):
                    loss.backward()
            else:
                # the first rank to time out informs the others, perhaps before their own timeout
                with pytest.raises(sc.TransportError, match=r"waited 1 s for rank|left call"):
                    loss.backward()
        training.optimizer.remove()
        dist.barrier()


@case
def a_backward_pass_that_fails_everywhere() -> None:
    """`synchronize` exchanges the gradients before the failure. Continuing without it raises an error."""
    training = Training()
    model = training.model
    training.follow(gradients_by_rank(0))
    training.optimizer.zero_grad()
    part, rest = ({n: g for n, g in gradients(1, RANK).items() if n in names} for names in ("ab", "cde"))
    loss = Fails.apply(model(part))  # autograd starts with the operation that was computed last
    with pytest.raises(ValueError, match="planted"):
        (loss + model(rest)).backward()
    assert [n for n, p in model.named_parameters() if p.grad is not None] == ["c", "d", "e"]
    with pytest.raises(sc.InvalidInputError, match=r"call synchronize\(\)"):
        model(part).backward()
    model.a.grad = model.b.grad = None
    training.optimizer.synchronize()
    training.update()
    training.compare([{n: g for n, g in mine.items() if n in "cde"} for mine in gradients_by_rank(1)])
    training.follow(gradients_by_rank(2))
