"""Measure how long ranks of different speed compute and wait.

    mpirun -n 8 python -m bench.uneven [--sync-every 20] [--unit 0.01] [--deadline 2 --stall 3]

Local steps sleep, so that many ranks can share a core: a step of rank r takes ``--unit`` times its number in
``--speeds``. Each line is a training by `sparsecomm.LocalSteps`: with equally many local steps on all ranks, by speed,
and by speed with exchanges in the background for a tenth of a round. "Computing" is the time of local steps / the time
of the rounds, on average over the ranks, without the first round, in which speeds are measured. With ``--stall`` one
local step of the first rank takes that many seconds in the middle of the training; with ``--deadline`` the others
continue without it.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("SPARSECOMM_THREADS", "1")

import numpy as np

import sparsecomm as sc
from bench import report

Row = dict[str, Any]


def main() -> None:
    from mpi4py import MPI

    parser = report.parser(__doc__)
    parser.add_argument(
        "--speeds",
        type=float,
        nargs="+",
        default=[1, 1, 2, 2, 2, 4, 4, 4],
        help="units of a local step, by rank (1 1 2 2 2 4 4 4)",
    )
    parser.add_argument("--unit", type=float, default=0.01, help="seconds (0.01)")
    parser.add_argument("--sync-every", type=int, default=20, help="local steps of a round, of a rank on average (20)")
    parser.add_argument("--rounds", type=int, default=10, help="that are measured (10)")
    parser.add_argument("--elements", type=int, default=1_000_000, help="of the model (1,000,000)")
    parser.add_argument("--deadline", type=float, help="as of LocalSteps; none")
    parser.add_argument("--stall", type=float, default=0.0, help="seconds of one local step of rank 0; none")
    parser.add_argument("--write", type=Path, metavar="STEM", help="write STEM.txt and STEM.json")
    args = parser.parse_args()
    world = MPI.COMM_WORLD
    if len(args.speeds) != world.size:
        parser.error(f"--speeds has {len(args.speeds)} numbers, and there are {world.size} ranks")
    rows = []
    for way, options in (
        ("equally many local steps", {}),
        ("by speed", {"by_speed": True}),
        ("by speed, delayed", {"by_speed": True, "fragment_sync_delay": max(1, args.sync_every // 10)}),
    ):
        mine = train(world, args, options)
        each = world.allgather(mine)
        steps = [row["steps"] for row in each]
        rows.append(
            {
                "way": way,
                "steps": steps,
                "tokens": sum(row["taken"] for row in each),
                "seconds": max(row["seconds"] for row in each),
                "computing": float(np.mean([row["computed"] / row["seconds"] for row in each])),
                "left_out": sorted({rank for row in each for rank in row["left_out"]}),
            }
        )
    if world.rank:
        return
    columns = [
        ("rounds", lambda row: row["way"]),
        ("local steps of a round, by rank", lambda row: " ".join(map(str, row["steps"]))),
        ("local steps in all", lambda row: row["tokens"]),
        ("s", report.number("seconds", ".2f")),
        ("local steps per s", lambda row: f"{row['tokens'] / row['seconds']:.0f}"),
        ("computing", lambda row: f"{100 * row['computing']:.1f} %"),
        ("left out", lambda row: " ".join(map(str, row["left_out"])) or None),
    ]
    about = report.about("-m bench.uneven", sys.argv[1:], world.size)
    title = f"{args.rounds} rounds of local steps of {args.elements / 1e6:g}M weights, P = {world.size}"
    report.publish(
        args.write, report.head(about), [report.table(rows, columns, title=title)], {"run": about, "rows": rows}
    )


def train(world: Any, args: Any, options: Row) -> Row:
    """Train for some rounds; return what this rank did after the first one."""
    parameters = {"x": np.zeros(args.elements, np.float32)}
    local = sc.LocalSteps(parameters, comm=world, sync_every=args.sync_every, deadline=args.deadline, **options)
    random, duration = np.random.default_rng(world.rank), args.unit * args.speeds[world.rank]
    change = random.standard_normal(args.elements, np.float32)
    computed, taken, start, left_out, steps = 0.0, 0, time.perf_counter(), set[int](), local.steps
    world.Barrier()
    while local.round <= args.rounds:
        round_no, began = local.round, time.perf_counter()
        stalls = args.stall and world.rank == 0 and (round_no, local.local_step) == (args.rounds // 2, 1)
        time.sleep(args.stall if stalls else duration)
        parameters["x"][::100] += change[::100]
        computed, taken = computed + time.perf_counter() - began, taken + 1
        local.step(parameters)
        left_out.update(local.left_out)
        if round_no == 0 and local.round:
            computed, taken, start = 0.0, 0, time.perf_counter()
        elif local.round <= args.rounds:
            steps = local.steps
    taken_in = time.perf_counter() - start
    local.finish(parameters)
    return {"computed": computed, "taken": taken, "seconds": taken_in, "left_out": left_out, "steps": steps[world.rank]}


if __name__ == "__main__":
    main()
