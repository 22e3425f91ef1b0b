"""The instructions of a call: callgrind counts those of 220 calls and of 20, on two simulated ranks.

    python -m bench.instructions               this checkout
    python -m bench.instructions FOLDER        another one, built in place

n = 4,096, k = 64, with a residual, by butterfly. The simulated network is counted with it. Needs valgrind.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
import numpy as np
import sparsecomm as sc
from sparsecomm.transport import simulated

def program(ranks):
    x = np.random.default_rng(ranks.rank).standard_normal(4096).astype("f4")
    r = np.zeros_like(x)
    for _ in range(int(sys.argv[1])):
        sc.sparse_allreduce(x, 64, comm=ranks, residual=r, algorithm="butterfly")

simulated.run(2, program)
"""


def instructions(folder: Path, calls: int) -> int:
    """Return the number of instructions of a program with that many calls, including its start."""
    command = [
        "valgrind",
        "--tool=callgrind",
        "--callgrind-out-file=/dev/null",
        sys.executable,
        "-c",
        PROGRAM,
        f"{calls}",
    ]
    environment = os.environ | {"PYTHONPATH": str(folder), "OPENBLAS_NUM_THREADS": "1"}
    output = subprocess.run(command, env=environment, cwd=folder, check=True, capture_output=True, text=True).stderr
    found = re.search(r"Collected : (\d+)", output)
    assert found is not None, output
    return int(found[1])


if __name__ == "__main__":
    folder = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else Path(__file__).parents[1]
    few, many = (instructions(folder, calls) for calls in (20, 220))
    print(f"{(many - few) / 400:,.0f} instructions per call and rank")
