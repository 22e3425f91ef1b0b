"""Progress reaches the terminal of the user, and nothing else; what is drawn does not meet the lines of the table."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
from pathlib import Path

import pytest

from sparsecomm.cli.terminal import progress
from tests.processes import ENVIRONMENT, LIMIT, MPIRUN, needs_mpirun
from tests.thinning import exhaustive

BENCH = ["-m", "sparsecomm", "bench", "-b4Ki", "-e4Ki", "-n1", "-w0", "--density=0.1,0.2", "--algorithms=tree"]
MODEL = ["-m", "sparsecomm", "model", "--ranks=2,4", "--n=1K", "--algorithms=tree"]


def shown_on_a_terminal(command: list[str], output: Path | None) -> str:
    """Run Python on a terminal, its standard output perhaps in a file; return what the terminal was sent."""
    ours, theirs = pty.openpty()
    out = os.open(output, os.O_WRONLY | os.O_CREAT) if output else os.dup(theirs)
    with subprocess.Popen(command, env=ENVIRONMENT, stdin=theirs, stdout=out, stderr=theirs) as process:
        os.close(out)
        os.close(theirs)
        found = b""
        try:
            while part := os.read(ours, 65536):
                found += part
        except OSError:  # the other end is closed
            pass
        assert process.wait(LIMIT) == 0, found
    os.close(ours)
    return found.decode()


@needs_mpirun
@pytest.mark.mpi
def test_mpirun_does_not_hold_it_back(tmp_path: Path) -> None:
    assert MPIRUN is not None
    seen = tmp_path / "seen"
    program = """
import sys, time
from pathlib import Path
from sparsecomm.cli.terminal import progress
with progress(2) as show_progress:
    show_progress("one step")
    while not Path(sys.argv[1]).exists():
        time.sleep(0.01)
"""
    ours, theirs = pty.openpty()
    command = [MPIRUN, "-n", "1", sys.executable, "-c", program, str(seen)]
    with subprocess.Popen(command, env=ENVIRONMENT, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        found = b""
        while b"one step" not in found and select.select([ours], [], [], LIMIT)[0]:
            found += os.read(ours, 65536)
        seen.touch()
        assert process.wait(LIMIT) == 0
    assert b"0/2  0:0" in found
    os.close(ours)
    os.close(theirs)


def test_the_clock_goes_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    shown = ""
    with progress(1, ticking=True) as show_progress:
        show_progress("first")
        while shown.count("first") < 3:
            shown += capsys.readouterr().err


@needs_mpirun
@pytest.mark.mpi
@pytest.mark.parametrize("redirected", [exhaustive(False), True])
def test_under_mpirun(redirected: bool, tmp_path: Path) -> None:
    assert MPIRUN is not None
    output = tmp_path / "output" if redirected else None
    shown = shown_on_a_terminal([MPIRUN, "-n", "2", sys.executable, *BENCH], output)
    assert "density=0.2 tree auto" in shown
    table = shown if output is None else output.read_text()
    rows = [line for line in table.splitlines() if line.rstrip().endswith(" -")]
    assert len(rows) == 2
    if output is not None:
        assert "\x1b" not in table
        assert "algbw" not in shown
        return
    between = [line for line in table.splitlines() if "density=0.2 tree auto" in line]
    assert table.index(rows[0]) < table.index(between[0]) < table.index(rows[1])


def test_model(tmp_path: Path) -> None:
    output = tmp_path / "output"
    assert "4 ranks, tree" in shown_on_a_terminal([sys.executable, *MODEL], output)
    assert "\x1b" not in output.read_text()


def test_progress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress(2) as show_progress:
        for text in ("first", "second"):
            show_progress(text)
            show_progress(None)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "0/2" in shown.err
    assert "1/2" in shown.err
    assert "second" in shown.err


def test_no_progress_into_files(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(1) as show_progress:
        show_progress("first")
    assert capsys.readouterr().err == ""
