"""``python -m bench.compare`` on real ranks: correct results, files, and errors before any work."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.thinning import exhaustive

ROOT = Path(__file__).parents[2]
ALL = "dense,tree,butterfly,allgather,split,dense-ring,int8,topk-numpy"


def compare(P: int, *arguments: str) -> tuple[int, str]:
    from tests.processes import mpirun

    return mpirun(P, "-m", "bench.compare", *arguments)


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [x for v in value for x in numbers(v)]
    return [value] if isinstance(value, float) else []


@pytest.mark.parametrize(("P", "wire"), [(4, "plain"), exhaustive(3, "packed_int8")])
def test_comparison(P: int, wire: str, tmp_path: Path) -> None:
    only = ["--only", f"{ALL},gtopk-paper"] if P == 3 else []  # these need no PyTorch
    options = ["--n", "2e4", "--rounds", "2", "--calls", "2", "--wire", wire, *only]
    status, said = compare(P, *options, "--write", str(tmp_path), "--name", "it")
    assert status == 0, said
    content = json.loads((tmp_path / "it.json").read_text())
    assert "0 results wrong" in (tmp_path / "it.txt").read_text()
    names = {row["name"] for row in content["times"]}
    assert set(ALL.split(",")) <= names
    assert {row["format"] for row in content["times"] if row["ours"]} == {wire}
    assert ("gtopk-paper" in names) == (P == 4)
    times = [x for row in content["times"] for x in numbers([row["step_ms"], row["exchange_ms"]])]
    assert all(x > 0 or math.isnan(x) for x in times)
    for row in content["bounds"]:
        assert row["plain"]["ms"] > 0
        assert row["plain"]["ratio"] > 0
        assert row["measured"]["bound_ms"] > 0


def test_densities(tmp_path: Path) -> None:
    status, said = compare(2, "--n", "1e4", "--densities", "0.5,0.001", "--rounds", "2", "--write", str(tmp_path))
    assert status == 0, said
    content = json.loads((tmp_path / "densities-2.json").read_text())
    assert [row["density"] for row in content["densities"]] == [0.001, 0.5]
    assert set(content["crossings"]) == {"step", "exchange"}


def test_replay_and_the_paper() -> None:
    """Replays send the recorded messages, and the gTop-k baseline loses gradients as its authors' code does."""
    from tests.processes import mpirun

    status, said = mpirun(4, "-m", "mpi4py", __file__)
    assert status == 0, said
    assert said.count("done") == 4, said


def gradients(P: int, n: int) -> list[np.ndarray]:
    """Return every rank's gradient: integers with few equal magnitudes, so that sums are exact in any order."""
    integers = np.random.default_rng(n).integers(-(2**20), 2**20, (P, n)) * 4 + 1
    return [x.astype(np.float32) for x in integers]


def check_paper(comm: Any) -> None:
    from bench.compare.baselines import GtopkPaper
    from tests import reference

    baseline = GtopkPaper(comm)
    for n in (1, 7, 4096, 30_011):
        every, k = gradients(comm.size, n), max(1, n // 50)
        residual = np.zeros(n, np.float32)
        result = baseline.step(every[comm.rank], residual, k)
        expected = reference.allreduce("tree", every, k, range(comm.size))
        np.testing.assert_array_equal(result, reference.dense(expected, n))
        mine = every[comm.rank].copy()
        indices = reference.topk(mine, k)[0]
        mine[indices[result[indices] != 0]] = 0  # dropped only at indices of the result
        np.testing.assert_array_equal(residual, mine)
    # Rank 0's merge rejects rank 1's 3 at index 1. Rank 2's 9 brings the index into the result, so the 3 is lost.
    x = np.array([[8, 0, 0], [0, 3, 0], [0, 9, 0], [0, 0, 1]], np.float32)[comm.rank]
    residual = np.zeros(3, np.float32)
    assert baseline.step(x, residual, 1).tolist() == [0, 9, 0]
    assert np.sum(comm.allgather(residual), axis=0).tolist() == [8, 0, 1]


def main() -> None:
    """Check on every rank that the recorder sees the bytes that the transport counts, and that the replay ends."""
    import sys

    sys.path.insert(0, str(ROOT))
    sys.modules["torch"] = None  # type: ignore[assignment]  # the baseline selects without it, too
    from mpi4py import MPI

    from bench.compare.contenders import CONTENDERS, FromZero
    from sparsecomm import transport

    counters = transport.transport_of(MPI.COMM_WORLD).counters
    x = np.random.default_rng(MPI.COMM_WORLD.rank).standard_normal(10_007, np.float32)
    vectors = FromZero(MPI.COMM_WORLD, x, np.zeros_like(x), np.zeros_like(x))
    names = [name for name, contender in CONTENDERS.items() if contender.kind == "ours"]
    for name, wire in product(names, ("plain", "packed_int8")):
        contender = CONTENDERS[name].make(vectors, 100, wire)
        messages = contender.recorder.messages
        sent, received = counters.bytes_sent, counters.bytes_received
        contender.before("exchange")
        contender.exchange()
        assert sum(out for _, _, out, _, _ in messages) == counters.bytes_sent - sent > 0
        assert sum(into for *_, into in messages) == counters.bytes_received - received
        contender.plain()
    check_paper(MPI.COMM_WORLD)
    print("done", flush=True)


if __name__ == "__main__":
    main()
