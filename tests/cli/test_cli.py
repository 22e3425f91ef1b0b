"""The shell commands, each in a process of its own: an MPI started in this one would disturb later `mpirun`s."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.cli import COMMANDS, info, main, oracles
from sparsecomm.transport.cuda_aware import cuda_aware
from tests.processes import LIMIT, MORE_RANKS_THAN_CORES, MPIRUN, ROOT
from tests.thinning import exhaustive


def shell(*arguments: str, ranks: int = 0, **settings: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    if ranks:
        if MPIRUN is None:
            pytest.skip("no mpirun")
        command = [MPIRUN, "-n", str(ranks), *command]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("SPARSECOMM_")}
    environment = {**clean, **MORE_RANKS_THAN_CORES, "PYTHONPATH": str(ROOT), **settings}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT)


def facts(output: str) -> dict[str, str]:
    return {line[:15].strip(): line[16:] for line in output.splitlines()}


# -- the command line -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["nonsense"], [], ["info", "--nonsense"]])
def test_bad_command_lines(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "usage: sparsecomm" in capsys.readouterr().err


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(name in text for name in COMMANDS)


def test_errors_are_messages(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(arguments: object) -> int:
        raise sc.TransportError("no way")

    monkeypatch.setattr(info, "run", broken)
    assert main(["info"]) == 1
    assert capsys.readouterr().err == "sparsecomm: no way\n"


def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    """``sparsecomm info | head -1`` is no error to speak of."""
    command = f"{sys.executable} -m sparsecomm info 2>{tmp_path}/said; echo $? >{tmp_path}/status"
    with subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE) as ran:
        assert ran.stdout is not None
        ran.stdout.close()
    assert (tmp_path / "said").read_text() == ""
    assert int((tmp_path / "status").read_text()) == 128 + signal.SIGPIPE


# -- info -------------------------------------------------------------------------------------------------------------


def test_info() -> None:
    ran = shell("-m", "sparsecomm", "info", SPARSECOMM_THREADS="3", SPARSECOMM_TIMEOUT="12")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.replace("\n", "").isprintable()
    found = facts(ran.stdout)
    assert found["sparsecomm"].startswith(sc.__version__)
    assert found["NumPy"] == np.__version__
    assert sys.executable in found["Python"]
    assert found["kernels"].endswith(", 3 threads")
    assert found["settings"] == "SPARSECOMM_THREADS=3 SPARSECOMM_TIMEOUT=12"
    assert re.search(r"\d+ of \d+ cores usable", found["CPU"])
    assert re.search(r"\d\.\d.*, 1 rank", found["MPI"])
    level, calls = found["MPI threads"].split("; ")
    assert level in {"SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE"}
    assert ("by a thread" in calls) == (level == "MULTIPLE")
    assert found["MPI transport"].startswith("loads")
    assert re.match(r"(yes|no) \(.+\)", found["CUDA-aware MPI"])
    assert {"mpi4py", "platform", "frameworks", "CuPy", "CUDA driver", "built for", "MPI library"} <= set(found)


def test_info_without_mpi() -> None:
    ran = shell("-m", "sparsecomm", "info", MPI4PY_LIBMPI="/no/such/libmpi.so", SPARSECOMM_THREADS="many")
    assert ran.returncode == 0, ran.stderr
    found = facts(ran.stdout)
    assert "cannot be loaded" in found["MPI"]
    assert "/no/such/libmpi.so" in found["MPI"]
    assert found["CUDA-aware MPI"] == "no (MPI is not loaded)"
    assert "SPARSECOMM_THREADS='many'" in found["kernels"]


@pytest.mark.mpi
def test_info_prints_once() -> None:
    ran = shell("-m", "sparsecomm", "info", ranks=2)
    assert ran.returncode == 0, ran.stderr
    assert len(re.findall("^sparsecomm ", ran.stdout, re.MULTILINE)) == 1
    assert "2 rank" in facts(ran.stdout.replace("\r", ""))["MPI"]


class FakeMPI:
    """As much of mpi4py.MPI as the probes ask."""

    def __init__(self, kinds: str | None) -> None:
        self.__file__ = "MPI.so"
        self.COMM_WORLD = SimpleNamespace(Get_info=lambda: {"mpi_memory_alloc_kinds": kinds} if kinds else {})


@pytest.mark.parametrize(
    ("word", "query", "kinds", "answer", "probe"),
    [
        ("1", 0, "mpi,system", True, "the user's word"),
        ("off", 1, "cuda", False, "the user's word"),
        ("perhaps", 1, "cuda", False, "expected 0 or 1"),
        ("", 1, None, True, "MPIX_Query_cuda_support"),
        (" ", 0, "cuda", False, "MPIX_Query_cuda_support"),
        ("", None, "mpi,system,cuda:device", True, "mpi_memory_alloc_kinds"),
        ("", None, "mpi,system", False, "mpi_memory_alloc_kinds"),
        ("", None, None, False, "no probe answered"),
    ],
)
def test_cuda_aware(
    monkeypatch: pytest.MonkeyPatch, word: str, query: int | None, kinds: str | None, answer: bool, probe: str
) -> None:
    library = SimpleNamespace() if query is None else SimpleNamespace(MPIX_Query_cuda_support=lambda: query)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: library)
    monkeypatch.setenv("SPARSECOMM_CUDA_AWARE", word)
    found, said = cuda_aware(FakeMPI(kinds))
    assert found is answer
    assert probe in said


# -- selftest ---------------------------------------------------------------------------------------------------------

# What a broken tree may do to the result, to the residual, or instead of either.
FAULTS = {
    "a value": "v = s.values.copy(); v[-1:] *= 2; return SV.trusted(s.indices, v, s.size, s.shape)",
    "an entry": "return s.part(0, s.nnz - 1) if s.nnz > 1 else s",
    "a drop": "gradient.drop(s.part(0, 1)); return s",
    "an error": "raise sc.TransportError('deliberate')",
}
PROGRAM = """
import dataclasses, sys
import sparsecomm as sc
from mpi4py import MPI
from sparsecomm.algorithms import ALGORITHMS
from sparsecomm.cli import main
SV, right = sc.SparseVector, ALGORITHMS["tree"]
def wrong(group, gradient, k):
    s = right.run(group, gradient, k)
    {fault}
if MPI.COMM_WORLD.Get_rank() == {rank}:
    ALGORITHMS["tree"] = dataclasses.replace(right, run=wrong)
sys.exit(main(["selftest"]))
"""


def test_every_algorithm_has_an_oracle() -> None:
    for name in sc.algorithms():
        assert callable(oracles.oracle(name))


def test_selftest_on_one_rank() -> None:
    ran = shell("-m", "sparsecomm", "selftest")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = {line.split()[0]: line.split()[1:3] for line in ran.stdout.splitlines() if line.endswith(" ms")}
    assert set(rows) == set(sc.algorithms())
    assert all(int(checks) > 1000 and failures == "0" for checks, failures in rows.values())
    assert len({len(line) for line in ran.stdout.splitlines() if line.endswith(" ms")}) == 1  # columns
    assert "All passed on 1 rank." in ran.stdout


@pytest.mark.covering(0)
@pytest.mark.parametrize("fault", FAULTS)
def test_selftest_notices(fault: str) -> None:
    ran = shell("-c", PROGRAM.format(fault=FAULTS[fault], rank=0))
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "FAILED" in ran.stdout
    failures = {line.split()[0]: line.split()[2] for line in ran.stdout.splitlines() if line.endswith(" ms")}
    assert failures.pop("tree") != "0"
    assert set(failures.values()) == {"0"}


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", [2, exhaustive(3)])
def test_selftest_on_ranks(ranks: int) -> None:
    ran = shell("-m", "sparsecomm", "selftest", ranks=ranks)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"All passed on {ranks} ranks." in ran.stdout


@pytest.mark.exhaustive
@pytest.mark.mpi
def test_selftest_on_a_device() -> None:
    ran = shell("-m", "tests.emulator.cli", "selftest", "--device", "cuda", ranks=2)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "float64 on cuda (emulated)" in ran.stdout
    assert "All passed on 2 ranks." in ran.stdout


@pytest.mark.mpi
def test_selftest_names_the_rank() -> None:
    ran = shell("-c", PROGRAM.format(fault=FAULTS["a value"], rank=2), ranks=3)
    assert ran.returncode != 0
    assert "rank 2: float16" in ran.stdout
    assert "FAILED" in ran.stdout


def test_selftest_without_mpi() -> None:
    ran = shell("-m", "sparsecomm", "selftest", MPI4PY_LIBMPI="/no/such/libmpi.so")
    assert ran.returncode == 1
    assert "mpi4py cannot be loaded" in ran.stderr
    assert "Traceback" not in ran.stderr


# -- a launcher that is not that of the MPI ---------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["selftest", "bench", "tune"])
def test_ranks_that_do_not_know_each_other_fail(command: str) -> None:
    ran = shell("-m", "sparsecomm", command, SLURM_STEP_NUM_TASKS="2", SLURM_PROCID="1")
    assert ran.returncode == 1, ran.stdout
    assert ran.stdout == ""
    assert ran.stderr.startswith("sparsecomm: SLURM_STEP_NUM_TASKS=2, SLURM_PROCID=1: srun has started 2 ranks")
