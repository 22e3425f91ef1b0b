"""The instructions of small calls and steps on two simulated ranks, counted by callgrind in one run.

    PYTHONHASHSEED=0 python -m bench.instructions            this checkout
    PYTHONHASHSEED=0 python -m bench.instructions FOLDER     another one, built in place

Counts repeat to 0.2 %. They include the simulated network. Needs valgrind.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

CALLS = 20
# What is counted. A deep copy of some numbers is a measure of the interpreter.
NAMES = {
    "call": "sparse_allreduce, n = 4,096, k = 64, with a residual, by butterfly",
    "reducer": "a step of a Reducer, 20 tensors of 1,000",
    "adamw": "a step of SparseAdamW, 20 tensors of 1,000",
    "local": "an exchange of LocalSteps, 20 tensors of 1,000",
    "copy": "copy.deepcopy of 20 lists of 5 numbers",
}
# getppid() separates the parts: callgrind writes a file of counts whenever it is called.
PROGRAM = """
import copy, os, sys
import numpy as np
import sparsecomm as sc
from sparsecomm.transport import simulated

def program(ranks):
    random = np.random.default_rng(ranks.rank)
    x, residual = random.standard_normal(4096).astype("f4"), np.zeros(4096, "f4")
    gradients = {str(i): random.standard_normal(1000).astype("f4") for i in range(20)}
    weights, parameters = ({name: np.zeros_like(g) for name, g in gradients.items()} for _ in range(2))
    reducer = sc.Reducer(gradients, 0.1, comm=ranks)
    adamw = sc.SparseAdamW(weights, comm=ranks)
    local = sc.LocalSteps(parameters, comm=ranks, sync_every=1)
    lists = [[i / 3] * 5 for i in range(20)]

    def step():
        for name, gradient in gradients.items():
            reducer.push(name, gradient.copy())
        reducer.wait()

    actions = {
        "call": lambda: sc.sparse_allreduce(x, 64, comm=ranks, residual=residual, algorithm="butterfly"),
        "reducer": step,
        "adamw": lambda: adamw.step(gradients),
        "local": lambda: local.step(parameters),
        "copy": lambda: copy.deepcopy(lists),
    }
    for name in sys.argv[2:]:
        for round in range(2):
            for _ in range(int(sys.argv[1])):
                actions[name]()
            if ranks.rank == 0:
                os.getppid()

simulated.run(2, program)
"""


def instructions(folder: Path, names: list[str]) -> dict[str, float]:
    """Return the instructions of one call and rank in the checkout ``folder``; ``names``: of `NAMES`."""
    if not shutil.which("valgrind"):
        sys.exit("valgrind is missing: install it (Debian, Ubuntu: apt-get install valgrind)")
    environment = os.environ | {"PYTHONPATH": str(folder), "OPENBLAS_NUM_THREADS": "1", "SPARSECOMM_PROFILE": "none"}
    environment |= {"PYTHONHASHSEED": "0"}
    with TemporaryDirectory() as scratch:
        command = ["valgrind", "--tool=callgrind", "--dump-before=getppid", f"--callgrind-out-file={scratch}/counts"]
        command += [sys.executable, "-c", PROGRAM, str(CALLS), *names]
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr)
        counts = {}
        for part, name in enumerate(names):
            text = Path(scratch, f"counts.{2 * part + 2}").read_text()
            match = re.search(r"^(?:totals|summary): (\d+)", text, re.MULTILINE)
            assert match is not None
            counts[name] = int(match[1]) / CALLS / 2
    return counts


if __name__ == "__main__":
    folder = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else Path(__file__).parents[1]
    for name, count in instructions(folder, list(NAMES)).items():
        print(f"{count:,.0f} instructions per call and rank: {NAMES[name]}")
