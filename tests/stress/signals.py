"""Signals at random times in calls on real ranks.

In every second call each rank gets a signal at a random time, whose handler raises. Then the ranks agree, realign, and
make a call without signals, which must give the right result. After every call each rank's residual must be
`residual + x`, or it must be committed and the result must stand in out; where the call had not begun, both are as they
were. A wait that takes as long as the timeout is a hang.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests import data, reference
from tests.stress.jobs import Meeting, run_ranks, say
from tests.stress.report import Report

__all__ = ["HELP", "add_arguments", "run"]

HELP = "signals at random times in calls on real ranks"

_N, _K = 64, 5
_UNTOUCHED = 77.5  # in out before a call; no result has it
_TIMEOUT = 20  # seconds: SPARSECOMM_TIMEOUT
_ALGORITHMS = ("split", "butterfly", "allgather", "tree", "dense")
_SECONDS_PER_CALL = 0.02  # at most, on a busy machine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--calls", type=int, default=100_000, help="on each number of ranks (%(default)s)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3], help="(1 2 3)")


def run(arguments: argparse.Namespace, report: Report) -> None:
    """Make so many calls on each number of ranks."""
    for P in arguments.ranks:
        repeat = f"-m tests.stress signals --seed {report.seed} --calls {arguments.calls} --ranks {P}"
        seconds = 300 + arguments.calls * _SECONDS_PER_CALL
        run_ranks(report, P, "tests.stress.signals", [report.seed, arguments.calls], seconds, repeat)


# -- on the ranks -----------------------------------------------------------------------------------------------------


class _Interrupted(BaseException):
    """What the handler raises."""


class _Alarm:
    """A signal at a random time, once."""

    def __init__(self) -> None:
        self.armed = False
        signal.signal(signal.SIGALRM, self._handle)

    def _handle(self, *_: Any) -> None:
        if self.armed:
            self.armed = False
            raise _Interrupted

    def arm(self, seconds: float) -> None:
        """Raise `_Interrupted` in so many seconds."""
        self.armed = True
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))

    def disarm(self) -> None:
        """Raise nothing from now on. The signal may still come in here."""
        self.armed = False


def _committed(name: str, held: NDArray[Any], total: NDArray[Any], residual: NDArray[Any]) -> bool:
    """Return whether a residual that was `residual + x` is as after the call with that result."""
    if name == "dense":
        return not residual.any()
    if name in ("split", "allgather"):  # what this rank has selected, and the result holds, is gone
        selected = reference.dense(reference.topk(held, _K), _N)
        inside = (total != 0) & (selected != 0) if name == "split" else selected != 0
        return np.array_equal(residual, np.where(inside, 0, held))
    return np.array_equal(residual[total == 0], held[total == 0])


class _Program:
    """One rank."""

    def __init__(self, seed: int) -> None:
        import sparsecomm as sc

        self.sc, self.seed = sc, seed
        self.meeting, self.alarm = Meeting(), _Alarm()
        self.rng = np.random.default_rng([seed, self.meeting.rank])
        self.counts, self.failures = Counter[str](), []
        self.figures: dict[str, float] = {}
        self.residual, self.out = np.zeros(_N, np.float32), np.empty(_N, np.float32)
        self.usual = 1e-3  # seconds

    def fail(self, call: int, what: str) -> None:
        """Record what should not be."""
        self.failures.append(f"rank {self.meeting.rank}, call {call}: {what}")

    def call(self, i: int, *, signals: bool) -> None:
        """Make call ``i``, and check what it leaves."""
        name = _ALGORITHMS[i // 2 % len(_ALGORITHMS)]
        x = data.integers(_N, "float32", self.seed + i * self.meeting.size + self.meeting.rank, 5)
        before = self.residual.copy()
        held = before + x
        everyones = self.meeting.all(held)
        self.out[:] = _UNTOUCHED
        error = self._made(name, x, signals)
        total = np.zeros(_N, np.float32)
        indices, values = reference.allreduce(name, list(everyones), _K, range(self.meeting.size))
        total[indices] = values
        kept = np.array_equal(self.residual, held)
        committed = np.array_equal(self.out, total) and _committed(name, held, total, self.residual)
        if error is None:
            self.counts["calls done"] += 1
            if not np.array_equal(self.out, total):
                self.fail(i, f"{name}: a wrong result")
            elif not committed:
                self.fail(i, f"{name}: the call is done, and the residual is not committed")
        else:
            self.counts[f"calls that raised {type(error).__name__.lstrip('_')}"] += 1
            if not signals or isinstance(error, self.sc.TimeoutError):
                self.fail(i, f"{name}: {'a hang' if signals else 'without a signal'}: {error!r}")
            untouched = np.array_equal(self.residual, before) and bool(np.all(self.out == _UNTOUCHED))
            for what, holds in (("not begun", untouched), ("residual + x", kept), ("committed", committed)):
                self.counts[f"residuals after an interrupt: {what}"] += holds
            if not (kept or committed or untouched):
                self.fail(i, f"{name}: raised {error!r}, and gradient was lost or made")
        self._agree(i, everyones, error)

    def _made(self, name: str, x: NDArray[Any], signals: bool) -> BaseException | None:
        began, raised = time.perf_counter(), None
        try:
            try:
                if signals:
                    self.alarm.arm(float(self.rng.uniform(0, 1.5 * self.usual)))
                self.sc.sparse_allreduce(x, _K, algorithm=name, residual=self.residual, out=self.out)
            finally:
                self.alarm.disarm()
        except (_Interrupted, Exception) as error:
            raised = error
        signal.setitimer(signal.ITIMER_REAL, 0)
        if not signals:
            self.usual += 0.05 * (min(time.perf_counter() - began, 0.01) - self.usual)
        return raised

    def _agree(self, i: int, before: NDArray[Any], error: BaseException | None) -> None:
        """Learn what the others have, check that together nothing is lost if all are done, and meet again."""
        state = self.meeting.all(np.concatenate([self.residual, self.out, [error is not None]]).astype(np.float32))
        if not state[:, -1].any():
            if not np.array_equal(state[:, :_N].sum(0) + self.out, before.sum(0)):
                self.fail(i, "gradient was lost or made, summed over ranks")
            return
        self.counts["rounds with an interrupt"] += self.meeting.rank == 0
        self.counts["rounds that some ranks finished"] += self.meeting.rank == 0 and not state[:, -1].all()
        getattr(self.sc, "realign", lambda: None)()

    def run(self, calls: int) -> None:
        """Make so many calls, every second one with signals."""
        said = time.monotonic()
        for i in range(-20, calls):
            self.call(i + 20, signals=i >= 0 and i % 2 == 0)
            if self.meeting.rank == 0 and time.monotonic() - said > 30:
                said = time.monotonic()
                print(f"progress: {i:,} of {calls:,} calls on {self.meeting.size} ranks", flush=True)
            if i % 100 == 0 and self.meeting.all(np.array([len(self.failures)])).max() > 50:
                break
        say(self.counts, self.figures, self.failures)


if __name__ == "__main__":
    os.environ["SPARSECOMM_TIMEOUT"] = str(_TIMEOUT)
    _Program(int(sys.argv[1])).run(int(sys.argv[2]))
