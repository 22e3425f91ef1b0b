"""Attacks on real ranks: started under mpirun, and what their ranks share besides the library."""

from __future__ import annotations

import faulthandler
import json
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.processes import mpirun
from tests.stress.report import Report

__all__ = ["SideChannel", "run_ranks", "say"]

_MARK = "stress: "  # begins the line in which a rank tells what it has found
_HANGS = 90  # seconds in which no round of a rank ends


def run_ranks(
    report: Report,
    P: int,
    module: str,
    words: list[object],
    seconds: float,
    repeat: str,
    launch: Callable[..., tuple[int, str]] = mpirun,
) -> None:
    """Run ``python -m module words`` on P ranks, by ``launch``, and add what they tell to the report."""

    def follow(job: subprocess.Popen[bytes], output: Callable[[], str]) -> None:
        shown, began = 0, time.monotonic()
        while job.poll() is None and time.monotonic() - began < seconds:
            time.sleep(0.2)
            lines = [line for line in output().splitlines() if line.startswith("progress: ")]
            for line in lines[shown:]:
                print(line, file=sys.stderr, flush=True)
            shown = len(lines)

    try:
        status, output = launch(P, "-m", module, *map(str, words), seconds=seconds, meanwhile=follow)
    except AssertionError as error:  # it has not ended
        status, output = -1, str(error)
    told = 0
    for line in output.splitlines():
        if _MARK in line:  # torchrun may put a name before it
            told += 1
            found = json.loads(line.partition(_MARK)[2])
            report.counts.update(found["counts"])
            for name, value in found["figures"].items():
                report.figures[name] = max(value, report.figures.get(name, value))
            for failure in found["failures"]:
                report.fail(failure, repeat)
    if status != 0 or told != P:
        command = shlex.join([module, *map(str, words)])
        report.fail(f"{P} ranks of {command} ended with status {status}, {told} told:\n{output[-6000:]}", repeat)


def say(counts: Counter[str], figures: dict[str, float], failures: list[str]) -> None:
    """Tell, on a rank, what it has found."""
    line = _MARK + json.dumps({"counts": counts, "figures": figures, "failures": failures[:20]})
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class SideChannel:
    """What ranks tell each other besides the library: on a communicator of their own, with all signals blocked."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()

    def all(self, mine: NDArray[Any]) -> NDArray[Any]:
        """Return every rank's array, shape (P, ...). A rank that does not come ends the process, with a traceback."""
        faulthandler.dump_traceback_later(_HANGS, exit=True)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM, signal.SIGINT})
        found = np.empty((self.size, *mine.shape), mine.dtype)
        request = self._comm.Iallgather([np.ascontiguousarray(mine), self._mpi.BYTE], [found, self._mpi.BYTE])
        pause = 1e-5
        while not request.Test():
            time.sleep(pause)
            pause = min(1.5 * pause, 1e-3)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return found
