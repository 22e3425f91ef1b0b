"""Memory of the CPU kernels: forks beside threads, and scratch memory."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from sparsecomm.backends import Backends
from sparsecomm.tensors import interop
from sparsecomm.tensors.sparse import SparseVector
from tests.processes import LIMIT

FORKS = """
import os, signal, threading
import numpy as np
from sparsecomm import SparseVector
from sparsecomm.backends import CpuBackend
from sparsecomm.tensors import interop

backend = CpuBackend(3)
entries = SparseVector(np.arange(20_000), np.ones(20_000, np.float32), 20_000)
x = interop.tensor(np.random.default_rng(0).standard_normal(1_000_001).astype(np.float32), "x")
expected = backend.topk(x, 100, None).indices

def merge_on():
    while True:
        backend.merge_topk(entries, entries, 10)

for _ in range(3):
    threading.Thread(target=merge_on, daemon=True).start()
for number in range(100):
    child = os.fork()
    if child == 0:
        signal.alarm(100)  # kills a child that hangs
        backend.merge_topk(entries, entries, 10)
        fine = number % 20 or np.array_equal(backend.topk(x, 100, None).indices, expected)
        os._exit(0 if fine else 1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, status
os._exit(0)
"""


def test_a_fork_beside_threads_has_threads_and_scratch_memory_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKS], timeout=LIMIT, check=False)
    assert done.returncode == 0


def test_scratch_memory_is_its_owners() -> None:
    """An owner's next results reuse its memory; another owner's results do not."""
    count = 100_000
    entries = SparseVector(np.arange(count), np.ones(count, np.float32), count)

    def memory(owner: Backends) -> set[int]:
        return {interop.tensor(owner.of(interop.CPU).merge(entries, entries).values, "v").pointer for _ in range(3)}

    owners = [Backends(), Backends()]
    first, second = (memory(owner) for owner in owners)
    assert len(first) == len(second) == 1
    assert not first & second
    assert memory(owners[0]) == first
