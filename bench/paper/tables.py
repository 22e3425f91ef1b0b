"""The tables of `bench.paper`, from its results: in dilated time, as on a cluster with links of the paper's rate."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from bench import report
from bench.paper.models import MODELS, RANKS, RATE, Model
from sparsecomm.quantities import number_text, rate_text

Row = dict[str, Any]
NAMES = {"dense": "dense", "topk": "Top-k", "gtopk": "gTop-k", "ours": "ours"}
STYLES = {"dense": "dense", "topk": "allgather", "gtopk": "tree", "ours": "butterfly"}  # of plots: an algorithm's


def rows_of(file: Path) -> list[Row]:
    """Return the results in a file of JSON lines, none if there is no such file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def work_seconds(row: Row) -> tuple[float, float]:
    """Return dilated seconds of the selection among all ranks, and those of a rank that has a core to itself."""
    if row["method"] == "dense":
        return 0.0, 0.0
    return float(row["parts"]["select"] / row["slowdown"]), float(row["alone"]["select"])


def step_seconds(row: Row) -> float:
    """Return dilated seconds of a step. The selection counts for no less than it takes a rank alone."""
    company, alone = work_seconds(row)
    median = float(np.median(row["steps"]) / row["slowdown"])
    return float(row["compute"]) + median + max(0.0, alone - company)


def notes(rows: list[Row]) -> list[str]:
    """Return the lines above the tables."""
    rates = sorted({(row["P"], row["rate"], row["slowdown"]) for row in rows})
    factors = ", ".join(f"P = {P}: {rate_text(rate)} and 1/{slowdown:g}" for P, rate, slowdown in rates)
    return [
        f"# links of {rate_text(RATE)} in dilated time; rate of the links here, and the factor of all times: {factors}",
        f"# {os.cpu_count()} cores; the compute time is the paper's batch / its throughput of one worker, as a wait",
        "# published: Shi et al., ICDCS 2019, 32 workers on 1 Gb/s; ceiling: with an exchange that takes no time",
    ]


def _by_method(rows: list[Row]) -> list[tuple[Model, int, dict[str, Row]]]:
    """Return model, ranks and the results by method, in the order of the paper."""
    groups = []
    for name, model in MODELS.items():
        for P in sorted({row["P"] for row in rows}):
            by_method = {row["method"]: row for row in rows if (row["model"], row["P"]) == (name, P)}
            if not model.own_dense:
                same = [row for row in rows if (row["n"], row["P"], row["method"]) == (model.n, P, "dense")]
                by_method |= {"dense": same[0]} if same else {}
            if by_method:
                groups.append((model, P, by_method))
    return groups


def _published(model: Model, method: str, P: int) -> float | None:
    values = model.published.get(method)
    return values[RANKS.index(P)] if values and P in RANKS else None


def tables(rows: list[Row]) -> list[Table]:
    """Return the tables of all ranks."""
    titles = {
        "paper_throughput": "samples per second and worker (published); scaling efficiency of ours",
        "paper_speedups": "speed-up of a whole step",
        "paper_costs": "parts of a step of ours in dilated ms; the exchange alone over its formula",
    }
    return [report.table_of_cells(lines, titles[name]) for name, lines in pages(rows).items()]


def pages(rows: list[Row], last: bool = False) -> dict[str, list[list[str]]]:
    """Return the tables as lists of cells, the heading first; speed-ups and costs at the ``last`` P only, if asked."""
    methods = [f"{name}: measured (published)" for name in ("dense", "Top-k", "gTop-k")]
    throughputs = [["model", "ranks", *methods, "sparsecomm", "efficiency of sparsecomm"]]
    kinds = [f"{name}: {kind}" for name in ("dense", "Top-k") for kind in ("measured", "ceiling", "published")]
    speeds = [["model", *(f"speed-up over {kind}" for kind in (*kinds, "gTop-k: measured"))]]
    times = ("compute", "select", "exchange in a step", "exchange alone", "formula")
    others = ("exchange alone / formula", "bytes sent by the busiest rank")
    costs = [["model", "algorithm", *(f"{name}, ms" for name in times), *others]]
    for model, P, by_method in _by_method(rows):
        if "ours" not in by_method:
            continue
        ours = by_method["ours"]
        seconds = step_seconds(ours)
        line = [model.name, str(P)]
        for method in ("dense", "topk", "gtopk"):
            mine, theirs = by_method.get(method), _published(model, method, P)
            throughput = model.batch / step_seconds(mine) if mine else None
            line.append("{} ({})".format(*(number_text(rate) if rate else "-" for rate in (throughput, theirs))))
        throughputs.append([*line, number_text(model.batch / seconds), f"{model.compute / seconds:.1%}"])
        if last and max(row["P"] for row in rows) != P:
            continue
        line = [model.name if last else f"{model.name}, P = {P}"]
        for method in ("dense", "topk"):
            theirs = step_seconds(by_method[method]) if method in by_method else math.nan
            gtopk, other = _published(model, "gtopk", P), _published(model, method, P)
            published = f"{gtopk / other:.1f}" if gtopk and other else "-"
            line += [f"{theirs / seconds:.2f}", f"{theirs / model.compute:.2f}", published]
        speeds.append([*line, f"{step_seconds(by_method['gtopk']) / seconds:.2f}" if "gtopk" in by_method else "-"])
        ms, alone, exchange = 1e3 / ours["slowdown"], float(np.median(ours["exchange"])), ours["parts"]["exchange"]
        line = [line[0], f"{ours['algorithm']}, {ours['wire']}", f"{1e3 * model.compute:,.1f}"]
        line += [f"{1e3 * max(work_seconds(ours)):.2f}", f"{ms * exchange:.2f}"]
        line += [f"{ms * alone:.2f}", f"{ms * ours['formula']:.2f}", f"{alone / ours['formula']:.2f}"]
        costs.append([*line, f"{ours['sent']:,.0f}"])
    return {"paper_throughput": throughputs, "paper_speedups": speeds, "paper_costs": costs}
