"""A job of torchrun, before and after it has a process group."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ENVIRONMENT, LIMIT

pytest.importorskip("torch.distributed")


@pytest.mark.slow
def test_nobody_is_silently_alone() -> None:
    program = Path(__file__).with_name("job_of_torchrun.py")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(program)]
    frameworks = ["jax"] if importlib.util.find_spec("jax") else []
    environment = ENVIRONMENT | {"OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(
        [sys.executable, *launch, *frameworks], env=environment, capture_output=True, text=True, timeout=LIMIT
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("is done") == 2


def test_torch_is_not_imported() -> None:
    program = (
        "import sys, numpy as np, sparsecomm as sc\n"
        "sc.sparse_allreduce(np.ones(4, np.float32), 4)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, check=True, timeout=LIMIT)
