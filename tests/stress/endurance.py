"""Many small calls and many communicators on real ranks: memory, descriptors and threads must stay as they are."""

from __future__ import annotations

import gc
import os
import resource
from pathlib import Path

import numpy as np

import sparsecomm as sc
from tests.stress.harness import Attack
from tests.stress.side_channel import SideChannel

__all__ = ["Endurance", "held"]

_MAX_GROWTH = 2**20  # bytes of resident memory
_SECONDS_PER_CALL, _SECONDS_PER_COMMUNICATOR = 2e-3, 0.1  # at most, on a busy machine
_ALGORITHMS = ("butterfly", "tree", "split", "allgather", "dense")


def held() -> dict[str, int]:
    """Return what this process holds."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "bytes of resident memory": pages * resource.getpagesize(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


class Endurance(Attack):
    options = ("calls", 1_000_000, ""), ("communicators", 10_000, ""), ("ranks", 2, "")

    def run(self) -> None:
        """Make so many calls on ranks, and calls on so many communicators."""
        calls, communicators = self.given.calls, self.given.communicators
        self.start_ranks(self.given.ranks, 300 + calls * _SECONDS_PER_CALL + communicators * _SECONDS_PER_COMMUNICATOR)
        self.report.measure("calls and communicators/s", (calls + communicators) / self.report.seconds)

    def on_rank(self, ranks: SideChannel) -> None:
        """Make them, and look at what is held after a quarter, and at the end."""
        rng = np.random.default_rng([self.report.seed, ranks.rank])
        gradients = [rng.standard_normal(200).astype(np.float32) for _ in range(7)]
        residual, out = np.zeros(200, np.float32), np.empty(200, np.float32)

        def call(i: int) -> None:
            make = sc.sparse_allreduce if i % 10 else lambda *x, **options: sc.isparse_allreduce(*x, **options).wait()
            wire = ("plain", "packed")[i % 2]
            make(gradients[i % 7], 5, comm=comm, algorithm=_ALGORITHMS[i % 5], residual=residual, out=out, wire=wire)

        for what in ("calls", "communicators"):
            number, comm = getattr(self.given, what), ranks.comm
            warm_up = min(number // 4, 5000)
            for i in range(number):
                if i == warm_up:
                    before = held()
                if what == "communicators":
                    comm = ranks.new()
                call(i)
                if what == "communicators":
                    comm.Free()
                self.progress(f"{i:,} of {number:,} {what}")
            growth = {kind: now - before[kind] for kind, now in held().items()}
            ranks.gather(None)
            self.counts[f"{what}, all ranks'"] += number
            for kind, grown in growth.items():
                self.report.measure(f"{kind}: growth over {what}", grown)
                if grown > (_MAX_GROWTH if "bytes" in kind else 0):
                    self.fail(f"rank {ranks.rank}: {grown} more {kind} after {number - warm_up} {what}")
