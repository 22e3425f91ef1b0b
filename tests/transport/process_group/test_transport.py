"""The transport over a process group, between local processes that run `transport_cases.py`."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

pytest.importorskip("torch.distributed")

from tests.forks import Run
from tests.thinning import exhaustive

IMPORTS = ("pytest",)
PROGRAM = "import sys; from tests.transport.process_group import transport_cases; transport_cases.main(*sys.argv[1:])"


@pytest.mark.slow
@pytest.mark.parametrize(("P", "killed"), [exhaustive(2, False), (4, True)])
def test_cases(P: int, killed: bool, tmp_path: Path, forks: Run) -> None:
    """All ranks but the killed one succeed, without output on stderr, also when Python ends."""
    status, said = forks("-c", PROGRAM, tmp_path, ranks=P, finalize=True)
    errors = "".join(file.read_text() for file in tmp_path.glob("stderr*"))
    assert status == (signal.SIGKILL if killed else 0), said + errors
    assert said.count(": finished") == P - 2 * killed, said  # one is killed, and one ends within a call
    assert not errors
