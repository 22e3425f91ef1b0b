"""Four MPI ranks as two nodes, passed as communicators: see `test_under_mpirun.py`.

Results and residuals of each half of the tensor equal those of two ranks that reduce the nodes' sums.
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests import data

WORLD, STEPS, N = MPI.COMM_WORLD, 3, 1000
OPTIONS = {"density": 0.1, "op": "sum", "wire": "packed", "dense_below": 0}


def gradient(step: int, rank: int) -> np.ndarray:
    return data.integers(N, "float32", 100 * step + rank, 8)


def trained(comm: object, nodes: object, size: int, gradients: list[np.ndarray]) -> tuple[list[bytes], bytes]:
    reducer, results = sc.Reducer({"w": np.zeros(size, np.float32)}, comm=comm, nodes=nodes, **OPTIONS), []
    for array in gradients:
        reducer.reduce({"w": array})
        results.append(array.tobytes())
    return results, reducer.residual("w").tobytes()


rank = WORLD.rank
node, half = divmod(rank, 2)
ours, kept = trained(WORLD, WORLD.Split(node), N, [gradient(step, rank) for step in range(STEPS)])


def of_node(transport: simulated.SimulatedTransport) -> tuple[list[bytes], bytes]:
    first, part = 2 * transport.rank, slice(half * N // 2, (half + 1) * N // 2)
    sums = [(gradient(step, first) + gradient(step, first + 1))[part] for step in range(STEPS)]
    return trained(transport, False, N // 2, sums)


theirs = [result.value for result in simulated.run(2, of_node)]
begin = 4 * half * N // 2  # bytes
assert [result[begin : begin + 2 * N] for result in ours] == theirs[node][0]
assert kept == theirs[node][1]
assert WORLD.allgather(ours) == [ours] * 4
print(f"rank {rank} ok\n", end="", flush=True)
