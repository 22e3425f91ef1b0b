"""Many small calls and many communicators on real ranks: memory, descriptors and threads must stay as they are."""

from __future__ import annotations

import argparse
import gc
import os
import resource
import sys
from collections import Counter
from pathlib import Path

import numpy as np

from tests.stress.jobs import SideChannel, run_ranks, say
from tests.stress.report import Report

__all__ = ["HELP", "add_arguments", "run"]

HELP = "many small calls and communicators: memory, descriptors and threads stay as they are"

_MAX_GROWTH = 2**20  # bytes of resident memory
_SECONDS_PER_CALL, _SECONDS_PER_COMMUNICATOR = 2e-3, 0.1  # at most, on a busy machine
_ALGORITHMS = ("butterfly", "tree", "split", "allgather", "dense")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--calls", type=int, default=1_000_000, help="(%(default)s)")
    parser.add_argument("--communicators", type=int, default=10_000, help="(%(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="(%(default)s)")


def run(arguments: argparse.Namespace, report: Report) -> None:
    """Make so many calls on ranks, and calls on so many communicators."""
    calls, communicators = arguments.calls, arguments.communicators
    repeat = f"--calls {calls} --communicators {communicators} --ranks {arguments.ranks}"
    seconds = 300 + calls * _SECONDS_PER_CALL + communicators * _SECONDS_PER_COMMUNICATOR
    words: list[object] = [report.seed, calls, communicators]
    run_ranks(report, arguments.ranks, "endurance", words, seconds, repeat)
    report.figures["calls and communicators/s"] = (calls + communicators) / report.seconds


# -- on the ranks -----------------------------------------------------------------------------------------------------


def _held() -> dict[str, int]:
    """Return what this process holds."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "bytes of resident memory": pages * resource.getpagesize(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def _main(seed: int, calls: int, communicators: int, side: SideChannel) -> None:
    from mpi4py import MPI

    import sparsecomm as sc

    rng = np.random.default_rng([seed, side.rank])
    gradients = [rng.standard_normal(200).astype(np.float32) for _ in range(7)]
    residual, out = np.zeros(200, np.float32), np.empty(200, np.float32)

    def call(i: int, comm: MPI.Intracomm) -> None:
        options = {
            "algorithm": _ALGORITHMS[i % 5],
            "residual": residual,
            "out": out,
            "wire": ("plain", "packed")[i % 2],
        }
        if i % 10 == 0:
            sc.isparse_allreduce(gradients[i % 7], 5, comm=comm, **options).wait()
        else:
            sc.sparse_allreduce(gradients[i % 7], 5, comm=comm, **options)

    def use(i: int) -> None:
        comm = MPI.COMM_WORLD.Dup()
        call(i, comm)
        comm.Free()

    counts, figures, failures = Counter[str](), {}, []
    for what, number, each in (
        ("calls", calls, lambda i: call(i, MPI.COMM_WORLD)),
        ("communicators", communicators, use),
    ):
        warm_up = min(number // 4, 5000)
        for i in range(warm_up):
            each(i)
        before = _held()
        for i in range(warm_up, number):
            each(i)
            if side.rank == 0 and i % (number // 20 + 1) == 0:
                print(f"progress: {i:,} of {number:,} {what}", flush=True)
        growth = {kind: now - before[kind] for kind, now in _held().items()}
        side.all(np.zeros(1))
        counts[f"{what}, all ranks'"] += number
        for kind, grown in growth.items():
            figures[f"{kind}: growth over {what}"] = grown
            if grown > (_MAX_GROWTH if "bytes" in kind else 0):
                failures.append(f"rank {side.rank}: {grown} more {kind} after {number - warm_up} {what}")
    say(counts, figures, failures)


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:4]), SideChannel(*sys.argv[4:]))
