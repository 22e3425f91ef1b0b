"""Cases of sharded models, on four ranks, two replicas of two shards: see `test_shards.py`."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import sparsecomm as sc
from sparsecomm.torch import DistributedOptimizer, broadcast_parameters, register, register_fsdp
from tests.torch.training_ranks import EXACT, RANK, Chosen, Gradients, Oracle, P, all_gather, case, gradients, sgd, soon

SHARDS = 2
MESH = init_device_mesh("cpu", (P // SHARDS, SHARDS), mesh_dim_names=("replicate", "shard"))
REPLICA, SHARD = divmod(RANK, SHARDS)
SHAPES = {"a": (20, 14), "b": (7,), "c": (5, 24), "d": (290,), "e": (1,)}
PARTS = {"first": ("a", "b", "c"), "second": ("d", "e")}  # of which one is a group of its own, and one the root's


class Parts(nn.Module):
    """Two groups of FSDP. Rows do not divide by the shards, and of "e" there is none for the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (Chosen({name: SHAPES[name] for name in names}) for names in PARTS.values())

    def forward(self, gradients: Gradients) -> torch.Tensor:
        parts = [{n: g for n, g in gradients.items() if n in names} for names in PARTS.values()]
        return torch.stack([m(g) for m, g in zip((self.first, self.second), parts, strict=True) if g]).sum()


def given(step: int, rank: int, unused: str = "") -> Gradients:
    return {name: g for name, g in gradients(step, rank, SHAPES).items() if name not in unused}


def sharded(mesh: Any, **options: Any) -> Any:
    model = Parts()
    fully_shard(model.first, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def hybrid(way: str, density: float | None = None, **options: Any) -> tuple[Any, Any]:
    """A model on a mesh of two dimensions, or on its shards alone, with the replicas as comm."""
    model = sharded(MESH if way == "mesh" else MESH["shard"], **options)
    comm = {"comm": None if way == "mesh" else MESH["replicate"].get_group()}
    exact = {**EXACT, "algorithm": "split"} if density is None else {"density": density}
    return model, register_fsdp(model, **comm, **exact)


def shard_of(whole: torch.Tensor, shard: int = SHARD) -> torch.Tensor:
    rows = torch.chunk(whole, SHARDS)
    return rows[shard] if shard < len(rows) else whole[:0]


class Shards(nn.Module):
    """This rank's shards, as an `Oracle` takes them: of the mean over the ranks that shard, across replicas."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for name, parameter in model.named_parameters():
            self.register_parameter(name.replace(".", "_"), nn.Parameter(parameter.to_local().detach().clone()))  # type: ignore[attr-defined]


def shards_by_replica(by_rank: list[Gradients]) -> list[Gradients]:
    found = []
    for first in range(0, P, SHARDS):
        means = {
            name: sum(by_rank[first + s].get(name, torch.zeros(shape)) for s in range(SHARDS)) / SHARDS
            for name, shape in SHAPES.items()
        }
        found.append({f"{part}_{name}": shard_of(means[name]) for part, names in PARTS.items() for name in names})
    return found


# -- hybrid FSDP2 -----------------------------------------------------------------------------------------------------


@case
def dense_sums_are_fsdps() -> None:
    """Bit for bit, in float32 and where shards are summed in bfloat16: gradients are small whole numbers."""
    for reduce_dtype in (None, torch.bfloat16):
        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
        plain = sharded(MESH, mp_policy=policy)
        found = {way: hybrid(way, 1.0, mp_policy=policy, reshard_after_forward=way == "mesh") for way in ("mesh", "1d")}
        optimizers = [sgd(model.parameters()) for model in (plain, *(m for m, _ in found.values()))]
        for step in range(2):
            for model in (plain, *(m for m, _ in found.values())):
                model(given(step, RANK)).backward()
            for model, _ in found.values():
                for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
                    assert torch.equal(p.grad.to_local(), q.grad.to_local()), (reduce_dtype, name)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert all(state.reducer.counters.bytes_sent > 0 for _, state in found.values())
    model, state = found["mesh"]  # without the state FSDP sums as it did
    state.remove()
    for m in (plain, model):
        m(given(3, RANK)).backward()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(p.grad.to_local(), q.grad.to_local())


class Run:
    """A training of a hybrid model, and its oracle."""

    def __init__(self, way: str) -> None:
        self.way = way
        self.model, self.state = hybrid(way)
        self.optimizer = sgd(self.model.parameters())
        self.oracle = Oracle(Shards(self.model), rank=REPLICA, ranks=P // SHARDS)

    def step(self, number: int, more: str | None = None, unused: str = "") -> None:
        """One step, after a pass that only adds up, if ``more`` says how."""
        by_rank = [given(number, rank, unused) for rank in range(P)]
        if more is not None:
            other = [given(number + 9, rank) for rank in range(P)]
            self._add(more, other[RANK])
            both = [{n: g + a.get(n, 0) for n, g in b.items()} for a, b in zip(by_rank, other, strict=True)]
        self.model(by_rank[RANK]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.oracle.step(shards_by_replica(by_rank if more is None else both))

    def _add(self, way: str, gradients: Gradients) -> None:
        if way == "no_sync":
            with self.state.no_sync():
                self.model(gradients).backward()
            return
        switch = getattr(self.model, way)
        switch(False)
        self.model(gradients).backward()
        switch(True)

    def check(self) -> None:
        """Weights and residuals are the oracle's, bit for bit."""
        for name, parameter in self.model.named_parameters():
            assert torch.equal(parameter.to_local(), self.oracle.named[name.replace(".", "_")]), name
        for name, kept in self.state.state_dict()["residuals"].items():
            assert np.array_equal(kept.numpy().reshape(-1), self.oracle.residuals[REPLICA][name.replace(".", "_")]), (
                name
            )

    def stop(self) -> None:
        """Go on with another model, from a checkpoint."""
        saved = io.BytesIO()
        torch.save((self.state.state_dict(), self.model.state_dict()), saved)
        saved.seek(0)
        state, weights = torch.load(saved, weights_only=False)
        self.state.remove()
        self.model, self.state = hybrid(self.way)
        self.model.load_state_dict(weights)
        self.state.load_state_dict(state)
        self.optimizer = sgd(self.model.parameters())


@case
def sparse_sums_are_the_oracles() -> None:
    """Also with gradients that only add up, unused parameters, and a stop."""
    for way in ("mesh", "1d"):
        run = Run(way)
        run.step(0)
        run.step(1, "no_sync")
        run.step(2, "set_requires_gradient_sync")
        run.check()
        run.stop()
        run.step(3, "set_requires_all_reduce")
        run.step(4, unused="bd")
        run.step(5, unused="ade")
        run.step(6)
        run.check()
