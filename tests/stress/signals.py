"""Signals at random times in calls, on simulated ranks, over MPI and over gloo.

In every second call a signal comes at a random time, and its handler raises. Then the ranks realign, and make a call
without signals, which must be right. After every call each rank's residual must be `residual + x`, or committed with
the result in out; where the call had not begun, both are as they were. A wait as long as the timeout is a hang.

``--over files``: signals come again and again while one rank saves and loads checkpoints, and their handler always
raises. Only its exceptions may surface, and the newest checkpoint or the one before it is complete.
"""

from __future__ import annotations

import gc
import os
import signal
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests.interrupts import InterruptError
from tests.stress.harness import MAX_FAILURES, Attack, Ranks
from tests.stress.one_call import ALGORITHMS, Alarm, Call, Interrupted, integers

SECONDS_PER_CALL = 0.02  # at most, on a busy machine


class Signals(Attack):
    options = (
        ("calls", 100_000, "on each number of ranks"),
        ("ranks", (1, 2, 3), ""),
        ("over", ("simulated", "mpi", "gloo", "files"), "files: on one rank"),
    )

    def run(self) -> None:
        for over, P in product(self.given.over, self.given.ranks):
            self.given.over, self.given.ranks = [over], [P]
            if over == "files":
                if P == 1:
                    self._save_and_load()
            elif over == "simulated":
                self._simulate(P)
            else:
                self.start_ranks(P, 300 + self.given.calls * SECONDS_PER_CALL, over)

    def on_rank(self, ranks: Ranks) -> None:
        alarm, rng, usual = Alarm(), np.random.default_rng([self.report.seed, ranks.rank]), 1e-3
        residual = integers(0) * 0
        for number in range(-20, self.given.calls):
            call, signals = self._new(number, ranks.rank, ranks.size, residual)
            held = ranks.gather(call.held)
            began = time.perf_counter()
            alarm.set(float(rng.uniform(0, 1.5 * usual)) if signals else 0)
            call.make(ranks.comm, alarm if signals else None)
            self._end(alarm)
            usual = usual if signals else average(time.perf_counter() - began, usual)
            of_ranks = ranks.gather((call.error is not None, call.residual, call.number, not_begun(call)))
            failed, residuals, numbers, alone = zip(*of_ranks, strict=True)
            apart = any(alone) or len(set(numbers)) > 1
            self._judge(f"rank {ranks.rank}, call {number}", call, held, signals, apart)
            if any(failed):
                self.counts["rounds with an interrupt"] += ranks.rank == 0
                self.counts["rounds that some ranks finished"] += ranks.rank == 0 and not all(failed)
                sc.realign(ranks.comm)
            else:
                self._judge_sum(number, residuals, call.out, held)
            self.progress(f"{number:,} of {self.given.calls:,} calls on {ranks.size} ranks")
            if number % 100 == 0 and self.too_many_failures(ranks):
                break

    def _simulate(self, P: int) -> None:
        alarm, rng, usual = Alarm(), np.random.default_rng([self.report.seed, P]), 1e-3
        residuals = [integers(0) * 0 for _ in range(P)]
        for number in range(-20, self.given.calls):
            made = [self._new(number, rank, P, residuals[rank]) for rank in range(P)]
            calls, signals = [call for call, _ in made], made[0][1]
            held, began = [call.held for call in calls], time.perf_counter()

            def program(transport: Any, calls: list[Call] = calls, within: Any = alarm if signals else None) -> None:
                calls[transport.rank].make(transport, within)

            alarm.set(float(rng.uniform(0, 1.2 * usual)) if signals else 0)
            simulated.run(P, program)
            self._end(alarm)
            usual = usual if signals else average(time.perf_counter() - began, usual)
            alone = any(map(not_begun, calls)) or len({call.number for call in calls}) > 1
            for rank, call in enumerate(calls):
                self._judge(f"rank {rank}, call {number}", call, held, signals, alone)
            if all(call.error is None for call in calls):
                self._judge_sum(number, [call.residual for call in calls], calls[0].out, held)
            if len(self.report.failures) > MAX_FAILURES:
                break

    def _save_and_load(self) -> None:
        os.environ["SPARSECOMM_ALONE"] = "1"
        rng = np.random.default_rng(self.report.seed)
        for name, error in product(("sparsecomm", "sparsecomm.torch"), (Interrupted, InterruptError)):
            module, usual, newest = import_module(name), 1e-2, 0
            with tempfile.TemporaryDirectory() as folder:
                for step in range(self.given.calls // 4):
                    reducer = sc.Reducer({"x": integers(0)}, 0.1)
                    objects = {"step": step, "x": integers(step).tolist(), "reducer": reducer}
                    saves, began = step % 2 == 0, time.perf_counter()
                    act = partial(module.save, folder, step) if saves else partial(module.load, folder)
                    times = rng.uniform(1e-4, (1.2 * usual, 0.3 * usual)) * (step > 0)  # no signals in the first save
                    found, raised = storm(partial(act, objects), error, *times)
                    usual = usual if raised else average(time.perf_counter() - began, usual)
                    last = module.load(folder, objects)
                    what = f"{name}, {'save' if saves else 'load'} {step}"
                    if type(raised) not in (error, type(None)):
                        self.fail(f"{what}: raised {raised!r}")
                    if last.step not in (step, newest)[: 1 + (raised is not None or not saves)]:
                        self.fail(f"{what}: of steps {newest} and {step} there is {last.step}; {raised!r}")
                    if found is not None and found.step != newest:
                        self.fail(f"{what}: step {newest} was there, and {found.step} was loaded")
                    if [last.values["step"], last.values["x"]] != [last.step, integers(last.step).tolist()]:
                        self.fail(f"{what}: wrong values of step {last.step}")
                    newest = last.step
                    self.counts[f"{name}: {'saves' if saves else 'loads'}{' that raised' if raised else ''}"] += 1
                    self.progress(f"{step:,} of {self.given.calls // 4:,} saves and loads by {name}")
                    if step % 20 == 0:
                        gc.collect()

    def _new(self, number: int, rank: int, P: int, residual: NDArray[Any]) -> tuple[Call, bool]:
        x = integers(self.report.seed, number * P, rank, 20 * P)
        call = Call(ALGORITHMS[number // 2 % len(ALGORITHMS)], x, residual)
        return call, number >= 0 and number % 2 == 0

    def _end(self, alarm: Alarm) -> None:
        where = alarm.where
        alarm.set(0)
        if where:
            place = "Python code of the library" if where.startswith("sparsecomm") else "compiled code or around it"
            self.counts[f"interrupts in {place}"] += 1

    def _judge(self, which: str, call: Call, held: list[Any], signals: bool, alone: bool) -> None:
        """Check the state after a call.

        ``alone``: ranks wait for one that was interrupted before the call began, or while it measured links for it.
        """
        which, committed = f"{which}, {call.algorithm}", call.committed(held)
        if call.error is None:
            self.counts["calls done"] += 1
            if not committed:
                right = call.right(held)
                self.fail(f"{which}: {'done, and the residual is not committed' if right else 'a wrong result'}")
            return
        self.counts[f"calls that raised {type(call.error).__name__}"] += 1
        if not signals or (isinstance(call.error, sc.TimeoutError) and not alone):
            self.fail(f"{which}: {'a hang' if signals else 'without a signal'}: {call.error!r}")
        states = {"not begun": call.untouched, "residual + x": call.kept, "committed": committed}
        for state, holds in states.items():
            self.counts[f"residuals after an interrupt: {state}"] += holds
        if not any(states.values()):
            self.fail(f"{which}: raised {call.error!r}, and gradient was lost or made")

    def _judge_sum(self, number: int, residuals: Any, out: NDArray[Any], held: list[Any]) -> None:
        if not np.array_equal(sum(residuals) + out, sum(held)):
            self.fail(f"call {number}: gradient was lost or made, summed over ranks")


def not_begun(call: Call) -> bool:
    return isinstance(call.error, Interrupted) and call.untouched


def average(seconds: float, usual: float) -> float:
    return usual + 0.05 * (min(seconds, 0.01) - usual)


def storm(act: Callable[[], Any], error: type[BaseException], first: float, again: float) -> tuple[Any, Any]:
    """Return what an action returns and what it raises while signals come, whose handler raises every time."""
    found = raised = None

    def handle(_: int, frame: Any) -> None:
        if frame.f_code is not storm.__code__:
            raise error

    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, first, again)
    try:
        found = act()
    except BaseException as caught:
        raised = caught
    signal.setitimer(signal.ITIMER_REAL, 0)
    return found, raised
