"""`sparsecomm.torch` over MPI, compared with a process group: see `tests/mpi/test_under_mpirun.py`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

from tests.mpi.ranks import RANK, WORLD, P

if P != 2:
    pytest.skip("on 2 ranks only: PyTorch takes long to load", allow_module_level=True)
torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from sparsecomm.torch import DistributedOptimizer, broadcast_parameters, register  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    folder = WORLD.bcast(tempfile.mkdtemp() if RANK == 0 else None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", P), rank=RANK, world_size=P)
    yield
    WORLD.Barrier()
    dist.destroy_process_group()
    if RANK == 0:
        shutil.rmtree(folder)


def trained(way: str, comm: Any) -> list[bytes]:
    torch.manual_seed(RANK)
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5))
    broadcast_parameters(model.state_dict(), comm=comm)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    run: Any = model
    if way == "hook":
        run = DistributedDataParallel(model)
        state = register(run, 0.05, comm=comm, dense_below=10, algorithm="split")
    else:
        optimizer = DistributedOptimizer(
            optimizer, model.named_parameters(), 0.05, comm=comm, dense_below=10, algorithm="split"
        )
    for step in range(4):
        random = torch.Generator().manual_seed(10 * step + RANK)
        optimizer.zero_grad()
        run(torch.randn(8, 20, generator=random)).square().mean().backward()
        optimizer.step()
    assert (state if way == "hook" else optimizer).reducer.counters.calls == 8
    return [p.detach().numpy().tobytes() for p in model.parameters()]


@pytest.mark.parametrize("way", ["hook", "optimizer"])
def test_mpi_gives_the_same_weights_as_the_process_group(way: str) -> None:
    over_mpi, over_gloo = trained(way, WORLD), trained(way, None)
    assert over_mpi == over_gloo
    assert all(theirs == over_mpi for theirs in WORLD.allgather(over_mpi))
