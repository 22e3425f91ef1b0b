"""The transport over a process group, between processes of this machine: what they do is in `transport_cases.py`."""

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
from tests.transport.conformance import CASES

PROGRAM = Path(__file__).with_name("transport_cases.py")
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}

# Every start of a process takes seconds, so the ranks of a job make all of its cases. A group of one rank and one of
# three are among them: in `parts_of_the_world`, and as the survivors of the first end of four.
CASES_OF_A_JOB = [
    *CASES,
    "what_a_transport_says_of_itself",
    "gradients_are_summed",
    "links_are_measured_at_the_first_call",
    "pings_that_are_long_due",
    "what_is_no_group",
    "ranks_of_another_version",
    "an_address_that_leads_nowhere",
    "many_groups",
    "a_forked_process",
    "a_rank_that_is_stopped",
    "a_peer_that_has_ended",
    "ranks_that_leave_a_call_and_end_at_once",
    "a_peer_that_sends_what_is_no_message",
    "a_group_is_destroyed_in_a_call",
    "groups_are_destroyed_and_made_again",
]
ENDS = {2: ["ranks_end_one_after_another"], 4: ["a_rank_ends_in_a_call", "a_rank_is_killed"]}
KILLED = {2: (), 4: (2,)}


def ranks(P: int, folder: Path, *names: str, killed: tuple[int, ...]) -> None:
    """Run cases on P ranks: they all end well, and say nothing on stderr."""
    jobs = []
    for rank in range(P):
        start = [sys.executable, str(PROGRAM), str(rank), str(P), str(folder), *names]
        with (folder / f"out{rank}").open("w") as out, (folder / f"err{rank}").open("w") as err:
            jobs.append(subprocess.Popen(start, cwd=ROOT, env=ENVIRONMENT, stdout=out, stderr=err))
    deadline = time.monotonic() + LIMIT
    try:
        for job in jobs:
            job.wait(max(0.0, deadline - time.monotonic()))
    finally:
        for rank, job in enumerate(jobs):
            job.kill()
            said = [(folder / f"{stream}{rank}").read_text() for stream in ("out", "err")]
            print(f"-- rank {rank} of {P}: {job.wait()}", *said, sep="\n")
    assert [job.returncode for job in jobs] == [-9 if rank in killed else 0 for rank in range(P)]
    assert not any((folder / f"err{rank}").read_text() for rank in range(P))


@pytest.mark.slow
@pytest.mark.parametrize("P", [exhaustive(2), 4])
def test_cases(P: int, tmp_path: Path) -> None:
    ranks(P, tmp_path, *CASES_OF_A_JOB, *ENDS[P], killed=KILLED[P])


def test_a_process_ends_in_order_after_an_interrupted_first_call() -> None:
    """The thread that connects the ranks is then in torch's C++, and must not come back from there into no Python."""
    program = Path(__file__).with_name("interrupted_joining.py")
    ended = subprocess.run(
        [sys.executable, str(program)],
        cwd=ROOT,
        env=ENVIRONMENT | {"PYTHONWARNINGS": ""},
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "interrupted\n"), ended.stderr
