"""`SparseAdamW` on every rank: with and without overlap, weights are equal."""

from __future__ import annotations

import io
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from sparsecomm.torch import SparseAdamW
from tests.torch.training_ranks import ODD, RANK, Chosen, all_gather, case, gradients

SETTINGS = {"lr": 0.05, "density": 0.2, "bucket_bytes": 600}  # several buckets


def made(overlap: bool, dtypes: Any) -> tuple[nn.Module, SparseAdamW]:
    model = Chosen(dtypes=dtypes)
    return model, SparseAdamW(model.named_parameters(), **SETTINGS, overlap=overlap)


def check(*models: nn.Module) -> None:
    """Check that all models have the same weights, on all ranks."""
    flat = [torch.cat([p.detach().float().reshape(-1) for p in model.parameters()]) for model in models]
    for other in [*flat[1:], *all_gather(flat[0])]:
        assert torch.equal(other, flat[0])


def step_of(model: nn.Module, optimizer: SparseAdamW, *batches: Any, by_closure: bool = False) -> None:
    """Make a step with one backward pass per batch."""

    def passes() -> torch.Tensor:
        optimizer.zero_grad()
        for batch in batches:
            with nullcontext() if batch is batches[-1] else optimizer.no_sync():
                loss: torch.Tensor = model(batch)
                loss.backward()
        return loss

    if by_closure:
        assert optimizer.step(passes).ndim == 0
    else:
        passes()
        optimizer.step()


@case
def weights_are_those_of_an_exchange_in_step() -> None:
    """Includes unused and frozen parameters, accumulation, closures, skipped steps and a checkpoint."""
    for dtypes in ((), (torch.bfloat16, torch.float32)):
        both = [made(False, dtypes), made(True, dtypes)]
        for step in range(9):
            batches = [gradients(10 * step + i, RANK) for i in range(3 if step in (3, 7) else 1)]
            if RANK == ODD and step == 2:
                del batches[0]["c"], batches[0]["e"]
            for model, _ in both:
                model.get_parameter("a").requires_grad_(step not in (1, 2))
            if step in (1, 2):
                del batches[0]["a"]
            if RANK == ODD and step in (0, 4):
                batches[0]["b"] = batches[0]["b"] + torch.nan
            if step == 6:
                file = io.BytesIO()
                torch.save([(model.state_dict(), optimizer.state_dict()) for model, optimizer in both], file)
                file.seek(0)
                for _, optimizer in both:
                    optimizer.remove()
                both = [made(False, dtypes), made(True, dtypes)]
                for (model, optimizer), (weights, state) in zip(
                    both, torch.load(file, weights_only=False), strict=True
                ):
                    step_of(model, optimizer, gradients(99, RANK))
                    model.load_state_dict(weights)
                    optimizer.load_state_dict(state)
            for model, optimizer in both:
                step_of(model, optimizer, *batches, by_closure=step in (0, 4, 5))
            check(*(model for model, _ in both))
        assert {optimizer.state_dict()["state"][3]["step"].item() for _, optimizer in both} == {7}
        assert len(both[1][1].reducer.groups) > 1
