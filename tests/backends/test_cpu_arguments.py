"""The compiled CPU functions: arrays that they refuse, forks, and scratch memory."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from sparsecomm.backends import Backends, CpuBackend
from sparsecomm.backends.adamw import AdamWPart, Moments
from sparsecomm.backends.base import Addend
from sparsecomm.tensors import interop
from sparsecomm.tensors.kinds import BFLOAT16, EXACT
from sparsecomm.tensors.sparse import SparseVector
from tests.processes import LIMIT

BACKEND = CpuBackend(1)
INDICES, VALUES = np.arange(6, dtype=np.int32), np.ones(6, np.float32)
TABLE = np.ones((1, 6), np.float32)
WRONG = {
    "short": lambda array: array[:-1],
    "long": lambda array: np.repeat(array, 2),
    "wide": lambda array: array.astype("f8" if array.dtype.kind == "f" else "i8"),
    "two axes": lambda array: array.reshape(2, -1),
    "no axes": lambda array: array[0:1].reshape(()),
    "with gaps": lambda array: np.repeat(array, 2)[::2],
}


def vector(indices: np.ndarray, values: np.ndarray = VALUES) -> SparseVector:
    return SparseVector.trusted(indices, values, 6, (6,))


@pytest.mark.parametrize("wrong", WRONG)
def test_arrays_that_kernels_cannot_take_are_refused(wrong: str) -> None:
    """Each array of each method is wrong in turn; a kernel would read or write out of bounds."""
    make, fine, dense = WRONG[wrong], vector(INDICES), interop.tensor(np.zeros(6, np.float32), "x", writable=True)
    calls = [
        lambda v: BACKEND.merge(v, fine),
        lambda v: BACKEND.merge(fine, v),
        lambda v: BACKEND.merge_topk(v, fine, 3),
        lambda v: BACKEND.merge_topk(fine, v, 3),
        lambda v: BACKEND.scatter_add(dense, v),
        lambda v: BACKEND.scatter_add_where(dense, v, fine, True),
        lambda v: BACKEND.densify(dense, v),
        lambda v: BACKEND.well_formed(v),
        lambda v: BACKEND.pack(v, EXACT),
    ]
    of_any_type = calls[-2:]
    for call in calls:
        with pytest.raises(ValueError, match="expected"):
            call(vector(make(INDICES)))
        if wrong != "wide" or call not in of_any_type:
            with pytest.raises(ValueError, match="expected"):
                call(vector(INDICES, make(VALUES)))
    moments, exponents = Moments(VALUES, VALUES, INDICES, VALUES), np.ones(6, np.uint8)

    def adamw(units: np.ndarray = exponents, **changes: np.ndarray) -> None:
        BACKEND.adamw([AdamWPart(0, dense, moments._replace(**changes), TABLE, 1.0, 1.0, 1)], units, fine, 4.0, True)

    def add(**how: np.ndarray) -> None:
        BACKEND.add_first([Addend(0, dense, **how)], np.zeros(6, np.float32), None, 0.5, 0.0, True)

    arrays = [
        (lambda a: BACKEND.add(VALUES.copy(), a), VALUES),
        (lambda a: add(minuend=a), VALUES),
        (lambda a: add(exponents=a), exponents),
        (lambda a: BACKEND.mix_into(dense, a, 0.5), VALUES),
        *((lambda a, name=name: adamw(**{name: a}), array) for name, array in moments._asdict().items()),
    ]
    if wrong not in ("long", "no axes"):  # the step uses only a part of a longer array
        arrays += [(adamw, exponents)]
    if wrong != "with gaps":
        arrays += [(lambda a: BACKEND.cast_into(a, dense), VALUES)]
    if wrong not in ("short", "long"):
        arrays += [
            (lambda a: BACKEND.quantize_values(a, BFLOAT16), VALUES),
            (lambda a: BACKEND.unpack(a, b"", 1, 6, EXACT, False), np.zeros(64, np.uint8)),
            (lambda a: BACKEND.scatter_add_where(dense, fine, vector(a), True), INDICES),
        ]
    for take, array in arrays:
        with pytest.raises(ValueError, match="expected"):
            take(make(array))


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
