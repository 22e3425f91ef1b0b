"""Is what "auto" takes the fastest? On simulated ranks, over a grid of networks and problems.

    python -m bench.auto_model [--write bench/results]

Every candidate, algorithm and format, is run as `bench.model` runs it, with its work, in virtual time; "auto" is
the one that the formulas predict to be the fastest. Told are "auto" as a multiple of the fastest, by number of ranks,
and the cases where it is worst. `bench.auto` does the same on a real network.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import asdict
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track
from rich.table import Table

from bench import report, simulate
from bench.simulate import Problem
from sparsecomm.primitives.costs import Costs, Link
from sparsecomm.quantities import rate_text
from sparsecomm.tuning import choice
from sparsecomm.tuning.profile import DEFAULT

RANKS, PER_NODE = (2, 3, 4, 8, 16, 32), (1, 4)
LINKS = {  # bits per second: seconds per message
    1e8: 200e-6,
    1e9: 100e-6,
    1e10: 30e-6,
}
SIZES, DENSITIES = (1_000_000, 25_600_000), (0.001, 0.01, 0.1)
LIMIT = 1.10
Row = dict[str, Any]


def case(P: int, per_node: int, rate: float, n: int, density: float) -> Row:
    costs = Costs(**{**asdict(DEFAULT), "link": Link(LINKS[rate], 8 / rate), "node": DEFAULT.node})
    k = round(density * n)
    problem = Problem(n, k, costs, per_node)
    query = choice.CostQuery(P, -(-P // per_node), n, k, 4)
    found = []
    for c in choice.candidates(query, costs):
        if found and c.seconds > 4 * min(each["seconds"] for each in found):
            continue  # it will not be the fastest
        took = simulate.simulate(problem, P, c.algorithm, c.wire).step_seconds
        found.append({"name": f"{c.algorithm.name}, {c.wire.name}", "predicted": c.seconds, "seconds": took})
    best = min(found, key=lambda each: each["seconds"])
    return {
        "ranks": P,
        "per machine": per_node,
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


def worst(rows: list[Row]) -> Table:
    columns = [
        *((name, itemgetter(name)) for name in ("ranks", "per machine")),
        ("link", lambda row: f"{rate_text(row['rate'])}"),
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
    options = parser.parse_args()
    os.environ["SPARSECOMM_THREADS"] = "1"
    simulate._HANDLED = 1 << 20  # smaller problems than `bench.model` runs: there are more than a thousand here
    cases = [case for case in product(RANKS, PER_NODE, LINKS, SIZES, DENSITIES) if case[0] > case[1] or case[1] == 1]
    rows = [case(*each) for each in track(cases, description="simulating")]
    run = report.about("-m bench.auto_model", [], threads=1)
    stem = options.write and options.write / "auto-model"
    report.publish(stem, report.head(run), [by_ranks(rows), worst(rows)], run | {"rows": rows})


if __name__ == "__main__":
    main()
