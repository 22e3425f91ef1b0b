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
START = """
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
KILLED_IN_STEP_2 = """
import os, runpy, signal, sys
import sparsecomm.torch as st

def save(folder, step, objects, save=st.save):
    if step > 1:
        os.kill(os.getpid(), signal.SIGKILL)
    save(folder, step, objects)

st.save = save
"""
RESUMED_AFTER_STEP_1 = """
import runpy, sys
import sparsecomm.torch as st

def save(folder, step, objects, save=st.save):
    assert step > 1, "it began again"
    save(folder, step, objects)

st.save = save
"""


def weights(forks: Run, *command: str) -> str:
    """Run the transformer, and return the checksum of its final weights."""
    status, said = forks(*command, ranks=RANKS)
    assert status == 0, said
    checksums = re.findall(r"^rank \d: weights (\w{8})$", said, re.MULTILINE)
    assert len(checksums) == RANKS, said
    assert len(set(checksums)) == 1, said
    return checksums[0]


@pytest.mark.slow
def test_a_killed_transformer_resumes_bit_for_bit(tmp_path: Path, forks: Run) -> None:
    whole, killed, dense = ([*COMMAND, f"--folder={tmp_path / name}"] for name in ("whole", "killed", "dense"))
    complete = weights(forks, *whole)
    status, said = forks("-c", KILLED_IN_STEP_2 + START, *killed, ranks=RANKS)
    assert status == signal.SIGKILL, said
    assert weights(forks, "-c", RESUMED_AFTER_STEP_1 + START, *killed) == complete
    assert weights(forks, *dense, "--dense") != complete
