"""The examples run, and show what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ENVIRONMENT, LIMIT, MPIRUN, ROOT, needs_mpirun

SETTINGS = ENVIRONMENT | {"TERM": "dumb"}


def run(*command: str) -> str:
    ran = subprocess.run(command, env=SETTINGS, capture_output=True, text=True, timeout=LIMIT)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return re.sub(r"\x1b\[[\d;?]*\w", "", ran.stdout)  # mpirun gives its ranks a terminal, so there are colours


def rows(output: str) -> dict[str, list[str]]:
    """The cells of the result table, by the name in the first."""
    table = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if line.startswith("│")]
    return {name: cells for name, *cells in table}


@pytest.mark.mpi
@needs_mpirun
def test_digits(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    plot = tmp_path / "digits.png"
    output = run(
        str(MPIRUN), "-n", "2", sys.executable, str(ROOT / "examples/digits.py"), "--epochs", "15", "--plot", str(plot)
    )
    found = rows(output)
    assert list(found) == ["Dense", "Top-k", "gTop-k"]
    accuracy = {name: float(cells[0].rstrip("%")) for name, cells in found.items()}
    assert min(accuracy.values()) > 85
    fraction = {name: float(cells[2].rstrip("%")) for name, cells in found.items()}
    assert fraction["Dense"] == 100
    assert max(fraction["Top-k"], fraction["gTop-k"]) < 5
    assert "sc.sparse_allreduce(gradient, 0.01" in output
    assert str(plot) in output
    assert plot.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_digits_on_one_rank(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    plot = tmp_path / "digits.png"
    output = run(sys.executable, str(ROOT / "examples/digits.py"), "--epochs", "1", "--plot", str(plot))
    assert "mpirun -n 4 python examples/digits.py" in output
    assert list(rows(output)) == ["Dense", "Top-k", "gTop-k"]
    assert plot.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_digits_names_what_is_missing(tmp_path: Path) -> None:
    program = "import importlib.util as u, runpy, sys\nfind = u.find_spec\n"
    program += "u.find_spec = lambda name, *rest: None if name == 'rich' else find(name, *rest)\n"
    program += "runpy.run_path(sys.argv[1])"
    command = [sys.executable, "-c", program, str(ROOT / "examples/digits.py")]
    ran = subprocess.run(command, env=SETTINGS, capture_output=True, text=True)
    assert ran.returncode == 1
    assert ran.stderr == "This example needs rich: pip install 'sparsecomm[demo]'\n"


@pytest.mark.exhaustive
@pytest.mark.mpi
@needs_mpirun
def test_jax_optax() -> None:
    for package in ("sklearn", "jax", "optax"):
        pytest.importorskip(package)
    output = run(str(MPIRUN), "-n", "2", sys.executable, str(ROOT / "examples/jax_optax.py"))
    accuracy = re.search(r"test accuracy ([\d.]+)%", output)
    sent = re.search(r"sent per step: ([\d.]+) kB; a dense allreduce would send ([\d.]+) kB", output)
    assert accuracy is not None, output
    assert sent is not None, output
    assert float(accuracy[1]) > 90
    assert float(sent[1]) < float(sent[2]) / 5
