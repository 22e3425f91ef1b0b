"""Starts files of cases, such as `training_hook.py`, on several ranks: processes of this machine.

``python -m tests.torch.training_jobs`` imports torch once, and makes the ranks of each job that it reads by forks.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.processes import LIMIT, ROOT

ENVIRONMENT = os.environ | {
    "PYTHONPATH": str(ROOT),
    "PYTHONWARNINGS": "error,ignore:Adam divides gradients,ignore:DTensor random operators",
    "OMP_NUM_THREADS": "1",
    "SPARSECOMM_PROFILE": "none",  # "auto" chooses alike in every run
    "GLOO_SOCKET_IFNAME": "lo",
}


class Jobs:
    """A process that runs jobs, one after another."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.torch.training_jobs"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdin=pipe, stdout=pipe, text=True)

    def run(self, P: int, folder: Path, *names: str, killed: int = -1) -> None:
        """Run the cases of files. All ranks end well, but for one that is killed. They are waited for no longer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([P, str(folder), killed, names]), file=self._process.stdin, flush=True)
        ended = json.loads(self._process.stdout.readline())
        outputs = [path.read_text() if (path := folder / f"rank{rank}").exists() else "" for rank in range(P)]
        said = "\n".join(f"-- rank {rank} of {P}\n{output}" for rank, output in enumerate(outputs))
        assert ended == _expected(P, killed), f"ended: {ended}, None: it was still running\n{said}"
        print(said)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


def _expected(P: int, killed: int) -> list[int | None]:
    return [-signal.SIGKILL if rank == killed else 0 for rank in range(P)]


def _fork_all(P: int, folder: Path, killed: int, names: list[str]) -> list[int | None]:
    """Run the ranks; return how each has ended, None for those that still ran."""
    ranks = [_fork(rank, P, folder, names, at_once=killed >= 0) for rank in range(P)]
    ended: list[int | None] = [None] * P
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline and None in ended:
        _look(ranks, ended)
        if any(status not in (None, right) for status, right in zip(ended, _expected(P, killed), strict=True)):
            time.sleep(1)  # the others may have something to say about it
            _look(ranks, ended)
            break
        time.sleep(0.02)
    for pid, status in zip(ranks, ended, strict=True):
        if status is None:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return ended


def _look(ranks: list[int], ended: list[int | None]) -> None:
    for rank, pid in enumerate(ranks):
        if ended[rank] is None:
            found, status = os.waitpid(pid, os.WNOHANG)
            ended[rank] = int(os.waitstatus_to_exitcode(status)) if found else None


def _fork(rank: int, P: int, folder: Path, names: list[str], *, at_once: bool) -> int:
    """Return the process of a rank; in that process, do not return.

    Args:
        at_once: with old versions of PyTorch, a rank that has run all cases ends without cleaning up: its threads of a
            process group that lost a rank may abort the process otherwise, also without this library.
    """
    pid = os.fork()
    if pid:
        return pid
    output = os.open(folder / f"rank{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = ["training_ranks", str(rank), str(P), str(folder / "store"), *names]
    import torch

    from tests.torch import training_ranks

    training_ranks.main()
    if at_once and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        os._exit(0)
    sys.exit()


if __name__ == "__main__":
    # What takes long to import, also in the first use of DDP and of FSDP.
    for module in ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "sparsecomm.torch"):
        importlib.import_module(module)
    for line in sys.stdin:
        size, to, victim, files = json.loads(line)
        print(json.dumps(_fork_all(size, Path(to), victim, files)), flush=True)
