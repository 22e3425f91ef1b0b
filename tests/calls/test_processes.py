"""Exits and forks of processes with calls in the background: the calls are made, in order, by their own process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.processes import LIMIT, ROOT, mpirun
from tests.thinning import exhaustive


def python(program: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program],
        cwd=ROOT,
        timeout=LIMIT,
        text=True,
        capture_output=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | env,
    )


HEAD = """
import os, sys, threading, time
import numpy as np
import sparsecomm as sc
from sparsecomm.calls.queue import CallQueue
from types import SimpleNamespace
class Call:
    def __init__(self, name, seconds=0.0): self.name, self.seconds = name, seconds
    def run(self):
        time.sleep(self.seconds)
        print("made", self.name, flush=True)
        if self.name == "wrong": raise sc.CollectiveMismatchError("calls differ")
        return sc.SparseVector([0], [1.0], 1)
    def leave(self, error): print("left", self.name, flush=True)
"""


def test_errors_of_calls_that_are_made_at_exit_are_logged() -> None:
    done = python(f"""{HEAD}
queue_ = CallQueue(SimpleNamespace(rank=0, threaded=False))
for name in ("a", "wrong", "b"):
    queue_.submit(Call(name))
""")
    assert done.stdout.splitlines() == ["made a", "made wrong", "made b"]
    assert done.stderr.count("no wait() raised its error: calls differ") == 1, done.stderr


@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit(0)"])
def test_a_fork_makes_no_calls_and_its_parent_continues(end: str) -> None:
    done = python(f"""{HEAD}
queue_ = CallQueue(SimpleNamespace(rank=0, threaded=True))
handles = [queue_.submit(Call(i, 0.02)) for i in range(10)]
child = os.fork()
if child == 0:
    for make in (queue_.submit, queue_.call):
        try:
            make(Call("child"))
        except sc.InvalidInputError as error:
            assert f"belongs to process {{os.getppid()}}" in str(error), error
        else:
            print("the child made a call", flush=True)
    {end}
assert os.waitpid(child, 0)[1] == 0
for handle in handles:
    handle.wait()
queue_.call(Call("last"))
""")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [*(f"made {i}" for i in range(10)), "made last"]


# -- over MPI ---------------------------------------------------------------------------------------------------------

LEAVING = """
import time
import numpy as np
import mpi4py
mpi4py.rc.thread_level = "{level}"
from mpi4py import MPI
import sparsecomm as sc
from sparsecomm import transport
rank, P = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
def start(n, comm=None):
    return sc.isparse_allreduce(np.ones(n, np.float32), 3, comm=comm)
assert transport.transport_of().threaded == ("{level}" == "multiple")
handles = [start(100 + i) for i in range(5)]
sc.sparse_allreduce(np.ones(7, np.float32), 2)
assert all(handle.test() for handle in handles)
other = MPI.COMM_WORLD.Dup()
transport.transport_of(other)
last = [start(50, other), start(60)] if rank else [start(60), start(50, other)]
if rank != 1:
    time.sleep(0.3)
    for handle in handles + last * ("{level}" == "multiple"):  # without threads they are made at the end
        assert handle.wait(60).values.tolist() == [P] * 3
print("fine", flush=True)
"""


@pytest.mark.parametrize("level", ["multiple", "serialized", exhaustive("funneled"), exhaustive("single")])
def test_a_rank_that_exits_without_waiting_makes_its_calls(level: str) -> None:
    status, said = mpirun(3, "-c", LEAVING.replace("{level}", level))
    assert status == 0, said
    assert said.count("fine") == 3, said
