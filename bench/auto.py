"""Is what "auto" takes the fastest? Every candidate is timed, and "auto" with them.

    python -m bench.slow_network run --ranks 4 --rate 1gbit -- python -m bench.auto [--write FILE]
    mpirun -n 4 python -m bench.auto                       # on the network, or the memory, that is there

Costs are measured first, as `sparsecomm tune` does. Then whole calls are timed, with a residual, for a grid of sizes
and densities: in every round all candidates, in another order, all ranks leaving a barrier together; what has taken
three times as long as the fastest is left out from the fourth round on. The time of a call is that of the slowest rank.
Told are medians over the rounds, and "auto" as a multiple of the fastest.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI
from rich.table import Table

import sparsecomm as sc
from bench import report
from sparsecomm import transport
from sparsecomm.cli import main as command
from sparsecomm.cli.bench.runners import Ours, Vectors
from sparsecomm.cli.bench.timing import Timer, uninterrupted
from sparsecomm.quantities import number_text

COMM = MPI.COMM_WORLD
Row = dict[str, Any]


def measured(n: int, density: float, rounds: int) -> Row:
    """Return the times of all candidates, the one that is predicted to be the fastest first, and which is."""
    rng = np.random.default_rng(COMM.rank)
    vectors = Vectors(COMM, rng.standard_normal(n, np.float32), rng.standard_normal(n, np.float32))
    candidates = sc.explain(n, density).candidates
    k = max(1, round(density * n))
    runners = [Ours(c.algorithm.name, vectors, k, c.wire.name) for c in candidates]
    timers = [Timer(COMM, runner, "step", rounds) for runner in runners]
    near = list(range(len(timers)))
    with uninterrupted():
        for round_no in range(-1, rounds):
            if round_no == 3:  # what takes three times as long will not be the fastest
                medians = [timer.timing().median for timer in timers]
                near = [i for i, median in enumerate(medians) if median < 3 * min(medians) or i == 0]
            for i in np.random.default_rng(round_no + 1).permutation(near):
                timers[i].run(round_no)
    found = []
    for c, slowest in zip(candidates, (timer.timing().slowest for timer in timers), strict=True):
        row = {"algorithm": c.algorithm.name, "wire": c.wire.name, "predicted": c.seconds}
        found.append(row | {"calls": int(np.isfinite(slowest).sum()), "quartiles": report.quartiles(slowest)})
    fastest = min(found, key=lambda each: each["quartiles"][1])
    names = {
        "auto": f"{found[0]['algorithm']}, {found[0]['wire']}",
        "fastest": f"{fastest['algorithm']}, {fastest['wire']}",
    }
    ratio = found[0]["quartiles"][1] / fastest["quartiles"][1]
    return {"n": n, "density": density, **names, "ratio": ratio, "candidates": found}


def table_of(rows: list[Row]) -> Table:
    def ms(seconds: Any) -> Any:
        return lambda row: f"{1e3 * seconds(row['candidates']):.2f}"

    columns = [
        ("n", report.number("n", ",")),
        ("density", report.number("density", "g")),
        ("auto takes", lambda row: row["auto"]),
        ("predicted, ms", ms(lambda candidates: candidates[0]["predicted"])),
        ("measured, ms", ms(lambda candidates: candidates[0]["quartiles"][1])),
        ("the fastest", lambda row: row["fastest"]),
        ("measured, ms", ms(lambda candidates: min(c["quartiles"][1] for c in candidates))),
        ("auto / fastest", report.number("ratio", ".2f")),
    ]
    return report.table(rows, columns)


def main() -> None:
    parser = report.parser(__doc__)
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

    given = ["--sizes", options.sizes, "--density", options.density, "--rounds", str(options.rounds)]
    run = report.about("-m bench.auto", given, COMM.size)
    rows = []
    for n in map(int, options.sizes.split(",")):
        for density in map(float, options.density.split(",")):
            rows.append(measured(n, density, options.rounds))
            if COMM.rank == 0:
                print(f"n={n}, density {number_text(density)}: auto / fastest {rows[-1]['ratio']:.2f}", flush=True)
    ratios = [row["ratio"] for row in rows]
    link = os.environ.get("SLOW_NETWORK_LINK", "of this machine")
    lines = [
        *report.head(run),
        f"# {transport.transport_of(None).num_nodes} machine(s); link {link}",
        *(f"# {line}" for line in str(sc.explain(1_000_000, 0.001)).splitlines()[1:3]),
        f"# auto / fastest: {max(ratios):.2f} at most, {np.median(ratios):.2f} in the median",
    ]
    if COMM.rank == 0:
        report.publish(options.write, lines, [table_of(rows)], run | {"rows": rows})


if __name__ == "__main__":
    main()
