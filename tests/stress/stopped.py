"""A rank that is stopped for longer than the timeout, and goes on.

In every round another rank gets SIGSTOP at a random time, and SIGCONT when the others have given up, with errors that
name it. Its own call must end with an error, or with the right result. After `realign` the next calls must be right.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np

import sparsecomm as sc
from tests.stress.harness import Attack, Ranks
from tests.stress.one_call import Call


class Stopped(Attack):
    options = ("rounds", 50, ""), ("ranks", 3, "")
    timeout = 2.0
    stopped = 3.5 * timeout  # seconds: also a rank that waits for one that waits for the stopped one gives up

    def run(self) -> None:
        self.start_ranks(self.given.ranks, 120 + self.given.rounds * 10 * self.timeout)

    def on_rank(self, ranks: Ranks) -> None:
        common, processes = np.random.default_rng(self.report.seed), ranks.gather(os.getpid())
        number = 0
        self._call(number, ranks)
        for i in range(self.given.rounds):
            number = max(ranks.gather(number))
            victim, delay = int(common.integers(ranks.size)), float(common.uniform(0, 0.02))
            timers = []
            if ranks.rank == (victim + 1) % ranks.size:
                for sign, after in ((signal.SIGSTOP, delay), (signal.SIGCONT, delay + self.stopped)):
                    timers.append(threading.Timer(after, os.kill, (processes[victim], sign)))
                    timers[-1].start()
            began, error = time.monotonic(), None
            while error is None and time.monotonic() - began < 2 * self.stopped:
                number += 1  # calls before the signal succeed
                error = self._call(number, ranks)
            who = "stopped ranks" if ranks.rank == victim else "other ranks"
            self.counts[f"{who}: {type(error).__name__}"] += 1
            if error is None:
                self.fail(f"call {number}: rank {victim} was stopped, and nothing was raised")
            elif ranks.rank != victim and f"for rank {victim} " in str(error):
                self.counts["other ranks: the error names the stopped one"] += 1
            elif ranks.rank != victim and ranks.size == 2:
                self.fail(f"call {number}: rank {victim} was stopped, and the error does not name it: {error}")
            for timer in timers:
                timer.join()
            first = max(ranks.gather(number)) + 1
            sc.realign()
            for number in range(first, first + 3):
                if (error := self._call(number, ranks)) is not None:
                    self.fail(f"rank {ranks.rank}, call {number}, after realign: {error!r}")
            self.progress(f"{i + 1} of {self.given.rounds} rounds")
            if self.too_many_failures(ranks):
                break

    def _call(self, number: int, ranks: Ranks) -> BaseException | None:
        call, held = Call.numbered(number, self.report.seed, ranks.rank, ranks.size)
        call.make(ranks.comm)
        which = f"rank {ranks.rank}, call {number}, {call.algorithm}"
        if call.error is None and not call.committed(held):
            self.fail(f"{which}: a wrong result, or another residual")
        if call.error is not None and not (call.kept and isinstance(call.error, sc.TransportError)):
            self.fail(f"{which}: raised {call.error!r}, and the residual is {'' if call.kept else 'not '}residual + x")
        return call.error
