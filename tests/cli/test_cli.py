"""The commands. Those that use MPI run in processes of their own, since MPI here would disturb later `mpirun`s."""

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
from sparsecomm.cli import launch, main
from sparsecomm.transport.abi import cuda_aware
from tests.processes import ENVIRONMENT, LIMIT, MORE_RANKS_THAN_CORES, MPIRUN, ROOT, torchrun
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


def several(*lines: str, prepare: str = "", **settings: str) -> subprocess.CompletedProcess[str]:
    """Run command lines in one process without mpirun; the exit status is 0 if all return 1."""
    program = f"import sys\nfrom sparsecomm.cli import main\n{prepare}\nlines = {list(map(str.split, lines))}\n"
    return shell("-c", program + "sys.exit([main(line) for line in lines] != [1] * len(lines))", **settings)


def facts(output: str) -> dict[str, str]:
    return {line[:15].strip(): line[16:] for line in output.splitlines()}


# -- the command line -------------------------------------------------------------------------------------------------


MODEL = "--parameters 30.8M --step-time 30ms"
FAR = f"plan --ranks 4 --rate 50mbit --rtt 80ms {MODEL}"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "usage: sparsecomm"),
        ("", "usage: sparsecomm"),
        ("bench -f 1", "argument -f"),
        ("bench --device tpu", "argument --device"),
        ("tune --seconds 3601", "3601: expected a number above 0, and 3600 at most"),
        (f"{FAR} --loss 200%", "200%: expected a packet loss of at most 50%, such as 0.1% or 0.001"),
        (f"{FAR} --sync-every 8,0", "0: expected a number of at least 1"),
        (f"{FAR} --cores-per-rank 8", "8: expected at most 1, because costs are those of one core. For several, run"),
    ],
)  # fmt: skip
def test_bad_command_lines(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(line.split())
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("bench -b 2M -e 1M", "-b 2000000 -e 1000000: expected -b to be at least 4, and at most -e"),
        ("bench -e 900000G --ranks 3", "on 3 rank(s) of one machine needs about"),
        ("bench --wire plain,packed_int8 --dtype float64", "expected auto, plain or packed with --dtype float64"),
        ("bench --device cuda", "--device cuda: CuPy cannot be imported"),
        ("bench --json /no/such/folder/a.json", "/no/such/folder/a.json: cannot be written: No such file or directory"),
        ("plan --ranks 4", "Add, with your numbers: --rate 50mbit, --parameters 30.8M, --step-time 30ms"),
        (f"plan --ranks 4 {MODEL} --rtt 0ms", "with your numbers: --rate 50mbit, or --measure under mpirun"),
        (f"{FAR} --ranks-per-node 3", "--ranks 4: must be a multiple of --ranks-per-node 3"),
        (f"{FAR} --device cuda --cores-per-rank 0.5", "--cores-per-rank with --device cuda: GPUs do the work"),
        (f"{FAR} --profile=/no/such", "--profile /no/such: it cannot be read"),
        (f"{FAR} --json=/no/such/folder/a.json", "/no/such/folder/a.json: cannot be written"),
    ],
)
def test_refused(line: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors are printed in one line before any measurement, without MPI and without starting ranks."""
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for module in ("mpi4py.MPI", "cupy"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(launch.subprocess, "Popen", None)
    assert main(line.split()) == 1
    output = capsys.readouterr()
    assert message in output.err
    assert output.err.startswith("sparsecomm: ")
    assert output.err.count("\n") == 1
    assert output.out == ""


def test_a_reader_that_closes_the_pipe(tmp_path: Path) -> None:
    """``sparsecomm info | head -1`` prints no error."""
    command = ["sh", "-c", '"$0" -m sparsecomm info 2>said; echo $? >status', sys.executable]
    with subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE) as ran:
        assert ran.stdout is not None
        ran.stdout.close()
    assert (tmp_path / "said").read_text() == ""
    assert int((tmp_path / "status").read_text()) == 128 + signal.SIGPIPE


# -- info -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("redirection", "said"), [(">/dev/full", "No space left on device"), (">&-", "standard output is closed.*")]
)
def test_output_that_cannot_be_written(redirection: str, said: str) -> None:
    program = f"{sys.executable} -m sparsecomm"
    ran = subprocess.run(
        ["sh", "-c", f"{program} info {redirection}; echo $? >&2"], capture_output=True, text=True, timeout=LIMIT
    )
    assert re.fullmatch(rf"sparsecomm: .*{said}\n1\n", ran.stderr), ran.stderr


def test_info() -> None:
    ran = shell("-m", "sparsecomm", "info", ranks=2, SPARSECOMM_THREADS="3", SPARSECOMM_TIMEOUT="12")
    assert ran.returncode == 0, ran.stderr
    output = ran.stdout.replace("\r", "")
    assert output.replace("\n", "").isprintable()
    assert len(re.findall("^sparsecomm ", output, re.MULTILINE)) == 1
    lines = facts(output)
    expected = {"sparsecomm": sc.__version__, "NumPy": np.__version__, "Python": sys.executable}
    expected |= {"kernels": ", 3 threads", "settings": "SPARSECOMM_THREADS=3 SPARSECOMM_TIMEOUT=12"}
    expected |= {"CPU": "cores usable", "MPI": ", 2 rank"}
    assert {name for name, text in expected.items() if text not in lines[name]} == set()
    level, calls = lines["MPI threads"].split("; ")
    assert level in {"SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE"}
    assert ("background thread" in calls) == (level == "MULTIPLE")
    assert lines["MPI transport"].startswith("loads")
    assert re.match(r"(yes|no) \(.+\)", lines["CUDA-aware MPI"])
    assert {"mpi4py", "platform", "frameworks", "CuPy", "CUDA driver", "built for", "MPI library"} <= set(lines)


def test_info_without_mpi() -> None:
    ran = shell("-m", "sparsecomm", "info", MPI4PY_LIBMPI="/no/such/libmpi.so", SPARSECOMM_THREADS="many")
    assert ran.returncode == 0, ran.stderr
    lines = facts(ran.stdout)
    assert "cannot be loaded" in lines["MPI"]
    assert "/no/such/libmpi.so" in lines["MPI"]
    assert lines["CUDA-aware MPI"] == "no (MPI is not loaded)"
    assert "SPARSECOMM_THREADS='many'" in lines["kernels"]


class FakeMPI:
    """The attributes of mpi4py.MPI that the probes use."""

    def __init__(self, kinds: str | None) -> None:
        self.__file__ = "MPI.so"
        self.COMM_WORLD = SimpleNamespace(Get_info=lambda: {"mpi_memory_alloc_kinds": kinds} if kinds else {})


@pytest.mark.parametrize(
    ("word", "query", "kinds", "answer", "probe"),
    [
        ("1", 0, "mpi,system", True, "set by the user"),
        ("off", 1, "cuda", False, "set by the user"),
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
    aware, said = cuda_aware(FakeMPI(kinds))
    assert aware is answer
    assert probe in said


# -- selftest ---------------------------------------------------------------------------------------------------------

# By error message: the body of a broken tree, which gets the right sum ``s`` and the rank's contribution.
FAULTS = {
    "wrong values": "v = s.values.copy(); v[-1:] *= 2; return SV.trusted(s.indices, v, s.size, s.shape)",
    "wrong indices": "return s.part(0, s.nnz - 1) if s.nnz > 1 else s",
    "gradient was lost": "gradient.record_dropped(s.part(0, 1)); return s",
    "TransportError: deliberate": "raise sc.TransportError('deliberate')",
}
BROKEN = """
import dataclasses, sys
import sparsecomm as sc
from mpi4py import MPI
from sparsecomm.algorithms import ALGORITHMS
from sparsecomm.cli import main, selftest
SV, right, last = sc.SparseVector, ALGORITHMS["tree"], MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1
for name in set(ALGORITHMS) - {"tree", "allgather"}:
    del ALGORITHMS[name]
selftest.SIZES, selftest._MAX_FAILURES = selftest.SIZES[1:2], 10_000  # other ranks' failures hide none of the last rank
if last:
    run = lambda group, gradient, k: wrong(right.run(group, gradient, k), gradient)
    ALGORITHMS["tree"] = dataclasses.replace(right, run=run)
found = []
for fault in sys.argv[1:]:
    exec(f"def wrong(s, gradient): {fault}")
    found.append(main(["selftest"]))
MPI.COMM_WORLD.Barrier()
sys.exit(found != [1] * len(found))  # on every rank
"""


def rows_of(output: str) -> list[list[str]]:
    rows = [line.split() for line in output.replace("\r", "").splitlines()]
    return [row for row in rows if row and row[0] in sc.algorithms()]


@pytest.mark.parametrize(("ranks", "sizes"), [(0, "[1:3]"), (2, "[1:2]"), exhaustive(3, "[:]")])
def test_selftest(ranks: int, sizes: str) -> None:
    program = f"import sys\nfrom sparsecomm.cli import main, selftest\nselftest.SIZES = selftest.SIZES{sizes}\n"
    ran = shell("-c", program + "sys.exit(main(['selftest']))", ranks=ranks)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = rows_of(ran.stdout)
    assert [name for name, *_ in rows] == list(sc.algorithms())
    assert all(int(checks) > 300 and failures == "0" for _, checks, failures in rows)
    assert f"All passed on {ranks or 1} rank{'s' * (ranks > 1)}." in ran.stdout


@pytest.mark.parametrize("ranks", [exhaustive(0), 3])
def test_selftest_notices(ranks: int) -> None:
    ran = shell("-c", BROKEN, *FAULTS.values(), ranks=ranks, SPARSECOMM_TIMEOUT=str(LIMIT))  # cores may be busy
    assert ran.returncode == 0, ran.stdout + ran.stderr
    runs = ran.stdout.replace("\r", "").split("sparsecomm ")[1:]
    assert len(runs) == len(FAULTS)
    for output, said in zip(runs, FAULTS, strict=True):
        assert "FAILED" in output
        (tree, _, broken), (allgather, _, right) = rows_of(output)
        assert (tree, allgather, right, broken != "0") == ("tree", "allgather", "0", True)
        assert re.search(rf"^  rank {max(ranks, 1) - 1}: float16 .*{said}", output, re.MULTILINE), output


@pytest.mark.exhaustive
def test_selftest_on_a_device() -> None:
    ran = shell("-m", "tests.emulator.cli", "selftest", "--device", "cuda", ranks=2)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "float64 on cuda (emulated)" in ran.stdout
    assert "All passed on 2 ranks." in ran.stdout


# -- missing ranks ----------------------------------------------------------------------------------------------------


def test_without_mpi() -> None:
    ran = several("selftest", "tune", MPI4PY_LIBMPI="/no/such/libmpi.so")
    assert ran.returncode == 0
    assert ran.stderr.count("mpi4py cannot be loaded") == 2
    assert "Traceback" not in ran.stderr


PLAN = "plan --measure --parameters 1M --step-time 1ms"


def test_ranks_that_do_not_know_each_other_fail() -> None:
    ran = several("selftest", "bench", "tune", PLAN, SLURM_STEP_NUM_TASKS="2", SLURM_PROCID="1")
    assert ran.returncode == 0, ran.stdout
    assert ran.stdout == ""
    said = "^sparsecomm: SLURM_STEP_NUM_TASKS=2, SLURM_PROCID=1: srun has started 2 ranks"
    assert len(re.findall(said, ran.stderr, re.MULTILINE)) == 4


UNDER_TORCHRUN = """
import os, sys
os.environ["MPI4PY_LIBMPI"] = "/no/such/libmpi.so"
import torch.distributed as dist
from sparsecomm.cli import main, selftest
selftest.SIZES = selftest.SIZES[1:3]
dist.init_process_group("gloo")
lines = [
    "bench -b4Ki -e4Ki -n2 -w0 -c --breakdown --algorithms=tree,dense",
    "selftest",
    "tune --seconds=0.1 --output=" + sys.argv[1],
]
status = any([main(line.split()) for line in lines])
dist.destroy_process_group()
sys.exit(status)
"""


@pytest.mark.exhaustive
def test_under_torchrun(tmp_path: Path) -> None:
    """The commands need no MPI."""
    pytest.importorskip("torch")
    (tmp_path / "program.py").write_text(UNDER_TORCHRUN)
    status, said = torchrun(2, str(tmp_path / "program.py"), str(tmp_path / "profile.json"))
    assert status == 0, said
    for line in ("every element is right", "All passed on 2 ranks.", "The profile is in"):
        assert said.count(line) == 1
    assert "Traceback" not in said
