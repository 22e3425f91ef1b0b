"""The transport over a process group, between local processes that run `transport_cases.py`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch.distributed")

from tests.processes import LIMIT, ROOT
from tests.thinning import exhaustive

PROGRAM = Path(__file__).with_name("transport_cases.py")
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}

KILLED = {2: (), 4: (2,)}


@pytest.mark.slow
@pytest.mark.parametrize("P", [exhaustive(2), 4])
def test_cases(P: int, tmp_path: Path) -> None:
    """All ranks succeed, without output on stderr."""
    jobs = []
    for rank in range(P):
        start = [sys.executable, str(PROGRAM), str(rank), str(P), str(tmp_path)]
        with (tmp_path / f"out{rank}").open("w") as out, (tmp_path / f"err{rank}").open("w") as err:
            jobs.append(subprocess.Popen(start, cwd=ROOT, env=ENVIRONMENT, stdout=out, stderr=err))
    deadline = time.monotonic() + LIMIT
    try:
        for job in jobs:
            job.wait(max(0.0, deadline - time.monotonic()))
    finally:
        for rank, job in enumerate(jobs):
            job.kill()
            said = [(tmp_path / f"{stream}{rank}").read_text() for stream in ("out", "err")]
            print(f"-- rank {rank} of {P}: {job.wait()}", *said, sep="\n")
    assert [job.returncode for job in jobs] == [-9 if rank in KILLED[P] else 0 for rank in range(P)]
    assert not any((tmp_path / f"err{rank}").read_text() for rank in range(P))
