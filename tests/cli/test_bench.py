"""`sparsecomm bench`: its checks, its measurements and its output."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

import sparsecomm as sc
from sparsecomm.cli import bench as command
from sparsecomm.cli import launch, main
from sparsecomm.tracing import observers
from sparsecomm.wire import WIRES
from tests.cli.test_cli import shell
from tests.processes import needs_mpirun
from tests.thinning import exhaustive


@pytest.fixture(autouse=True)
def _not_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("variables", "rank"),
    [
        ({}, False),
        ({"PMIX_RANK": "0"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, True),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}, True),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, False),  # the shell of salloc
    ],
)
def test_launchers_are_detected(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], rank: bool) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (launch.launcher() is not None) == rank


def test_mpirun_beside_python_comes_first_and_torchrun_last(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    beside, other = tmp_path / "mpirun", tmp_path / "other" / "mpirun"
    other.parent.mkdir()
    for file in (beside, other):
        file.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(other.parent))
    for file in (beside, other):
        assert launch._launcher_command(2)[0] == str(file)
        file.unlink()
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node 3 -m"
    assert " ".join(launch._launcher_command(3)[1:]) == torchrun
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(sc.TransportError, match="there is no mpirun"):
        launch._launcher_command(3)


@pytest.mark.parametrize(("status", "ranks"), [(3, "--ranks=5"), (-9, "--rank 5")])
def test_ranks_run_the_same_command_and_its_status_is_returned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int, ranks: str
) -> None:
    end = f"exit {status}" if status >= 0 else f"kill {status} $$"
    fake = tmp_path / "mpirun"
    fake.write_text(f'#!/bin/sh\nprintf "%s|" "$@" > "{tmp_path}/said"\n{end}\n')
    fake.chmod(0o755)
    monkeypatch.setattr(launch, "_launcher_command", lambda ranks: [str(fake), str(ranks)])
    arguments = ["-b1K", "-e", "4 K", "-c", *ranks.split(), "-n", "7", "--wire=plain"]
    assert main(["bench", *arguments]) == (status if status >= 0 else 128 - status)
    assert (tmp_path / "said").read_text() == "5|sparsecomm|bench|-b1K|-e|4 K|-c|-n|7|--wire=plain|"


# -- runs -------------------------------------------------------------------------------------------------------------


def bench(*options: str, ranks: int = 0, **settings: str) -> subprocess.CompletedProcess[str]:
    return shell("-m", "sparsecomm", "bench", *options, ranks=ranks, **settings)


@needs_mpirun
@pytest.mark.parametrize(
    ("ranks", "dtype", "wires", "largest"),
    [(2, "float32", "auto,packed_int4", 4096), exhaustive(3, "float16", "all", 4096)],
)
def test_a_run(ranks: int, dtype: str, wires: str, largest: int, tmp_path: Path) -> None:
    file, drawn = tmp_path / "bench.json", tmp_path / "drawn.png"
    densities = (0.01, 0.5) if ranks > 2 else (0.01,)
    arguments = f"-b 4Ki -e {largest} --density {','.join(map(str, densities))} -n 3 -w 1 -c --breakdown"
    arguments += f" --algorithms all --wire {wires} --dtype {dtype}"
    files = "--json", str(file), "--plot", str(drawn)
    # Without a profile, costs are those of simulated ranks.
    ran = bench(*arguments.split(), *files, "--ranks", str(ranks), SPARSECOMM_PROFILE="none")
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == ""
    content = json.loads(file.read_text())
    assert content["schema"] == command.SCHEMA
    assert content["header"]["ranks"] == ranks
    assert content["header"]["dtype"] == dtype
    rows = content["rows"]
    names = tuple(WIRES) if wires == "all" else tuple(wires.split(","))
    asked = list(product(dict.fromkeys((4096, largest)), densities, sc.algorithms(), names))
    assert [(r["size_bytes"], r["density"], r["algorithm"], r["wire"]) for r in rows] == asked
    for row in rows:
        assert row["wrong"] == 0
        assert 0 < row["time_min_us"] <= row["time_median_us"] <= row["time_p99_us"] <= row["time_max_us"]
        assert 0 < row["sent_bytes_per_rank"] <= row["wire_bytes_per_rank"] < 20_000
        assert row["algbw_gb_per_s"] == pytest.approx(row["size_bytes"] / row["time_median_us"] / 1000)
        assert row["busbw_gb_per_s"] == pytest.approx(row["algbw_gb_per_s"] * 2 * (ranks - 1) / ranks)
        parts = row["breakdown_us"]
        assert list(parts) == [*observers.PARTS, "other"]
        assert all(value >= 0 for value in parts.values())
        assert sum(parts.values()) == pytest.approx(row["time_median_us"])
    assert drawn.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")

    lines = ran.stdout.replace("\r", "").splitlines()
    table = [line.split() for line in lines if not line.startswith("#")]
    shown = [[str(r["size_bytes"]), str(r["count"]), str(r["k"]), r["algorithm"]] for r in rows]
    assert [line[:4] for line in table] == shown
    assert {(len(line), line[12]) for line in table} == {(13 + 7, "0")}
    assert "# every element is right" in lines
    assert re.search(rf"^# ranks +{ranks}\r?$", ran.stdout, re.MULTILINE)


def test_one_rank_without_mpirun() -> None:
    ran = bench("-b", "4K", "-e", "4K", "-n", "2", "-c", "--dtype", "bfloat16")
    assert ran.returncode == 0, ran.stderr
    assert re.fullmatch("sparsecomm: one rank, which sends nothing: start N with --ranks N.*\n", ran.stderr)
    assert "every element is right" in ran.stdout


ON_CUDA = ["-m", "tests.emulator.cli"]


@pytest.mark.exhaustive
def test_vectors_of_a_device() -> None:
    ran = shell(*ON_CUDA, "bench", "--device", "cuda", "-e", "64Ki", "-n", "1", "-c", "--breakdown", ranks=2)
    assert ran.returncode == 0, ran.stderr
    assert "every element is right" in ran.stdout
    assert re.search(r"^# device +cuda \(emulated\)\r?$", ran.stdout, re.MULTILINE)


FAULTY = """
import os, signal, sys
from mpi4py import MPI
from sparsecomm.cli import main
from sparsecomm.tools.timing import Ours
right = Ours.step
def wrong(self):
    result = right(self)
    if MPI.COMM_WORLD.rank == 1:
        exec(fault)
    return result
Ours.step = wrong
for fault in {faults}:
    status = main(["bench", "-b4K", "-e4K", "-n3", "-c", "--wire=plain,packed_int8", "--algorithms=tree,split"])
    assert status == 1, status
"""


def test_a_rank_that_fails_ends_the_others() -> None:
    ran = shell("-c", FAULTY.format(faults=["raise ValueError('deliberate')"]), ranks=2)
    assert ran.returncode != 0
    assert "rank 1: Traceback" in ran.stderr


def test_wrong_elements_are_counted() -> None:
    faults = ["self.vectors.out[7] += 1", "self.vectors.residual[7] += 1", "result.values[0] += 1"]
    ran = shell("-c", FAULTY.format(faults=faults), ranks=2)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("elements are wrong") == len(faults)
    table = [line.split() for line in ran.stdout.replace("\r", "").splitlines() if not line.startswith("#")]
    assert len(table) == len(faults) * 2 * 2 * 2
    assert all(int(line[12]) > 0 for line in table)
