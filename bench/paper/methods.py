"""The methods of the table, each as steps of training on this rank whose parts are timed.

A step leaves the dense sum of what was sent in ``vectors.out``, ready for an optimiser. The sparse ones select with
sparsecomm's selection, so that their times differ by the exchange alone.

    dense     the whole gradient along gloo's ring, the fastest dense allreduce found on this network
    topk      Top-k S-SGD: allgather of 32-bit indices and float32 values, and their sum
    gtopk     the paper's gTopKAllReduce: a tree, and a broadcast, of 32-bit indices and float32 values
    ours      the choice of ``algorithm="auto"`` with the profile that `sparsecomm tune` measured here
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
from mpi4py import MPI

import sparsecomm as sc
from bench.compare import baselines, contenders
from sparsecomm.cli.bench import timing as runners
from sparsecomm.cli.bench.timing import Vectors

COMM = MPI.COMM_WORLD
Array = np.ndarray[Any, Any]


class Method:
    """A way to sum gradients; ``choice`` says which algorithm and wire format that is."""

    choice = ("", "")

    def __init__(self, vectors: Vectors, k: int) -> None:
        self.vectors, self.k = vectors, k

    def before(self) -> None:
        """Set up what a step starts from, outside the time."""

    def step(self) -> dict[str, float]:
        """Go from gradient and residual to the dense sum in ``out``; return the seconds of each part."""
        raise NotImplementedError

    def exchange(self) -> None:
        """Go from what was selected in the last step to the sum, or to all that it takes to make it."""
        raise NotImplementedError

    def sent(self) -> float:
        """Return the payload bytes that this rank has sent so far."""
        raise NotImplementedError

    def close(self) -> None:
        """Give back what was opened."""


class Dense(Method):
    """gloo's allreduce; the gradient is summed in place, in ``out``."""

    choice = ("gloo's ring", "dense")

    def __init__(self, vectors: Vectors, k: int) -> None:
        super().__init__(vectors, k)
        import torch
        from torch import distributed

        torch.set_num_threads(1)
        comm = COMM
        if not distributed.is_initialized():
            interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
            host = comm.bcast(baselines._address(interface) if comm.rank == 0 else None)
            limit = timedelta(minutes=20)
            store = distributed.TCPStore(host, 0, comm.size, True, limit, False) if comm.rank == 0 else None
            port = comm.bcast(store.port if store is not None else None)
            store = store or distributed.TCPStore(host, port, comm.size, False, limit)
            distributed.init_process_group("gloo", timeout=limit, store=store, rank=comm.rank, world_size=comm.size)
        self._distributed, self._tensor, self._sent = distributed, torch.from_numpy(vectors.out), 0.0

    def before(self) -> None:
        np.copyto(self.vectors.out, self.vectors.x)

    def step(self) -> dict[str, float]:
        begin = time.perf_counter()
        self.exchange()
        return {"exchange": time.perf_counter() - begin}

    def exchange(self) -> None:
        P = COMM.size
        self._distributed.all_reduce(self._tensor)
        self._sent += 2 * (P - 1) / P * self.vectors.out.nbytes

    def sent(self) -> float:
        return self._sent


class TopK(Method):
    """Selection of ours, `bench.compare.baselines.TopkNumpy`'s exchange and sum."""

    choice = ("MPI's allgather", "plain")

    def __init__(self, vectors: Vectors, k: int) -> None:
        super().__init__(vectors, k)
        self._baseline = baselines.TopkNumpy(COMM)
        self._selected: baselines.Entries = (np.empty(0, np.int32), np.empty(0, np.float32))

    def step(self) -> dict[str, float]:
        v, times = self.vectors, [time.perf_counter()]
        found = sc.topk(v.x, self.k, residual=v.residual)
        self._selected = found.indices, found.values
        times.append(time.perf_counter())
        result = self._baseline.exchange(self._selected)
        times.append(time.perf_counter())
        self._baseline.densify(result, v.out)
        times.append(time.perf_counter())
        return dict(zip(("select", "exchange", "densify"), map(float, np.diff(times)), strict=True))

    def exchange(self) -> None:
        self._baseline.exchange(self._selected)

    def sent(self) -> float:
        return self._baseline.sent


class Ours(Method):
    """`sparse_allreduce` with a residual and ``out``."""

    def __init__(self, vectors: Vectors, k: int, algorithm: str = "auto", wire: str = "auto") -> None:
        super().__init__(vectors, k)
        self._runner = runners.Ours(algorithm, vectors, k, wire, breakdown=True)
        self._exchange: contenders.Ours | None = None
        taken = self._runner.taken
        self.choice = taken.algorithm.name, taken.wire.name
        self.problem = self._runner.explained.query.problem(taken.wire)
        self.predicted_time = taken.algorithm.predicted_time

    def step(self) -> dict[str, float]:
        assert self._runner.clock is not None
        self._runner.clock.reset()
        begin = time.perf_counter()
        self._runner.step()
        took, parts = time.perf_counter() - begin, self._runner.parts()
        return parts | {"other": took - sum(parts.values())}

    def exchange(self) -> None:
        if self._exchange is None:
            self._exchange = contenders.Ours(*self.choice[:1], self.vectors, self.k, self.choice[1])
        self._exchange.exchange()

    def sent(self) -> float:
        return float(self._runner.traffic()[0])


METHODS: dict[str, Callable[[Vectors, int], Method]] = {
    "ours": Ours,
    "gtopk": lambda vectors, k: Ours(vectors, k, "tree", "plain"),
    "topk": TopK,
    "dense": Dense,
}
