"""Signals at random times in calls, on simulated ranks, over MPI and over gloo.

In every second call a signal comes at a random time, to each real rank or to one simulated rank, and its handler
raises. Then the ranks agree, realign, and make a call without signals, which must give the right result. After every
call each rank's residual must be `residual + x`, or it must be committed and the result must stand in out; where the
call had not begun, both are as they were. A wait that takes as long as the timeout is a hang. The counts say how many
calls were interrupted, and what the handlers found below them: other Python code, or compiled code that asked.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from greenlet import getcurrent
from numpy.typing import NDArray

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests import data, reference
from tests.stress.jobs import SideChannel, run_ranks, say
from tests.stress.report import Report

__all__ = ["HELP", "Alarm", "add_arguments", "run"]

HELP = "signals at random times in calls, on simulated and on real ranks"

_N, _K = 64, 5
_UNTOUCHED = 77.5  # in out before a call; no result has it
_TIMEOUT = 20  # seconds: SPARSECOMM_TIMEOUT
_ALGORITHMS = ("split", "butterfly", "allgather", "tree", "dense")
_SECONDS_PER_CALL = 0.02  # at most, on a busy machine
_LIBRARY, _SIMULATED = (str(Path(module.__file__ or "").parent) + os.sep for module in (sc, simulated))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--calls", type=int, default=100_000, help="on each number of ranks (%(default)s)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3], help="(1 2 3)")
    parser.add_argument("--over", nargs="+", default=["simulated", "mpi", "gloo"], help="(simulated mpi gloo)")


def run(arguments: argparse.Namespace, report: Report) -> None:
    """Make so many calls on each number of ranks."""
    for over in arguments.over:
        for P in arguments.ranks:
            repeat = f"--calls {arguments.calls} --ranks {P} --over {over}"
            if over == "simulated":
                found = _Judge(report.counts)
                _simulate(report.seed, arguments.calls, P, found)
                for failure in found.failures:
                    report.fail(failure, f"-m tests.stress signals --seed {report.seed} {repeat}")
            else:
                seconds = 300 + arguments.calls * _SECONDS_PER_CALL
                run_ranks(report, P, "signals", [report.seed, arguments.calls], seconds, repeat, over)


class Interrupted(BaseException):
    """What the handler raises."""


class Alarm:
    """A signal at a random time, once, whose handler raises.

    Attributes:
        armed: the greenlets in which the handler may raise.
        where: of the last one that was raised: the innermost place in Python code.
    """

    def __init__(self, error: type[BaseException] = Interrupted) -> None:
        self.armed: set[Any] = set()
        self.where = ""
        self._error = error
        signal.signal(signal.SIGALRM, self._handle)

    def may_raise(self, frame: FrameType | None) -> bool:
        """Return whether the handler raises here: not in what stands for MPI and the network."""
        return frame is None or not frame.f_code.co_filename.startswith(_SIMULATED)

    def _handle(self, _: int, frame: FrameType | None) -> None:
        if getcurrent() in self.armed and self.may_raise(frame):
            self.armed = set()
            code = frame.f_code if frame is not None else self._handle.__code__
            self.where = f"{os.path.relpath(code.co_filename)}:{code.co_name}"
            raise self._error
        if self.armed:  # soon
            signal.setitimer(signal.ITIMER_REAL, 2e-5)

    def set(self, seconds: float) -> None:
        """Raise in so many seconds, once this greenlet, or another one, is armed."""
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))

    def arm(self) -> None:
        """Let the handler raise in this greenlet from now on."""
        self.armed.add(getcurrent())

    def disarm(self) -> None:
        """Raise nothing in this greenlet from now on. The signal may still come in here."""
        self.armed.discard(getcurrent())


def _committed(name: str, held: NDArray[Any], total: NDArray[Any], residual: NDArray[Any]) -> bool:
    """Return whether a residual that was `residual + x` is as after the call with that result."""
    if name == "dense":
        return not residual.any()
    if name in ("split", "allgather"):  # what this rank has selected, and the result holds, is gone
        selected = reference.dense(reference.topk(held, _K), _N)
        inside = (total != 0) & (selected != 0) if name == "split" else selected != 0
        return np.array_equal(residual, np.where(inside, 0, held))
    return np.array_equal(residual[total == 0], held[total == 0])


@dataclass
class _Call:
    """A rank's part of a call: its arguments, and what it leaves."""

    name: str
    x: NDArray[Any]
    residual: NDArray[Any]
    out: NDArray[Any] = field(default_factory=lambda: np.full(_N, _UNTOUCHED, np.float32))
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.before = self.residual.copy()
        self.held = self.before + self.x

    @property
    def untouched(self) -> bool:
        """Whether all is as before the call."""
        return np.array_equal(self.residual, self.before) and bool(np.all(self.out == _UNTOUCHED))

    def make(self, comm: Any, alarm: Alarm | None) -> None:
        """Make it; ``alarm``: it may be interrupted."""
        try:
            try:
                if alarm is not None:
                    alarm.arm()
                sc.sparse_allreduce(self.x, _K, comm=comm, algorithm=self.name, residual=self.residual, out=self.out)
            finally:
                if alarm is not None:
                    alarm.disarm()
        except (Interrupted, Exception) as error:
            self.error = error


@dataclass
class _Judge:
    """Says what should not be."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def judge(
        self, number: int, rank: int, call: _Call, everyones: list[NDArray[Any]], signals: bool, alone: bool = False
    ) -> None:
        """Check what a call has left on a rank.

        Args:
            everyones: residual + x of all ranks.
            alone: a rank was interrupted before it had begun the call, for which others then wait.
        """

        def fail(what: str) -> None:
            self.failures.append(f"rank {rank}, call {number}, {call.name}: {what}")

        total = np.zeros(_N, np.float32)
        indices, values = reference.allreduce(call.name, everyones, _K, range(len(everyones)))
        total[indices] = values
        right = np.array_equal(call.out, total)
        committed = right and _committed(call.name, call.held, total, call.residual)
        if call.error is None:
            self.counts["calls done"] += 1
            if not committed:
                fail("the call is done, and the residual is not committed" if right else "a wrong result")
            return
        self.counts[f"calls that raised {type(call.error).__name__}"] += 1
        if not signals or (isinstance(call.error, sc.TimeoutError) and not alone):
            fail(f"{'a hang' if signals else 'without a signal'}: {call.error!r}")
        kept, untouched = np.array_equal(call.residual, call.held), call.untouched
        for what, holds in (("not begun", untouched), ("residual + x", kept), ("committed", committed)):
            self.counts[f"residuals after an interrupt: {what}"] += holds
        if not (kept or committed or untouched):
            fail(f"raised {call.error!r}, and gradient was lost or made")

    def interrupted(self, where: str) -> None:
        """Count an interrupt."""
        in_python = where.startswith("sparsecomm")
        self.counts[f"interrupts in {'Python code of the library' if in_python else 'compiled code or around it'}"] += 1


def _gradient(seed: int, number: int, rank: int, P: int) -> NDArray[Any]:
    return data.integers(_N, "float32", seed + number * P + rank, 5)


def _shrunk(seconds: float, usual: float) -> float:
    """Return the usual duration of a call, after another one."""
    return usual + 0.05 * (min(seconds, 0.01) - usual)


# -- simulated ranks --------------------------------------------------------------------------------------------------


def _simulate(seed: int, calls: int, P: int, found: _Judge) -> None:
    alarm, rng, usual = Alarm(), np.random.default_rng([seed, P]), 1e-3
    residuals = [np.zeros(_N, np.float32) for _ in range(P)]
    for number in range(-20, calls):
        signals, name = number >= 0 and number % 2 == 0, _ALGORITHMS[number // 2 % len(_ALGORITHMS)]
        made = [_Call(name, _gradient(seed, number + 20, rank, P), residuals[rank]) for rank in range(P)]
        alarm.where = ""

        def program(ranks: simulated.SimulatedTransport, made: list[_Call] = made, signals: bool = signals) -> None:
            made[ranks.rank].make(ranks, alarm if signals else None)

        began = time.perf_counter()
        if signals:
            alarm.set(float(rng.uniform(0, 1.2 * usual)))
        simulated.run(P, program)
        signal.setitimer(signal.ITIMER_REAL, 0)
        usual = usual if signals else _shrunk(time.perf_counter() - began, usual)
        if alarm.where:
            found.interrupted(alarm.where)
        alone = any(isinstance(call.error, Interrupted) and call.untouched for call in made)
        for rank, call in enumerate(made):
            found.judge(number, rank, call, [each.held for each in made], signals, alone)
        if all(call.error is None for call in made):
            left = sum(call.residual for call in made) + made[0].out
            if not np.array_equal(left, sum(call.held for call in made)):
                found.failures.append(f"call {number}: gradient was lost or made, summed over ranks")
        if len(found.failures) > 20:
            break


# -- real ranks -------------------------------------------------------------------------------------------------------


class _Program:
    """One rank."""

    def __init__(self, seed: int, side: SideChannel) -> None:
        self.seed, self.side, self.alarm, self.found = seed, side, Alarm(), _Judge()
        self.rng = np.random.default_rng([seed, self.side.rank])
        self.residual = np.zeros(_N, np.float32)
        self.usual = 1e-3  # seconds

    def call(self, number: int, *, signals: bool) -> None:
        """Make call ``number``, check what it leaves, and meet the others again."""
        x = _gradient(self.seed, number, self.side.rank, self.side.size)
        call = _Call(_ALGORITHMS[number // 2 % len(_ALGORITHMS)], x, self.residual)
        everyones = self.side.all(call.held)
        self.alarm.where, began = "", time.perf_counter()
        if signals:
            self.alarm.set(float(self.rng.uniform(0, 1.5 * self.usual)))
        call.make(self.side.comm, self.alarm if signals else None)
        signal.setitimer(signal.ITIMER_REAL, 0)
        if not signals:
            self.usual = _shrunk(time.perf_counter() - began, self.usual)
        if self.alarm.where:
            self.found.interrupted(self.alarm.where)
        not_begun = isinstance(call.error, Interrupted) and call.untouched
        told = self.side.gather((call.error is not None, self.residual, not_begun))
        self.found.judge(number, self.side.rank, call, list(everyones), signals, any(alone for _, _, alone in told))
        failed = [error for error, _, _ in told]
        if not any(failed):
            if not np.array_equal(sum(residual for _, residual, _ in told) + call.out, everyones.sum(0)):
                self.found.failures.append(f"call {number}: gradient was lost or made, summed over ranks")
            return
        self.found.counts["rounds with an interrupt"] += self.side.rank == 0
        self.found.counts["rounds that some ranks finished"] += self.side.rank == 0 and not all(failed)
        sc.realign(self.side.comm)

    def run(self, calls: int) -> None:
        """Make so many calls, every second one with signals."""
        said = time.monotonic()
        for number in range(-20, calls):
            self.call(number + 20, signals=number >= 0 and number % 2 == 0)
            if self.side.rank == 0 and time.monotonic() - said > 30:
                said = time.monotonic()
                print(f"progress: {number:,} of {calls:,} calls on {self.side.size} ranks", flush=True)
            if number % 100 == 0 and max(self.side.gather(len(self.found.failures))) > 50:
                break
        say(self.found.counts, {}, self.found.failures)


if __name__ == "__main__":
    os.environ["SPARSECOMM_TIMEOUT"] = str(_TIMEOUT)
    _Program(int(sys.argv[1]), SideChannel(*sys.argv[3:])).run(int(sys.argv[2]))
