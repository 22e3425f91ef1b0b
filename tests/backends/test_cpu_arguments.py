"""The compiled functions of the CPU: arrays that they refuse, threads, and forks."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from sparsecomm.backends import CpuBackend, _cpu
from sparsecomm.tensors import interop
from tests import data
from tests.backends.test_cpu import same

FLAT = {"int32": np.arange(6, dtype=np.int32), "float32": np.ones(6, np.float32), "uint8": np.zeros(64, np.uint8)}
WRONG = {
    "short": lambda array: array[:-1],
    "long": lambda array: np.repeat(array, 2),
    "wide": lambda array: array.astype("f8" if array.dtype.kind == "f" else "i8"),
    "two axes": lambda array: array.reshape(2, -1),
    "no axes": lambda array: array[0:1].reshape(()),
    "with gaps": lambda array: np.repeat(array, 2)[::2],
}


@pytest.mark.parametrize("wrong", WRONG)
def test_arrays_that_kernels_cannot_take_are_refused(wrong: str) -> None:
    """Each array of each function, alone: kernels would read or write what is not theirs."""
    i, v, data_, out = FLAT["int32"], FLAT["float32"], FLAT["uint8"], np.zeros(6, np.float32)
    to = out.ctypes.data
    calls = [
        (lambda *a: _cpu.merge(*a, False, False), (i, v, i, v)),
        (lambda *a: _cpu.merge_topk(*a, 3, False, False), (i, v, i, v)),
        (lambda *a: _cpu.scatter_add(to, 2, 6, *a, False), (i, v)),
        (lambda *a: _cpu.scatter_add_where(to, 2, 6, *a, i, False, True), (i, v)),
        (lambda *a: _cpu.densify(to, 2, 6, *a, False, 1), (i, v)),
        (lambda *a: _cpu.well_formed(*a, 6, False, False), (i, v)),
        (lambda *a: _cpu.pack(*a, 0, False, False), (i, v)),
        (lambda *a: _cpu.add(*a, False, 1), (out, v)),
        (lambda *a: _cpu.narrow(*a, to, 2, 6, 1), (v,)),
    ]
    lengths_free = [
        (lambda *a: _cpu.scatter_add_where(to, 2, 6, i, v, *a, False, True), (i,)),
        (lambda *a: _cpu.quantize_values(*a, 1), (v,)),
        (lambda *a: _cpu.unpack(*a, 1, 6, 0, False, False), (data_,)),
    ]
    for call, arrays in calls + ([] if wrong in ("short", "long") else lengths_free):
        for position in range(len(arrays)):
            given = list(arrays)
            given[position] = WRONG[wrong](given[position])
            with pytest.raises(ValueError, match="expected"):
                call(*given)


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    x = data.gradient("few values", 2_000_001, "float32")
    results = [CpuBackend(threads).topk(interop.tensor(x, "x"), 3000, None) for threads in (1, 2, 5, 8)]
    for other in results[1:]:
        same(other, (results[0].indices, results[0].values))


def test_a_child_process_after_fork_has_threads_of_its_own() -> None:
    import multiprocessing
    import warnings

    x = data.gradient("normal", 1_000_001, "float32")
    expected = CpuBackend(3).topk(interop.tensor(x, "x"), 100, None)
    with warnings.catch_warnings():
        for warned in (DeprecationWarning, RuntimeWarning):  # of fork beside threads, the point; JAX has its own
            warnings.simplefilter("ignore", warned)
        with multiprocessing.get_context("fork").Pool(1) as pool:
            indices = pool.apply_async(_topk_in_child, (x,)).get(timeout=60)
    np.testing.assert_array_equal(indices, expected.indices)


FORKS = """
import os, signal, threading
import numpy as np
from sparsecomm.backends import _cpu

indices, values = np.arange(20_000, dtype=np.int32), np.ones(20_000, np.float32)

def work():
    _cpu.merge_topk(indices, values, indices, values, 10, False, False)
    _cpu.release_scratch()

def work_on():
    while True:
        work()

for _ in range(3):
    threading.Thread(target=work_on, daemon=True).start()
for _ in range(200):
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends one that waits for ever
        work()
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, status
os._exit(0)
"""


def test_a_fork_beside_threads_that_take_scratch_memory_has_scratch_memory() -> None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKS], timeout=120, check=False)
    assert done.returncode == 0


def _topk_in_child(x: np.ndarray) -> np.ndarray:
    return CpuBackend(3).topk(interop.tensor(x, "x"), 100, None).indices
