"""The transformer resumes from a checkpoint, bit for bit as if it had not been killed."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.forks import Run
from tests.processes import ROOT

pytest.importorskip("torch")

RANKS = 2
COMMAND = [str(ROOT / "examples/transformer.py"), "--steps=3", "--save-every=1"]
KILLED = """
import os, runpy, signal, sys
import sparsecomm.torch as st

def save(folder, step, objects, save=st.save):
    if step > 1:
        os.kill(os.getpid(), signal.SIGKILL)
    save(folder, step, objects)

st.save = save
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def weights(forks: Run, folder: Path, *options: str) -> str:
    """Run the transformer, and return the checksum of its final weights."""
    status, said = forks(*COMMAND, f"--folder={folder}", *options, ranks=RANKS)
    assert status == 0, said
    checksums = re.findall(r"^rank \d: weights (\w{8})$", said, re.MULTILINE)
    assert len(checksums) == RANKS, said
    assert len(set(checksums)) == 1, said
    return checksums[0]


@pytest.mark.slow
def test_a_killed_transformer_resumes_bit_for_bit(tmp_path: Path, forks: Run) -> None:
    complete, folder = weights(forks, tmp_path / "whole"), tmp_path / "killed"
    status, said = forks("-c", KILLED, *COMMAND, f"--folder={folder}", ranks=RANKS)
    assert status == signal.SIGKILL, said
    assert len(list(folder.glob("step1-*"))) == RANKS, said
    assert weights(forks, folder) == complete
    assert weights(forks, tmp_path / "dense", "--dense") != complete
