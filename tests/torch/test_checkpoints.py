"""Checkpoints of PyTorch objects: training resumes bit for bit, or with another world size.

What is the same for both kinds of files: `tests/checkpoints`.
"""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed")

from torch import nn  # noqa: E402

from sparsecomm.torch import Checkpoint, DiLoCo, DistributedOptimizer, SparseAdamW, load, save  # noqa: E402
from sparsecomm.transport import simulated  # noqa: E402
from tests.ranks import run  # noqa: E402

WAYS = ("SparseAdamW", "DistributedOptimizer", "DiLoCo")


def network() -> nn.Module:
    return copy.deepcopy(_network())


@cache  # simulated ranks share torch's random numbers
def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30), nn.Linear(30, 20))


class Training:
    """A model with one of the objects that are saved; gradients differ between ranks."""

    def __init__(self, way: str, transport: simulated.SimulatedTransport) -> None:
        self.way, self.ranks, self.model = way, transport, network()
        self.objects: dict[str, Any] = {"model": self.model}
        named = list(self.model.named_parameters())
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.5)
        options: dict[str, Any] = {"comm": transport, "check_weights_every": None}
        if way == "SparseAdamW":
            self.optimizer = SparseAdamW(named, lr=1e-2, **options)
        elif way == "DistributedOptimizer":
            self.optimizer = DistributedOptimizer(self.optimizer, named, 0.05, **options)
        else:
            self.objects["sparse"] = DiLoCo(self.model, self.optimizer, sync_every=3, comm=transport)
        self.objects["optimizer"] = self.optimizer
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.objects["scheduler"] = self.scheduler

    def step(self, number: int) -> None:
        random = torch.Generator().manual_seed(1000 * number + self.ranks.rank)
        for p in self.model.parameters():
            p.grad = torch.randn(p.shape, generator=random)
        self.optimizer.step()
        self.scheduler.step()

    def bits(self) -> list[bytes]:
        return [p.detach().numpy().tobytes() for p in self.model.parameters()]

    def waiting(self) -> np.ndarray:
        """Return this rank's residuals."""
        sparse = self.objects.get("sparse", self.optimizer)
        reducers = sparse.reducers if hasattr(sparse, "reducers") else [sparse.reducer]
        residual_of = {name: reducer.residual(name) for reducer in reducers for name in reducer.names}
        return np.concatenate([residual_of[name].reshape(-1) for name in sorted(residual_of)])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("P", [1, 2, 3])
def test_a_training_that_resumes_is_bit_identical(way: str, P: int, tmp_path: Path) -> None:
    def whole(transport: simulated.SimulatedTransport) -> list[bytes]:
        training = Training(way, transport)
        assert load(tmp_path, {**training.objects, "note": None}, comm=transport) is None
        for step in range(8):
            training.step(step)
            if step == 3:
                save(tmp_path, step + 1, {**training.objects, "note": [step, "text", torch.ones(2)]}, comm=transport)
        return training.bits()

    def resumed(transport: simulated.SimulatedTransport) -> list[bytes]:
        training = Training(way, transport)
        found = load(tmp_path, {**training.objects, "note": None}, comm=transport)
        assert found is not None
        assert (found.step, found.ranks) == (4, P)
        assert found.values["note"][:2] == [3, "text"]
        assert training.scheduler.last_epoch == 4
        for step in range(found.step, 8):
            training.step(step)
        return training.bits()

    expected = run(P, whole)
    assert len(list(tmp_path.glob("step*"))) == P
    assert run(P, resumed) == expected


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("P", "new"), [(3, 2), (2, 4), (2, 1)])
def test_residuals_are_distributed_over_another_world_size(way: str, P: int, new: int, tmp_path: Path) -> None:
    def before(transport: simulated.SimulatedTransport) -> tuple[list[bytes], np.ndarray]:
        training = Training(way, transport)
        for step in range(4):
            training.step(step)
        save(tmp_path, 4, training.objects, comm=transport)
        return training.bits(), training.waiting()

    def after(transport: simulated.SimulatedTransport) -> tuple[list[bytes], np.ndarray]:
        training = Training(way, transport)
        found = load(tmp_path, training.objects, comm=transport)
        assert found == Checkpoint(4, {}, P)
        kept = training.bits(), training.waiting()
        for step in range(4, 7):
            training.step(step)
        return kept

    old, made = run(P, before), run(new, after)
    np.testing.assert_allclose(sum(r for _, r in made), sum(r for _, r in old), rtol=1e-4, atol=1e-5)
    assert all(weights == made[0][0] for weights, _ in made)
    if way != "DiLoCo":  # in the middle of a round ranks' weights differ, and global ones are taken
        assert made[0][0] == old[0][0]
