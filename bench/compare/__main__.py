"""``python -m bench.compare``: see `bench.compare.options`."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from mpi4py import MPI
from rich.table import Table

import sparsecomm as sc
from bench import report
from bench.compare.checks import COMM, Inputs
from bench.compare.contenders import Ours, checked, contenders
from bench.compare.densities import crossing, density_row, density_table
from bench.compare.links import given_link, link_text, measured_link, message_lines, message_time
from bench.compare.options import parsed, refusal
from bench.compare.tables import (
    bound_rows,
    bound_table,
    launched_ring,
    ratio_rows,
    ratio_table,
    timing_rows,
    timing_table,
)
from bench.compare.timing import measure
from sparsecomm import config
from sparsecomm.primitives.costs import Link
from sparsecomm.wire import HEADER_BYTES

Run = dict[str, Any]


def main() -> int:
    options = parsed()
    if why := refusal(options):
        if COMM.rank == 0:
            print(f"bench.compare: {why}", file=sys.stderr, flush=True)
        return 2
    try:
        import torch

        torch.set_num_threads(config.threads())  # as many as ours
    except ImportError:
        options.only -= {"topk-gloo"}
    links = {"measured": measured_link()}
    if (given := given_link()) is not None:
        links["given"] = given
    run: Run = report.about("-m bench.compare", sys.argv[1:], COMM.size) | {
        "mpi": MPI.Get_library_version().split(",")[0].strip("\0 \n"),
        "P": COMM.size,
        "n": options.n,
        "wire": options.wire,
        "drain": options.drain,
        "calls": options.calls,
        "links": {source: {"alpha": link.alpha, "beta": link.beta} for source, link in links.items()},
    }
    tables = density_run(options, run) if options.densities else comparison(options, run, links)
    if COMM.rank == 0:
        lines = heading(run, links)
        report.show(lines, tables)
        if options.write:
            report.write(options.write / options.name, lines, tables, run)
    return 1 if run["wrong"] else 0


def comparison(options: argparse.Namespace, run: Run, links: dict[str, Link]) -> list[Table]:
    """Everyone at one density."""
    k = max(1, round(options.density * options.n))
    query = sc.explain(options.n, k, comm=COMM, algorithm="butterfly", wire=options.wire)
    nbytes = HEADER_BYTES + round(k * query.query.problem(query.candidates[0].wire).entry_bytes)
    run |= {"density": options.density, "k": k}
    run["message"] = {"bytes": nbytes, "ms": message_time(nbytes) * 1e3}
    found = list(contenders(Inputs(options.n, k), options.only, options.wire, say))
    run["wrong"] = checked(found, say)
    times = measure(found, options, say)
    ours = [c for c in found if isinstance(c, Ours)]
    run |= {"times": timing_rows(found, times), "bounds": bound_rows(ours, times, links)}
    run["ratios"] = ratio_rows(times, (COMM.size, options.n, k))
    for c in found:
        c.close()
    tables = [timing_table(run["times"])]
    tables += [bound_table(run["bounds"], links)] if run["bounds"] else []
    tables += [ratio_table(run["ratios"])] if run["ratios"] else []
    return tables


def density_run(options: argparse.Namespace, run: Run) -> list[Table]:
    """Ours and the dense ones, density by density."""
    inputs, rows = Inputs(options.n, 1), []
    run["wrong"] = []
    for density in options.densities:
        say(f"density {density:g}")
        inputs.k = max(1, round(density * options.n))
        found = list(contenders(inputs, options.only, options.wire, say))
        run["wrong"] += checked(found, say)
        rows.append(density_row(density, measure(found, options, lambda text: None)))
    run |= {"densities": rows, "crossings": {kind: crossing(rows, kind) for kind in ("step", "exchange")}}
    return [density_table(rows)]


def heading(run: Run, links: dict[str, Link]) -> list[str]:
    what = f"P = {run['P']}, n = {run['n']:,}" + (f", k = {run['k']:,}" if "k" in run else "")
    return [
        *report.head(run),
        f"# {run['mpi']}; MPI's allreduce is {'its ring' if launched_ring() else 'the one it chooses'}",
        f"# {what}; {link_text(links)}",
        *message_lines(run),
        f"# {len(run['wrong'])} results wrong",
        *(f"# WRONG: {text}" for text in run["wrong"]),
    ]


def say(text: str) -> None:
    if COMM.rank == 0:
        print(f"# {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
