"""Attacks on real ranks: started under mpirun, and what their ranks share besides the library."""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.processes import mpirun
from tests.stress.report import Report

__all__ = ["SideChannel", "run_ranks", "say"]

_MARK = "stress: "  # begins the line in which a rank tells what it has found
_HANGS = 90  # seconds in which no round of a rank ends


def run_ranks(
    report: Report, P: int, attack: str, words: list[object], seconds: float, repeat: str, over: str = "mpi"
) -> None:
    """Run ``python -m tests.stress.ATTACK WORDS OVER STORE`` on P ranks, and add what they tell to the report.

    `SideChannel` takes the last two words. ``repeat``: the options that show a failure again, besides the seed.
    """
    module, repeat = f"tests.stress.{attack}", f"-m tests.stress {attack} --seed {report.seed} {repeat}"

    def follow(job: subprocess.Popen[bytes], output: Callable[[], str]) -> None:
        shown, began = 0, time.monotonic()
        while job.poll() is None and time.monotonic() - began < seconds:
            time.sleep(0.2)
            lines = [line for line in output().splitlines() if line.startswith("progress: ")]
            for line in lines[shown:]:
                print(line, file=sys.stderr, flush=True)
            shown = len(lines)

    with tempfile.TemporaryDirectory() as folder:
        words = [*words, over, Path(folder) / "store"]
        try:
            status, output = mpirun(P, "-m", module, *map(str, words), seconds=seconds, meanwhile=follow)
        except AssertionError as error:  # it has not ended
            status, output = -1, str(error)
    told = 0
    for line in output.splitlines():
        if line.startswith(_MARK):
            told += 1
            found = json.loads(line.removeprefix(_MARK))
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
    """What ranks tell each other besides the library: on a communicator of their own, with all signals blocked.

    Attributes:
        comm: what the library uses, a communicator of MPI or a process group over gloo.
        new: returns another one, of the same ranks.
    """

    def __init__(self, over: str, store: str) -> None:
        if over == "mpi":
            from mpi4py import MPI

            self.comm, self.new, self._own = MPI.COMM_WORLD, MPI.COMM_WORLD.Dup, MPI.COMM_WORLD.Dup()
            self.rank, self.size = self._own.Get_rank(), self._own.Get_size()
            self._gather: Callable[[Any], list[Any]] = self._over_mpi
        else:
            import torch.distributed as dist

            self.rank, self.size = (
                int(os.environ.get(f"OMPI_COMM_WORLD_{what}") or os.environ[f"PMI_{what}"]) for what in ("RANK", "SIZE")
            )
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=self.rank, world_size=self.size)
            self.comm, self.new = dist.group.WORLD, lambda: dist.new_group(backend="gloo")
            own = self.new()

            def over_gloo(mine: Any) -> list[Any]:
                found: list[Any] = [None] * self.size
                dist.all_gather_object(found, mine, group=own)
                return found

            self._gather = over_gloo

    def _over_mpi(self, mine: Any) -> list[Any]:
        """Let other ranks have the cores meanwhile."""
        raw = pickle.dumps(mine)
        lengths, length = np.empty(self.size, np.int64), np.array([len(raw)], np.int64)
        self._wait(self._own.Iallgather(length, lengths))
        found = np.empty(int(lengths.sum()), np.uint8)
        self._wait(self._own.Iallgatherv(np.frombuffer(raw, np.uint8), [found, lengths.tolist()]))
        ends = np.cumsum(lengths).tolist()
        return [pickle.loads(found[end - n : end].tobytes()) for n, end in zip(lengths.tolist(), ends, strict=True)]

    @staticmethod
    def _wait(request: Any) -> None:
        pause = 1e-5
        while not request.Test():
            time.sleep(pause)
            pause = min(1.5 * pause, 1e-3)

    def gather(self, mine: Any) -> list[Any]:
        """Return what each rank tells. A rank that does not come ends the process, with a traceback."""
        faulthandler.dump_traceback_later(_HANGS, exit=True)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM, signal.SIGINT})
        found = self._gather(mine)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return found

    def all(self, mine: NDArray[Any]) -> NDArray[Any]:
        """Return every rank's array, shape (P, ...)."""
        return np.stack(self.gather(mine))
