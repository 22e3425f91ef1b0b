"""A rank that is stopped for longer than the timeout, and goes on.

In every round another rank gets SIGSTOP at a random time, and SIGCONT when the others have given up. They must have
raised `TimeoutError` that names it, or `TransportError` because one of them did. What the stopped rank was in must end
with an error, or with the right result if it was done already. After `realign` the next call must be right on all.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests import data, reference
from tests.stress.jobs import SideChannel, run_ranks, say
from tests.stress.report import Report

__all__ = ["HELP", "add_arguments", "run"]

HELP = "a rank is stopped for longer than the timeout, and goes on"

_N, _K = 200, 7
_TIMEOUT = 2.0  # seconds: SPARSECOMM_TIMEOUT
_STOPPED = 3.5 * _TIMEOUT  # seconds: a rank that waits for one that waits for it gives up, too
_ALGORITHMS = ("butterfly", "split", "tree", "dense", "allgather")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--rounds", type=int, default=50, help="(%(default)s)")
    parser.add_argument("--ranks", type=int, default=3, help="(%(default)s)")


def run(arguments: argparse.Namespace, report: Report) -> None:
    """Stop ranks in so many rounds."""
    repeat = f"--rounds {arguments.rounds} --ranks {arguments.ranks}"
    seconds = 120 + arguments.rounds * 10 * _TIMEOUT
    run_ranks(report, arguments.ranks, "stopped", [report.seed, arguments.rounds], seconds, repeat)


# -- on the ranks -----------------------------------------------------------------------------------------------------


class _Program:
    """One rank."""

    def __init__(self, seed: int, side: SideChannel) -> None:
        import sparsecomm as sc

        self.sc, self.seed = sc, seed
        self.side = side
        self.rank, self.size = self.side.rank, self.side.size
        self.processes = self.side.all(np.array([os.getpid()]))[:, 0].tolist()
        self.counts, self.failures = Counter[str](), []
        self.number = 0  # of the next call

    def fail(self, what: str) -> None:
        """Record what should not be."""
        self.failures.append(f"rank {self.rank}, call {self.number}: {what}")

    def _inputs(self, rank: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the gradient and the residual of a rank for the next call."""
        seed = self.seed + 2 * (self.number * self.size + rank)
        return data.integers(_N, "float32", seed, 5), data.integers(_N, "float32", seed + 1, 5)

    def call(self) -> Exception | None:
        """Make the next call, check what it leaves, and return its error."""
        name = _ALGORITHMS[self.number % len(_ALGORITHMS)]
        everyones = [r + x for x, r in map(self._inputs, range(self.size))]
        x, residual = self._inputs(self.rank)
        out = np.empty(_N, np.float32)
        try:
            self.sc.sparse_allreduce(x, _K, algorithm=name, residual=residual, out=out)
        except self.sc.SparseCommError as error:
            if not np.array_equal(residual, everyones[self.rank]):
                self.fail(f"raised {error!r}, and the residual is not residual + x")
            if not isinstance(error, self.sc.TransportError):
                self.fail(f"raised {error!r}")
            return error
        total = reference.dense(reference.allreduce(name, everyones, _K, range(self.size)), _N)
        if not np.array_equal(out, total):
            self.fail(f"{name}: a wrong result")
        return None

    def round(self, victim: int, delay: float) -> None:
        """Stop a rank, and go on with it."""
        self.number = int(self.side.all(np.array([self.number])).max()) + 1
        timers = []
        if self.rank == (victim + 1) % self.size:
            for sign, after in ((signal.SIGSTOP, delay), (signal.SIGCONT, delay + _STOPPED)):
                timers.append(threading.Timer(after, os.kill, (self.processes[victim], sign)))
                timers[-1].start()
        began = time.monotonic()
        while (error := self.call()) is None and time.monotonic() - began < 2 * _STOPPED:
            self.number += 1  # done before the signal came
        who = "stopped ranks" if self.rank == victim else "other ranks"
        self.counts[f"{who}: {type(error).__name__}"] += 1
        if error is None:
            self.fail(f"rank {victim} was stopped, and nothing was raised")
        elif self.rank != victim and f"for rank {victim} " in str(error):
            self.counts["other ranks: the error names the stopped one"] += 1
        elif self.rank != victim and self.size == 2:
            self.fail(f"rank {victim} was stopped, and the error does not name it: {error}")
        for timer in timers:
            timer.join()
        self.number = int(self.side.all(np.array([self.number])).max()) + 1
        self.sc.realign()
        for _ in range(3):
            if (error := self.call()) is not None:
                self.fail(f"after realign: {error!r}")
            self.number += 1

    def run(self, rounds: int) -> None:
        """Make so many rounds."""
        common = np.random.default_rng(self.seed)
        self.call()
        for i in range(rounds):
            self.round(int(common.integers(self.size)), float(common.uniform(0, 0.02)))
            if self.rank == 0:
                print(f"progress: {i + 1} of {rounds} rounds", flush=True)
            if self.side.all(np.array([len(self.failures)])).max() > 20:
                break
        say(self.counts, {}, self.failures)


if __name__ == "__main__":
    os.environ["SPARSECOMM_TIMEOUT"] = str(_TIMEOUT)
    _Program(int(sys.argv[1]), SideChannel(*sys.argv[3:])).run(int(sys.argv[2]))
