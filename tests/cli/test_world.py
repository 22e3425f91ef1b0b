"""Commands on ranks of torchrun: no MPI is loaded, and none is needed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.processes import LIMIT, ROOT
from tests.thinning import whole

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "sparsecomm"]
BENCH = ["bench", "-b4Ki", "-e4Ki", "-n2", "-w0", "-c", "--breakdown", "--algorithms=tree,dense"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (BENCH, "every element is right"),
        whole(["selftest"], "All passed on 2 ranks."),  # tests/packaging runs it, too
        (["tune", "--dry-run", "--seconds=0.1"], "Nothing was written."),
    ],
)
def test_under_torchrun(options: list[str], said: str) -> None:
    pytest.importorskip("torch")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MPI4PY_LIBMPI": "/no/such/libmpi.so"}
    ran = subprocess.run([*TORCHRUN, *options], env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert ran.returncode == 0, ran.stderr
    assert said in ran.stdout
    assert "Traceback" not in ran.stderr
