"""The baselines of `bench.compare` on real ranks. The file is the test, and the program of its ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
SIZES = [1, 7, 4096, 30_011]


def gradients(P, n, whole=True):
    """Return every rank's gradient: integers, whose sums are exact in any order, with few equal magnitudes."""
    rng = np.random.default_rng(n)
    made = rng.integers(-(2**20), 2**20, (P, n)) * 4 + 1 if whole else rng.standard_normal((P, n))
    return [x.astype(np.float32) for x in made]


def check_dense(comm, baseline):
    for n in SIZES:
        every = gradients(comm.size, n)
        x = every[comm.rank].copy()
        found = baseline.step(x, None, 1)
        np.testing.assert_array_equal(found, np.sum(every, axis=0))
        np.testing.assert_array_equal(x, every[comm.rank])
        np.testing.assert_array_equal(baseline.exchange(x), found)


def check_int8(comm, baseline):
    from bench.compare import baselines

    block = baselines.BLOCK
    for n in SIZES:
        every = gradients(comm.size, n, whole=False)
        found = baseline.step(every[comm.rank], None, 1)
        exact = np.sum(every, axis=0)
        for begin in range(0, n, block):
            cut = slice(begin, begin + block)
            rounded = sum(np.abs(x[cut]).max() for x in every) / 254
            bound = rounded + (np.abs(exact[cut]).max() + rounded) / 254
            assert np.abs(found[cut] - exact[cut]).max() <= bound * 1.0001
        assert len({v.tobytes() for v in comm.allgather(found)}) == 1
    assert not baseline.step(np.zeros(100, np.float32), None, 1).any()


def check_topk(comm, baseline):
    from tests import reference

    for n in SIZES:
        every, k = gradients(comm.size, n), max(1, n // 50)
        residual = np.zeros(n, np.float32)
        found = baseline.step(every[comm.rank], residual, k)
        expected = reference.allreduce("allgather", every, k, range(comm.size))
        np.testing.assert_array_equal(found, reference.dense(expected, n))
        kept_back = np.sum(comm.allgather(residual), axis=0)
        np.testing.assert_array_equal(kept_back + found, np.sum(every, axis=0))  # nothing is lost


def check_paper(comm, baseline):
    from tests import reference

    for n in SIZES:
        every, k = gradients(comm.size, n), max(1, n // 50)
        residual = np.zeros(n, np.float32)
        found = baseline.step(every[comm.rank], residual, k)
        expected = reference.allreduce("tree", every, k, range(comm.size))
        np.testing.assert_array_equal(found, reference.dense(expected, n))
        mine = every[comm.rank].copy()
        indices = reference.topk(mine, k)[0]
        mine[indices[found[indices] != 0]] = 0  # put back by index: what is in the result stays out
        np.testing.assert_array_equal(residual, mine)

    # rank 1's 3 at index 1 is rejected by rank 0's merge; with rank 2's 9 the index is in the result: 3 is lost
    if comm.size == 4:
        x = np.array([[8, 0, 0], [0, 3, 0], [0, 9, 0], [0, 0, 1]], np.float32)[comm.rank]
        residual = np.zeros(3, np.float32)
        assert baseline.step(x, residual, 1).tolist() == [0, 9, 0]
        assert np.sum(comm.allgather(residual), axis=0).tolist() == [8, 0, 1]


CHECKS = {
    "dense-mpi": check_dense,
    "dense-ring": check_dense,
    "int8": check_int8,
    "topk-numpy": check_topk,
    "topk-gloo": check_topk,
    "gtopk-paper": check_paper,
}


@pytest.mark.mpi
def test_baselines() -> None:
    """Run on 4, 3 and 2 ranks."""
    from tests.processes import mpirun

    status, said = mpirun(4, "-m", "mpi4py", __file__)
    assert status == 0, said
    assert said.count("done") == 2 + 3 + 4, said


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from mpi4py import MPI

    from bench.compare.baselines import BASELINES

    assert set(CHECKS) == set(BASELINES)
    for P in (4, 3, 2):
        comm = MPI.COMM_WORLD.Split(0 if MPI.COMM_WORLD.rank < P else MPI.UNDEFINED)
        if comm == MPI.COMM_NULL:
            continue
        for name, check in CHECKS.items():
            if name == "gtopk-paper" and comm.size & (comm.size - 1):
                with pytest.raises(ValueError, match=f"on {comm.size} ranks; expected 1, 2, 4"):
                    BASELINES[name](comm)
                continue
            baseline = BASELINES[name](comm)
            check(comm, baseline)
            assert baseline.sent > 0 or np.isnan(baseline.sent)
            baseline.close()
        print("done", flush=True)


if __name__ == "__main__":
    main()
