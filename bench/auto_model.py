"""Is what "auto" takes the fastest? On simulated ranks, over a grid of delays, rates and problems.

    python -m bench.auto_model [--every 4] [--write bench/results]

Ranks measure their simulated network first, as they do where there is no profile, and "auto" is what the formulas
predict to be the fastest by these costs. Every candidate, algorithm and format, is then run as `bench.model` runs it,
with its work, in virtual time; what counts is the second call, since algorithms keep what they found in the one before.
Told are "auto" as a multiple of the fastest, by number of ranks and by network, and the cases where it is worst.
`bench.auto` does the same on a real network.
"""

from __future__ import annotations

import os
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

from bench import report, simulate
from bench.simulate import Problem
from sparsecomm.calls.measurement import costs_of
from sparsecomm.primitives.costs import Costs, Link
from sparsecomm.quantities import rate_text, time_text
from sparsecomm.transport import simulated
from sparsecomm.tuning import choice
from sparsecomm.tuning.profile import DEFAULT

RANKS, PER_NODE = (2, 4, 8, 16, 64), (1, 4)
DELAYS, RATES = (5e-6, 100e-6, 2e-3, 10e-3, 40e-3, 80e-3), (5e7, 2e8, 1e9, 5e9, 25e9)  # one way; bits per second
SIZES, DENSITIES = (1_000_000, 25_600_000), (0.001, 0.01, 0.1)
LIMIT = 1.10
Row = dict[str, Any]


def measured(P: int, problem: Problem) -> Costs:
    """Return the costs that ranks find on the network of a problem."""
    link, node = problem.costs.link, problem.costs.node or problem.costs.link
    inside = {"node_alpha": node.alpha, "node_beta": node.beta, "node_gap": node.gap}
    network = {"alpha": link.alpha, "beta": link.beta, "gap": link.gap, **inside}
    results = simulated.run(P, costs_of, node_of_rank=problem.node_of_rank(P), **network)
    assert results[0].value is not None
    return results[0].value.costs


def case(P: int, per_node: int, delay: float, rate: float, n: int, density: float) -> Row:
    costs = replace(DEFAULT, link=Link(delay, 8 / rate, min(delay, DEFAULT.link.gap)))
    k = round(density * n)
    problem = Problem(n, k, costs, per_node)
    query = choice.CostQuery(P, -(-P // per_node), n, k, 4)
    found = []
    for c in choice.candidates(query, measured(P, problem)):
        if found and c.seconds > 4 * min(each["seconds"] for each in found):
            continue  # it will not be the fastest
        took = simulate.step_seconds(problem, P, c.algorithm, c.wire)
        found.append({"name": f"{c.algorithm.name}, {c.wire.name}", "predicted": c.seconds, "seconds": took})
    best = min(found, key=lambda each: each["seconds"])
    return {
        "ranks": P,
        "per machine": per_node,
        "delay": delay,
        "rate": rate,
        "n": n,
        "density": density,
        "auto": found[0]["name"],
        "fastest": best["name"],
        "ratio": found[0]["seconds"] / best["seconds"],
        "candidates": found,
    }


def by_ranks(rows: list[Row]) -> Table:
    summaries = []
    for P in RANKS:
        its = [row for row in rows if row["ranks"] == P]
        ratios, taken = [row["ratio"] for row in its], Counter(row["auto"] for row in its)
        often = ", ".join(f"{name} ({count})" for name, count in taken.most_common())
        above = sum(ratio > LIMIT for ratio in ratios)
        summaries.append([P, len(its), f"{np.median(ratios):.3f}", f"{max(ratios):.3f}", above, often])
    names = ("ranks", "cases", "median", "worst", f"above {LIMIT:g}", "auto takes")
    columns = [(name, itemgetter(i)) for i, name in enumerate(names)]
    return report.table(summaries, columns, title="auto / fastest", title_justify="left")


def by_network(rows: list[Row]) -> Table:
    def ratio(rate: float) -> Callable[[float], str]:
        def worst_at(delay: float) -> str:
            ratios = [row["ratio"] for row in rows if (row["delay"], row["rate"]) == (delay, rate)]
            return f"{max(ratios):.3f}" if ratios else ""

        return worst_at

    columns = [("delay", time_text), *((rate_text(rate), ratio(rate)) for rate in RATES)]
    return report.table(DELAYS, columns, title="auto / fastest, the worst by network", title_justify="left")


def worst(rows: list[Row]) -> Table:
    columns = [
        *((name, itemgetter(name)) for name in ("ranks", "per machine")),
        ("link", lambda row: f"{time_text(row['delay'])}, {rate_text(row['rate'])}"),
        ("n", report.number("n", ",")),
        ("density", report.number("density", "g")),
        ("auto takes", itemgetter("auto")),
        ("the fastest", itemgetter("fastest")),
        ("auto / fastest", report.number("ratio")),
    ]
    last = sorted(rows, key=lambda row: -row["ratio"])[:10]
    return report.table(last, columns, title="the worst cases", title_justify="left")


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--write", type=Path, help="a folder for auto-model.txt and auto-model.json")
    parser.add_argument("--every", type=int, default=1, metavar="I", help="only every I-th case (%(default)s)")
    options = parser.parse_args()
    os.environ["SPARSECOMM_THREADS"] = "1"
    os.environ["SPARSECOMM_PROFILE"], os.environ["XDG_CACHE_HOME"] = "", "/nowhere"  # there is no profile
    simulate._HANDLED = 1 << 20  # smaller problems than `bench.model` runs: there are more than a thousand here
    grid = product(RANKS, PER_NODE, DELAYS, RATES, SIZES, DENSITIES)
    cases = [case for case in grid if case[0] > case[1] or case[1] == 1][:: options.every]
    rows = [case(*each) for each in track(cases, description="simulating")]
    given = ["--every", str(options.every)] if options.every > 1 else []
    run = report.about("-m bench.auto_model", given, threads=1)
    stem = options.write and options.write / "auto-model"
    report.publish(stem, report.head(run), [by_ranks(rows), by_network(rows), worst(rows)], run | {"rows": rows})


if __name__ == "__main__":
    main()
