"""Cases of FSDP2 and tensor parallelism, on four ranks: two replicas of two shards."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import sparsecomm as sc
from sparsecomm.torch import DiLoCo, DistributedOptimizer, SparseAdamW, broadcast_parameters, register, register_fsdp
from tests.torch.training_ranks import EXACT, RANK, Chosen, Gradients, Oracle, P, case, gradients, sgd, soon

SHARDS = 2
MESH = init_device_mesh("cpu", (P // SHARDS, SHARDS), mesh_dim_names=("replicate", "shard"))
REPLICA, SHARD = divmod(RANK, SHARDS)
SHAPES = {"a": (20, 14), "b": (7,), "c": (5, 24), "d": (8201,), "e": (1,)}
PARTS = {"first": ("a", "b", "c"), "second": ("d", "e")}  # one is an FSDP group, one belongs to the root


class Parts(nn.Module):
    """Two FSDP groups. Rows do not divide evenly by the shards, and the last shard of "e" is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (Chosen({name: SHAPES[name] for name in names}) for names in PARTS.values())

    def forward(self, gradients: Gradients) -> torch.Tensor:
        parts = [{n: g for n, g in gradients.items() if n in names} for names in PARTS.values()]
        return torch.stack([m(g) for m, g in zip((self.first, self.second), parts, strict=True) if g]).sum()


def gradients_of(step: int, rank: int, unused: str = "") -> Gradients:
    return {name: g for name, g in gradients(step, rank, SHAPES).items() if name not in unused}


def sharded(mesh: Any, **options: Any) -> Any:
    model = Parts()
    fully_shard(model.first, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def hybrid(density: float | None = None, **options: Any) -> tuple[Any, Any]:
    """Return a model that is sharded only, with its replicas as the communicator."""
    model = sharded(MESH["shard"], **options)
    exact = {**EXACT, "algorithm": "split"} if density is None else {"density": density}
    return model, register_fsdp(model, comm=MESH["replicate"].get_group(), **exact)


def shard_of(tensor: torch.Tensor, shard: int = SHARD) -> torch.Tensor:
    rows = torch.chunk(tensor, SHARDS)
    return rows[shard] if shard < len(rows) else tensor[:0]


class Shards(nn.Module):
    """This rank's shards for an `Oracle`: replicas exchange the mean over the shard group."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for name, parameter in model.named_parameters():
            self.register_parameter(name.replace(".", "_"), nn.Parameter(parameter.to_local().detach().clone()))  # type: ignore[attr-defined]


def shards_by_replica(by_rank: list[Gradients]) -> list[Gradients]:
    shards = []
    for first in range(0, P, SHARDS):
        means = {
            name: sum(by_rank[first + s].get(name, torch.zeros(shape)) for s in range(SHARDS)) / SHARDS
            for name, shape in SHAPES.items()
            if any(name in by_rank[first + s] for s in range(SHARDS))
        }
        of_part = {name: part for part, names in PARTS.items() for name in names}
        shards.append({f"{of_part[name]}_{name}": shard_of(mean) for name, mean in means.items()})
    return shards


# -- hybrid FSDP2 -----------------------------------------------------------------------------------------------------


@case
def dense_sums_are_fsdps() -> None:
    """Equal bit for bit, in float32 and with bfloat16 sums, since gradients are small integers."""
    for reduce_dtype in (None, torch.bfloat16):
        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
        plain = sharded(MESH, mp_policy=policy)
        pairs = [hybrid(1.0, mp_policy=policy, reshard_after_forward=reshard) for reshard in (True, False)]
        models = [plain, *(model for model, _ in pairs)]
        optimizers = [sgd(model.parameters()) for model in models]
        for step in range(2):
            for model in models:
                model(gradients_of(step, RANK)).backward()
            for model in models[1:]:
                for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
                    assert torch.equal(p.grad.to_local(), q.grad.to_local()), (reduce_dtype, name)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert all(state.reducer.counters.bytes_sent > 0 for _, state in pairs)
    model, state = pairs[0]  # without the state, gradients are means over the shard group only
    state.remove()
    model(gradients_of(3, RANK)).backward()
    mine = shards_by_replica([gradients_of(3, rank) for rank in range(P)])[REPLICA]
    for name, p in model.named_parameters():
        assert torch.equal(p.grad.to_local(), mine[name.replace(".", "_")])


@case
def sparse_sums_are_the_oracles() -> None:
    """Equal bit for bit, with gradient accumulation, unused parameters and a checkpoint."""
    model, state = hybrid()
    optimizer = sgd(model.parameters())
    oracle = Oracle(Shards(model), rank=REPLICA, ranks=P // SHARDS)
    for step, (adds, unused) in enumerate(
        [("", ""), ("no_sync", ""), ("switch", ""), ("", "bd"), ("", "ade"), ("", "")]
    ):
        by_rank = [gradients_of(step, rank, unused) for rank in range(P)]
        if step == 3:
            saved = io.BytesIO()
            torch.save((state.state_dict(), model.state_dict()), saved)
            saved.seek(0)
            of_exchange, weights = torch.load(saved, weights_only=False)
            state.remove()
            model, state = hybrid()
            model.load_state_dict(weights)
            state.load_state_dict(of_exchange)
            optimizer = sgd(model.parameters())
        if adds == "no_sync":
            with state.no_sync():
                model(gradients_of(step + 9, RANK)).backward()
        elif adds:
            model.set_requires_gradient_sync(False)
            model(gradients_of(step + 9, RANK)).backward()
            model.set_requires_gradient_sync(True)
        model(by_rank[RANK]).backward()
        optimizer.step()
        optimizer.zero_grad()
        added = [gradients_of(step + 9, rank) if adds else {} for rank in range(P)]
        sums = [{n: g + a.get(n, 0) for n, g in b.items()} for a, b in zip(added, by_rank, strict=True)]
        oracle.step(shards_by_replica(sums))
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.to_local(), oracle.named[name.replace(".", "_")]), name
        for name, residual in state.state_dict()["residuals"].items():
            assert np.array_equal(residual.numpy().reshape(-1), oracle.residuals[REPLICA][name.replace(".", "_")]), name


# -- DTensors ---------------------------------------------------------------------------------------------------------


@case
def weights_by_shard() -> None:
    model = sharded(MESH["shard"])
    replicas = MESH["replicate"].get_group()
    if RANK == P - 1:
        model.second.d.detach().to_local().fill_(7)
    if SHARD == 1:  # only one shard takes part
        with pytest.raises(sc.WeightMismatchError, match=r"second\.d.* rank 1 differ from rank 0"):
            sc.check_weights(model.named_parameters(), comm=replicas)
    broadcast_parameters(model.named_parameters(), comm=replicas)
    sc.check_weights(model.named_parameters(), comm=replicas)
    assert torch.equal(model.second.d.to_local(), shard_of(Parts().second.d))


@case
def what_cannot_be_summed_is_refused() -> None:
    """Nothing is sent, unless only other ranks can notice."""
    plain, both, rows = sharded(init_device_mesh("cpu", (P,))), sharded(MESH), sharded(MESH["shard"])
    world, replicas = dist.group.WORLD, MESH["replicate"].get_group()

    def optimizer_of(model: nn.Module, comm: Any) -> object:
        return DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), comm=comm)

    nothing, by = "cannot be summed", r"first.a is a DTensor, sharded over .*None.*'replicate', 'sh"
    for refused, match in (
        (lambda: optimizer_of(plain, None), by),
        (
            lambda: optimizer_of(both, replicas),
            r"replicated over dimension 'replicate'.*fully_shard\(module, mesh=mesh",
        ),
        (lambda: DiLoCo(both, sgd(both.parameters()), comm=replicas), r"replicated over dimension 'replicate'"),
        (lambda: register_fsdp(plain, comm=world), nothing),
        (lambda: broadcast_parameters(plain.named_parameters()), nothing),
        (lambda: register_fsdp(rows, comm=replicas, clip=1.0), "clip: must be None with DTensors"),
        (lambda: register_fsdp(nn.Linear(2, 2)), "named_parameters: at least one"),
        (lambda: register(both), "register_fsdp"),
    ):
        with pytest.raises(sc.InvalidInputError, match=match):
            refused()
    state = register_fsdp(rows, comm=replicas)
    with pytest.raises(sc.InvalidInputError, match="exchanged already"):
        register_fsdp(rows, comm=replicas)
    state.remove()
    # The mesh does not know these groups of different shards.
    crossed = [dist.new_group(ranks) for ranks in ([0, P - 1], [1, P - 2])]
    state = register_fsdp(rows, comm=crossed[0 if RANK in (0, P - 1) else 1])
    with soon(), pytest.raises(sc.CollectiveMismatchError, match=r"is .* on rank \d and .*hold different shards"):
        rows(gradients_of(0, RANK)).backward()


@case
def ranks_are_lost_and_found() -> None:
    """A replica leaves, and returns with its shards of the other replica's weights."""
    model, state = hybrid()
    optimizer = sgd(model.parameters())
    both = MESH["replicate"].get_group()
    alone = [dist.new_group([rank]) for rank in range(P)][RANK]
    model(gradients_of(0, RANK)).backward()
    optimizer.step()
    before = state.state_dict()["residuals"]
    if REPLICA == 0:
        rebuilt = state.rebuild(alone)
        assert (rebuilt.size, rebuilt.ranks_lost) == (1, (1,))
        assert all(torch.equal(residual, before[name]) for name, residual in state.state_dict()["residuals"].items())
        optimizer.zero_grad()
        model(gradients_of(1, RANK)).backward()
        optimizer.step()
    else:
        state.remove()
        model, state = hybrid()
        optimizer = sgd(model.parameters())
    rebuilt = state.rebuild(both, joining=REPLICA == 1)
    assert rebuilt.ranks_joined == (1,)
    broadcast_parameters(model.named_parameters(), comm=both)
    for step in (2, 3):
        optimizer.zero_grad()
        model(gradients_of(step, RANK)).backward()  # checks the weights
        optimizer.step()
    sc.check_weights(model.named_parameters(), comm=both)


# -- local steps ------------------------------------------------------------------------------------------------------


@case
def local_steps_of_shards() -> None:
    """Replicas of shards train like a plain loop with whole parameters."""
    comm = MESH["replicate"].get_group()
    for reshard in (True, False):
        model = sharded(MESH["shard"], reshard_after_forward=reshard)
        replicas = [Parts() for _ in range(P // SHARDS)]
        inner, inners = sgd(model.parameters()), [sgd(m.parameters()) for m in replicas]
        outer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5, nesterov=True)
        diloco = DiLoCo(model, inner, outer, 1.0, sync_every=2, comm=comm, scope="tensor", dense_below=0)
        unsharded = Parts()
        plain = torch.optim.SGD(unsharded.parameters(), lr=0.5, momentum=0.5, nesterov=True)
        for step in range(4):
            inner.zero_grad()
            model(gradients_of(step, RANK)).backward()
            inner.step()
            for r, (replica, optimizer) in enumerate(zip(replicas, inners, strict=True)):
                optimizer.zero_grad()
                ranks = range(r * SHARDS, (r + 1) * SHARDS)
                sum(replica(gradients_of(step, rank)) / SHARDS for rank in ranks).backward()
                optimizer.step()
            if step % 2:
                for p, *theirs in zip(unsharded.parameters(), *(m.parameters() for m in replicas), strict=True):
                    p.grad = sum(p.detach() - q.detach() for q in theirs) / len(theirs)
                plain.step()
                for replica in replicas:
                    replica.load_state_dict(unsharded.state_dict())
            for (name, p), q in zip(model.named_parameters(), replicas[REPLICA].parameters(), strict=True):
                assert torch.equal(p.to_local(), shard_of(q)), (step, name)
        assert all(p.grad is not None for p in model.parameters())
        diloco.remove()


# -- SparseAdamW ------------------------------------------------------------------------------------------------------


@case
def shards_under_adamw() -> None:
    """Each rank's result equals training its shard alone with the other replicas, also after a checkpoint."""
    comm = MESH["replicate"].get_group()
    settings: dict[str, Any] = {"lr": 0.05, "density": 0.2, "comm": comm}
    for overlap in (False, True):
        model = sharded(MESH["shard"])
        alone = Shards(model)
        ours = SparseAdamW(model.named_parameters(), overlap=overlap, **settings)
        plain = SparseAdamW(alone.named_parameters(), **settings)
        for step in range(6):
            mine = shards_by_replica([gradients_of(step, rank) for rank in range(P)])[REPLICA]
            model(gradients_of(step, RANK)).backward()
            for name, p in alone.named_parameters():
                p.grad = mine[name].clone()
            ours.step()
            ours.zero_grad()
            plain.step()
            for p, q in zip(model.parameters(), alone.parameters(), strict=True):
                assert torch.equal(p.to_local(), q), step  # type: ignore[attr-defined]
            if step == 3:
                parts = [ours.state[p]["exp_avg"] for p in model.parameters()]  # small parts, and half of a large one
                assert REPLICA or parts[4].placements == model.second.e.placements
                state = io.BytesIO()
                torch.save(ours.state_dict(), state)
                state.seek(0)
                ours.load_state_dict(torch.load(state, weights_only=False))
            if step == 4:  # like trainers built on torch.distributed.checkpoint
                residuals, (weights, theirs) = ours.residuals_apart(), get_state_dict(model, ours)
                ours.remove()
                model = sharded(MESH["shard"])
                ours = SparseAdamW(model.named_parameters(), overlap=overlap, **settings)
                new_residuals, (_, room) = ours.residuals_apart(), get_state_dict(model, ours)
                for name, saved in theirs["state"].items():
                    assert {k: type(v) for k, v in saved.items()} == {
                        k: type(v) for k, v in room["state"][name].items()
                    }
                new_residuals.load_state_dict(residuals.state_dict())
                set_state_dict(model, ours, model_state_dict=weights, optim_state_dict=theirs)
        ours.remove()


# -- tensor parallelism -----------------------------------------------------------------------------------------------


@case
def tensor_parallel_parameters() -> None:
    """Replicas train like one that sees the data of both. The norm's gradient arrives as partial sums."""

    def network() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6), nn.LayerNorm(6))

    model, plain_model = network(), network()
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel(output_layouts=Shard(1), use_local_output=False)}
    plan["2"] = SequenceParallel(use_local_output=False)
    parallelize_module(model, MESH["shard"], plan)
    settings: dict[str, Any] = {"density": 1.0, "comm": MESH["replicate"].get_group()}
    optimizer = DistributedOptimizer(sgd(model.parameters()), model.named_parameters(), **settings)
    plain = sgd(plain_model.parameters())
    for step in range(3):
        x = torch.randn(4, 2, 6, generator=torch.Generator().manual_seed(step))  # the data of both replicas
        optimizer.zero_grad()
        model(x[2 * REPLICA : 2 * REPLICA + 2]).full_tensor().square().mean().backward()
        optimizer.step()
        plain.zero_grad()
        plain_model(x).square().mean().backward()
        plain.step()
    assert optimizer.reducer.counters.bytes_sent > 0
    for (name, p), q in zip(model.named_parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q, msg=name)
