"""Survivors over gloo go on with a new process group: what they do is in `lost_rank.py`."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch.distributed")

from tests.torch.training_jobs import ENVIRONMENT, ROOT, SECONDS


@pytest.mark.slow
def test_survivors_go_on_with_a_new_process_group(tmp_path: Path) -> None:
    jobs = []
    for rank in range(3):
        with (tmp_path / f"said{rank}").open("w") as said:
            command = [sys.executable, "-m", "tests.torch.lost_rank", str(rank), str(tmp_path)]
            jobs.append(subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=said, stderr=subprocess.STDOUT))
    try:
        ended = [job.wait(SECONDS) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    said_by_all = "\n".join((tmp_path / f"said{rank}").read_text() for rank in range(3))
    assert ended == [0, -signal.SIGKILL, 0], said_by_all
