"""Cases of `SparseAdamW` on every rank, where backward passes go on beside the exchange: see `test_training.py`."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import nn

from sparsecomm.torch import SparseAdamW
from tests.torch.training_ranks import ODD, RANK, Chosen, P, all_gather, case, gradients

SETTINGS = {"lr": 0.05, "density": 0.2, "bucket_bytes": 600}  # several buckets


def pair(dtypes: Any = ()) -> list[tuple[nn.Module, SparseAdamW]]:
    """Two alike: one exchanges in `step`, and one while the backward pass goes on."""
    found = []
    for overlap in (False, True):
        model = Chosen(dtypes=dtypes)
        found.append((model, SparseAdamW(model.named_parameters(), **SETTINGS, overlap=overlap)))
    return found


def check(*models: nn.Module) -> None:
    """All models have the same weights, on all ranks."""
    flat = [torch.cat([p.detach().float().reshape(-1) for p in model.parameters()]) for model in models]
    for other in [*flat[1:], *all_gather(flat[0])]:
        assert torch.equal(other, flat[0])


def step_of(model: nn.Module, optimizer: SparseAdamW, *given: Any) -> None:
    optimizer.zero_grad()
    for each in given[:-1]:
        with optimizer.no_sync():
            model(each).backward()
    model(given[-1]).backward()
    optimizer.step()


@case
def weights_are_those_of_an_exchange_in_step() -> None:
    for dtypes in ((), (torch.bfloat16, torch.float32)):
        both = pair(dtypes)
        for step in range(6):
            mine = gradients(step, RANK)
            if step == 2 and RANK == ODD:
                del mine["c"], mine["e"]
            for model, optimizer in both:
                step_of(model, optimizer, mine)
            check(*(model for model, _ in both))
        assert len(both[1][1].reducer.groups) > 1


@case
def passes_that_add_up() -> None:
    both = pair()
    for step in range(4):
        given = [gradients(10 * step + i, RANK) for i in range(3)]
        for model, optimizer in both:
            step_of(model, optimizer, *given)
        check(*(model for model, _ in both))


@case
def closures_and_skipped_steps() -> None:
    (one, first), (other, second) = pair()
    for step in range(5):
        mine = gradients(step, RANK)
        if step in (0, 3) and RANK == ODD:
            mine["b"] = mine["b"] + torch.nan
        for model, optimizer in ((one, first), (other, second)):

            def closure(model: nn.Module = model, optimizer: SparseAdamW = optimizer, mine: Any = mine) -> Any:
                optimizer.zero_grad()
                loss = model(mine)
                loss.backward()
                return loss

            optimizer.step(closure)
        check(one, other)
    assert first.state_dict()["state"][0]["step"] == second.state_dict()["state"][0]["step"] == 3


@case
def checkpoints() -> None:
    (one, first), (other, second) = pair()
    for step in range(3):
        step_of(one, first, gradients(step, RANK))
    file = io.BytesIO()
    torch.save((one.state_dict(), first.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=False)
    step_of(other, second, gradients(9, RANK))
    other.load_state_dict(weights)
    second.load_state_dict(state)
    for step in range(3, 6):
        for model, optimizer in ((one, first), (other, second)):
            step_of(model, optimizer, gradients(step, RANK))
        check(one, other)


@case
def at_density_1_it_is_torchs_adamw() -> None:
    """Also with parameters that are frozen, frozen in mid-training, unused on one rank, or unused on all ranks."""
    for overlap in (False, True):
        mine, theirs = Chosen(), Chosen()
        parameters = dict(theirs.named_parameters())
        mine.get_parameter("d").requires_grad_(False)
        optimizer = SparseAdamW(mine.named_parameters(), 0.05, density=1.0, bucket_bytes=600, overlap=overlap)
        dense = torch.optim.AdamW(parameters.values(), 0.05)
        for step in range(12):
            given = [gradients(step, rank) for rank in range(P)]
            for rank, each in enumerate(given):
                del each["d"]
                if 3 <= step < 6 or (step == 7 and rank == ODD) or step == 8:
                    del each["a"]
            mine.get_parameter("a").requires_grad_(not 3 <= step < 6)
            step_of(mine, optimizer, given[RANK])
            for name, p in parameters.items():
                found = [each[name] for each in given if name in each]
                p.grad = sum(found) / P if found else None
            dense.step()
            for name, p in mine.named_parameters():
                torch.testing.assert_close(p, parameters[name], rtol=3e-6, atol=3e-6)
        check(mine)
        for name, p in mine.named_parameters():
            assert optimizer.state.get(p, {}).get("step") == dense.state.get(parameters[name], {}).get("step")
