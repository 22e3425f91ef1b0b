"""The command line of the comparison, and what is refused before anything is allocated."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from mpi4py import MPI

from bench import report
from bench.compare.tables import DENSE, SPARSE
from bench.contenders import CONTENDERS
from sparsecomm.wire import WIRES

COMM = MPI.COMM_WORLD
ARRAYS = 10  # of n float32, at most, that a rank has at once: torch.topk takes four for itself
ABOUT = """Every algorithm of sparsecomm beside every baseline, on the same inputs, in one run.

    mpirun -n 8 python -m bench.compare                                     25.6M elements, density 0.001
    mpirun -n 8 python -m bench.compare --n 4e6 --densities 0.001,0.01,0.1  from which density on dense wins

What is timed and how, and how results are checked: docs/reports/baselines.md.
"""


def parsed() -> argparse.Namespace:
    parser = _parser()
    options = parser.parse_args()
    drain = (1 << 20 if os.environ.get("SLOW_NETWORK_LINK") else 0) if options.drain is None else options.drain
    options.drain = max(0, int(drain))
    options.n, options.only = int(options.n), set(options.only)
    options.name = options.name or f"{'densities' if options.densities else 'compare'}-{COMM.size}"
    if unknown := options.only - set(CONTENDERS):
        parser.error(f"--only {','.join(sorted(unknown))}: expected names of {', '.join(CONTENDERS)}")
    if not all(0 < d <= 1 for d in options.densities or [options.density]) or options.n < 1:
        parser.error("expected n >= 1 and densities in (0, 1]")
    if min(options.rounds, options.slow_rounds, options.calls) < 1:
        parser.error("expected one round at least, and one call")
    options.slow_rounds = min(options.slow_rounds, options.rounds)
    if options.densities:
        options.only &= {*SPARSE, *DENSE}
        if not options.only & set(SPARSE) or not options.only & set(DENSE):
            parser.error("--densities needs a sparse one of ours and a dense one among --only")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = report.parser(ABOUT, prog="python -m bench.compare")
    usual = [name for name, contender in CONTENDERS.items() if contender.usual]
    parser.add_argument("--n", type=float, default=25.6e6, help="elements (25.6e6)")
    parser.add_argument("--density", type=float, default=0.001, help="k/n (0.001)")
    parser.add_argument(
        "--densities",
        type=lambda text: sorted(map(float, text.split(","))),
        metavar="D,D,...",
        help="instead of the comparison: from which density on dense wins",
    )
    parser.add_argument("--rounds", type=int, default=7, help="timings of each (7)")
    parser.add_argument("--slow-rounds", type=int, default=3, help="rounds in which slow baselines take part (3)")
    parser.add_argument(
        "--calls", type=int, default=1, help="calls in a row whose mean is a timing; short messages need several (1)"
    )
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        default=usual,
        metavar="NAME,...",
        help=f"of {', '.join(CONTENDERS)} ({', '.join(usual)})",
    )
    parser.add_argument(
        "--drain",
        type=float,
        metavar="BYTES",
        help="sent by all before each timing, to use up the bursts of a link that is limited by a "
        "token bucket (2^20 if SLOW_NETWORK_LINK is set)",
    )
    parser.add_argument("--wire", default="plain", choices=["auto", *WIRES], help="sparsecomm's format (plain)")
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="write the tables and a JSON file there")
    parser.add_argument("--name", metavar="STEM", help="name of these files")
    return parser


def refusal(options: argparse.Namespace) -> str | None:
    """Return why this run cannot be, or None.

    Ranks share the memory of their machine, even if it is made to look like several.
    """
    boot_ids = COMM.allgather(Path("/proc/sys/kernel/random/boot_id").read_text())
    available = int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) * 1024
    needed = boot_ids.count(boot_ids[COMM.rank]) * (ARRAYS * 4 * options.n + (400 << 20))
    why = None
    if needed > available:
        why = f"{needed / 2**30:.1f} GiB needed, {available / 2**30:.1f} available: take a smaller --n"
    try:
        if COMM.rank == 0 and options.write:
            options.write.mkdir(parents=True, exist_ok=True)
            for kind in ("json", "txt"):
                (options.write / f"{options.name}.{kind}").open("a").close()
    except OSError as error:
        why = f"cannot write: {error}"
    return next((why for why in COMM.allgather(why) if why), None)
