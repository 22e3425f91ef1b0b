"""Cases with nodes of two ranks, passed as process groups. Every rank runs them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import sparsecomm as sc
from sparsecomm.calls.nodes import find_nodes
from sparsecomm.transport import transport_of
from sparsecomm.transport.process_group.collectives import GroupCollectives
from sparsecomm.transport.process_group.transport import ProcessGroupTransport
from tests.torch.training_ranks import RANK, WAYS, P, Training, case, gradients, same_everywhere

M = 2
GROUPS = [dist.new_group([*range(first, first + M)]) for first in range(0, P, M)]
NODE = GROUPS[RANK // M]


@case
def ranks_train_alike_and_dense_steps_are_those_without_nodes() -> None:
    for way in WAYS:
        for density in (0.2, 1.0):
            with_nodes = Training(way, algorithm="auto", op="mean", nodes=NODE, density=density, scope="bucket")
            flat = Training(way, algorithm="auto", op="mean", nodes=False, density=density, scope="bucket")
            for step in range(3):
                for training in (with_nodes, flat):
                    training.step(gradients(step, RANK))
            assert "2 of 2 ranks, summed densely inside" in with_nodes.exchange.reducer.report()
            weights = same_everywhere(with_nodes.model)
            if density == 1.0:
                assert np.array_equal(weights, same_everywhere(flat.model))
            for training in (with_nodes, flat):
                training.end()


@case
def collectives_of_a_backend_give_the_bits_of_messages() -> None:
    """The collectives here are gloo's, for arrays on CPUs."""

    def program() -> list[bytes]:
        reducer = sc.Reducer({"w": np.zeros(1001, np.float32)}, 0.1, comm=dist.new_group(), nodes=NODE)
        results = []
        for step in range(3):
            gradient = gradients(step, RANK, {"w": (1001,)})["w"].numpy()
            reducer.reduce({"w": gradient})
            results += [gradient.tobytes(), reducer.residual("w").tobytes()]
        return results

    used: list[str] = []

    class Counted(GroupCollectives):
        def reduce_scatter(self, tensor: Any, own: Any) -> None:
            used.append("reduce_scatter")
            super().reduce_scatter(tensor, own)

    expected = program()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProcessGroupTransport, "has_collectives", lambda _, device: device == "cpu")
        patch.setattr(ProcessGroupTransport, "collectives", lambda *_: Counted(NODE))
        assert program() == expected
        nodes, _ = find_nodes(transport_of(None), NODE, {"cuda" if RANK == 0 else "cpu"})
    assert used.count("reduce_scatter") == 3
    assert nodes is not None
    assert [*nodes.collectives] == ["cpu"] * (RANK >= M)  # rank 1 must not wait for rank 0


@case
def a_rebuild_without_the_groups_goes_on_without_nodes() -> None:
    """Nothing is lost."""
    groups, w = [dist.new_group([*range(first, first + M)]) for first in range(0, P, M)], {"w": (1000,)}
    reducer = sc.Reducer(gradients(0, RANK, w), 0.1, op="sum", nodes=groups[RANK // M], wire="packed", dense_steps=0)
    pushed, sums = np.zeros(1000), np.zeros(1000)
    for step in range(4):
        if step == 2:
            dist.destroy_process_group(groups[RANK // M])
            reducer.rebuild(dist.new_group())
            assert "unknown after rebuild(), so every rank counts as a node" in reducer.report()
        gradient = gradients(step, RANK, w)["w"].numpy()
        pushed += gradient
        reducer.reduce({"w": gradient})
        sums += gradient
    waiting = torch.from_numpy(reducer.residual("w").astype(np.float64) - pushed)
    dist.all_reduce(waiting)
    assert np.array_equal(waiting.numpy(), -sums)


@case
def groups_that_are_no_nodes_are_refused() -> None:
    wrong, destroyed = dist.new_group([0, 1, 2]), [dist.new_group([0, 1]), dist.new_group([2, 3])][RANK // M]
    dist.destroy_process_group(destroyed)
    for nodes in (wrong if RANK < 3 else NODE, destroyed if RANK < 2 else NODE):
        with pytest.raises(sc.InvalidInputError, match="pass on each rank a group that contains it"):
            sc.Reducer({"w": np.zeros(9, np.float32)}, nodes=nodes).push("w", np.ones(9, np.float32))
    assert transport_of(None).size == P
    reducer = sc.Reducer({"w": np.zeros(9, np.float32)}, comm=dist.new_group(), nodes=RANK < P - 1 and NODE)
    with pytest.raises(sc.CollectiveMismatchError, match="pass groups as nodes= on all ranks, or on none"):
        reducer.reduce({"w": np.ones(9, np.float32)})
