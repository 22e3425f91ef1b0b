"""Reproduce the gTop-k paper's table of throughputs on an emulated network, beside what the paper published.

    python -m bench.paper run [--ranks 4 8 16 32] [--models VGG-16 ...] [--write bench/results]
    python -m bench.paper tables [--write bench/results]      # of what was measured so far

P ranks share this machine, so time is dilated: the links have 1 Gb/s divided by P, and times are divided by P. In
dilated time every rank has as many cores as the machine, and the links 1 Gb/s. ``run`` needs what `bench.slow_network`
needs, and an idle machine. It writes results to ``--file`` one by one; start it again to continue.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from bench import report
from bench.paper import tables
from bench.paper.models import MODELS, RANKS, RATE
from sparsecomm.tools.machine import available_bytes

METHODS = ("ours", "gtopk", "topk", "dense")
MARGIN = 1 << 20  # elements by which views of the gradient may be apart: see `bench.paper.worker`
MEMORY = 8  # bytes per rank and parameter: residual and sum


def main() -> int:
    parser = report.parser(__doc__, prog="python -m bench.paper")
    parser.add_argument("what", choices=("run", "tables"))
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS), metavar="P")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="MODEL")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--steps", type=int, default=2, help="timed, of the sparse methods (%(default)s)")
    parser.add_argument("--rate", type=float, default=RATE, help="bits per second of the cluster (%(default)g)")
    parser.add_argument("--file", type=Path, default=Path("build/paper/results.jsonl"), help="%(default)s")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write the tables and a JSON file there")
    parser.add_argument("--name", default="paper", help="of these files (%(default)s)")
    options = parser.parse_args()
    if options.what == "run":
        for P in options.ranks:
            if status := _run(options, P):
                return status
    rows = tables.rows_of(options.file)
    if not rows:
        print(f"bench.paper: {options.file} has no results yet", file=sys.stderr)
        return 1
    run = report.about("-m bench.paper", ["run"], threads=1)
    stem = options.write and options.write / options.name
    data, lines = run | {"rows": rows, "pages": tables.pages(rows, last=True)}, [*report.head(run), *tables.notes(rows)]
    report.publish(stem, lines, tables.tables(rows), data)
    return 0


def _run(options: argparse.Namespace, P: int) -> int:
    """Measure what is missing on P ranks; return mpirun's exit status."""
    options.file.parent.mkdir(parents=True, exist_ok=True)
    n = max(MODELS[name].n for name in options.models)
    with tempfile.TemporaryDirectory(dir=_shared_memory(P, n)) as folder:
        gradient = Path(folder) / "gradient.npy"
        np.save(gradient, np.random.default_rng(0).standard_normal(n + MARGIN, dtype=np.float32))
        rate = options.rate / P
        # fmt: off
        command = [
            sys.executable, "-m", "bench.slow_network", "run", "--ranks", str(P), "--rate", f"{rate / 1e6:g}mbit",
            "--no-measure", "--mca", "btl_tcp_eager_limit", "4194304", "--",
            sys.executable, "-m", "bench.paper.worker", "--slowdown", str(P), "--rate", str(rate),
            "--models", *options.models, "--methods", *options.methods, "--steps", str(options.steps),
            "--gradient", str(gradient), "--file", str(options.file.absolute()),
        ]
        # fmt: on
        environment = {"GLOO_SOCKET_IFNAME": "eth0", "SPARSECOMM_TIMEOUT": "1200", **os.environ}
        return subprocess.run(command, env=environment).returncode


def _shared_memory(P: int, n: int) -> Path:
    """Return a folder in memory, in which n numbers have a place beside P ranks that work on as many."""
    needed, available = 4 * (n + MARGIN) + P * (MEMORY * n + (64 << 20)), available_bytes()
    if available is not None and available < needed:
        what = f"{P} ranks need {needed / 1e9:.1f} GB and {available / 1e9:.1f} GB are free"
        raise SystemExit(f"bench.paper: {what}: leave the largest models out, with --models")
    shared = Path("/dev/shm")
    return shared if shared.is_dir() and shutil.disk_usage(shared).free > 4 * (n + MARGIN) else Path.cwd()


if __name__ == "__main__":
    raise SystemExit(main())
