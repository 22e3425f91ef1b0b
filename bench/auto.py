"""Is what "auto" takes the fastest? Every candidate is timed, and "auto" with them.

    python -m bench.slow_network run --ranks 4 --rate 1gbit -- python -m bench.auto [--write FILE]
    mpirun -n 4 python -m bench.auto                       # on the network, or the memory, that is there

Costs are measured first, as `sparsecomm tune` does. Then whole calls are timed, with a residual, for a grid of sizes
and densities: in every round all candidates, in another order, all ranks leaving a barrier together; what has taken
three times as long as the fastest is left out from the fourth round on. The time of a call is that of the slowest rank.
Told are medians over the rounds, and "auto" as a multiple of the fastest.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI
from rich.table import Table

import sparsecomm as sc
from bench.report import about, head, show, write
from sparsecomm import transport
from sparsecomm.cli import main as command

COMM = MPI.COMM_WORLD


def measured(n: int, density: float, rounds: int) -> list[dict[str, Any]]:
    """All candidates, the one that is predicted to be the fastest first."""
    rng = np.random.default_rng(COMM.rank)
    x, start = rng.standard_normal(n, np.float32), rng.standard_normal(n, np.float32)
    residual = np.empty_like(x)
    candidates = sc.explain(n, density).candidates
    times: list[list[float]] = [[] for _ in candidates]

    def timed(i: int) -> None:
        np.copyto(residual, start)
        COMM.Barrier()
        began, taken = time.perf_counter(), candidates[i]
        sc.sparse_allreduce(x, density, residual=residual, algorithm=taken.algorithm.name, wire=taken.wire.name)
        times[i].append(COMM.allreduce(time.perf_counter() - began, MPI.MAX))

    for round in range(rounds + 1):  # the first is not counted
        if round == 4:  # what takes three times as long will not be the fastest
            minimum = min(np.median(its[1:]) for its in times)
        for i in np.random.default_rng(round).permutation(len(candidates)):
            if round < 4 or np.median(times[i][1:]) < 3 * minimum or i == 0:
                timed(i)
    return [
        {
            "algorithm": c.algorithm.name,
            "wire": c.wire.name,
            "predicted": c.seconds,
            "calls": len(its) - 1,
            "quartiles": [float(q) for q in np.percentile(its[1:], (25, 50, 75))],
        }
        for c, its in zip(candidates, times, strict=True)
    ]


def row_of(n: int, density: float, found: list[dict[str, Any]]) -> dict[str, Any]:
    medians = [each["quartiles"][1] for each in found]
    fastest = int(np.argmin(medians))
    return {
        "n": n,
        "density": density,
        "auto": f"{found[0]['algorithm']}, {found[0]['wire']}",
        "fastest": f"{found[fastest]['algorithm']}, {found[fastest]['wire']}",
        "ratio": medians[0] / medians[fastest],
        "candidates": found,
    }


def table_of(rows: list[dict[str, Any]]) -> Table:
    made = Table("n", "density", "auto takes", title_justify="left")
    for name in ("predicted, ms", "measured, ms", "the fastest", "measured, ms", "auto / fastest"):
        made.add_column(name, justify="left" if name == "the fastest" else "right")
    for row in rows:
        best = min(row["candidates"], key=lambda c: c["quartiles"][1])
        first = row["candidates"][0]
        made.add_row(
            f"{row['n']:,}",
            f"{row['density']:g}",
            row["auto"],
            f"{1e3 * first['predicted']:.2f}",
            f"{1e3 * first['quartiles'][1]:.2f}",
            row["fastest"],
            f"{1e3 * best['quartiles'][1]:.2f}",
            f"{row['ratio']:.2f}",
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="100000,1000000,10000000", help="elements (%(default)s)")
    parser.add_argument("--density", default="0.001,0.01,0.1", help="with commas (%(default)s)")
    parser.add_argument("--rounds", type=int, default=101, help="(%(default)s)")
    parser.add_argument("--write", type=Path, help="FILE.txt and FILE.json")
    options = parser.parse_args()

    profile = Path(COMM.bcast(tempfile.mkdtemp())) / "profile.json"
    os.environ["SPARSECOMM_PROFILE"] = str(profile)
    if command(["tune", "--seconds", "0.5"]):
        raise SystemExit("the costs could not be measured")
    COMM.Barrier()

    ranks = transport.of(None)
    given = ["--sizes", options.sizes, "--density", options.density, "--rounds", str(options.rounds)]
    run = about("-m bench.auto", given, COMM.size)
    lines = [
        *head(run),
        f"# {ranks.num_nodes} machine(s); link {os.environ.get('SLOW_NETWORK_LINK', 'of this machine')}",
    ]
    rows = []
    for n in map(int, options.sizes.split(",")):
        for density in map(float, options.density.split(",")):
            rows.append(row_of(n, density, measured(n, density, options.rounds)))
            if COMM.rank == 0:
                print(f"n={n}, density {density:g}: auto / fastest {rows[-1]['ratio']:.2f}", flush=True)
    lines += [f"# {line}" for line in str(sc.explain(1_000_000, 0.001)).splitlines()[1:3]]
    worst = max(row["ratio"] for row in rows)
    lines.append(
        f"# auto / fastest: {worst:.2f} at most, {np.median([row['ratio'] for row in rows]):.2f} in the median"
    )
    if COMM.rank == 0:
        show(lines, [table_of(rows)])
        if options.write:
            write(options.write, lines, [table_of(rows)], run | {"rows": rows})


if __name__ == "__main__":
    main()
