"""Many small calls and many communicators on real ranks: memory, descriptors and threads must not grow."""

from __future__ import annotations

import gc
import os
import resource
from pathlib import Path

import numpy as np

import sparsecomm as sc
from tests.stress.harness import ALGORITHMS, Attack, Ranks

MAX_GROWTH = 2**20  # bytes of resident memory
SECONDS_PER_CALL, SECONDS_PER_COMMUNICATOR = 2e-3, 0.1  # upper bounds on a busy machine


def resources() -> dict[str, int]:
    """Return the memory, descriptors and threads of this process."""
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
        calls, communicators = self.arguments.calls, self.arguments.communicators
        limit = 300 + calls * SECONDS_PER_CALL + communicators * SECONDS_PER_COMMUNICATOR
        self.start_ranks(self.arguments.ranks, limit)
        self.report.measure("calls and communicators/s", (calls + communicators) / self.report.seconds)

    def on_rank(self, ranks: Ranks) -> None:
        """Compare the resources at the end with those after a quarter."""
        rng = np.random.default_rng([self.report.seed, ranks.rank])
        gradients = [rng.standard_normal(200).astype(np.float32) for _ in range(7)]
        buffers = {"residual": np.zeros(200, np.float32), "out": np.empty(200, np.float32)}
        for what in ("calls", "communicators"):
            number, comm = getattr(self.arguments, what), ranks.comm
            warm_up = min(number // 4, 5000)
            for i in range(number):
                if i == warm_up:
                    before = resources()
                if what == "communicators":
                    comm = ranks.new()
                options = {"comm": comm, "algorithm": ALGORITHMS[i % 5], "wire": ("plain", "packed")[i % 2], **buffers}
                if i % 10:
                    sc.sparse_allreduce(gradients[i % 7], 5, **options)
                else:
                    sc.isparse_allreduce(gradients[i % 7], 5, **options).wait()
                if what == "communicators":
                    comm.Free()
                self.progress(f"{i:,} of {number:,} {what}")
            growth = {kind: now - before[kind] for kind, now in resources().items()}
            ranks.gather(None)
            self.counts[f"{what}, all ranks'"] += number
            for kind, grown in growth.items():
                self.report.measure(f"{kind}: growth over {what}", grown)
                if grown > (MAX_GROWTH if "bytes" in kind else 0):
                    self.fail(f"rank {ranks.rank}: {grown} more {kind} after {number - warm_up} {what}")
