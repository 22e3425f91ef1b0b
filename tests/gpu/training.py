"""Cases of training whose model and gradients are on a GPU, on every rank: see `test_training.py`.

Ranks share GPUs if there are fewer. The dense baseline in the same program is DDP with the plain optimizer.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparsecomm.torch as sparse

LEARNING_RATE, DENSITY = 1e-3, 0.1
CASES: list[Callable[[], None]] = []


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES.append(function)
    return function


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(500, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10)]
    return nn.Sequential(*layers).to("cuda", dtype)


def batches(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of this rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(count):
        x, y = torch.randn(32, 500, generator=generator), torch.randint(10, (32,), generator=generator)
        yield x.cuda(), y.cuda()


def train(called: Callable[[Tensor], Tensor], optimizer: Any, steps: int = 10, autocast: bool = False) -> None:
    for x, y in batches(steps):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = nn.functional.cross_entropy(called(x), y)
        loss.backward()
        optimizer.step()


def weights(trained: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(trained.parameters()).detach().float()


def check_that_ranks_agree(trained: nn.Module) -> None:
    """Check that all ranks have the same bits, and that the weights have changed."""
    trained_weights = weights(trained)
    assert torch.isfinite(trained_weights).all()
    assert not torch.equal(trained_weights, weights(model()))
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, hashlib.sha256(trained_weights.cpu().numpy().tobytes()).hexdigest())
    assert len(set(digests)) == 1, "the weights of ranks differ"


def adamw(trained: nn.Module, **options: Any) -> sparse.SparseAdamW:
    return sparse.SparseAdamW(trained.named_parameters(), lr=LEARNING_RATE, **options)


@case
def all_entries_by_adamw_are_what_ddp_does() -> None:
    sparse_model, dense_model = model(), model()
    train(sparse_model, adamw(sparse_model, density=1.0))
    check_that_ranks_agree(sparse_model)
    train(DistributedDataParallel(dense_model), torch.optim.AdamW(dense_model.parameters(), lr=LEARNING_RATE))
    torch.testing.assert_close(weights(sparse_model), weights(dense_model), rtol=0, atol=1e-6)


@case
def few_entries_by_adamw() -> None:
    for autocast in (False, True):
        trained = model()
        train(trained, adamw(trained), autocast=autocast)
        check_that_ranks_agree(trained)


@case
def few_entries_of_bfloat16_by_adamw() -> None:
    trained = model(torch.bfloat16)
    train(lambda x: trained(x.bfloat16()).float(), adamw(trained))
    check_that_ranks_agree(trained)


@case
def gradients_of_two_passes_and_frozen_weights() -> None:
    trained = model()
    optimizer = adamw(trained)
    frozen = trained[2].weight.requires_grad_(False)
    before = frozen.clone()
    for _ in range(4):
        optimizer.zero_grad()
        for x, y in batches(2):
            nn.functional.cross_entropy(trained(x), y).backward()
        optimizer.step()
    assert torch.equal(before, frozen)
    check_that_ranks_agree(trained)


@case
def the_hook_of_ddp() -> None:
    trained = model()
    ddp = DistributedDataParallel(trained)
    sparse.register(ddp, DENSITY)
    train(ddp, torch.optim.SGD(trained.parameters(), lr=0.05, momentum=0.9))
    check_that_ranks_agree(trained)


@case
def any_optimizer() -> None:
    trained = model()
    inner = torch.optim.SGD(trained.parameters(), lr=0.05, momentum=0.9)
    train(trained, sparse.DistributedOptimizer(inner, trained.named_parameters(), DENSITY))
    check_that_ranks_agree(trained)


@case
def local_steps() -> None:
    trained = model()
    inner = torch.optim.AdamW(trained.parameters(), lr=LEARNING_RATE)
    rounds = sparse.DiLoCo(trained, inner, sync_every=5, fragments=2, fragment_sync_delay=1)
    train(trained, inner, 20)
    rounds.finish()
    rounds.write_global_parameters()
    rounds.remove()
    check_that_ranks_agree(trained)


@case
def a_checkpoint_goes_on_as_if_it_had_not_ended() -> None:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    ended, goes_on = model(), model()
    optimizer, loaded = adamw(ended), adamw(goes_on)
    train(ended, optimizer)
    sparse.save(folder[0], 1, {"model": ended, "optimizer": optimizer})
    sparse.load(folder[0], {"model": goes_on, "optimizer": loaded})
    train(ended, optimizer)
    train(goes_on, loaded)
    assert torch.equal(weights(ended), weights(goes_on))
    check_that_ranks_agree(goes_on)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    torch.backends.cuda.matmul.allow_tf32 = False
    for run in CASES:
        run()
        torch.cuda.synchronize()
        print(f"rank {dist.get_rank()}: {run.__name__}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
