"""Is the choice of "auto" the fastest? Times every candidate, on real or on simulated ranks.

    python -m bench.slow_network run --ranks 4 --rate 1gbit -- python -m bench.auto [--write FILE]
    mpirun -n 4 python -m bench.auto                       # on the network, or the memory, that is there
    python -m bench.auto --simulated [--every 4] [--write FILE]

On real ranks, costs are measured first, as by `sparsecomm tune`. Then whole calls with a residual are timed for a grid
of sizes and densities: in every round all candidates, in another order, after a barrier. Candidates that take three
times as long as the fastest leave after three rounds. The time of a call is the time of its slowest rank.

Simulated ranks run in virtual time on a grid of delays, rates, sizes and densities. They measure their simulated
network first, as without a profile. Every candidate is run by `bench.simulate`, with its work; the second call counts,
since algorithms keep results of the call before.

The tables have the time of "auto" / the time of the fastest candidate: medians over the rounds, or the summaries and
the worst cases of the grid.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track
from rich.table import Table

import sparsecomm as sc
from bench import report, simulate
from bench.simulate import Problem
from bench.timing import Ours, Timer
from sparsecomm import transport
from sparsecomm.calls.measurement import costs_of
from sparsecomm.cli import main as command
from sparsecomm.primitives.costs import Costs, Link
from sparsecomm.quantities import number_text, rate_text, time_text
from sparsecomm.tools import options as types
from sparsecomm.tools.timing import Vectors, uninterrupted
from sparsecomm.transport import simulated
from sparsecomm.tuning import choice
from sparsecomm.tuning.profile import DEFAULT

# The grid of simulated cases.
RANKS, PER_NODE = (2, 4, 8, 16, 64), (1, 4)
DELAYS, RATES = (5e-6, 100e-6, 2e-3, 10e-3, 40e-3, 80e-3), (5e7, 2e8, 1e9, 5e9, 25e9)  # one way; bits per second
SIZES, DENSITIES = (1_000_000, 25_600_000), (0.001, 0.01, 0.1)
LIMIT = 1.10
Row = dict[str, Any]


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--simulated", action="store_true", help="on simulated ranks, instead of those of mpirun")
    parser.add_argument("--every", type=int, default=1, metavar="I", help="simulate every I-th case (%(default)s)")
    sizes, densities = types.listed(types.count), types.listed(types.density)
    parser.add_argument("--sizes", type=sizes, default="100000,1000000,10000000", help="elements (%(default)s)")
    parser.add_argument("--density", type=densities, default="0.001,0.01,0.1", help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=101, help="(%(default)s)")
    parser.add_argument("--write", type=Path, help="FILE.txt and FILE.json")
    options = parser.parse_args()
    (on_simulated_ranks if options.simulated else on_real_ranks)(options)


def on_real_ranks(options: Any) -> None:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    profile = Path(comm.bcast(tempfile.mkdtemp())) / "profile.json"
    os.environ["SPARSECOMM_PROFILE"] = str(profile)
    if command(["tune", "--seconds", "0.5"]):
        raise SystemExit("the costs could not be measured")
    comm.Barrier()
    run, rows = report.about("-m bench.auto", sys.argv[1:], comm.size), []
    for n, density in product(options.sizes, options.density):
        rows.append(timed(comm, n, density, options.rounds))
        if comm.rank == 0:
            print(f"n={n}, density {number_text(density)}: auto / fastest {rows[-1]['ratio']:.2f}", flush=True)
    ratios = [row["ratio"] for row in rows]
    link = os.environ.get("SLOW_NETWORK_LINK", "of this machine")
    lines = [
        *report.head(run),
        f"# {transport.transport_of(None).num_nodes} machine(s); link {link}",
        *(f"# {line}" for line in str(sc.explain(1_000_000, 0.001)).splitlines()[1:3]),
        f"# auto / fastest: {max(ratios):.2f} at most, {np.median(ratios):.2f} in the median",
    ]
    if comm.rank == 0:
        report.publish(options.write, lines, [cases_table(rows)], run | {"rows": rows})


def timed(comm: Any, n: int, density: float, rounds: int) -> Row:
    """Time all candidates, beginning with the choice of "auto"."""
    rng = np.random.default_rng(comm.rank)
    vectors = Vectors(comm, rng.standard_normal(n, np.float32), rng.standard_normal(n, np.float32))
    candidates = sc.explain(n, density).candidates
    k = max(1, round(density * n))
    timers = [Timer(comm, Ours(c.algorithm.name, vectors, k, c.wire.name), "step", rounds) for c in candidates]
    near = list(range(len(timers)))
    with uninterrupted():
        for round_no in range(-1, rounds):
            if round_no == 3:
                medians = [timer.timing().median for timer in timers]
                near = [i for i, median in enumerate(medians) if median < 3 * min(medians) or i == 0]
            for i in np.random.default_rng(round_no + 1).permutation(near):
                timers[i].run(round_no)
    measured = []
    for c, slowest in zip(candidates, (timer.timing().slowest for timer in timers), strict=True):
        row = {"algorithm": c.algorithm.name, "wire": c.wire.name, "predicted": c.seconds}
        measured.append(row | {"calls": int(np.isfinite(slowest).sum()), "quartiles": report.quartiles(slowest)})
    fastest = min(measured, key=lambda row: row["quartiles"][1])
    auto, best = (f"{row['algorithm']}, {row['wire']}" for row in (measured[0], fastest))
    ratio = measured[0]["quartiles"][1] / fastest["quartiles"][1]
    return {"n": n, "density": density, "auto": auto, "fastest": best, "ratio": ratio, "candidates": measured}


def cases_table(rows: list[Row]) -> Table:
    def ms(seconds: Any) -> Any:
        return lambda row: f"{1e3 * seconds(row['candidates']):.2f}"

    columns = [
        ("n", report.number("n", ",")),
        ("density", report.number("density", "g")),
        ("auto takes", itemgetter("auto")),
        ("predicted, ms", ms(lambda candidates: candidates[0]["predicted"])),
        ("measured, ms", ms(lambda candidates: candidates[0]["quartiles"][1])),
        ("the fastest", itemgetter("fastest")),
        ("measured, ms", ms(lambda candidates: min(c["quartiles"][1] for c in candidates))),
        ("auto / fastest", report.number("ratio", ".2f")),
    ]
    return report.table(rows, columns)


def on_simulated_ranks(options: Any) -> None:
    os.environ["SPARSECOMM_THREADS"] = "1"
    os.environ["SPARSECOMM_PROFILE"], os.environ["XDG_CACHE_HOME"] = "", "/nowhere"  # there is no profile
    simulate._HANDLED = 1 << 20  # smaller problems than `bench.model` runs: there are more than a thousand here
    grid = product(RANKS, PER_NODE, DELAYS, RATES, SIZES, DENSITIES)
    cases = [case for case in grid if case[0] > case[1] or case[1] == 1][:: options.every]
    rows = [simulated_case(*case) for case in track(cases, description="simulating")]
    run = report.about("-m bench.auto", sys.argv[1:], threads=1)
    tables = [by_ranks(rows), by_network(rows), worst_cases(rows)]
    report.publish(options.write, report.head(run), tables, run | {"rows": rows})


def simulated_case(P: int, per_node: int, delay: float, rate: float, n: int, density: float) -> Row:
    costs = replace(DEFAULT, link=Link(delay, 8 / rate, min(delay, DEFAULT.link.gap)))
    k = round(density * n)
    problem = Problem(n, k, costs, per_node)
    query = choice.CostQuery(P, -(-P // per_node), n, k, 4)
    measured: list[Row] = []
    for c in choice.candidates(query, measured_costs(P, problem)):
        if measured and c.seconds > 4 * min(row["seconds"] for row in measured):
            continue  # it will not be the fastest
        seconds = simulate.step_seconds(problem, P, c.algorithm, c.wire)
        measured.append({"name": f"{c.algorithm.name}, {c.wire.name}", "predicted": c.seconds, "seconds": seconds})
    best = min(measured, key=itemgetter("seconds"))
    case = {"ranks": P, "per machine": per_node, "delay": delay, "rate": rate, "n": n, "density": density}
    ratio = measured[0]["seconds"] / best["seconds"]
    return case | {"auto": measured[0]["name"], "fastest": best["name"], "ratio": ratio, "candidates": measured}


def measured_costs(P: int, problem: Problem) -> Costs:
    """Return the costs that ranks measure on the network of a problem."""
    results = simulated.run(P, costs_of, **problem.network(P))
    assert results[0].value is not None
    return results[0].value.costs


def by_ranks(rows: list[Row]) -> Table:
    summaries = []
    for P in RANKS:
        own = [row for row in rows if row["ranks"] == P]
        if not own:
            continue
        ratios, choices = [row["ratio"] for row in own], Counter(row["auto"] for row in own)
        often = ", ".join(f"{name} ({count})" for name, count in choices.most_common())
        above = sum(ratio > LIMIT for ratio in ratios)
        summaries.append([P, len(own), f"{np.median(ratios):.3f}", f"{max(ratios):.3f}", above, often])
    names = ("ranks", "cases", "median", "worst", f"above {LIMIT:g}", "auto takes")
    columns = [(name, itemgetter(i)) for i, name in enumerate(names)]
    return report.table(summaries, columns, title="auto / fastest", title_justify="left")


def by_network(rows: list[Row]) -> Table:
    def worst(rate: float) -> Callable[[float], str]:
        def worst_at(delay: float) -> str:
            ratios = [row["ratio"] for row in rows if (row["delay"], row["rate"]) == (delay, rate)]
            return f"{max(ratios):.3f}" if ratios else ""

        return worst_at

    columns = [("delay", time_text), *((rate_text(rate), worst(rate)) for rate in RATES)]
    return report.table(DELAYS, columns, title="auto / fastest, the worst by network", title_justify="left")


def worst_cases(rows: list[Row]) -> Table:
    columns = [
        *((name, itemgetter(name)) for name in ("ranks", "per machine")),
        ("link", lambda row: f"{time_text(row['delay'])}, {rate_text(row['rate'])}"),
        ("n", report.number("n", ",")),
        ("density", report.number("density", "g")),
        ("auto takes", itemgetter("auto")),
        ("the fastest", itemgetter("fastest")),
        ("auto / fastest", report.number("ratio")),
    ]
    largest = sorted(rows, key=lambda row: -row["ratio"])[:10]
    return report.table(largest, columns, title="the worst cases", title_justify="left")


if __name__ == "__main__":
    main()
