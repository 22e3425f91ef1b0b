"""Starts files of cases, such as `training_hook.py`, on several ranks: processes of this machine.

``python -m tests.torch.training_jobs SIZE FOLDER NAME ...`` imports torch once, and makes the ranks by forks.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": str(ROOT),
    "PYTHONWARNINGS": "error",
    "OMP_NUM_THREADS": "1",
    "SPARSECOMM_TIMEOUT": "200",
    "GLOO_SOCKET_IFNAME": "lo",
}
SECONDS = 300  # on a machine that does much else


def run(P: int, folder: Path, *names: str) -> None:
    """All ranks end well. If one does not, the others are not waited for."""
    start = [sys.executable, "-m", "tests.torch.training_jobs", str(P), str(folder), *names]
    job = subprocess.run(start, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    outputs = [path.read_text() if (path := folder / f"rank{rank}").exists() else "" for rank in range(P)]
    said = "\n".join(f"-- rank {rank} of {P}\n{output}" for rank, output in enumerate(outputs))
    assert job.returncode == 0, f"{job.stdout}\n{said}"
    print(said)


def _fork_all(P: int, folder: Path, names: list[str]) -> list[int | None]:
    """Run the ranks; return how each has ended, None for those that still ran."""
    import torch.distributed.fsdp  # what takes long to import
    import torch.distributed.tensor.parallel
    import torch.nn.parallel  # noqa: F401

    ranks = [_fork(rank, P, folder, names) for rank in range(P)]
    ended: list[int | None] = [None] * P
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and None in ended:
        _look(ranks, ended)
        if any(ended):
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
            ended[rank] = os.waitstatus_to_exitcode(status) if found else None


def _fork(rank: int, P: int, folder: Path, names: list[str]) -> int:
    """Return the process of a rank; in that process, do not return."""
    pid = os.fork()
    if pid:
        return pid
    output = os.open(folder / f"rank{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = ["training_ranks", str(rank), str(P), str(folder / "store"), *names]
    from tests.torch import training_ranks

    training_ranks.main()
    sys.exit()


if __name__ == "__main__":
    found = _fork_all(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
    sys.exit(f"{found}, None: it was still running" if any(status != 0 for status in found) else 0)
