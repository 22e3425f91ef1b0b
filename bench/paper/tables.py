"""The tables of `bench.paper`, from its results: in dilated time, as on a cluster with links of the paper's rate."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from bench.paper.models import MODELS, RANKS, RATE, Model
from sparsecomm.quantities import number_text, rate_text

Row = dict[str, Any]
TARGETS = {  # of gTop-k's speed-up at 32 workers: over dense, over Top-k
    name: (model.published["gtopk"][-1] / model.published["dense"][-1],
           model.published["gtopk"][-1] / model.published["topk"][-1])
    for name, model in MODELS.items()
}  # fmt: skip
NAMES = {"dense": "dense", "topk": "Top-k", "gtopk": "gTop-k", "ours": "ours"}


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
    found = []
    for name, model in MODELS.items():
        for P in sorted({row["P"] for row in rows}):
            its = {row["method"]: row for row in rows if (row["model"], row["P"]) == (name, P)}
            if not model.own_dense:
                same = [row for row in rows if (row["n"], row["P"], row["method"]) == (model.n, P, "dense")]
                its |= {"dense": same[0]} if same else {}
            if its:
                found.append((model, P, its))
    return found


def _table(title: str, columns: list[str], lines: list[list[object]]) -> Table:
    result = Table(title=title, title_justify="left")
    for column in columns:
        result.add_column(column, justify="left" if column in ("model", "method", "algorithm") else "right")
    for line in lines:
        result.add_row(*("" if cell is None else str(cell) for cell in line))
    return result


def _published(model: Model, method: str, P: int) -> float | None:
    values = model.published.get(method)
    return values[RANKS.index(P)] if values and P in RANKS else None


def _number(value: float | None, form: str = "") -> str | None:
    if value is None:
        return None
    return format(value, form) if form else number_text(value)


def throughput(rows: list[Row]) -> Table:
    """Return samples per second and worker, and scaling efficiency, beside the published ones."""
    lines: list[list[object]] = []
    for model, P, its in _by_method(rows):
        line: list[object] = [model.name, P]
        for method in NAMES:
            mine = model.batch / step_seconds(its[method]) if method in its else None
            line.append(_number(mine))
            if method != "ours":
                line.append(_number(_published(model, method, P)))
        for method in ("dense", "topk", "ours"):
            mine = model.batch / step_seconds(its[method]) / model.alone if method in its else None
            line.append(_number(mine, ".1%"))
        published = _published(model, "gtopk", P)
        line.append(_number(published and published / model.alone, ".1%"))
        lines.append(line)
    columns = ["model", "P"]
    for method, name in NAMES.items():
        columns += [name] + (["published"] if method != "ours" else [])
    columns += ["efficiency: dense", "Top-k", "ours", "gTop-k, published"]
    return _table("samples per second and worker; scaling efficiency", columns, lines)


def speedups(rows: list[Row]) -> Table:
    """Return our speed-up, beside the published one of gTop-k."""
    lines: list[list[object]] = []
    for model, P, its in _by_method(rows):
        if "ours" not in its:
            continue
        ours, line = step_seconds(its["ours"]), [model.name, P]
        for method in ("dense", "topk"):
            theirs = step_seconds(its[method]) if method in its else None
            mine = theirs and theirs / ours
            gtopk, other = _published(model, "gtopk", P), _published(model, method, P)
            line += [_number(mine, ".2f"), _number(theirs and theirs / model.compute, ".2f")]
            line.append(_number(gtopk and other and gtopk / other, ".2f"))
        theirs = step_seconds(its["gtopk"]) if "gtopk" in its else None
        line.append(_number(theirs and theirs / ours, ".2f"))
        lines.append(line)
    columns = ["model", "P", "ours / dense", "ceiling", "published", "ours / Top-k", "ceiling", "published"]
    columns.append("ours / gTop-k, the paper's way")
    return _table("speed-up of a whole step", columns, lines)


def parts(rows: list[Row]) -> Table:
    """Return the parts of a step, and the ratio of an exchange alone to its formula."""
    lines: list[list[object]] = []
    for model, P, its in _by_method(rows):
        for method in NAMES:
            if method not in its:
                continue
            row = its[method]
            ms, its_parts = 1e3 / row["slowdown"], row["parts"]
            company, alone = work_seconds(row)
            exchange = float(np.median(row["exchange"])) * ms if row["exchange"] else None
            formula = row["formula"] * ms if "formula" in row else None
            other = sum(seconds for part, seconds in its_parts.items() if part not in ("select", "exchange")) * ms
            ratio = exchange / formula if exchange and formula else None
            line: list[object] = [model.name, P, NAMES[method], f"{row['algorithm']}, {row['wire']}"]
            line += [_number(1e3 * step_seconds(row), ".2f"), _number(1e3 * row["compute"], ".2f")]
            line += [_number(1e3 * company, ".2f"), _number(1e3 * alone, ".2f")]
            line += [_number(its_parts["exchange"] * ms, ".2f"), _number(other, ".2f"), _number(exchange, ".2f")]
            line += [_number(formula, ".2f"), _number(ratio, ".2f")]
            line += [f"{row['sent']:,.0f}", _number(row["busy"], ".0%")]
            lines.append(line)
    columns = ["model", "P", "method", "algorithm", "step, ms", "compute", "select, all ranks", "alone"]
    columns += ["exchange", "merge to densify", "exchange alone", "formula", "ratio"]
    return _table("a step's parts in dilated ms", [*columns, "bytes sent", "cores busy"], lines)


# -- for docs/reports/paper.md -----------------------------------------------------------------------------------------


def pages(rows: list[Row]) -> dict[str, list[list[str]]]:
    """Return the tables of the documentation, as lists of cells, the heading first."""
    last = max(row["P"] for row in rows)
    groups = _by_method(rows)
    heading = ["model", "P", *(f"{name} (published)" for name in ("dense", "Top-k", "gTop-k")), "ours", "efficiency"]
    throughputs = [heading]
    speeds = [["model", "over dense", "ceiling", "published", "over Top-k", "ceiling", "published", "over gTop-k"]]
    costs = [
        ["model", "algorithm", "compute", "select", "exchange", "exchange alone", "formula", "ratio", "bytes sent"]
    ]
    for model, P, its in groups:
        if "ours" not in its:
            continue
        ours = its["ours"]
        seconds = step_seconds(ours)
        line = [model.name, str(P)]
        for method in ("dense", "topk", "gtopk"):
            mine = _number(model.batch / step_seconds(its[method])) if method in its else "-"
            line.append(f"{mine} ({_number(_published(model, method, P)) or '-'})")
        throughputs.append([*line, f"{_number(model.batch / seconds)}", f"{model.compute / seconds:.1%}"])
        if last != P:
            continue
        line = [model.name]
        for i, method in enumerate(("dense", "topk")):
            theirs = step_seconds(its[method]) if method in its else math.nan
            line += [f"{theirs / seconds:.2f}", f"{theirs / model.compute:.2f}", f"{TARGETS[model.name][i]:.1f}"]
        speeds.append([*line, f"{step_seconds(its['gtopk']) / seconds:.2f}" if "gtopk" in its else "-"])
        ms, alone = 1e3 / ours["slowdown"], float(np.median(ours["exchange"]))
        line = [model.name, f"{ours['algorithm']}, {ours['wire']}", f"{1e3 * model.compute:,.1f}"]
        line += [f"{1e3 * max(work_seconds(ours)):.2f}", f"{ms * ours['parts']['exchange']:.2f}"]
        line += [f"{ms * alone:.2f}", f"{ms * ours['formula']:.2f}", f"{alone / ours['formula']:.2f}"]
        costs.append([*line, f"{ours['sent']:,.0f}"])
    return {"paper_throughput": throughputs, "paper_speedups": speeds, "paper_costs": costs}
