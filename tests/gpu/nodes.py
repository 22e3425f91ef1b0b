"""A program for each rank, with tensors on a GPU: see `test_training.py`.

One rank calls NCCL's collectives as `NodeCall` does. Four ranks train over gloo, in two nodes of two ranks.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn

import sparsecomm.torch as sparse
from tests.gpu.training import check_that_ranks_agree, model, train, weights


def nccl() -> None:
    import cupy

    from sparsecomm.transport.process_group.collectives import collectives_of

    collectives = collectives_of(dist.group.WORLD, [0])  # type: ignore[arg-type]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        total = cupy.arange(1 << 20, dtype=cupy.float32)
        for _ in range(50):  # later work on the stream must wait for the collective
            own, again = cupy.zeros_like(total), cupy.zeros_like(total)
            total += 1
            collectives.reduce_scatter(total, own)
            own *= 2
            collectives.all_gather(own, again)
            again -= 2 * total
            assert not again.any()


def nodes() -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    trained: list[nn.Module] = []
    for density in (0.1, 1.0):
        for option in (groups[dist.get_rank() // 2], False):
            trained.append(model())
            optimizer = sparse.SparseAdamW(trained[-1].named_parameters(), density=density, nodes=option)
            train(trained[-1], optimizer)
            check_that_ranks_agree(trained[-1])
            summed = optimizer._exchange.reducer.counters.bytes_inside > 0
            assert summed == (option is not False)
    torch.testing.assert_close(weights(trained[2]), weights(trained[3]), rtol=1e-3, atol=1e-5)  # dense sums


if __name__ == "__main__":
    torch.cuda.set_device(0)
    if "nccl" in sys.argv:
        dist.init_process_group("nccl")
        nccl()
    else:
        dist.init_process_group("gloo")
        nodes()
    dist.destroy_process_group()
