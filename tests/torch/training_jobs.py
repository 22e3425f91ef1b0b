"""Starts files of cases, such as `training_hook.py`, on several ranks: processes of this machine."""

from __future__ import annotations

import os
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
    jobs, outputs = [], [folder / f"rank{rank}" for rank in range(P)]
    for rank, output in enumerate(outputs):
        start = [sys.executable, "-m", "tests.torch.training_ranks", str(rank), str(P), str(folder / "store"), *names]
        with output.open("w") as file:
            jobs.append(subprocess.Popen(start, cwd=ROOT, env=ENVIRONMENT, stdout=file, stderr=subprocess.STDOUT))
    deadline = time.monotonic() + SECONDS
    try:
        while time.monotonic() < deadline and any(job.poll() is None for job in jobs):
            if any(job.poll() for job in jobs):
                time.sleep(1)  # the others may have something to say about it
                break
            time.sleep(0.02)
        ended = [job.poll() for job in jobs]
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    said = "\n".join(f"-- rank {rank} of {P}\n{output.read_text()}" for rank, output in enumerate(outputs))
    assert ended == [0] * P, f"{ended}, None: it was still running\n{said}"
    print(said)
