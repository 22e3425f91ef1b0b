"""Two checkouts side by side: each figure is measured with one and with the other in turn, several times.

    python -m bench.versus FOLDER              this checkout against that in FOLDER; both are built in place
    python -m bench.versus FOLDER --times 9 --large

A figure is a ratio of two things timed in turn in one process, so that a change of the machine's speed meets both
alike. The table has the median over the turns of each checkout, with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parents[1]

# It may only use what both checkouts have.
PROGRAM = """
import json, sys, time
import numpy as np
import sparsecomm as sc
from mpi4py import MPI

comm, large = MPI.COMM_WORLD, sys.argv[1] == "large"
found = {}

def ratio(name, ours, theirs, rounds):
    times = np.empty((rounds, 2))
    for i in range(-rounds // 5, rounds):
        for j, action in enumerate((ours, theirs)):
            comm.Barrier()
            start = time.perf_counter()
            action()
            if i >= 0:
                times[i, j] = time.perf_counter() - start
    comm.Allreduce(MPI.IN_PLACE, times, op=MPI.MAX)
    a, b = np.median(times, axis=0)
    found[name] = a / b, a * 1e6, b * 1e6

n, k = 65_536, 256
x, out = np.random.default_rng(comm.rank).standard_normal(n, dtype=np.float32), np.empty(n, np.float32)
r, plain = np.zeros_like(x), np.zeros_like(x)
dense = lambda: comm.Allreduce(x, out)
add = lambda: np.add(plain, x, out=plain)
ratio("call, n = 65,536, k = 256 / MPI_Allreduce", lambda: sc.sparse_allreduce(x, k, comm=comm), dense, 2000)
ratio("with residual / MPI_Allreduce", lambda: sc.sparse_allreduce(x, k, comm=comm, residual=r), dense, 2000)
queued = lambda: sc.isparse_allreduce(x, k, comm=comm).wait()
ratio("on the queue's thread / here", queued, lambda: sc.sparse_allreduce(x, k, comm=comm), 1000)
ratio("top-k with residual / np.add", lambda: sc.topk(x, k, residual=r), add, 500)
if large:
    n = 25_600_000
    x = np.random.default_rng(comm.rank).standard_normal(n, dtype=np.float32)
    r, plain = np.zeros_like(x), np.zeros_like(x)
    step = lambda: sc.sparse_allreduce(x, n // 1000, comm=comm, residual=r)
    ratio("step, n = 25.6M, k = n / 1,000 / np.add", step, add, 15)
if comm.rank == 0:
    print(json.dumps(found))
"""


def measured(folder: Path, ranks: int, large: bool) -> dict[str, list[float]]:
    """Return a ratio and two times in microseconds for each figure, measured with the checkout in ``folder``."""
    mpirun = shutil.which("mpirun", path=Path(sys.executable).parent) or "mpirun"
    environment = os.environ | {"PYTHONPATH": str(folder), "SPARSECOMM_THREADS": "1"}
    command = [mpirun, "-n", str(ranks), sys.executable, "-c", PROGRAM, "large" if large else "small"]
    said = subprocess.run(command, env=environment, cwd=folder, check=True, capture_output=True, text=True).stdout
    found: dict[str, list[float]] = json.loads(said.splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="another checkout, built in place")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--times", type=int, default=5, help="turns of each checkout")
    parser.add_argument("--large", action="store_true", help="also a step of 25.6M elements")
    options = parser.parse_args()
    turns: dict[str, list[dict[str, list[float]]]] = {"that": [], "this": []}
    for _ in range(options.times):
        for name, folder in (("that", options.folder.resolve()), ("this", HERE)):
            turns[name].append(measured(folder, options.ranks, options.large))
    table = Table("figure", "that: ratio", "this: ratio", "that, us", "this, us")
    for figure in turns["this"][0]:
        ratios, micros = [], []
        for name in ("that", "this"):
            values = [turn[figure] for turn in turns[name]]
            each = [ratio for ratio, *_ in values]
            ratios.append(f"{statistics.median(each):.2f} ({min(each):.2f} - {max(each):.2f})")
            micros.append("{:.1f} / {:.1f}".format(*(statistics.median(v[i] for v in values) for i in (1, 2))))
        table.add_row(figure, *ratios, *micros)
    Console(width=140).print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
